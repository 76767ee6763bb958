"""Runs functions as ranks of a group of the backend."""

import datetime
import os

import torch
import torch.distributed as dist
from convoke_dist import launch


def run(fn, nproc=2, *args, **kwargs):
    """Runs `fn(rank, size, *args)` as ranks of a group; returns the results of all ranks."""
    return launch(_rank, nproc, start_method="fork")(fn, args, kwargs)


def _rank(fn, args, kwargs, backend="convoke"):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # No import of convoke_dist.torch: torch finds the backend by its entry point.
    backend = os.environ.get("SUITE_BACKEND", backend)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    try:
        return fn(dist.get_rank(), dist.get_world_size(), *args, **kwargs)
    finally:
        dist.destroy_process_group()
