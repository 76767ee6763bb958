"""The backend "convoke" of torch.distributed."""

import datetime
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import convoke_dist.torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from interrupts import interrupt_when_asleep, interruption  # noqa: E402
from torch_ranks import run  # noqa: E402


def _collectives(rank, size):
    for dtype in (torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.bool):
        x = torch.ones(5).to(dtype)
        dist.all_reduce(x)
        assert (x == torch.full((5,), float(size)).to(dtype)).all(), dtype
    for op, expected in [(dist.ReduceOp.MAX, size), (dist.ReduceOp.MIN, 1), (dist.ReduceOp.AVG, (size + 1) / 2)]:
        x = torch.full((3,), rank + 1.0)
        dist.all_reduce(x, op)
        assert (x == expected).all(), op
    # Tensors that are not in one piece get the results where they are.
    x = torch.zeros(4, 6)
    x[:, ::2] = rank
    dist.all_reduce(x[:, ::2])
    assert (x[:, ::2] == sum(range(size))).all() and (x[:, 1::2] == 0).all()
    x = torch.arange(6.0).view(2, 3).t() + rank
    dist.broadcast(x, 1)
    assert (x == torch.arange(6.0).view(2, 3).t() + 1).all()
    outputs = [torch.empty(3) for _ in range(size)]
    dist.all_gather(outputs, torch.full((3,), float(rank)))
    assert [o[0].item() for o in outputs] == list(range(size))
    out = torch.empty(2 * size)
    dist.all_gather_into_tensor(out, torch.full((2,), float(rank)))
    assert out[::2].tolist() == list(range(size))
    out = torch.empty(2)
    dist.reduce_scatter_tensor(out, torch.arange(2.0 * size))
    assert (out == torch.tensor([2.0 * rank, 2.0 * rank + 1]) * size).all()
    outputs = [torch.empty(1) for _ in range(size)]
    dist.all_to_all(outputs, [torch.tensor([10.0 * rank + to]) for to in range(size)])
    assert [o.item() for o in outputs] == [10.0 * source + rank for source in range(size)]
    out = torch.empty(size)
    dist.all_to_all_single(out, torch.arange(float(size)) + 10 * rank)
    assert out.tolist() == [10.0 * source + rank for source in range(size)]
    gathered = [torch.empty(2) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((2,), float(rank)), gathered, dst=0)
    assert rank != 0 or [o[0].item() for o in gathered] == list(range(size))
    out = torch.empty(2)
    dist.scatter(out, [torch.full((2,), float(to)) for to in range(size)] if rank == 1 else None, src=1)
    assert (out == rank).all()
    x = torch.full((2,), float(rank))
    dist.reduce(x, 0)
    assert (x == (sum(range(size)) if rank == 0 else rank)).all(), "other ranks keep their tensors"
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": rank} for rank in range(size)]
    sparse = torch.sparse_coo_tensor([[rank, size]], [1.0, 2.0], (size + 1,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1.0] * size + [2.0 * size]
    dist.barrier()
    # Older ones have it for gloo alone, and the fallback in Python never.
    if torch.__version__ >= "2.15" and convoke_dist.torch.mode() != "python":
        dist.monitored_barrier()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_of_tensors(size):
    run(_collectives if size > 1 else _one, size)


def _one(rank, size):
    x = torch.arange(3.0)
    dist.all_reduce(x)
    assert (x == torch.arange(3.0)).all() and size == 1


def _messages(rank, size):
    peer = 1 - rank
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((4,), float(rank)), peer),
            dist.P2POp(dist.irecv, received := torch.empty(4), peer),
        ]
    )
    for request in requests:
        request.wait()
    assert (received == peer).all()
    if rank == 0:
        dist.send(torch.arange(3.0), 1, tag=7)
        dist.send(torch.arange(2.0), 1)
    else:
        assert dist.recv(out := torch.empty(2)) == 0 and out.tolist() == [0, 1]
        dist.recv(out := torch.empty(3), 0, tag=7)
        assert out.tolist() == [0, 1, 2]
    work = dist.all_reduce(x := torch.ones(1000), async_op=True)
    assert work.wait() and work.is_completed() and (x == size).all()
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda f: f.value()[0] * 10)
    assert future.wait().tolist() == [10.0 * size] * 2
    # A callback may wait for another operation.
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    nested = future.then(lambda f: dist.all_reduce(f.value()[0], async_op=True).get_future().wait()[0])
    assert nested.wait().tolist() == [float(size * size)] * 2


def test_messages_futures_and_callbacks():
    run(_messages)


def _groups(rank, size):
    even = dist.new_group([0, 2])
    if rank in (0, 2):
        x = torch.ones(2)
        dist.all_reduce(x, group=even)
        assert (x == 2).all() and dist.get_world_size(even) == 2
    mine = dist.new_group([rank], use_local_synchronization=True)
    assert dist.get_rank(mine) == 0
    mesh = dist.init_device_mesh("cpu", (3,))
    x = torch.full((1,), float(rank))
    dist.all_reduce(x, group=mesh.get_group())
    assert x.item() == 3
    began = time.monotonic()
    groups = [dist.new_group(list(range(size))) for _ in range(30)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    assert time.monotonic() - began < 20
    both = dist.new_group(backend="gloo")
    dist.all_reduce(x, group=both)


def test_subgroups_meshes_and_another_backend_beside():
    run(_groups, 3)


def _ddp(rank, size):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    single = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    single.load_state_dict(model.state_dict())
    ddp = DDP(model, gradient_as_bucket_view=True)
    data = torch.randn(size * 4, 8)
    for net, part in [(ddp, data[rank * 4 :][:4]), (single, data)]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(part).square().mean().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), single.parameters()):
        assert torch.allclose(a, b, atol=1e-6)


def test_data_parallel_training_equals_training_on_one_rank():
    run(_ddp, 2)


def _recorded(rank, size):
    from torch._C._distributed_c10d import _dump_fr_trace

    x = torch.ones(3)
    for _ in range(5):
        dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    entries = pickle.loads(_dump_fr_trace(backend="convoke")).get("entries", [])
    return [(entry["profiling_name"], entry["state"]) for entry in entries]


@pytest.mark.skipif(not hasattr(dist.distributed_c10d, "_maybe_attach_flight_recorder"), reason="torch records only NCCL")
@pytest.mark.skipif(os.environ.get("CONVOKE_TORCH_SHIM") == "python", reason="groups in Python call no hooks")
def test_torchs_flight_recorder_is_on_request_and_sees_operations_end(monkeypatch):
    assert run(_recorded, 2) == [[], []], "torch's recorder takes more time than the operation, and nobody asked for it"
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    for entries in run(_recorded, 2):
        names, states = zip(*entries)
        assert len(entries) == 6 and set(states) == {"completed"}, entries
        assert all("all_reduce" in name.lower() or "allreduce" in name.lower() for name in names), entries


def _killed(rank, size):
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        while True:
            dist.all_reduce(torch.ones(10))
    took = time.monotonic() - began
    import convoke_dist.torch

    error = convoke_dist.torch.failure()
    assert isinstance(error, convoke_dist.PeerLost) and error.rank == 1 and "all_reduce" in error.call
    assert took < 5, took
    raise error


def test_killed_rank_is_named_to_all_others():
    with pytest.raises(convoke_dist.LaunchError) as caught:
        run(_killed, 3)
    assert caught.value.rank == 1 and "SIGKILL" in str(caught.value)


def _own_groups(rank, size):
    import convoke_dist.torch

    sums = []
    for number in range(3):
        store = dist.PrefixStore(f"try {number}", dist.distributed_c10d._get_default_store())
        group = convoke_dist.torch.process_group(store, rank, size, datetime.timedelta(seconds=30))
        x = torch.tensor([float(rank)])
        group.allreduce([x]).wait()
        sums.append(x.item())
        group.abort()
    return sums


def test_framework_makes_groups_of_its_own():
    assert run(_own_groups, 3) == [[3, 3, 3]] * 3


def _interrupted(rank, size, kind):
    x = torch.ones(3)
    if rank == 1:
        try:
            dist.recv(x, 0)
            dist.all_reduce(x)
        except RuntimeError as error:
            return str(error)
        return x.tolist()
    work = dist.all_reduce(x, async_op=True) if kind == "work" else None
    interrupt_when_asleep()
    error = interruption(work.wait if work else lambda: dist.all_reduce(x))
    if work:
        # The operation goes on, so the group does as well.
        dist.send(torch.ones(3), 1)
        work.wait()
    return error


@pytest.mark.parametrize("kind", ["call", "work"])
@pytest.mark.skipif(os.environ.get("CONVOKE_TORCH_SHIM") == "python", reason="works of groups in Python do not say it")
def test_interrupted_wait_says_for_which_rank_it_waited(kind):
    of_0, of_1 = run(_interrupted, 2, kind)
    if kind == "call":
        assert "interrupted by a signal, as by Ctrl-C, while it waited for rank 1" in of_0
        assert "rank 0" in of_1 and "while it waited for rank 1" in of_1
    else:
        assert "wait was interrupted by a signal" in of_0 and of_1 == [2, 2, 2]


def _average_hook(rank, size, group):
    gradients = []
    for hook in (None, convoke_dist.torch.average_hook):
        torch.manual_seed(0)
        model = DDP(torch.nn.Linear(5, 3))
        if hook:
            model.register_comm_hook(dist.group.WORLD if group else None, hook)
        model(torch.full((2, 5), rank + 1.0)).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for own, of_hook in zip(*gradients):
        torch.testing.assert_close(of_hook, own)


@pytest.mark.parametrize("group", [False, True])
def test_average_hook_gives_the_gradients_of_ddp_itself(group):
    run(_average_hook, 3, group)


def _forms_alone(rank):
    server = convoke_dist.StoreServer("127.0.0.1")
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    interrupt_when_asleep()
    return interruption(lambda: dist.init_process_group("convoke", store=store, rank=rank, world_size=2))


@pytest.mark.parametrize("rank", [0, 1])
def test_interrupted_init_process_group_ends(rank):
    began = time.monotonic()
    [error] = convoke_dist.launch(_forms_alone, 1, start_method="fork")(rank)
    # Rank 1 waits in Python, where only KeyboardInterrupt is raised.
    assert rank == 1 or "interrupted by a signal, as by Ctrl-C, while it waited for rank(s) 1 of 2 to join" in error
    assert time.monotonic() - began < 30


def _rank_0_is_late(rank):
    server = convoke_dist.StoreServer("127.0.0.1")
    limit = datetime.timedelta(seconds=0.5)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit)
    with pytest.raises(dist.DistStoreError, match="rank 0 did not begin to form the group within 0.5 s"):
        dist.init_process_group("convoke", store=store, rank=rank, world_size=2)


def test_absent_rank_0_is_named_after_the_time_limit_of_the_store():
    convoke_dist.launch(_rank_0_is_late, 1, start_method="fork")(1)


def _short_message(rank, size):
    if rank == 0:
        dist.send(torch.ones(2), 1)
    else:
        x = torch.full((4, 2), 7.0)
        dist.recv(x[:, 0], 0)
        assert x[:, 0].tolist() == [1, 1, 7, 7] and (x[:, 1] == 7).all()


def test_message_shorter_than_the_tensor_leaves_its_rest():
    run(_short_message, 2)


def _mismatch(rank, size):
    with pytest.raises(dist.DistBackendError, match=r"all_reduce\(f32, 4.*broadcast|broadcast.*all_reduce\(f32, 4"):
        dist.all_reduce(torch.ones(4)) if rank == 0 else dist.broadcast(torch.ones(4), 0)


def test_different_calls_are_an_error_on_all_ranks():
    run(_mismatch, 2)


def _refused(rank, size):
    with pytest.raises(RuntimeError, match="cannot reduce elements of type"):
        dist.all_reduce(torch.zeros(4).to(torch.float8_e4m3fn))
    x = torch.full((4,), float(rank)).to(torch.float8_e4m3fn)
    dist.broadcast(x, 1)
    assert (x.float() == 1).all()
    with pytest.raises(RuntimeError, match="4 elements"):
        dist.all_gather_into_tensor(torch.empty(4), torch.empty(3))


def test_wrong_tensors_are_refused_and_8_bit_floats_are_moved():
    run(_refused, 2)


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("{backend}")
x = torch.ones(1000)
dist.all_reduce(x)
pending = dist.all_reduce(torch.ones(1000), async_op=True)
never = dist.irecv(torch.ones(1), tag=5)
assert "{backend}" in dist.get_backend()
import sys; assert "convoke_dist.torch" in sys.modules
"""


@pytest.mark.parametrize("backend, flags", [("convoke", []), ("gloo", ["--as-gloo"])])
def test_script_that_destroys_no_group_ends_with_0(tmp_path, backend, flags):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(backend=backend))
    done = subprocess.run(
        [sys.executable, "-m", "convoke_dist.run", "--standalone", "--nproc-per-node=2", *flags, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


BUSY_SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("convoke")
x = torch.ones(1000)
for _ in range(50):
    dist.all_reduce(x)
never = dist.irecv(torch.ones(1), tag=5)
futures = [dist.all_reduce(torch.ones(5000), async_op=True).get_future().then(lambda done: done.value()) for _ in range(20)]
waited = dist.all_reduce(torch.ones(1000), async_op=True)
waited.wait()
dist.all_reduce(torch.ones(1000), async_op=True)
"""


def test_script_that_destroys_no_group_ends_with_0_on_a_busy_machine(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(BUSY_SCRIPT)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        for number in range(int(os.environ.get("SUITE_EXITS", "3"))):
            command = [sys.executable, "-m", "convoke_dist.run", "--standalone", "--nproc-per-node=2", str(script)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, (number, done.stderr)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


DRAIN_SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist

def save(step):
    with open(f"step.{dist.get_rank()}", "w") as file:
        file.write(str(step))

dist.init_process_group("convoke")
for step in range(1_000_000):
    time.sleep(0.001 * dist.get_rank())
    if step == 20:
        open(f"runs.{dist.get_rank()}", "w").close()
LINES
"""


def test_ranks_stop_at_one_step_after_the_three_lines_of_the_guide(tmp_path):
    guide = (Path(__file__).parents[3] / "docs/guides/pytorch.md").read_text()
    lines = guide.split("## Drains")[1].split("```python\n")[1].split("```")[0]
    assert lines.count("\n") == 3
    script = tmp_path / "train.py"
    script.write_text(DRAIN_SCRIPT.replace("LINES", "    " + lines.strip().replace("\n", "\n    ")))
    launcher = [sys.executable, "-m", "convoke_dist.run"]
    command = [*launcher, "--nproc-per-node=3", "--log-dir=logs", str(script)]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not all((tmp_path / f"runs.{rank}").exists() for rank in range(3)):
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        subprocess.run([*launcher, "drain", "logs"], check=True, timeout=60, cwd=tmp_path)
        _, errors = job.communicate(timeout=60)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 75, errors
    steps = [(tmp_path / f"step.{rank}").read_text() for rank in range(3)]
    assert len(set(steps)) == 1 and int(steps[0]) >= 20, steps
