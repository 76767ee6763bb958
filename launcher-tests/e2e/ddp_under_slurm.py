"""Trains a small model with DDP, and says on rank 0 whether all ranks have the same parameters."""

import gc

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")


def train():
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    all_weights = [torch.empty_like(model.module.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(all_weights, model.module.weight.detach())
    if dist.get_rank() == 0 and all(torch.equal(all_weights[0], weight) for weight in all_weights):
        print(f"the same on {dist.get_world_size()} ranks", flush=True)


# The model refers to the group, and DDP has reference cycles. If it were still alive, threads of gloo might run while
# Python ends, and abort it.
train()
gc.collect()
dist.destroy_process_group()
