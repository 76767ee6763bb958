"""The backend "convoke" of torch.distributed.

torch finds it by itself:

    torch.distributed.init_process_group("convoke")                  # or "cpu:convoke,cuda:nccl"
    side = torch.distributed.new_group(backend="convoke")            # beside NCCL
"""

from __future__ import annotations

import atexit
import datetime
import functools
import json
import os
import secrets
import socket
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from .. import _core
from ..errors import ConvokeError, from_json

__all__ = [
    "average_hook",
    "data_parallel",
    "empty",
    "failure",
    "make_default",
    "mode",
    "process_group",
    "register",
    "replace_gloo",
]

_lock = threading.Lock()
_mode: str | None = None
_servers: list[_core.StoreServer] = []
_meetings: dict[str, int] = {}


def mode() -> str:
    """Loads the C++ part if it is not loaded, and returns how it was had: "prebuilt" or "compiled".

    If it cannot be had, returns "python": then groups are made in Python, which is slower and has less
    (docs/guides/pytorch.md). Where CONVOKE_TORCH_SHIM asks for a C++ part, that is an error.
    """
    global _mode
    with _lock:
        if _mode is None:
            _mode = _load_part()
    return _mode


def _load_part() -> str:
    from . import _load

    try:
        how = _load.load()
    except _load.LoadError as error:
        wanted = os.environ.get("CONVOKE_TORCH_SHIM")
        if wanted not in (None, "", "python"):
            raise
        if wanted != "python":
            print(f"convoke: groups are made in Python, which is slower and has less, because {error}", file=sys.stderr)
        return "python"
    torch.ops.convoke.set_table(_core.api_table())
    # Threads of the backend must not complete futures, which may run Python, once the interpreter ends.
    atexit.register(torch.ops.convoke.stop)
    return how


def _underlying(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _meet(opts: Any, meeting: int) -> tuple[str, str]:
    """Returns the name of a group, which no other group has, and the address of the store where its ranks meet.

    `meeting` is the number of the group among those of its name. The address is that of the group's TCPStore. For a store of
    another kind, rank 0 serves one, and tells its host's address and the boot by which ranks of that host know to use
    loopback.
    """
    if opts.group_size == 1:
        return opts.group_id or "default", ""
    store = _underlying(opts.store)
    key = f"convoke/{opts.group_id}/{meeting}"
    if opts.group_rank == 0:
        told = {"name": f"{opts.group_id or 'default'}-{secrets.token_hex(8)}"}
        if not isinstance(store, dist.TCPStore):
            # Ranks of other hosts can only share a file; a HashStore is of one process.
            server = _core.StoreServer("::" if isinstance(store, dist.FileStore) else "127.0.0.1", 0)
            _servers.append(server)
            told |= {"boot": _core.boot_id(), "host": _core.host_address() or socket.gethostname(), "port": server.port}
        opts.store.set(key, json.dumps(told))
    else:
        _wait(opts.store, key)
    told = json.loads(opts.store.get(key).decode())
    if isinstance(store, dist.TCPStore):
        host, port = store.host, store.port
    else:
        host, port = "127.0.0.1" if told["boot"] == _core.boot_id() else told["host"], told["port"]
    return told["name"], f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _wait(store: Any, key: str) -> None:
    """Waits for `key` up to the store's time limit. Ctrl-C ends it, which a wait in torch would not notice."""
    limit = store.timeout.total_seconds()
    deadline = time.monotonic() + limit
    while True:
        until = min(deadline, time.monotonic() + 0.2)
        try:
            return store.wait([key], datetime.timedelta(seconds=max(0.001, until - time.monotonic())))
        except dist.DistStoreError as error:
            now = time.monotonic()
            # torch cuts the limit to milliseconds, so a wait may end a little early. Another error than a time-out comes
            # again at once in the next wait.
            if now < until - 0.05:
                raise
            if now >= deadline:
                raise dist.DistStoreError(
                    f"convoke: rank 0 did not begin to form the group within {limit:g} s, the time limit of the store: did it reach "
                    f"init_process_group or new_group? ({key} is absent)"
                ) from error


def _create(opts: Any, _backend_options: object = None, *, is_gloo: bool = False) -> Any:
    """Makes the backend of a group; torch calls it. `is_gloo`: it takes the place of gloo."""
    _choose_recorder()
    with _lock:
        meeting = _meetings[opts.group_id] = _meetings.get(opts.group_id, 0) + 1
    group = _join(opts, meeting, is_gloo)
    return group if mode() == "python" else group._get_backend(torch.device("cpu"))


def _join(opts: Any, meeting: int, is_gloo: bool = False) -> Any:
    """Makes a process group with this backend alone."""
    how = mode()
    timeout = max(1, int(opts.timeout.total_seconds() * 1000))
    name, address = _meet(opts, meeting)
    if how == "python":
        return _create_in_python(opts, name, address, "gloo" if is_gloo else "convoke")
    group = ProcessGroup(opts.store, opts.group_rank, opts.group_size)
    torch.ops.convoke.attach(group.boxed(), name, address, opts.group_rank, opts.group_size, timeout, is_gloo)
    return group


def process_group(
    store: dist.Store, rank: int, size: int, timeout: datetime.timedelta = datetime.timedelta(minutes=30), name: str = ""
) -> ProcessGroup:
    """Makes a process group that torch.distributed does not know, for frameworks that make their groups, as torchft.

    All ranks call it with one store, which has served no other group of this name: give each group a PrefixStore. A failed
    group can be replaced by another one in the same process.
    """
    opts = dist.distributed_c10d._DistributedBackendOptions()
    opts.store, opts.group_rank, opts.group_size, opts.timeout, opts.group_id = store, rank, size, timeout, name
    group = _join(opts, 0)
    if mode() != "python":
        group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    return group


def _choose_recorder() -> None:
    """Lets torch's flight recorder record the calls only on request; torch asks after it has made a backend.

    torch 2.15 records those of each backend that it does not know, which takes 3 us a call. convoke records them anyway.
    """
    known = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    if any(os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")):
        known.discard("convoke")
    else:
        known.add("convoke")


def _create_in_python(opts: Any, name: str, meeting: str, backend: str) -> Any:
    from ..group import init
    from ._fallback import FallbackGroup

    seconds = opts.timeout.total_seconds()
    size, store = opts.group_size, meeting or "localhost:1"  # a group of one rank asks no store
    group = init(store=store, rank=opts.group_rank, world_size=size, name=name, timeout=seconds, init_timeout=seconds)
    return FallbackGroup(group, seconds, backend)


def register() -> None:
    """Registers the backend. torch calls it, by the entry points of this package."""
    if "CONVOKE" not in dist.Backend._plugins:
        dist.Backend.register_backend("convoke", _create, extended_api=True, devices=["cpu"])


def make_default() -> None:
    """Makes convoke the backend of CPU tensors where a script names none."""
    register()
    dist.Backend.default_device_backend_map["cpu"] = "convoke"


def replace_gloo() -> None:
    """Makes "gloo" mean convoke in this process, for scripts that name it.

    Code that asks whether a group is of the type `ProcessGroupGloo` gets no.
    """
    create = functools.partial(_create, is_gloo=True)
    dist.Backend.register_backend("gloo", create, extended_api=True, devices=["cpu"])
    dist.Backend.default_device_backend_map["cpu"] = "gloo"


def empty(*size: int, dtype: torch.dtype | None = None, group: ProcessGroup | None = None) -> torch.Tensor:
    """Returns a tensor in memory that all ranks of a host can access, so that an all_reduce of all of it copies nothing.

    All ranks of the group call it, with equal sizes. If not all ranks share memory, it is ordinary memory. At most 64
    tensors of one size can live at a time.
    """
    if mode() == "python":
        return torch.empty(*size, dtype=dtype)
    shape = torch.Size(size)
    cpu = torch.device("cpu")
    backend = (group or dist.group.WORLD)._get_backend(cpu)
    return backend.allocate_tensor(shape.numel(), dtype=dtype or torch.get_default_dtype(), device=cpu).view(shape)


def average_hook(group: ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages the gradients of a bucket of DDP, as DDP itself does, but in the all_reduce.

    `model.register_comm_hook(None, convoke_dist.torch.average_hook)`, with None or the process group of DDP. DDP itself
    first divides all gradients by the number of ranks, which reads and writes them once more.
    """
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


# DDP compares them, and takes no text.
average_hook.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def data_parallel(module: torch.nn.Module, process_group: ProcessGroup | None = None, **options: Any) -> Any:
    """Returns `DistributedDataParallel(module, ...)` whose gradients are averaged where they are.

    The buckets are in memory of the group, the gradients are views of them (`gradient_as_bucket_view`, unless `options`
    say otherwise), and `average_hook` averages them. So nothing is copied between the ranks of a host, and DDP does not
    divide the gradients first. It sets DDP_DISABLE_COMM_MEM=0 in this process, unless the variable is set. DDP takes one
    hook only: to register another, make the DDP yourself. With a torch that does not know the variable, or if the ranks do
    not share memory, the buckets are ordinary memory.
    """
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    options.setdefault("gradient_as_bucket_view", True)
    model = torch.nn.parallel.DistributedDataParallel(module, process_group=process_group, **options)
    model.register_comm_hook(process_group, average_hook)
    return model


def failure(group: ProcessGroup | None = None) -> ConvokeError | None:
    """Returns the error that ended a group, with the rank and the cause; None if the group has not ended."""
    group = group or dist.group.WORLD
    if mode() == "python":
        return getattr(group, "failure", None)
    text = torch.ops.convoke.failure(group.boxed())
    return from_json(text) if text else None


register()
if os.environ.get("CONVOKE_AS_GLOO") == "1":
    replace_gloo()
