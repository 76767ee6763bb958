"""Times one backend of torch.distributed: worker of bench_torch.py. Rank 0 prints JSON lines {"cell", "us"}."""

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

SIZES = [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]


def timed(function, seconds=0.15, most=2000):
    """The median time of a call in µs. The time of a call is the mean of the ranks, as in convoke-perf.

    `function` gets the number of the call, by which the ranks take turns as root, as in convoke-perf.
    """
    for number in range(3):
        function(number)
    began = time.perf_counter()
    function(0)
    count = torch.tensor([max(5, min(most, int(seconds / (time.perf_counter() - began))))])
    dist.broadcast(count, 0)
    times = []
    for number in range(int(count)):
        began = time.perf_counter()
        function(number)
        times.append(time.perf_counter() - began)
    means = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(means)
    return means.median().item() / dist.get_world_size() * 1e6


def report(cell, us):
    if dist.get_rank() == 0:
        print(json.dumps({"cell": cell, "us": us}), flush=True)


def collectives(size, memory):
    for count in SIZES:
        x = torch.zeros(count // 4)
        report(f"all_reduce {count}", timed(lambda _: dist.all_reduce(x)))
        if memory and count >= 16 << 20:
            import convoke_dist.torch

            y = convoke_dist.torch.empty(count // 4)
            y.zero_()
            report(f"all_reduce {count}, in memory of the group", timed(lambda _: dist.all_reduce(y)))
        if size > 1 and count <= 16 << 20:
            outputs = torch.empty(size * count // 4)
            report(f"all_gather {count}", timed(lambda _: dist.all_gather_into_tensor(outputs, x)))
            report(f"broadcast {count}", timed(lambda number: dist.broadcast(x, number % size)))
    objects = [None] * size
    value = {"step": 1, "loss": 0.5}
    report("all_gather_object small", timed(lambda _: dist.all_gather_object(objects, value)))
    report("barrier", timed(lambda _: dist.barrier()))


def ddp(shared, average):
    """What the synchronization adds to a step of 25 million f32."""
    model = torch.nn.Sequential(*[torch.nn.Linear(1000, 1000, bias=False) for _ in range(25)])
    if shared and average:
        import convoke_dist.torch

        parallel = convoke_dist.torch.data_parallel(model)
    else:
        parallel = DDP(model, gradient_as_bucket_view=True)
        if average:
            import convoke_dist.torch

            parallel.register_comm_hook(None, convoke_dist.torch.average_hook)
    x = torch.randn(8, 1000)

    def step():
        parallel(x).sum().backward()

    def alone():
        with parallel.no_sync():
            step()

    with_sync, without = [], []
    for _ in range(3):
        step()
    for _ in range(8):
        for function, times in ((alone, without), (step, with_sync)):
            dist.barrier()
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
    added = torch.tensor([statistics.median(with_sync) - statistics.median(without), statistics.median(with_sync)])
    dist.all_reduce(added, dist.ReduceOp.MAX)
    names = {(True, True): ", data_parallel", (False, True): ", average_hook", (True, False): ", buckets in memory of the group"}
    name = names.get((shared, average), "")
    report(f"DDP adds to a step{name}", added[0].item() * 1e6)
    report(f"DDP step{name}", added[1].item() * 1e6)


def main():
    backend, what, threads = sys.argv[1:]
    if threads != "all":
        torch.set_num_threads(int(threads))
    dist.init_process_group(backend)
    if what == "collectives":
        collectives(dist.get_world_size(), backend == "convoke")
    else:
        ddp("-shared" in what, "-average" in what)
    dist.destroy_process_group()


main()
