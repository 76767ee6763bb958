"""Process groups on arrays of numpy, CPU tensors of torch, and buffers."""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import struct
import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import _core
from ._arrays import Memory, describe
from .errors import InvalidArgument

__all__ = ["Group", "Message", "Work", "init"]

# The numbers of `cvk_kind`.
_BARRIER, _ALL_REDUCE, _BROADCAST, _REDUCE, _ALL_GATHER, _REDUCE_SCATTER = range(6)
_GATHER, _SCATTER, _ALL_TO_ALL, _ALL_GATHER_V, _REDUCE_SCATTER_V = range(6, 11)
_GATHER_V, _SCATTER_V, _ALL_TO_ALL_V, _SCAN, _EXCLUSIVE_SCAN, _SEND, _RECV = range(11, 18)
# The numbers of `cvk_op`.
_OPS = {"sum": 0, "min": 1, "max": 2, "product": 3, "avg": 4, "band": 5, "bor": 6, "bxor": 7}
_PREMUL_SUM = 8
_ANY_RANK = -1
_FACTORS = {8: "<f", 9: "<d", 10: "<f", 11: "<f"}


class Message(NamedTuple):
    """A received message, or one that waits: its sender, its tag, and its number of elements."""

    source: int
    tag: int
    count: int


class _Call:
    """A call, as `_core` reads it."""

    __slots__ = (
        "kind",
        "dtype",
        "op",
        "peer",
        "tag",
        "send",
        "send_count",
        "recv",
        "recv_count",
        "send_counts",
        "recv_counts",
        "factor",
        "timeout",
        "arrays",
    )

    def __init__(self, kind: int, timeout: float | None, peer: int = 0, tag: int = 0) -> None:
        self.kind, self.peer, self.tag, self.timeout = kind, peer, tag, timeout
        self.dtype = self.op = self.send = self.send_count = self.recv = self.recv_count = 0
        self.send_counts = self.recv_counts = self.factor = None
        self.arrays: list[Any] = []

    def _set_type(self, memory: Memory) -> None:
        if self.arrays and self.dtype != memory.type:
            raise InvalidArgument("the arrays of a call must have one element type")
        self.dtype = memory.type
        self.arrays.append(memory.owner)

    def reads(self, array: Any) -> _Call:
        if array is not None:
            memory = describe(array, False, "the array to send")
            self._set_type(memory)
            self.send, self.send_count = memory.address, memory.count
        return self

    def writes(self, array: Any) -> _Call:
        if array is not None:
            memory = describe(array, True, "the array to write")
            self._set_type(memory)
            self.recv, self.recv_count = memory.address, memory.count
        return self

    def reduces(self, op: str | float) -> _Call:
        if isinstance(op, (int, float)) and not isinstance(op, bool):
            if self.dtype not in _FACTORS:
                raise InvalidArgument("a factor needs an array of floating-point numbers")
            self.op, self.factor = _PREMUL_SUM, list(struct.pack(_FACTORS[self.dtype], op))
        elif op in _OPS:
            self.op = _OPS[op]
        else:
            raise InvalidArgument(f"no reduction {op!r}: pass one of {', '.join(_OPS)}, or a factor as a number")
        return self


class Work:
    """An operation in progress. Its arrays must not be used until it is done."""

    def __init__(self, work: _core.Work) -> None:
        self._work = work
        self._ready = -1

    def __del__(self) -> None:
        if self._ready >= 0:
            os.close(self._ready)

    def wait(self, timeout: float | None = None) -> Message | None:
        """Waits until the operation is done; returns the received message of `recv`.

        Raises TimeoutError after `timeout` seconds. The operation goes on then.
        """
        is_done, message = self._work.wait(timeout)
        if not is_done:
            raise TimeoutError(f"the operation is not done after {timeout} s; it goes on")
        return None if message is None else Message(*message)

    def is_done(self) -> bool:
        return self._work.is_done()

    def fileno(self) -> int:
        """A descriptor that becomes readable when the operation is done, for `select` and event loops."""
        descriptor = self._work.fileno()
        if descriptor >= 0:
            return descriptor
        if self._ready < 0:
            self._ready = os.eventfd(1)  # the operation was done from the start
        return self._ready


_open: weakref.WeakSet[Group] = weakref.WeakSet()


def _leave() -> None:
    """Leaves all groups before the process ends, so that other ranks do not take this one for dead."""
    _core.detach_works()
    for group in list(_open):
        group.close()


atexit.register(_leave)


class Group:
    """Ranks that work together. All ranks make the same calls, in the same order.

    Methods of operations wait. With `async_op=True` they return a `Work` at once. Arrays are numpy arrays, CPU tensors
    of torch, or buffers; they must be contiguous. `op` is "sum", "avg", "min", "max", "product", "band", "bor" or
    "bxor", or a number: the sum of all elements, each multiplied by it.
    """

    def __init__(self, group: _core.Group) -> None:
        self._group = group
        _open.add(self)

    # --- what the group is

    @property
    def rank(self) -> int:
        """This rank's number in the group, from 0."""
        return self._group.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._group.size

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks of its host."""
        return self._group.local_rank

    @property
    def local_size(self) -> int:
        """The number of ranks on this host."""
        return self._group.local_size

    @property
    def name(self) -> str:
        """The name of the group in errors and logs."""
        return self._group.name

    @property
    def timeout(self) -> float:
        """The time limit of a call in seconds."""
        return self._group.timeout

    @property
    def restart_count(self) -> int:
        """The number of times that the launcher has restarted the workers."""
        return self._group.restart_count

    @property
    def global_ranks(self) -> list[int]:
        """The rank of each member in the world."""
        return self._group.global_ranks

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host."""
        return self._group.hosts

    def __repr__(self) -> str:
        return f"<convoke_dist.Group {self.name!r}, rank {self.rank} of {self.size}>"

    # --- collectives

    def _run(self, call: _Call, async_op: bool) -> Any:
        if async_op:
            return Work(self._group.start(call, call.arrays))
        message = self._group.run(call)
        return None if message is None else Message(*message)

    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Work | None:
        """Waits until all ranks have called it."""
        return self._run(_Call(_BARRIER, timeout), async_op)

    def monitored_barrier(self, timeout: float | None = None) -> None:
        """A barrier whose time-out names all ranks that are missing."""
        self._group.monitored_barrier(self.timeout if timeout is None else timeout)

    def broadcast(self, array: Any, root: int = 0, *, async_op: bool = False, timeout: float | None = None):
        """Copies the array of rank `root` into that of every rank."""
        return self._run(_Call(_BROADCAST, timeout, root).writes(array), async_op)

    def all_reduce(
        self, array: Any, op: str | float = "sum", *, out: Any = None, async_op: bool = False, timeout: float | None = None
    ):
        """Reduces the arrays of all ranks, in place or into `out`."""
        call = _Call(_ALL_REDUCE, timeout)
        call = call.writes(array) if out is None else call.reads(array).writes(out)
        return self._run(call.reduces(op), async_op)

    def reduce(
        self, array: Any, root: int = 0, op: str | float = "sum", *, async_op: bool = False, timeout: float | None = None
    ):
        """Reduces the arrays of all ranks in place at rank `root`; the other ranks' arrays are unspecified after."""
        return self._run(_Call(_REDUCE, timeout, root).writes(array).reduces(op), async_op)

    def all_gather(
        self,
        out: Any,
        array: Any,
        *,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ):
        """Concatenates the arrays of all ranks in `out`. `counts` has the number of elements of each rank."""
        call = _Call(_ALL_GATHER if counts is None else _ALL_GATHER_V, timeout).reads(array).writes(out)
        call.recv_counts = None if counts is None else list(counts)
        return self._run(call, async_op)

    def reduce_scatter(
        self,
        out: Any,
        array: Any,
        op: str | float = "sum",
        *,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ):
        """Reduces the arrays of all ranks, and gives each rank its part in `out`."""
        call = _Call(_REDUCE_SCATTER if counts is None else _REDUCE_SCATTER_V, timeout).reads(array).writes(out)
        call.send_counts = None if counts is None else list(counts)
        return self._run(call.reduces(op), async_op)

    def gather(
        self,
        array: Any,
        root: int = 0,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ):
        """Concatenates the arrays of all ranks in `out` of rank `root`."""
        call = _Call(_GATHER if counts is None else _GATHER_V, timeout, root).reads(array).writes(out)
        call.recv_counts = None if counts is None else list(counts)
        return self._run(call, async_op)

    def scatter(
        self,
        out: Any,
        root: int = 0,
        *,
        array: Any = None,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ):
        """Gives each rank its part of `array` of rank `root` in `out`."""
        call = _Call(_SCATTER if counts is None else _SCATTER_V, timeout, root).reads(array).writes(out)
        call.send_counts = None if counts is None else list(counts)
        return self._run(call, async_op)

    def all_to_all(
        self,
        out: Any,
        array: Any,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ):
        """Sends the n-th part of `array` to rank n, and receives the n-th part of `out` from it."""
        if (send_counts is None) != (recv_counts is None):
            raise InvalidArgument("all_to_all: pass both send_counts and recv_counts, or none")
        call = _Call(_ALL_TO_ALL if send_counts is None else _ALL_TO_ALL_V, timeout).reads(array).writes(out)
        call.send_counts = None if send_counts is None else list(send_counts)
        call.recv_counts = None if recv_counts is None else list(recv_counts)
        return self._run(call, async_op)

    def scan(self, array: Any, op: str | float = "sum", *, async_op: bool = False, timeout: float | None = None):
        """Reduces the arrays of this rank and all lower ranks, in place."""
        return self._run(_Call(_SCAN, timeout).writes(array).reduces(op), async_op)

    def exclusive_scan(
        self, array: Any, op: str | float = "sum", *, async_op: bool = False, timeout: float | None = None
    ):
        """Reduces the arrays of all lower ranks, in place. Rank 0 keeps its array."""
        return self._run(_Call(_EXCLUSIVE_SCAN, timeout).writes(array).reduces(op), async_op)

    # --- messages

    def send(self, array: Any, to: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None):
        """Sends the array to rank `to`, which receives it with the same tag."""
        return self._run(_Call(_SEND, timeout, to, tag).reads(array), async_op)

    def recv(
        self, array: Any, source: int | None = None, tag: int = 0, *, async_op: bool = False, timeout: float | None = None
    ):
        """Receives a message of rank `source`, or of any rank, into the array. Returns a `Message`."""
        peer = _ANY_RANK if source is None else source
        return self._run(_Call(_RECV, timeout, peer, tag).writes(array), async_op)

    def probe(self, source: int | None = None, tag: int = 0) -> Message:
        """Waits until a message is there. It stays until it is received."""
        return Message(*self._group.probe(source, tag))

    def try_probe(self, source: int | None = None, tag: int = 0) -> Message | None:
        """Returns the message that waits, if there is one."""
        message = self._group.try_probe(source, tag)
        return None if message is None else Message(*message)

    # --- objects, by pickle

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the objects of all ranks. They are pickled: use it only among ranks that trust each other."""
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        sizes = bytearray(8 * self.size)
        view = memoryview(sizes).cast("Q")
        self.all_gather(view, memoryview(bytearray(struct.pack("=Q", len(data)))).cast("Q"))
        counts = list(view)
        out = bytearray(sum(counts))
        self.all_gather(out, bytearray(data), counts=counts)
        ends = [sum(counts[: rank + 1]) for rank in range(self.size)]
        return [pickle.loads(memoryview(out)[end - count : end]) for end, count in zip(ends, counts)]

    def broadcast_object(self, value: Any = None, root: int = 0) -> Any:
        """Returns the object of rank `root`. It is pickled: use it only among ranks that trust each other."""
        data = bytearray(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)) if self.rank == root else bytearray()
        size = memoryview(bytearray(struct.pack("=Q", len(data)))).cast("Q")
        self.broadcast(size, root)
        if self.rank != root:
            data = bytearray(size[0])
        self.broadcast(data, root)
        return value if self.rank == root else pickle.loads(data)

    # --- memory and groups

    def alloc(self, nbytes: int) -> memoryview:
        """Allocates zeroed memory that all ranks of the host can access; all ranks call it.

        Use it as `numpy.frombuffer(memory, dtype)` or `torch.frombuffer(memory, dtype=...)`. An all_reduce of all of it
        copies nothing. If not all ranks share memory, it is ordinary memory.
        """
        memory = self._group.alloc(nbytes)
        view = (ctypes.c_ubyte * nbytes).from_address(memory.address)
        view.memory = memory  # freed with the last view
        return memoryview(view)

    def subgroup(self, ranks: Sequence[int], name: str | None = None) -> Group | None:
        """Makes a group of these ranks, in this order. Its members call it; returns None on other ranks."""
        return _wrap(self._group.subgroup(list(ranks), name))

    def split(self, color: int | None, key: int = 0) -> Group | None:
        """Makes a group of the ranks of each color, in the order of `key`; all ranks call it. None joins no group."""
        return _wrap(self._group.split(color, key))

    def shrink(self, within: float = 10.0) -> Group:
        """Makes a group of the ranks that are left after a failure and call it within so many seconds."""
        return Group(self._group.shrink(within))

    def with_timeout(self, timeout: float) -> Group:
        """Returns a handle of this group whose calls have another time limit, in seconds."""
        return Group(self._group.with_timeout(timeout))

    def abort(self, reason: str) -> None:
        """Ends the group on all ranks. Their calls fail with `Aborted`, which has the reason."""
        self._group.abort(reason)

    def close(self) -> None:
        """Leaves the group once the operations in progress are done."""
        self._group.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            # The other ranks need not wait for this one.
            self.abort(f"rank {self.rank} gave up: {type(error).__name__}: {error}")
        self.close()


def _wrap(group: _core.Group | None) -> Group | None:
    return None if group is None else Group(group)


def init(
    url: str | None = None,
    *,
    store: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    name: str | None = None,
    timeout: float | None = None,
    init_timeout: float | None = None,
) -> Group:
    """Joins the world: the ranks that a launcher has started, or a world of one rank without a launcher.

    `url` is as in torch (`env://`, `tcp://host:port?rank=0&world_size=2`, `file:///path`). `store` is the address of a
    store server that is there already, and needs `rank` and `world_size`. Times are in seconds.
    """
    if "multiprocessing.util" in sys.modules:
        # Processes of multiprocessing end without the functions of atexit.
        sys.modules["multiprocessing.util"].Finalize(None, _leave, exitpriority=0)
    return Group(_core.init(url, store, rank, world_size, name, timeout, init_timeout))
