"""A rank dies or stops at a random moment of training: every other rank raises an error that names it.

SUITE_KILLS=100 does it 100 times for each kind (5 by default); SUITE_SEED repeats a run.
"""

import datetime
import multiprocessing
import os
import random
import signal
import statistics
import time

import pytest

torch = pytest.importorskip("torch")

import convoke_dist  # noqa: E402
import convoke_dist.torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
from convoke_dist import _core  # noqa: E402

SEED = int(os.environ.get("SUITE_SEED", random.SystemRandom().randrange(1 << 32)))
KILLS = int(os.environ.get("SUITE_KILLS", "5"))
RANKS = 3
CONTEXT = multiprocessing.get_context("fork")


def _train(rank, variables, kind, timeout, reports, ready):
    for name, value in variables.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("convoke", timeout=datetime.timedelta(seconds=timeout))
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    if kind == "FSDP2":
        mesh = dist.init_device_mesh("cpu", (RANKS,))
        for layer in model:
            torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    try:
        while True:
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            step += 1
            if step == 3:
                ready.wait()
    except RuntimeError as error:
        reports.put((rank, time.monotonic(), str(error)))
        # A group that failed need not be destroyed.
    reports.close()
    reports.join_thread()
    os._exit(0)


def _once(moment, kind, signal_number, timeout):
    """Returns the rank that was hit, and the seconds until each other rank had its error, with the error."""
    victim = moment.randrange(RANKS)
    server = convoke_dist.StoreServer("127.0.0.1")
    worlds = _core.local_world(RANKS, server.port)
    reports, ready = CONTEXT.Queue(), CONTEXT.Barrier(RANKS + 1)
    arguments = [(rank, worlds[rank], kind, timeout, reports, ready) for rank in range(RANKS)]
    ranks = [CONTEXT.Process(target=_train, args=one) for one in arguments]
    try:
        for rank in ranks:
            rank.start()
        ready.wait(60)
        # Any moment of a step; each takes a few milliseconds.
        time.sleep(moment.uniform(0, 0.03))
        began = time.monotonic()
        os.kill(ranks[victim].pid, signal_number)
        told = [reports.get(timeout=timeout + 20) for _ in range(RANKS - 1)]
        for number, rank in enumerate(ranks):
            if number != victim:
                rank.join(20)
                assert rank.exitcode == 0, f"rank {number} ended with {rank.exitcode}"
        return victim, [(rank, at - began, text) for rank, at, text in told]
    finally:
        for rank in ranks:
            if rank.pid is not None:
                rank.kill()
                rank.join()


def _many(kind, signal_number, timeout, count):
    print(f"seed {SEED}")
    moment, times = random.Random(SEED), []
    for number in range(count):
        victim, told = _once(moment, kind, signal_number, timeout)
        for rank, took, text in told:
            assert rank != victim and f"rank {victim}" in text or f"rank(s) {victim}" in text, (number, victim, rank, text)
            times.append(took)
    median = statistics.median(times)
    print(f"{kind}, signal {signal_number}: {len(times)} errors, median {median * 1e3:.1f} ms, most {max(times) * 1e3:.1f} ms")
    return median


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_killed_rank_is_named_in_training(kind):
    assert _many(kind, signal.SIGKILL, 60, KILLS) < 0.1


def test_stopped_rank_is_named_after_the_deadline():
    assert 0.9 < _many("DDP", signal.SIGSTOP, 1, max(2, KILLS // 10)) < 2.5
