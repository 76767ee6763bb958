"""The store at MASTER_ADDR:MASTER_PORT speaks the TCPStore protocol of torch.distributed."""
from harness import case, eq, free_port, vals


def in_worker(ctx, body, *args, **kw):
    """Run body in one worker, with `c` connected to the agent store."""
    return ctx.run(*args, ctx.script("from storeclient import *\nc = StoreClient()\n" + body), **kw)


@case("store")
def store_requests(ctx):
    """Every request type gives the reply of the specification."""
    in_worker(ctx, """
assert c.ping(77) == 77
c.set("/k", "v1"); assert c.get("/k") == b"v1"
assert c.get("/missing") == b""
assert c.compare_set("/c", "", "A") == b"A"
assert c.compare_set("/c", "A", "B") == b"B"
assert c.compare_set("/c", "A", "C") == b"B"
assert c.compare_set("/absent", "A", "C") == b"A"
assert c.check("/absent") == 1
assert c.add("/n", 5) == 5 and c.add("/n", -7) == -2 and c.get("/n") == b"-2"
assert c.check("/k", "/n") == 0 and c.check("/k", "/zz") == 1 and c.check() == 0
c.append("/a", "x"); c.append("/a", "yz"); assert c.get("/a") == b"xyz"
c.multi_set([("/m1", "1"), ("/m2", "22")]); assert c.multi_get("/m1", "/m2") == [b"1", b"22"]
n = c.num_keys()
assert c.delete("/k") == 1 and c.delete("/k") == 0 and c.num_keys() == n - 1
assert b"/m1" in c.list_keys() and len(c.list_keys()) == n - 1
assert c.queue_len("/q") == 0 and c.queue_pop("/q") == (0, None)
c.queue_push("/q", "i1"); c.queue_push("/q", "i2")
assert c.queue_len("/q") == 2 and c.check("/q") == 0 and c.num_keys() == n - 1
assert c.queue_pop("/q") == (2, b"i1") and c.queue_pop("/q") == (1, b"i2") and c.check("/q") == 1
c.set("", "empty"); assert c.get("") == b"empty"
c.set(b"\\xff\\x00", b"\\x00\\xfe"); assert c.get(b"\\xff\\x00") == b"\\x00\\xfe"
""")


@case("store")
def store_wait_and_cancel(ctx):
    """WAIT answers 0 when all keys exist, CANCEL_WAIT answers 1; other requests work meanwhile."""
    in_worker(ctx, """
d = StoreClient()
c.start_wait("/w1", "/w2")
d.set("/w1", "1"); d.ping()
assert c.ping(5) == 5                      # still waiting, yet served
d.add("/w2", 1)
assert c.recv(1) == b"\\x00"
c.start_wait("/w1", "/w2"); assert c.recv(1) == b"\\x00"
c.start_wait("/never"); c.cancel_wait(); assert c.recv(1) == b"\\x01"
d.set("/never", "1"); assert c.ping(6) == 6  # no late wake-up
c.cancel_wait(); assert c.recv(1) == b"\\x01"  # nothing to cancel: same answer
for how in ("append", "compare_set", "multi_set", "queue_push"):
    key = "/wake-" + how
    c.start_wait(key); c.ping()
    if how == "append": d.append(key, "1")
    elif how == "compare_set": d.compare_set(key, "", "1")
    elif how == "multi_set": d.multi_set([(key, "1")])
    else: d.queue_push(key, "1")
    assert c.recv(1) == b"\\x00", how
""")


@case("store")
def store_barrier(ctx):
    """BARRIER releases all clients when world_size of them arrived; a timed-out client cancels."""
    in_worker(ctx, """
d = StoreClient()
c.start_barrier("/b", 2); assert c.ping(1) == 1
d.start_barrier("/b", 2)
assert c.recv(1) == b"\\x00" and d.recv(1) == b"\\x00"
c.start_barrier("/one", 1); assert c.recv(1) == b"\\x00"
c.start_barrier("/late", 2); c.cancel_wait(); assert c.recv(1) == b"\\x01"
""")


@case("store")
def store_handshake(ctx):
    """A wrong magic number gets no service; the server goes on serving others."""
    in_worker(ctx, """
bad = StoreClient(handshake=False, timeout=2)
bad.send(b"\\x00\\x01\\x02\\x03\\x04")
try:
    bad.ping()
    sys.exit("served without handshake")
except (EOFError, OSError):
    pass
assert c.ping() == 0x01020304
""")


@case("store")
def store_malformed_requests(ctx):
    """Unknown types, oversized keys and values, and ADD on text close that connection only."""
    in_worker(ctx, """
for data in (b"\\x63", b"\\xff", b"\\x01" + u64(8193), b"\\x01" + blob("/k") + u64((8 << 20) + 1),
             b"\\x06" + u64(131073), b"\\x0a" + u64(131073)):
    bad = StoreClient(timeout=5)
    bad.send(data + bytes(8))
    assert bad.closed_by_server(), data[:9]
c.set("/text", "abc")
bad = StoreClient(timeout=5)
bad.send(b"\\x04" + blob("/text") + u64(1))
assert bad.closed_by_server(), "ADD on text"
assert c.ping() == 0x01020304
c.set("k" * 8192, "max"); assert c.get("k" * 8192) == b"max"
big = b"x" * (8 << 20)
c.set("/big", big); assert c.get("/big") == big
c.append("/big", "yy"); assert len(c.get("/big")) == len(big) + 2
""")


@case("store")
def store_split_and_pipelined(ctx):
    """Requests may arrive byte by byte or many at once."""
    in_worker(ctx, """
for byte in b"\\x01" + blob("/slow") + blob("v") + b"\\x03" + blob("/slow"):
    c.send(bytes([byte])); time.sleep(0.002)
assert c.bytes() == b"v"
c.send(b"".join(b"\\x04" + blob("/p") + u64(1) for _ in range(1000)))
assert [c.i64() for _ in range(1000)] == list(range(1, 1001))
""")


@case("store")
def store_many_clients(ctx):
    """200 connections wait for one key and are all released."""
    in_worker(ctx, """
clients = [StoreClient() for _ in range(200)]
for x in clients: x.start_wait("/go")
c.set("/go", "1")
assert all(x.recv(1) == b"\\x00" for x in clients)
""")


@case("store")
def store_shared_between_nodes(ctx):
    """Workers of all nodes reach the one store (static backend: it is also the rendezvous store)."""
    port = free_port()
    worker = ctx.script("""
        from storeclient import *
        c = StoreClient()
        c.add("/count", 1)
        while c.get("/count") != b"2":
            time.sleep(0.05)
        touch(f"keys{RANK}", "\\n".join(sorted(k.decode() for k in c.list_keys())))
    """)
    agents = [ctx.start("--nnodes=2", f"--node-rank={i}", "--master-addr=127.0.0.1", f"--master-port={port}",
                        "--rdzv-id=run7", worker) for i in (0, 1)]
    for agent in agents:
        agent.expect(0)
    keys = ctx.flag("keys0").split("\n")
    for key in ("/run7/torchelastic/role_info/0", "/run7/torchelastic/role_info/1",
                "/run7/torchelastic/assigned_ranks/0", "init/"):
        assert key in keys, (key, keys)
