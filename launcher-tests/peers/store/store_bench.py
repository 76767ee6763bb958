#!/usr/bin/env python3
"""TCPStore benchmark: torch's own client against torch's server (libuv and not) and any other server.

  store_bench.py --out out/                                        # torch's two servers
  store_bench.py --server convoke=127.0.0.1:29400:12345 --out out/ # also one started by you (pid optional)

Run with a Python that has torch. Clients are forked processes, one connection each, all using torch's
TCPStore client; servers alternate within each repetition. Writes
  store.csv  system,op,clients,ops_per_s,lat_us_p50,lat_us_p99,rep
  scale.csv  system,clients,metric,value,unit
set/get carry 64-byte values; torch's set() does not wait for an answer, so its latency is only the call's, while
its ops/s count until the server has handled them all; torch's get() is two round trips (wait, then get); wait is on a key that exists; wake is the time from one client's set() call to
another client's return from wait(). scale opens N raw sockets that do the client's handshake (VALIDATE, PING),
then measures the server's memory per client, a torch client's operations while the N stay connected, and the
time from set() to the last of N raw clients' wait being answered.

With --pin, all servers run on the first of the two sets of cores and all clients on the second; a server given by
PID is moved there too. Servers take turns in a different order each repetition. At the end the median of each
figure is printed, and of the ratios to --against within the same repetition (higher is faster in both).
"""
import argparse
import csv
import datetime
import os
import resource
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time

import torch.distributed as dist

SERVE = """
import sys, time, torch.distributed as d
s = d.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=sys.argv[1] == "libuv")
print(s.port, flush=True)
time.sleep(3600)
"""
MAGIC = 0x3C85F7CE
LONG = datetime.timedelta(seconds=30)


def pin(pid, cores):
    """Moves a process with all its threads."""
    if cores:
        for task in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(task), cores)


def cores(text):
    return {int(c) for c in text.split(",")}


def client(addr):
    return dist.TCPStore(addr[0], addr[1], None, False, timeout=LONG, wait_for_workers=False)


def make_op(s, op, key):
    value = "x" * 64
    if op == "set":
        return lambda: s.set(key, value)
    if op == "get":
        s.set(key, value)
        return lambda: s.get(key)
    if op == "add":
        return lambda: s.add("shared-counter", 1)
    if op == "check":
        s.set(key, value)
        return lambda: s.check([key])
    if op == "wait":
        s.set(key, value)
        return lambda: s.wait([key])
    raise ValueError(op)


def throughput(addr, op, clients, seconds):
    """Forks the clients; returns (ops/s, p50 us, p99 us)."""
    go_r, go_w = os.pipe()
    kids = []
    for i in range(clients):
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(go_w)
                s = client(addr)
                f, sync = make_op(s, op, f"k{i}"), lambda: s.add(f"sync{i}", 1)
                for _ in range(20):
                    f()
                os.write(w, b"r")
                os.read(go_r, 1)
                lat, now = [], time.perf_counter
                t = t0 = now()
                end = t0 + seconds
                while t < end:
                    f()
                    u = now()
                    lat.append(u - t)
                    t = u
                sync()  # set() returns before the server has seen it: count until it has
                t = now()
                lat.sort()
                n = len(lat)
                os.write(w, struct.pack("5d", n, t0, t, lat[n // 2] * 1e6, lat[int((n - 1) * 0.99)] * 1e6))
            finally:
                os._exit(0)
        os.close(w)
        kids.append((pid, r))
    for _, r in kids:
        if os.read(r, 1) != b"r":
            raise RuntimeError("a client failed to start")
    os.close(go_w), os.close(go_r)
    res = [struct.unpack("5d", os.read(r, 40)) for _, r in kids]
    for pid, r in kids:
        os.waitpid(pid, 0)
        os.close(r)
    span = max(x[2] for x in res) - min(x[1] for x in res)  # perf_counter is one clock for all processes
    return sum(x[0] for x in res) / span, statistics.median(x[3] for x in res), max(x[4] for x in res)


def wake(addr, n=200):
    a, lat, tag = client(addr), [], f"{time.time_ns()}-"
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        b = client(addr)
        for i in range(n):
            b.set(f"ready{tag}{i}", "1")
            b.wait([f"wake{tag}{i}"])
            os.write(w, struct.pack("d", time.perf_counter()))
        os._exit(0)
    for i in range(n):
        a.wait([f"ready{tag}{i}"])
        time.sleep(0.002)  # let the other side block in wait
        t = time.perf_counter()
        a.set(f"wake{tag}{i}", "1")
        lat.append((struct.unpack("d", os.read(r, 8))[0] - t) * 1e6)
    os.waitpid(pid, 0)
    os.close(r), os.close(w)
    lat.sort()
    return lat[n // 2], lat[int((n - 1) * 0.99)]


def rss(pid):
    for line in open(f"/proc/{pid}/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1])


def recv(s, n):
    out = b""
    while len(out) < n:
        b = s.recv(n - len(out))
        if not b:
            raise ConnectionError("closed by the server")
        out += b
    return out


def release(name, addr, n, put, tag, socks):
    """The time from one client's set() until the last of all waits for that key is answered."""
    key = f"/release-{tag}".encode()  # torch's client puts "/" before every key
    for s in socks:
        s.sendall(struct.pack("<BQQ", 6, 1, len(key)) + key)
    time.sleep(0.5)
    ep = select.epoll()
    for s in socks:
        ep.register(s.fileno(), select.EPOLLIN)
    c = client(addr)
    t, left = time.perf_counter(), len(socks)
    c.set(key.decode()[1:], "1")
    while left and time.perf_counter() - t < 30:
        for fd, _ in ep.poll(1, 4096):
            os.read(fd, 16)
            left -= 1
    took = (time.perf_counter() - t) * 1e3
    put(name, n, "set to last of all waits answered" if not left else f"{left} waits never answered", took, "ms")
    return took


def scale(name, addr, pid, n, put, tag, releases):
    socks, t0 = [], time.perf_counter()
    before = rss(pid) if pid else None
    try:
        for i in range(n):
            s = socket.create_connection(addr, timeout=10)
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            s.sendall(struct.pack("<BIBI", 0, MAGIC, 13, i))
            if struct.unpack("<I", recv(s, 4))[0] != i:
                raise ConnectionError("wrong ping answer")
            socks.append(s)
    except OSError as e:
        put(name, n, f"failed after {len(socks)} clients: {e}", len(socks), "clients")
    put(name, n, "connect + handshake, one at a time", (time.perf_counter() - t0) / max(1, len(socks)) * 1e6, "us each")
    if pid:
        put(name, n, "server memory per client", (rss(pid) - before) * 1024 / max(1, len(socks)), "bytes")
    for op in ("set", "add"):
        ops, p50, _ = throughput(addr, op, 1, 1.0)
        put(name, n, f"{op}, one torch client, others idle", ops, "ops/s")
    took = [release(name, addr, n, put, f"{tag}-{i}", socks) for i in range(releases)]
    for s in socks:
        s.close()
    time.sleep(0.5)
    return statistics.median(took)


def turn(servers, rep):
    k = rep % len(servers)
    return servers[k:] + servers[:k]


def ratio(a, b):
    """The median over the repetitions of a's figure over b's."""
    return f" (x{statistics.median(x / y for x, y in zip(a, b)):.3f})"


def report(best, against):
    for (op, n), d in best.items():
        cells = []
        for name, rows in d.items():
            p50 = statistics.median(x[1] for x in rows)
            if op == "wake":
                text = f"{name}: p50 {p50:7.1f} us"
                if against in d:
                    text += ratio([x[1] for x in d[against]], [x[1] for x in rows])
            else:
                text = f"{name}: {statistics.median(x[0] for x in rows):9.0f} ops/s p50 {p50:7.1f} us"
                if against in d:
                    text += ratio([x[0] for x in rows], [x[0] for x in d[against]])
            cells.append(text)
        print(f"{op:6s} {n:3d} clients  " + "  ".join(cells), flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--server", action="append", default=[], help="NAME=HOST:PORT[:PID] of a running server")
    p.add_argument("--no-torch-servers", action="store_true")
    p.add_argument("--ops", default="set,get,add,check,wait")
    p.add_argument("--clients", default="1,8,64")
    p.add_argument("--scale", default="1000,5000,10000")
    p.add_argument("--seconds", type=float, default=1)
    p.add_argument("--reps", type=int, default=3)
    p.add_argument("--scale-reps", type=int, default=1, help="how often the whole of scale is repeated")
    p.add_argument("--releases", type=int, default=1, help="how often the waits are released for each N connected")
    p.add_argument("--no-legacy", action="store_true", help="leave out torch's old server, whose scale takes minutes")
    p.add_argument("--pin", help="SERVERS:CLIENTS, cores as 0:1 or 0,1:2,3")
    p.add_argument("--against", default="torch-libuv", help="what ratios are taken to")
    p.add_argument("--out", default="store-out")
    o = p.parse_args()
    os.makedirs(o.out, exist_ok=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers started here are ended
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # one line for each client without a host name
    server_cores, client_cores = map(cores, o.pin.split(":")) if o.pin else (None, None)
    pin(os.getpid(), client_cores)  # and all clients forked from here
    servers, procs = [], []
    if not o.no_torch_servers:
        for kind in ("libuv",) if o.no_legacy else ("libuv", "legacy"):
            q = subprocess.Popen([sys.executable, "-c", SERVE, kind], stdout=subprocess.PIPE, text=True)
            servers.append((f"torch-{kind}", ("127.0.0.1", int(q.stdout.readline())), q.pid))
            procs.append(q)
    for s in o.server:
        name, at = s.split("=", 1)
        f = at.split(":")
        servers.append((name, (f[0], int(f[1])), int(f[2]) if len(f) > 2 else None))
    for _, _, pid in servers:
        if pid:
            pin(pid, server_cores)
    best = {}
    released = {}
    try:
        with open(f"{o.out}/store.csv", "w") as fh:
            w = csv.writer(fh)
            w.writerow("system,op,clients,ops_per_s,lat_us_p50,lat_us_p99,rep".split(","))
            for rep in range(o.reps):
                for n in map(int, o.clients.split(",")):
                    for op in o.ops.split(","):
                        for name, addr, _ in turn(servers, rep):
                            x = throughput(addr, op, n, o.seconds)
                            w.writerow([name, op, n] + [f"{v:.1f}" for v in x] + [rep])
                            best.setdefault((op, n), {}).setdefault(name, []).append(x)
                for name, addr, _ in turn(servers, rep):
                    x = wake(addr)
                    w.writerow([name, "wake", 2, "", f"{x[0]:.1f}", f"{x[1]:.1f}", rep])
                    best.setdefault(("wake", 2), {}).setdefault(name, []).append((0,) + x)
        report(best, o.against)
        with open(f"{o.out}/scale.csv", "w") as fh:
            w = csv.writer(fh)
            w.writerow("system,clients,metric,value,unit".split(","))

            def put(*row):
                w.writerow(row[:3] + (round(row[3], 1),) + row[4:])
                print(*row, flush=True)
            for rep in range(o.scale_reps):
                for n in map(int, o.scale.split(",")) if o.scale else ():
                    for name, addr, pid in turn(servers, rep):
                        took = scale(name, addr, pid, n, put, f"{n}-{time.time_ns()}", o.releases)
                        released.setdefault(n, {}).setdefault(name, []).append(took)
        for n, d in released.items():
            print(f"release of {n} waits, median ms:  " + "  ".join(
                f"{name}: {statistics.median(v):.1f}{ratio(d[o.against], v) if o.against in d else ''}"
                for name, v in d.items()))
    finally:
        for q in procs:
            q.send_signal(signal.SIGKILL)
            q.wait()


main()
