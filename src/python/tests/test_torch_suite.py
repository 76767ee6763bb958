"""What programs do with torch.distributed, on the backend "convoke". SUITE_BACKEND=gloo runs it on gloo."""

import copy
import datetime
import os
import signal
import time

import pytest

torch = pytest.importorskip("torch")

# Imported before ranks are forked: some take seconds.
import convoke_dist.torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives  # noqa: E402
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook  # noqa: E402
import torch.distributed.checkpoint.state_dict  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.optim  # noqa: E402
import torch.distributed.pipelining  # noqa: E402
import torch.distributed.tensor.parallel  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import torch.profiler  # noqa: E402
from convoke_dist import LaunchError  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from torch_ranks import run  # noqa: E402

CPU = torch.device("cpu")


def cases(*names):
    """Makes a test of each name."""
    return pytest.mark.parametrize("case", names)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def net(width=16):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))


def data(rank, width=16, rows=4):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 + rank))


def reference_gradients(model, size, width=16):
    """The gradients that data-parallel training on `size` ranks gives, computed on one."""
    model = copy.deepcopy(model)
    for rank in range(size):
        (model(data(rank, width)).square().mean() / size).backward()
    return [parameter.grad for parameter in model.parameters()]


# --- DistributedDataParallel


def _ddp(rank, size, case):
    model = net()
    expected = reference_gradients(model, size)
    flags = {
        "plain": {},
        "buckets as views": {"gradient_as_bucket_view": True},
        "static graph": {"static_graph": True},
        "small buckets": {"bucket_cap_mb": 0.001},
        "unused parameters are looked for": {"find_unused_parameters": True},
        "no buffers": {"broadcast_buffers": False},
    }[case]
    ddp = DDP(model, **flags)
    for _ in range(2):  # the second step uses rebuilt buckets
        ddp.zero_grad()
        ddp(data(rank)).square().mean().backward()
        for parameter, gradient in zip(ddp.parameters(), expected):
            close(parameter.grad, gradient)


@cases("plain", "buckets as views", "static graph", "small buckets", "unused parameters are looked for", "no buffers")
def test_ddp(case):
    run(_ddp, 2, case)


def _ddp_hook(rank, size, case):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

    model = net()
    expected = reference_gradients(model, size)
    ddp = DDP(model)
    tolerance = 1e-5
    if case == "allreduce":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    elif case == "FP16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        tolerance = 1e-2
    elif case == "BF16":
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        tolerance = 5e-2
    elif case == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        tolerance = None
    elif case == "local SGD":
        state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=10)
        ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    else:
        group = dist.group.WORLD

        def hook(_, bucket):
            future = dist.all_reduce(bucket.buffer().div_(size), group=group, async_op=True).get_future()
            return future.then(lambda done: done.value()[0] * 1.0)

        ddp.register_comm_hook(None, hook)
    for _ in range(4):
        ddp.zero_grad()
        ddp(data(rank)).square().mean().backward()
    for parameter, gradient in zip(ddp.parameters(), expected):
        if tolerance is None:  # an approximation, equal on all ranks
            gradient = parameter.grad.clone()
            dist.broadcast(gradient, 0)
        close(parameter.grad, gradient, tolerance or 0)


@cases("allreduce", "FP16", "BF16", "PowerSGD", "local SGD", "a hook with a future")
def test_ddp_communication_hook(case):
    run(_ddp_hook, 2, case)


def _ddp_unused(rank, size):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    ddp = DDP(Chosen(model), find_unused_parameters=True)
    ddp(torch.ones(2, 4), "a" if rank == 0 else "b").sum().backward()
    for name in "ab":
        close(model[name].bias.grad, torch.full((4,), 2.0 / size))


class Chosen(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x, name):
        return self.parts[name](x)


def test_ddp_with_parameters_that_a_rank_does_not_use():
    run(_ddp_unused, 2)


def _ddp_join(rank, size):
    from torch.distributed.algorithms.join import Join

    ddp = DDP(net())
    steps = 0
    with Join([ddp]):
        for _ in range(2 + 3 * rank):
            ddp(data(rank)).sum().backward()
            steps += 1
    assert steps == 2 + 3 * rank
    sums = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(sums, sum(p.double().sum() for p in ddp.parameters()).float().reshape(1))
    assert len({s.item() for s in sums}) == 1


def test_ddp_join_with_uneven_inputs():
    run(_ddp_join, 3)


def _ddp_accumulation(rank, size):
    model = net()
    expected = reference_gradients(model, size)
    ddp = DDP(model)
    with ddp.no_sync():
        ddp(data(rank)).square().mean().backward()
    ddp(data(rank)).square().mean().backward()
    for parameter, gradient in zip(ddp.parameters(), expected):
        close(parameter.grad, 2 * gradient)


def test_ddp_accumulates_gradients():
    run(_ddp_accumulation, 2)


def _ddp_batch_norm(rank, size):
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
    ddp = DDP(model)
    for step in range(3):
        ddp(data(rank + step)).sum().backward()
    ddp(data(rank))
    means = [torch.zeros(8) for _ in range(size)]
    ddp.eval()
    dist.broadcast(model[1].running_mean, 0)
    dist.all_gather(means, model[1].running_mean)
    assert all((mean == means[0]).all() for mean in means)


def test_ddp_with_batch_norm():
    run(_ddp_batch_norm, 2)


def _ddp_sparse(rank, size):
    model = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
    ddp = DDP(model)
    ddp(torch.tensor([[rank, 5]])).sum().backward()
    gradient = model.weight.grad.to_dense()
    close(gradient[5], torch.full((4,), 1.0))
    close(gradient[rank], torch.full((4,), 1.0 / size))


def test_ddp_with_sparse_gradients():
    run(_ddp_sparse, 2)


def _ddp_memory(rank, size):
    os.environ["DDP_DISABLE_COMM_MEM"] = "0"
    _ddp(rank, size, "buckets as views")


def test_ddp_with_buckets_in_memory_of_the_group():
    run(_ddp_memory, 2)


def _data_parallel(rank, size):
    os.environ.pop("DDP_DISABLE_COMM_MEM", None)
    model, plain = net(), net()
    plain.load_state_dict(model.state_dict())
    ours, ddp = convoke_dist.torch.data_parallel(model), DDP(plain)
    assert os.environ["DDP_DISABLE_COMM_MEM"] == "0"
    for step in range(3):
        for wrapped in (ours, ddp):
            wrapped.zero_grad()
            wrapped(data(rank + step)).square().sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters()):
            close(mine.grad, theirs.grad)


@pytest.mark.parametrize("size", [2, 3])
def test_data_parallel_gives_the_gradients_of_ddp_itself(size):
    run(_data_parallel, size)


def _zero(rank, size):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net()
    plain = copy.deepcopy(model)
    ddp = DDP(model)
    ours = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    for _ in range(3):
        for parameter, gradient in zip(plain.parameters(), reference_gradients(plain, size)):
            parameter.grad = gradient
        reference.step()
        ddp.zero_grad()
        ddp(data(rank)).square().mean().backward()
        ours.step()
    for a, b in zip(model.parameters(), plain.parameters()):
        close(a, b, 1e-4)


def test_zero_redundancy_optimizer():
    run(_zero, 2)


# --- FSDP


def _fsdp1(rank, size, case):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    strategy = {
        "full shard": ShardingStrategy.FULL_SHARD,
        "shard of gradients": ShardingStrategy.SHARD_GRAD_OP,
        "no shard": ShardingStrategy.NO_SHARD,
    }[case]
    model = net()
    expected = reference_gradients(model, size)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    fsdp = FullyShardedDataParallel(model, sharding_strategy=strategy, device_id=CPU, use_orig_params=True)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=1.0)
    fsdp(data(rank)).square().mean().backward()
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(fsdp):
        for after, old, gradient in zip(fsdp.parameters(), before, expected):
            close(after, old - gradient)


@cases("full shard", "shard of gradients", "no shard")
def test_fsdp1(case):
    run(_fsdp1, 2, case)


def _fsdp2(rank, size, case):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    model = net()
    expected = reference_gradients(model, size)
    flags, tolerance = {"mesh": init_device_mesh("cpu", (size,))}, 1e-5
    if case == "no reshard":
        flags["reshard_after_forward"] = False
    elif case == "mixed precision":
        flags["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        tolerance = 2e-1
    elif case == "two-dimensional mesh":
        flags["mesh"] = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for layer in (model[0], model[2]):
        fully_shard(layer, **flags)
    fully_shard(model, **flags)
    if case == "memory of the group":
        for layer in (model[0], model[2], model):
            layer.set_allocate_memory_from_process_group_for_comm(True)
    for _ in range(3):
        model.zero_grad()
        model(data(rank)).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), expected):
        close(parameter.grad.full_tensor().float(), gradient, tolerance)


@cases("plain", "no reshard", "mixed precision", "memory of the group")
def test_fsdp2(case):
    run(_fsdp2, 2, case)


def test_fsdp2_on_a_two_dimensional_mesh():
    run(_fsdp2, 4, "two-dimensional mesh")


# --- DTensor, tensor and pipeline parallelism


def _dtensor(rank, size, case):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, ones

    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(64.0).reshape(8, 8)
    if case == "shards":
        shard = distribute_tensor(whole, mesh, [Shard(0)])
        assert shard.to_local().shape == (8 // size, 8)
        close(shard.full_tensor(), whole)
    elif case == "uneven shards":
        close(distribute_tensor(whole[:5], mesh, [Shard(0)]).full_tensor(), whole[:5])
    elif case == "another dimension":
        moved = distribute_tensor(whole, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
        close(moved.to_local(), whole.chunk(size, 1)[rank])
    elif case == "product":
        a, b = distribute_tensor(whole, mesh, [Shard(1)]), distribute_tensor(whole, mesh, [Shard(0)])
        product = a @ b
        assert product.placements == (Partial(),)
        close(product.redistribute(mesh, [Replicate()]).to_local(), whole @ whole)
    elif case == "sum":
        close(distribute_tensor(whole, mesh, [Shard(0)]).sum().full_tensor(), whole.sum())
    else:
        close(ones(8, 4, device_mesh=mesh, placements=[Shard(0)]).full_tensor(), torch.ones(8, 4))


@cases("shards", "uneven shards", "another dimension", "product", "sum", "factory")
def test_dtensor(case):
    run(_dtensor, 2, case)


def _tensor_parallel(rank, size, case):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (size,))
    model = net()
    whole = copy.deepcopy(model)
    x = data(0)
    if case == "columns and rows":
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        close(model(x), whole(x))
        model(x).square().mean().backward()
        whole(x).square().mean().backward()
        close(model[0].weight.grad.full_tensor(), whole[0].weight.grad)
    elif case == "sequence":
        norm = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))
        plain = copy.deepcopy(norm)
        plan = {
            "0": SequenceParallel(sequence_dim=0),
            "1": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        }
        prepare = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),))
        norm = parallelize_module(parallelize_module(norm, mesh, plan), mesh, prepare)
        close(norm(x), plain(x))
    else:
        layer = nn.Linear(16, 32)
        plain = copy.deepcopy(layer)
        parallelize_module(layer, mesh, ColwiseParallel(use_local_output=False))
        target = torch.tensor([1, 2, 3, 31])
        with loss_parallel():
            loss = F.cross_entropy(layer(x), target)
            loss.backward()
        close(loss.full_tensor(), F.cross_entropy(plain(x), target))


@cases("columns and rows", "sequence", "loss")
def test_tensor_parallel(case):
    run(_tensor_parallel, 2, case)


def _pipeline(rank, size, case):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch.manual_seed(1)
    layers = [nn.Linear(16, 16) for _ in range(size)]
    x, target = torch.randn(8, 16), torch.randn(8, 16)
    stage = PipelineStage(layers[rank], rank, size, CPU)
    schedule = (ScheduleGPipe if case == "GPipe" else Schedule1F1B)(stage, n_microbatches=4, loss_fn=F.mse_loss)
    for _ in range(2):
        layers[rank].zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            losses = []
            output = schedule.step(target=target, losses=losses)
        else:
            schedule.step()
    plain = nn.Sequential(*[copy.deepcopy(layer) for layer in layers])
    plain.zero_grad()
    F.mse_loss(plain(x), target).backward()
    if rank == size - 1:
        close(output, plain(x))
    close(layers[rank].weight.grad, plain[rank].weight.grad, 1e-4)


@cases("GPipe", "1F1B")
def test_pipelining(case):
    run(_pipeline, 3, case)


def _mesh(rank, size):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, members in [("dp", [rank % 2, rank % 2 + 2]), ("tp", [rank // 2 * 2, rank // 2 * 2 + 1])]:
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=mesh[name].get_group())
        assert x.item() == sum(members)
    x = torch.ones(1)
    dist.all_reduce(x, group=mesh["dp", "tp"]._flatten("all").get_group())
    assert x.item() == size


def test_device_mesh():
    run(_mesh, 4)


# --- Functional collectives and torch.compile


def _functional(rank, size, case):
    import torch.distributed._functional_collectives as fc

    group = dist.group.WORLD
    x = torch.arange(4.0) + rank
    if case == "all_reduce":
        close(fc.all_reduce(x, "sum", group), torch.arange(4.0) * size + sum(range(size)))
    elif case == "all_gather_tensor":
        close(fc.all_gather_tensor(x, 0, group), torch.cat([torch.arange(4.0) + r for r in range(size)]))
    elif case == "reduce_scatter_tensor":
        close(fc.reduce_scatter_tensor(x, "sum", 0, group), (torch.arange(4.0) * size + sum(range(size))).chunk(size)[rank])
    elif case == "all_to_all_single":
        out = fc.all_to_all_single(x, None, None, group)
        close(out, torch.cat([(torch.arange(4.0) + r).chunk(size)[rank] for r in range(size)]))
    elif case == "broadcast":
        close(fc.broadcast(x, 1, group), torch.arange(4.0) + 1)
    elif case == "coalesced":
        sums = fc.all_reduce_coalesced([x, 2 * x], "sum", group)
        close(sums[1], 2 * sums[0])


@cases("all_reduce", "all_gather_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast", "coalesced")
def test_functional_collective(case):
    run(_functional, 2, case)


def _compiled(rank, size, case):
    import torch.distributed._functional_collectives as fc

    if case == "ddp":
        model = net()
        expected = reference_gradients(model, size)
        ddp = torch.compile(DDP(model), backend="aot_eager")
        ddp(data(rank)).square().mean().backward()
        for parameter, gradient in zip(model.parameters(), expected):
            close(parameter.grad, gradient)
        return

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x):
        return fc.all_gather_tensor(fc.all_reduce(x + 1, "sum", dist.group.WORLD) * 2, 0, dist.group.WORLD)

    for _ in range(2):
        close(function(torch.full((3,), float(rank))), torch.full((3 * size,), 2.0 * (sum(range(size)) + size)))


@cases("function", "ddp")
def test_torch_compile(case):
    run(_compiled, 2, case)


# --- Checkpoints


def _checkpoint(rank, size, folder, case):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def model():
        made = net()
        if case != "whole tensors":
            fully_shard(made, mesh=init_device_mesh("cpu", (size,)))
        return made

    saved = model()
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(1)
    state = {"model": get_model_state_dict(saved)}
    if case == "asynchronous":
        dcp.async_save(state, checkpoint_id=folder).result()
    else:
        dcp.save(state, checkpoint_id=folder)
    dist.barrier()
    loaded = model()
    state = {"model": get_model_state_dict(loaded)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(loaded, state["model"])
    for a, b in zip(saved.parameters(), loaded.parameters()):
        a, b = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (a, b))
        close(a, b)


@cases("whole tensors", "shards", "asynchronous")
def test_distributed_checkpoint(tmp_path, case):
    arguments = (_checkpoint, 2, str(tmp_path / "checkpoint"), case)
    if case == "asynchronous" and os.environ.get("CONVOKE_TORCH_SHIM") == "python":
        # Without the C++ part, the group has no backend of CPU tensors beside others.
        with pytest.raises(LaunchError, match="CPU backend must be enabled"):
            run(*arguments)
    else:
        run(*arguments)


# --- Objects


def _objects(rank, size, case):
    mine = {"rank": rank, "text": "x" * 1000 * rank}
    all_of_them = [{"rank": r, "text": "x" * 1000 * r} for r in range(size)]
    if case == "all_gather":
        got = [None] * size
        dist.all_gather_object(got, mine)
        assert got == all_of_them
    elif case == "broadcast":
        got = [mine, rank] if rank == 1 else [None, None]
        dist.broadcast_object_list(got, src=1)
        assert got == [all_of_them[1], 1]
    elif case == "gather":
        got = [None] * size if rank == 0 else None
        dist.gather_object(mine, got, dst=0)
        assert rank != 0 or got == all_of_them
    elif case == "scatter":
        got = [None]
        dist.scatter_object_list(got, all_of_them if rank == 0 else None, src=0)
        assert got == [mine]
    elif case == "send and receive":
        if rank == 0:
            dist.send_object_list([mine, 5], dst=1)
        elif rank == 1:
            got = [None, None]
            dist.recv_object_list(got, src=0)
            assert got == [all_of_them[0], 5]


@cases("all_gather", "broadcast", "gather", "scatter", "send and receive")
def test_objects(case):
    run(_objects, 3, case)


# --- Messages


def _messages(rank, size, case):
    left, right = (rank - 1) % size, (rank + 1) % size
    if case == "batch":
        received = [torch.zeros(1000) for _ in range(2)]
        operations = [
            dist.P2POp(dist.isend, torch.full((1000,), float(rank)), right),
            dist.P2POp(dist.irecv, received[0], left),
            dist.P2POp(dist.isend, torch.full((1000,), -float(rank)), left),
            dist.P2POp(dist.irecv, received[1], right),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert received[0][0] == left and received[1][0] == -right
    elif case == "tags out of order":
        if rank == 0:
            for tag in (1, 2, 3):
                dist.isend(torch.tensor([tag]), 1, tag=tag)
        elif rank == 1:
            for tag in (3, 1, 2):
                x = torch.zeros(1, dtype=torch.int64)
                dist.recv(x, 0, tag=tag)
                assert x.item() == tag
    elif case == "any source":
        if rank == 0:
            x, sources = torch.zeros(1), set()
            for _ in range(size - 1):
                source = dist.recv(x)
                assert x.item() == source
                sources.add(source)
            assert sources == set(range(1, size))
        else:
            dist.send(torch.tensor([float(rank)]), 0)
    elif case == "large and first sent":
        works = [dist.isend(torch.full((1 << 20,), float(rank)), right)]
        x = torch.zeros(1 << 20)
        dist.recv(x, left)
        works[0].wait()
        assert x[-1] == left
    elif case == "parts of a tensor":
        x = torch.arange(20.0).reshape(4, 5)
        if rank == 0:
            dist.send(x[:, 1], 1)
        elif rank == 1:
            y = torch.zeros(4, 5)
            dist.recv(y[:, 3], 0)
            close(y[:, 3], x[:, 1])
            assert y[:, :3].sum() == 0
    dist.barrier()


@cases("batch", "tags out of order", "any source", "large and first sent", "parts of a tensor")
def test_messages(case):
    run(_messages, 3, case)


# --- Groups


def _groups(rank, size, case):
    x = torch.tensor([float(rank)])
    if case == "local synchronization":
        if rank > 0:  # rank 0 does not take part
            group = dist.new_group(list(range(1, size)), use_local_synchronization=True)
            dist.all_reduce(x, group=group)
            assert x.item() == sum(range(1, size))
    elif case == "subgroups":
        group, _ = dist.new_subgroups(2)
        dist.all_reduce(x, group=group)
        assert x.item() == rank // 2 * 4 + 1
    elif case == "enumeration":
        group, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        dist.all_reduce(x, group=group)
        assert x.item() == 3
    elif case == "order of ranks":
        group = dist.new_group([2, 0, 1], sort_ranks=False) if _sorts() else dist.new_group([0, 1, 2])
        if rank < 3:
            dist.broadcast(x, src=2, group=group)
            assert x.item() == 2
    elif case == "split":
        if not dist.group.WORLD._get_backend(CPU).supports_splitting:
            return "torch 2.7 and 2.8 and groups in Python split no groups"
        try:
            group = dist.split_group(split_ranks=[[3, 0], [1]])
        except RuntimeError as error:
            assert "No device associated with the default pg" in str(error)
            return "this torch splits only groups that are bound to a GPU"
        if rank == 2:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
        else:
            dist.all_reduce(x, group=group)
            assert x.item() == (1 if rank == 1 else 3)
            again = dist.split_group(group, split_ranks=[list(range(dist.get_world_size(group)))])
            dist.all_reduce(x, group=again)
            assert x.item() == (1 if rank == 1 else 6)
    elif case == "destroyed and made again":
        for _ in range(20):
            group = dist.new_group([0, 1])
            if rank < 2:
                y = torch.ones(3)
                dist.all_reduce(y, group=group)
                assert y[0] == 2
                dist.destroy_process_group(group)
    elif case == "many":
        groups = [dist.new_group(list(range(size))) for _ in range(30)]
        for number, group in enumerate(groups):
            y = torch.tensor([number])
            dist.all_reduce(y, group=group)
            assert y.item() == number * size
    elif case == "another backend beside":
        other = dist.new_group(backend="gloo")
        y = torch.tensor([float(rank)])
        works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, group=other, async_op=True)]
        for work in works:
            work.wait()
        assert x.item() == y.item() == sum(range(size))


def _sorts():
    import inspect

    return "sort_ranks" in inspect.signature(dist.new_group).parameters


@cases(
    "local synchronization", "subgroups", "enumeration", "order of ranks", "split", "destroyed and made again", "many",
    "another backend beside",
)
def test_groups(case):
    reason = run(_groups, 4, case)[0]
    if reason:
        pytest.skip(reason)


# --- Collectives


TYPES = [torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float64, torch.complex128]


def _types(rank, size, dtype):
    x = (torch.arange(10) + rank).to(dtype)
    everything = [(torch.arange(10) + r).to(dtype) for r in range(size)]
    total = sum(everything[1:], everything[0])
    y = x.clone()
    dist.all_reduce(y)
    close(y, total, 1e-2)
    if not dtype.is_complex:
        y = x.clone()
        dist.all_reduce(y, dist.ReduceOp.MAX)
        close(y, everything[-1])
    got = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(got, x)
    assert all((a == b).all() for a, b in zip(got, everything))
    y = torch.empty(10 // size, dtype=dtype)
    dist.reduce_scatter_tensor(y, x)
    close(y, total.chunk(size)[rank], 1e-2)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_collectives_of_a_type(dtype):
    run(_types, 2, dtype)


def _collectives(rank, size, case):
    if case == "empty tensors":
        x = torch.empty(0)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather([torch.empty(0) for _ in range(size)], x)
    elif case == "scalars":
        x = torch.tensor(float(rank))
        dist.all_reduce(x)
        assert x.item() == sum(range(size))
    elif case == "transposed":
        x = (torch.arange(6.0).reshape(2, 3) + rank).t()
        dist.all_reduce(x)
        close(x, (torch.arange(6.0).reshape(2, 3) * size + sum(range(size))).t())
    elif case == "input in the output":
        x = torch.full((3 * size,), float(rank))
        dist.all_gather_into_tensor(x, x[3 * rank : 3 * rank + 3])
        close(x, torch.arange(float(size)).repeat_interleave(3))
        y = torch.arange(3.0 * size) + 10 * rank
        dist.reduce_scatter_tensor(y[:3], y)
        close(y[:3], torch.arange(3.0 * rank, 3.0 * rank + 3) * size + 10 * sum(range(size)))
        z = torch.arange(float(size)) + 10 * rank
        dist.all_to_all_single(z, z)
        close(z, torch.arange(float(size)) * 10 + rank)
    elif case == "input in the output, not waited for":
        # The backend sends a copy of such an input, which must live until the end of the operation. A freed one of this
        # size is unmapped.
        count = 4 << 20
        outputs = [torch.arange(float(count)) + 10 * rank for _ in range(3)]
        works = [dist.reduce_scatter_tensor(y[: count // size], y, async_op=True) for y in outputs]
        for y, work in zip(outputs, works):
            work.wait()
            part = torch.arange(float(count)).chunk(size)[rank]
            close(y[: count // size], part * size + 10 * sum(range(size)))
    elif case == "unequal splits":
        send = [rank + r for r in range(size)]
        x = torch.cat([torch.full((rank + r,), 10.0 * rank + r) for r in range(size)])
        out = torch.empty(sum(send))
        dist.all_to_all_single(out, x, send, send)
        close(out, torch.cat([torch.full((rank + r,), 10.0 * r + rank) for r in range(size)]))
    elif case == "unequal lists":
        out = [torch.empty(rank + r + 1) for r in range(size)]
        dist.all_to_all(out, [torch.full((rank + r + 1,), 10.0 * rank + r) for r in range(size)])
        assert [o[0].item() for o in out] == [10.0 * r + rank for r in range(size)]
    elif case == "coalesced":
        x = [torch.full((n,), float(rank)) for n in (1, 5, 100)]
        with dist._coalescing_manager(device=CPU, async_ops=True) as manager:
            for y in x:
                dist.all_reduce(y)
        manager.wait()
        assert all((y == sum(range(size))).all() for y in x)
    elif case == "inference mode":
        with torch.inference_mode():
            x = torch.ones(4) * rank
            dist.all_reduce(x)
            work = dist.all_reduce(x, async_op=True)
            work.wait()
        assert (x == sum(range(size)) * size).all()
    elif case == "tensors that need gradients":
        x = torch.ones(4, requires_grad=True)
        y = x * rank
        dist.all_reduce(y.detach())
        with torch.no_grad():
            dist.all_reduce(x)
        assert (x == size).all()
    elif case == "gradients through collectives":
        import torch.distributed.nn.functional as dnn

        x = torch.full((2,), float(rank + 1), requires_grad=True)
        dnn.all_reduce(x * x).sum().backward()
        close(x.grad, 2 * x.detach() * size)
    elif case == "many in progress":
        x = [torch.full((n + 1,), float(rank)) for n in range(200)]
        works = [dist.all_reduce(y, async_op=True) for y in x]
        for work in reversed(works):
            work.wait()
        assert all((y == sum(range(size))).all() for y in x)
    elif case == "futures":
        x = torch.full((3,), float(rank))
        future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
        close(torch.futures.wait_all([future])[0], torch.full((3,), 2.0 * sum(range(size))))
    elif case == "profiles":
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            dist.all_reduce(torch.ones(4))
        assert any("all_reduce" in event.key for event in profiled.key_averages())
    dist.barrier()


@cases(
    "empty tensors", "scalars", "transposed", "input in the output", "input in the output, not waited for", "unequal splits",
    "unequal lists", "coalesced",
    "inference mode", "tensors that need gradients", "gradients through collectives", "many in progress", "futures", "profiles",
)
def test_collectives(case):
    run(_collectives, 2, case)


# --- Errors and ends


def _errors(rank, size, case):
    if case == "wait with a time limit":
        if rank == 0:
            work = dist.all_reduce(torch.ones(4), async_op=True)
            with pytest.raises(RuntimeError, match="(?i)timed out|timeout"):
                work.wait(datetime.timedelta(milliseconds=200))
            dist.send(torch.ones(1), 1)
            work.wait()
        else:
            dist.recv(torch.ones(1), 0)
            dist.all_reduce(torch.ones(4))
    elif case == "abort while the others wait":
        group = dist.new_group()
        if rank == 0:
            dist.recv(torch.ones(1), 1)
            group.abort()
        else:
            work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
            dist.send(torch.ones(1), 0)
            with pytest.raises(RuntimeError, match="abort"):
                work.wait()
    elif case == "different sizes":
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="all_reduce"):
            dist.all_reduce(torch.ones(4 + rank))
        assert time.monotonic() - began < 10


@cases("wait with a time limit", "abort while the others wait", "different sizes")
def test_errors(case):
    run(_errors, 2, case)


def _again(rank, size, count):
    for number in range(count):
        dist.destroy_process_group()
        dist.init_process_group(os.environ.get("SUITE_BACKEND", "convoke"))
        x = torch.tensor([number])
        dist.all_reduce(x)
        assert x.item() == number * size


def test_a_process_initializes_100_times():
    run(_again, 2, 100)


def _loader(rank, size):
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.arange(40.0)), batch_size=4, num_workers=2, multiprocessing_context="fork")
    total = torch.zeros(1)
    for _ in range(2):
        for (batch,) in loader:
            x = batch.sum().reshape(1)
            dist.all_reduce(x)
            total += x
    assert total.item() == 2 * size * sum(range(40))


def test_data_loader_with_forked_workers():
    run(_loader, 2)


def _store(rank, size, kind, folder):
    dist.destroy_process_group()
    port = int(os.environ["MASTER_PORT"])
    if kind == "TCPStore":
        store = dist.TCPStore("127.0.0.1", port, size, is_master=False)
    elif kind == "PrefixStore":
        store = dist.PrefixStore("a/b", dist.TCPStore("127.0.0.1", port, size, is_master=False))
    else:
        store = dist.FileStore(folder + "/store", size)
    dist.init_process_group(os.environ.get("SUITE_BACKEND", "convoke"), store=store, rank=rank, world_size=size)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x[0] == size


@cases("TCPStore", "PrefixStore", "FileStore")
def test_initialization_with_a_store(tmp_path, case):
    run(_store, 2, case, str(tmp_path))


def test_a_hash_store_serves_one_rank():
    os.environ.pop("RANK", None)
    dist.init_process_group(os.environ.get("SUITE_BACKEND", "convoke"), store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.destroy_process_group()
    assert x[0] == 1


def _detail(rank, size):
    dist.destroy_process_group()
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    dist.init_process_group(os.environ.get("SUITE_BACKEND", "convoke"))
    x = torch.ones(4)
    dist.all_reduce(x)
    assert x[0] == size
    # The flags of DDP's constructor are compared between ranks at this level.
    DDP(net())(data(rank)).sum().backward()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(4 + rank))


def test_debug_level_detail():
    run(_detail, 2)


def _forks(rank, size):
    # A thread of the parent completes futures, which a forked child does not have.
    x = torch.ones(3)
    done = []
    dist.all_reduce(x, async_op=True).get_future().then(lambda _: done.append(1)).wait()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        dist.distributed_c10d._update_default_pg(None)  # the parent's group is not the child's
        dist.init_process_group(os.environ.get("SUITE_BACKEND", "convoke"), store=dist.HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD
        dist.all_reduce(x, group=group, async_op=True).get_future().then(lambda _: done.append(2)).wait()
        os._exit(0 if done == [1, 2] else 1)
    assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(x)
    assert x[0] == size * size


def test_forked_child_makes_a_group_of_its_own():
    run(_forks, 2)
