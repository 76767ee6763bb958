#!/usr/bin/env python3
"""torch's stores and ours with each other: every operation, in every combination of client and server.

Run with a Python that has torch. CONVOKE_STORE is the path of convoke-store (default: target/release); the client
that makes our calls (an example of convoke-store) is built here unless STORE_CALLS is its path. Prints what failed
and, as its last line, `N passed, M failed`, and with -v each case; the exit code is 1 if something failed.
"""
import datetime
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
import torch.distributed as dist  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TARGET = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
LONG, SHORT = 20.0, 0.2
VERBOSE = "-v" in sys.argv


class Timeout(Exception):
    pass


class Ours:
    """Our client in a process of its own."""

    def __init__(self, *where):
        self.process = subprocess.Popen([CALLS, *where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "ok\n"

    def call(self, operation, *arguments, timeout=LONG):
        words = ["x" + a.hex() if isinstance(a, bytes) else str(a) for a in arguments]
        self.process.stdin.write(" ".join([operation, str(int(timeout * 1000)), *words]) + "\n")
        self.process.stdin.flush()
        kind, _, rest = self.process.stdout.readline().rstrip("\n").partition(" ")
        if kind == "timeout":
            raise Timeout
        if kind != "ok":
            raise RuntimeError(rest or "it ended")
        return [bytes.fromhex(w[1:]) if w.startswith("x") else w for w in rest.split()]

    def set(self, k, v): self.call("set", k, v)
    def get(self, k, timeout=LONG): return self.call("get", k, timeout=timeout)[0]
    def compare_set(self, k, e, d): return self.call("compare_set", k, e, d)[0]
    def add(self, k, n): return int(self.call("add", k, n)[0])
    def append(self, k, v): self.call("append", k, v)
    def check(self, ks): return self.call("check", *ks) == ["true"]
    def wait(self, ks, timeout=LONG): self.call("wait", *ks, timeout=timeout)
    def multi_get(self, ks): return self.call("multi_get", *ks)
    def multi_set(self, ks, vs): self.call("multi_set", *[x for pair in zip(ks, vs) for x in pair])
    def delete(self, k): return self.call("delete", k) == ["true"]
    def num_keys(self): return int(self.call("num_keys")[0])
    def list_keys(self): return sorted(self.call("list_keys"))
    def queue_push(self, k, v): self.call("queue_push", k, v)
    def queue_pop(self, k, timeout=LONG): return self.call("queue_pop", k, timeout=timeout)[0]
    def try_queue_pop(self, k): return (self.call("try_queue_pop", k) or [None])[0]
    def queue_len(self, k): return int(self.call("queue_len", k)[0])
    def barrier(self, k, n, timeout=LONG): self.call("barrier", k, n, timeout=timeout)
    def prefix(self, p): self.call("prefix", p); return self

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(10) == 0


class Torchs:
    """Torch's client, with the same operations."""

    def __init__(self, store):
        self.store = store

    def timed(self, timeout, work):
        before = self.store.timeout
        self.store.set_timeout(datetime.timedelta(seconds=timeout))
        try:
            return work()
        except dist.DistStoreError as e:
            raise Timeout(str(e)) from None
        except RuntimeError as e:  # its file store's
            if "timeout" not in str(e).lower():
                raise
            raise Timeout(str(e)) from None
        finally:
            self.store.set_timeout(before)

    def set(self, k, v): self.store.set(k.decode(), v)
    def get(self, k, timeout=LONG): return self.timed(timeout, lambda: self.store.get(k.decode()))
    def compare_set(self, k, e, d): return self.store.compare_set(k.decode(), e.decode(), d.decode())
    def add(self, k, n): return self.store.add(k.decode(), n)
    def append(self, k, v): self.store.append(k.decode(), v)
    def check(self, ks): return self.store.check([k.decode() for k in ks])

    def wait(self, ks, timeout=LONG):
        keys = [k.decode() for k in ks]
        self.timed(timeout, lambda: self.store.wait(keys, datetime.timedelta(seconds=timeout)))

    def multi_get(self, ks): return self.store.multi_get([k.decode() for k in ks])
    def multi_set(self, ks, vs): self.store.multi_set([k.decode() for k in ks], [v.decode() for v in vs])
    def delete(self, k): return self.store.delete_key(k.decode())
    def num_keys(self): return self.store.num_keys()
    def list_keys(self): return sorted(k.encode() for k in self.store.list_keys())
    def queue_push(self, k, v): self.store.queue_push(k.decode(), v)
    def queue_pop(self, k, timeout=LONG): return self.timed(timeout, lambda: self.store.queue_pop(k.decode()))

    def try_queue_pop(self, k):
        try:
            return self.store.queue_pop(k.decode(), False)
        except dist.QueueEmptyError:
            return None

    def queue_len(self, k): return self.store.queue_len(k.decode())
    def barrier(self, k, n, timeout=LONG): self.timed(timeout, lambda: self.store.barrier(k.decode(), n, datetime.timedelta(seconds=timeout)))
    def prefix(self, p): return Torchs(dist.PrefixStore(p.decode(), self.store))
    def close(self): self.store = None


# --- cases: a and b are clients of the same, empty store; both orders are run -------------------------------

def same(got, expected):
    assert got == expected, f"{got!r} is not {expected!r}"


def times_out(work):
    start = time.monotonic()
    try:
        got = work()
    except Timeout:
        took = time.monotonic() - start
        assert took < SHORT + 5, f"timed out only after {took:.1f} s"
    else:
        raise AssertionError(f"no timeout, but {got!r}")


def while_waiting(wait, then):
    """Runs wait() in a thread, and then() when it has fallen asleep; what wait() returned."""
    result = []
    thread = threading.Thread(target=lambda: result.append(wait()), daemon=True)
    thread.start()
    time.sleep(0.1)
    assert not result, "it did not wait"
    then()
    thread.join(LONG)
    assert result, "it was not woken"
    return result[0]


def case_set_and_get(a, b):
    for key, value in [(b"k", b"v1"), (b"empty", b""), (b"large", bytes(range(256)) * (1 << 15)), (b"k", b"second")]:
        a.set(key, value)
        same(b.get(key), value)


def case_get_waits(a, b):
    same(while_waiting(lambda: a.get(b"late"), lambda: b.set(b"late", b"x")), b"x")


def case_get_times_out_and_goes_on(a, b):
    times_out(lambda: a.get(b"never", timeout=SHORT))
    b.set(b"never", b"1")
    same(a.get(b"never"), b"1")


def case_compare_set(a, b):
    same(a.compare_set(b"c", b"A", b"C"), b"A")
    same(b.check([b"c"]), False)
    same(b.compare_set(b"c", b"", b"A"), b"A")
    same(a.compare_set(b"c", b"B", b"C"), b"A")
    same(a.compare_set(b"c", b"A", b"C"), b"C")
    same(b.get(b"c"), b"C")


def case_add(a, b):
    same(a.add(b"n", 5), 5)
    same(b.add(b"n", -7), -2)
    same(a.get(b"n"), b"-2")
    a.set(b"n", b"40")
    same(b.add(b"n", 2), 42)


def case_append(a, b):
    a.append(b"a", b"x")
    same(b.get(b"a"), b"x")
    b.append(b"a", b"yz")
    same(a.add(b"sync", 1), 1)
    time.sleep(0.1)  # torch's append does not wait for the server
    same(a.get(b"a"), b"xyz")


def case_check(a, b):
    a.set(b"x", b"")
    same(b.get(b"x"), b"")
    same(b.check([b"x"]), True)
    same(b.check([b"x", b"y"]), False)
    same(a.check([b"x", b"x"]), True)


def case_wait(a, b):
    a.wait([])
    b.set(b"one", b"")
    while_waiting(lambda: a.wait([b"one", b"two", b"three"]), lambda: (b.set(b"two", b""), b.add(b"three", 1)))
    a.wait([b"one", b"two"])


def case_wait_times_out_and_goes_on(a, b):
    for _ in range(3):
        times_out(lambda: a.wait([b"p", b"q"], timeout=SHORT))
    b.set(b"p", b"")
    b.set(b"q", b"")
    a.wait([b"p", b"q"])
    same(a.add(b"n", 1), 1)


def case_multi(a, b):
    keys = [b"m%d" % i for i in range(300)]
    values = [b"%d" % (i * i) for i in range(300)]
    a.multi_set(keys, values)
    same(b.multi_get(keys), values)
    same(while_waiting(lambda: a.multi_get([b"m1", b"m-late"]), lambda: b.multi_set([b"m-late"], [b"z"])), [b"1", b"z"])


def case_delete_and_count(a, b):
    before = a.num_keys()
    a.set(b"d1", b"")
    same(b.get(b"d1"), b"")
    same(b.num_keys(), before + 1)
    same(b.delete(b"d1"), True)
    same(a.delete(b"d1"), False)
    same(a.num_keys(), before)


def case_list(a, b):
    a.set(b"l1", b"")
    b.set(b"l2", b"")
    same(b.get(b"l1"), b"")
    a.wait([b"l2"])
    same(a.list_keys(), [b"l1", b"l2"])
    same(b.list_keys(), [b"l1", b"l2"])


def case_prefix(a, b):
    plain = b
    nested = a.prefix(b"b").prefix(b"a")
    nested.set(b"k", b"v")
    same(plain.get(b"b/a/k"), b"v")
    same(nested.list_keys(), [b"k"])
    same(nested.num_keys(), plain.num_keys())


def case_barrier(a, b):
    while_waiting(lambda: a.barrier(b"b", 2), lambda: b.barrier(b"b", 2))
    a.barrier(b"b", 2)
    times_out(lambda: a.barrier(b"b2", 2, timeout=SHORT))
    b.barrier(b"b2", 2)


def case_queue(a, b):
    for item in [b"item1", b"", b"3"]:
        a.queue_push(b"q", item)
    same(a.queue_len(b"q"), 3)
    same(b.queue_pop(b"q"), b"item1")
    same(b.try_queue_pop(b"q"), b"")
    same(a.queue_pop(b"q"), b"3")
    same(a.try_queue_pop(b"q"), None)
    same(b.queue_len(b"q"), 0)
    same(a.check([b"q"]), False)


def case_queue_pop_waits(a, b):
    same(while_waiting(lambda: a.queue_pop(b"q"), lambda: b.queue_push(b"q", b"late")), b"late")
    times_out(lambda: a.queue_pop(b"q", timeout=SHORT))
    b.queue_push(b"q", b"again")
    same(a.queue_pop(b"q"), b"again")


# --- stores -----------------------------------------------------------------------------------------------------

class OurServer:
    def __init__(self, *flags):
        self.process = subprocess.Popen([STORE, "--port", "0", *flags], stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        assert line.startswith("listening on "), line
        self.port = int(line.rsplit(":", 1)[1])

    def close(self):
        self.process.terminate()
        assert self.process.wait(10) == 0


class TorchServer:
    def __init__(self, libuv):
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=libuv)
        self.port = self.store.port

    def close(self):
        self.store = None


class FileServer:
    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "store")

    def close(self):
        assert not os.path.exists(self.path), "the last to close the store should have removed its file"
        self.folder.cleanup()


def torchs(server):
    if isinstance(server, FileServer):
        return Torchs(dist.FileStore(server.path, 2))
    timeout = datetime.timedelta(seconds=LONG)
    return Torchs(dist.TCPStore("127.0.0.1", server.port, None, False, timeout=timeout, wait_for_workers=False))


def ours(server):
    if isinstance(server, FileServer):
        return Ours("file", server.path, "2")
    return Ours("tcp", f"127.0.0.1:{server.port}")


def workers(server):
    """The count of workers that torch keeps: its constructor with a world size, and our two calls."""
    timeout = datetime.timedelta(seconds=LONG)
    client = ours(server)
    same(client.call("announce_worker"), ["1"])
    torch = dist.TCPStore("127.0.0.1", server.port, 2, False, timeout=timeout)
    client.call("wait_for_workers", 2)
    same(torch.num_keys(), 1)
    try:
        client.call("wait_for_workers", 3, timeout=SHORT)
    except Timeout:
        pass
    else:
        raise AssertionError("a third worker was counted")
    client.close()


def torch_waits_for_our_worker():
    """A torch server that waits for two workers, of which one is ours."""
    port = free_port()
    made = []
    timeout = datetime.timedelta(seconds=LONG)
    thread = threading.Thread(target=lambda: made.append(dist.TCPStore("127.0.0.1", port, 2, True, timeout=timeout)))
    thread.start()
    client = Ours("tcp", f"127.0.0.1:{port}")
    assert not made
    # Which of the two is counted first is open.
    counted = client.call("announce_worker")
    assert counted in (["1"], ["2"]), counted
    thread.join(LONG)
    assert made
    client.close()


def clones(server):
    store = torchs(server).store.clone()
    store.set("k", "of a clone")
    same(torchs(server).get(b"k"), b"of a clone")


def free_port():
    """A port that nobody listens at, below those that the kernel gives to outgoing connections."""
    import random
    import socket
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def captured_file():
    """The bytes of a file store, as spec/store-protocol.md has them, from torch and from us."""
    def fill(store):
        store.set(b"k", b"v1")
        store.add(b"n", 5)
        store.delete(b"k")
        store.compare_set(b"c", b"", b"z")
        store.append(b"ap", b"q")
    with tempfile.TemporaryDirectory() as folder:
        contents = []
        for name in ("torch", "ours"):
            path = os.path.join(folder, name)
            store = Torchs(dist.FileStore(path, 2)) if name == "torch" else Ours("file", path, "2")
            fill(store)
            store.close()
            with open(path, "rb") as f:
                contents.append(f.read())
        same(contents[1], contents[0])


def main():
    global STORE, CALLS
    STORE = os.environ.get("CONVOKE_STORE", os.path.join(TARGET, "release", "convoke-store"))
    CALLS = os.environ.get("STORE_CALLS")
    if not CALLS:
        build = ["cargo", "build", "-q", "--locked", "-p", "convoke-store", "--example", "store_calls"]
        subprocess.run(build, cwd=ROOT, check=True)
        CALLS = os.path.join(TARGET, "debug", "examples", "store_calls")
    cases = {name[5:]: f for name, f in globals().items() if name.startswith("case_")}
    queues = {name for name in cases if name.startswith("queue")}
    # What a server lacks, whoever asks; and what torch's file store gets wrong: its list has "efcount/", a key of
    # its own without the first letter, and deleting an absent key is told as done.
    pairs = [
        ("convoke-store", lambda: OurServer(), set()),
        ("torch-libuv", lambda: TorchServer(True), set()),
        ("torch-legacy", lambda: TorchServer(False), queues),
        ("file", FileServer, queues),
    ]
    clients = {"torch": torchs, "ours": ours}
    runs = []
    for server_name, server, lacks in pairs:
        for a in clients:
            for b in clients:
                if a == b == "torch" and server_name != "convoke-store":
                    continue  # torch with itself
                for name, case in cases.items():
                    odd = server is FileServer and "torch" in (a, b) and name in ("list", "delete_and_count")
                    if name not in lacks and not odd:
                        runs.append((f"{server_name}: {a} and {b}: {name}", server, clients[a], clients[b], case))
    passed, failed = 0, 0

    def run(title, work):
        nonlocal passed, failed
        if VERBOSE:
            print(title, flush=True)
        try:
            work()
            passed += 1
        except Exception:
            failed += 1
            print(f"FAILED {title}\n{traceback.format_exc()}", flush=True)

    def on_server(server, work):
        s = server()
        try:
            work(s)
        finally:
            s.close()

    def with_clients(a, b, case):
        def work(server):
            x, y = a(server), b(server)
            case(x, y)
            x.close()
            y.close()
        return work

    for title, server, a, b, case in runs:
        run(title, lambda: on_server(server, with_clients(a, b, case)))
    for name, server, _ in pairs[:3]:
        run(f"{name}: count of workers", lambda: on_server(server, workers))
    run("torch waits for our worker", torch_waits_for_our_worker)
    run("convoke-store: clone", lambda: on_server(lambda: OurServer(), clones))
    run("convoke-store at ::", lambda: on_server(lambda: OurServer("--host", "::"), clones))
    run("convoke-store at localhost", lambda: on_server(lambda: OurServer("--host", "localhost"), clones))
    run("file: captured bytes", captured_file)
    print(f"{passed} passed, {failed} failed", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
