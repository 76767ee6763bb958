"""Groups on numpy arrays and buffers, without torch."""

import array
import os
import pickle
import select
import signal
import socket
import sys
import time

import convoke_dist
import numpy as np
import pytest
from convoke_dist import launch
from interrupts import interrupt_when_asleep, interruption


def run(fn, nproc=3, *args):
    return launch(fn, nproc, start_method="fork")(*args)


def test_forked_child_may_drop_the_objects_of_its_parent():
    server = convoke_dist.StoreServer("127.0.0.1")
    group = convoke_dist.init(store=f"127.0.0.1:{server.port}", rank=0, world_size=1)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        # The child's thread gets the address of the parent's.
        own = convoke_dist.StoreServer("127.0.0.1")
        del server, group, own
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    group.close()


def _collectives():
    world = convoke_dist.init()
    rank, size = world.rank, world.size
    for dtype in ("int8", "uint16", "int64", "float16", "float32", "float64", "complex64", "complex128"):
        values = np.full(5, rank + 1, dtype=dtype)
        world.all_reduce(values)
        assert (values == sum(range(1, size + 1))).all(), dtype
    flags = np.array([rank == 0, False])
    world.all_reduce(flags, "bor")
    assert flags.tolist() == [True, False]
    values, out = np.arange(4.0) + rank, np.empty(4)
    world.all_reduce(values, "max", out=out)
    assert (out == np.arange(4.0) + size - 1).all() and (values == np.arange(4.0) + rank).all()
    world.all_reduce(values, 0.5)
    assert np.allclose(values, (np.arange(4.0) * size + sum(range(size))) / 2)
    values = np.full(3, rank)
    world.broadcast(values, 1)
    assert (values == 1).all()
    gathered = np.empty((size, 2), dtype="int32")
    world.all_gather(gathered, np.full(2, rank, dtype="int32"))
    assert (gathered[:, 0] == range(size)).all()
    counts = [rank + 1 for rank in range(size)]
    uneven = np.empty(sum(counts), dtype="int32")
    world.all_gather(uneven, np.full(rank + 1, rank, dtype="int32"), counts=counts)
    assert uneven.tolist() == [rank for rank in range(size) for _ in range(rank + 1)]
    part = np.empty(2)
    world.reduce_scatter(part, np.arange(2.0 * size), "sum")
    assert (part == np.array([2.0 * rank, 2.0 * rank + 1]) * size).all()
    out = np.empty(2 * size) if rank == 2 else None
    world.gather(np.full(2, float(rank)), 2, out=out)
    assert rank != 2 or out.tolist() == [float(rank) for rank in range(size) for _ in range(2)]
    world.scatter(part, 2, array=out)
    assert (part == rank).all()
    out = np.empty(size, dtype="int64")
    world.all_to_all(out, np.arange(size) + 10 * rank)
    assert out.tolist() == [10 * source + rank for source in range(size)]
    values = np.array([rank + 1])
    world.scan(values)
    assert values[0] == sum(range(1, rank + 2))
    world.barrier()
    world.monitored_barrier()
    return rank, size, world.local_rank, world.local_size, world.hosts


def test_collectives_give_what_their_names_say():
    assert run(_collectives) == [(rank, 3, rank, 3, [[0, 1, 2]]) for rank in range(3)]


def _messages():
    world = convoke_dist.init()
    if world.rank == 0:
        world.send(np.arange(3), 1, tag=7)
        world.send(np.arange(2), 1, tag=8)
    elif world.rank == 1:
        assert world.probe(0, 7) == convoke_dist.Message(0, 7, 3)
        out = np.empty(5, dtype="int64")
        assert world.recv(out, tag=8) == (0, 8, 2)
        assert world.recv(out, 0, 7).count == 3 and out[:3].tolist() == [0, 1, 2]
        assert world.try_probe(0, 7) is None
    work = world.all_reduce(values := np.ones(1000), async_op=True)
    select.select([work], [], [], 30)
    assert work.is_done() and work.wait() is None and (values == world.size).all()
    buffer, typed = bytearray(b"\1\2"), array.array("d", [1.5, 2.5])
    world.all_reduce(buffer)
    world.all_reduce(typed, "sum")
    assert buffer == bytes([world.size, 2 * world.size]) and typed.tolist() == [1.5 * world.size, 2.5 * world.size]
    objects = world.all_gather_object({"rank": world.rank, "data": b"x" * 1000 * world.rank})
    assert [value["rank"] for value in objects] == list(range(world.size))
    assert world.broadcast_object([world.rank], 2) == [2]
    memory = world.alloc(1 << 20)
    values = np.frombuffer(memory, dtype=np.float32)
    values[:] = world.rank
    world.all_reduce(values)
    assert (values == sum(range(world.size))).all()
    even = world.split(world.rank % 2)
    assert even.size == (2 if world.rank % 2 == 0 else 1) and even.global_ranks[even.rank] == world.rank
    pair = world.subgroup([2, 0], "pair")
    assert (pair is None) == (world.rank == 1)
    with world.with_timeout(5.0) as quick:
        assert quick.timeout == 5.0


def test_messages_objects_memory_and_subgroups():
    run(_messages)


def _killed():
    world = convoke_dist.init()
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            world.all_reduce(np.ones(10))
    except convoke_dist.PeerLost as error:
        assert error.rank == 1 and error.ends_group and "all_reduce" in error.call, error.facts
        smaller = world.shrink(within=5)
        values = np.ones(1)
        smaller.all_reduce(values)
        assert values[0] == 2 == smaller.size
        raise


def test_killed_rank_is_named_and_the_others_go_on_without_it():
    with pytest.raises(convoke_dist.LaunchError) as caught:
        run(_killed)
    assert caught.value.rank == 1 and "SIGKILL" in str(caught.value) and caught.value.exit_code == -9


SAME = np.ones(6)


def _wrong():
    world = convoke_dist.init()
    for call, text in [
        (lambda: world.all_reduce(np.ones(4)[::2]), "not contiguous"),
        (lambda: world.all_reduce(b"read-only"), "read-only"),
        (lambda: world.all_reduce([1, 2]), "not list"),
        (lambda: world.all_reduce(np.array(["text"])), "cannot be sent"),
        (lambda: world.all_reduce(np.ones(2), "average"), "no reduction 'average'"),
        (lambda: world.broadcast(np.ones(2), 99), "99"),
        (lambda: world.all_reduce(np.ones(2), out=np.ones(2, dtype="float32")), "one element type"),
        (lambda: world.all_gather(SAME, SAME[:2]), "overlap"),
        (lambda: world.all_reduce(SAME[:4], out=SAME[2:]), "overlap"),
        (lambda: world.all_to_all(np.ones(2), np.ones(2), send_counts=[1, 1]), "both send_counts and recv_counts"),
    ]:
        with pytest.raises(convoke_dist.InvalidArgument, match=text):
            call()
    world.barrier()
    if world.rank == 1:
        work = world.recv(np.ones(1), 0, tag=3, async_op=True)
        with pytest.raises(TimeoutError, match="it goes on"):
            work.wait(0.01)
        # The group ends on both ranks, because this one is missing in the barrier.
        with pytest.raises(convoke_dist.Timeout) as caught:
            work.wait()
    else:
        with pytest.raises(convoke_dist.Timeout) as caught:
            world.monitored_barrier(0.3)
    assert caught.value.missing == [1] and caught.value.ends_group


def _interrupted(kind):
    world = convoke_dist.init()
    values = np.zeros(3)
    world.barrier()
    if world.rank == 1:
        try:
            world.recv(values, 0)
            world.all_reduce(values)
        except convoke_dist.Aborted as error:
            return str(error)
        return None
    interrupt_when_asleep()
    work = world.all_reduce(values, async_op=True) if kind == "work" else None
    error = interruption(work.wait if work else lambda: world.all_reduce(values))
    if work:
        # The operation goes on, so the group does as well.
        world.send(values, 1)
        work.wait()
    return error


@pytest.mark.parametrize("kind", ["call", "work"])
def test_interrupted_wait_says_for_which_rank_it_waited(kind):
    of_0, of_1 = launch(_interrupted, 2, start_method="fork")(kind)
    if kind == "call":
        assert "interrupted by a signal, as by Ctrl-C, while it waited for rank 1" in of_0
        assert "rank 0" in of_1 and "while it waited for rank 1" in of_1
    else:
        assert (of_0, of_1) == ("None", None)


def _waits_alone(kind):
    """Waits for what never comes, in a process that an interruption must end; returns the error of the wait."""
    server = convoke_dist.StoreServer("127.0.0.1")
    address = f"127.0.0.1:{server.port}"
    store = convoke_dist.Store(address)
    if kind == "closed":
        del server
    waits = {
        "rank 0": lambda: convoke_dist.init(store=address, rank=0, world_size=2),
        "rank 1": lambda: convoke_dist.init(store=address, rank=1, world_size=2),
        "served": lambda: convoke_dist.init(f"tcp://127.0.0.1:{_free_port()}", rank=0, world_size=2),
        "closed": lambda: convoke_dist.Store(address),
        "key": lambda: store.get("absent"),
        "keys": lambda: store.wait(["absent"]),
    }
    interrupt_when_asleep()
    return interruption(waits[kind])


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("kind", "awaited"),
    [
        ("rank 0", "rank 0 was interrupted by a signal, as by Ctrl-C, while it waited for rank(s) 1 of 2 to join"),
        ("rank 1", "rank 1 was interrupted by a signal, as by Ctrl-C, while it waited for rank(s) 0 of 2 to join"),
        ("served", "rank 0 was interrupted by a signal, as by Ctrl-C, while it waited for rank(s) 1 of 2 to join"),
        ("closed", "connect was interrupted by a signal, as by Ctrl-C"),
        ("key", "get was interrupted by a signal, as by Ctrl-C"),
        ("keys", "waiting for absent"),
    ],
)
def test_interrupted_init_or_store_says_for_what_it_waited(kind, awaited):
    began = time.monotonic()
    assert awaited in run(_waits_alone, 1, kind)[0]
    assert time.monotonic() - began < 10


def test_wrong_arguments_are_errors_that_name_what_is_wrong():
    run(_wrong, 2)


def test_world_of_one_needs_no_launcher():
    world = convoke_dist.init()
    values = np.arange(3.0)
    world.all_reduce(values, "avg")
    assert world.size == 1 and values.tolist() == [0, 1, 2]
    world.close()
    with pytest.raises(convoke_dist.InvalidArgument, match="closed"):
        world.barrier()


def test_errors_keep_their_facts_when_they_are_pickled():
    error = convoke_dist.errors.from_json('{"code": "peer_lost", "message": "rank 3 died", "rank": 3, "ends_group": true}')
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is convoke_dist.PeerLost and again.rank == 3 and again.ends_group and str(again) == "rank 3 died"


def test_store_client_and_server():
    server = convoke_dist.StoreServer("127.0.0.1")
    store = convoke_dist.Store(f"127.0.0.1:{server.port}", 10.0).prefix("job")
    store.set("key", b"value")
    assert store.get("key") == b"value" and store.try_get("other") is None and store.check(["key"])
    assert store.add("count", 2) == 2 and store.compare_set("key", b"value", b"new") == b"new"
    store.wait(["key", "count"])
    with pytest.raises(convoke_dist.StoreFailed):
        store.get("missing", 0.05)
    assert store.delete("key") and not store.check(["key"])


def test_package_imports_neither_numpy_nor_torch():
    import subprocess

    code = "import sys, convoke_dist; assert not {'numpy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
