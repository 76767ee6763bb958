"""Data-parallel training with PyTorch on CPUs. Only the name of the backend is convoke's.

    convoke --standalone --nproc-per-node=2 train.py
    convoke --standalone --nproc-per-node=2 train.py gloo              # on gloo
    convoke --standalone --nproc-per-node=2 --as-gloo train.py gloo    # the same script, on convoke
"""

import gc
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "convoke")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(20, 1), gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# Every rank has its own part of the examples, whose answer is the sum of the numbers.
examples = torch.randn(256 * size, 20)[rank::size]
for epoch in range(60):
    optimizer.zero_grad()
    loss = (model(examples) - examples.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    total = loss.detach() / size
    dist.all_reduce(total)
    if rank == 0 and epoch % 20 == 19:
        print(f"epoch {epoch + 1:2}: loss {total.item():.6f}")
weights = [None] * size
dist.all_gather_object(weights, model.module.weight.sum().item())
if rank == 0:
    print(f"all {size} ranks have the same weights: {len(set(weights)) == 1}")

# DDP keeps the group alive, and gloo aborts a process that ends with a live group. convoke does not need these lines.
del model
gc.collect()
dist.destroy_process_group()
