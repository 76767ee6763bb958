"""The backend without its C++ part: a process group in Python, for a torch for which that part cannot be had.

It is slower: a small operation takes 2 to 3 times as long, and one with `async_op=True` takes a thread. It is the whole
group, so it cannot stand beside another backend ("cpu:convoke,cuda:nccl"). docs/guides/pytorch.md lists what it lacks.
"""

from __future__ import annotations

import atexit
import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    ProcessGroup,
    ReduceScatterOptions,
    Work,
    _create_work_from_future,
)

from .._arrays import TYPES
from ..errors import ConvokeError, Timeout
from ..group import Group

_REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}
Tensor = torch.Tensor


def _is_known(tensor: Tensor) -> bool:
    return str(tensor.dtype).removeprefix("torch.") in TYPES


def _reduction(op: Any, tensor: Tensor) -> str:
    if not _is_known(tensor):
        raise RuntimeError(f"convoke cannot reduce elements of type {tensor.dtype}; it can move them")
    for known, name in _REDUCTIONS.items():
        if op == known:
            return name
    raise RuntimeError(f"the Python fallback of the backend has no reduction {op}")


class _Target:
    """The memory into which a call writes tensors: they themselves, or memory that is copied to them after."""

    def __init__(self, tensors: Sequence[Tensor], is_read: bool = True) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        first = self.tensors[0]
        self.is_copied = len(self.tensors) > 1 or not _is_plain(first)
        if not self.is_copied:
            self._whole = first
        elif is_read:
            self._whole = torch.cat([_plain(tensor).reshape(-1) for tensor in self.tensors])
        else:
            self._whole = torch.empty(sum(tensor.numel() for tensor in self.tensors), dtype=first.dtype)
        self.memory = _sent(self._whole)

    def deliver(self) -> None:
        if not self.is_copied:
            return
        sizes = [tensor.numel() for tensor in self.tensors]
        for tensor, part in zip(self.tensors, self._whole.reshape(-1).split(sizes)):
            tensor.copy_(part.view(tensor.shape))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _plain(tensor: Tensor) -> Tensor:
    """Returns the elements in one piece."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _sent(tensor: Tensor) -> Tensor:
    """Returns the elements as convoke moves them: those of a type that it does not know as bytes."""
    return tensor if _is_known(tensor) else tensor.reshape(-1).view(torch.uint8)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return _sent(_plain(tensors[0]) if len(tensors) == 1 else torch.cat([_plain(tensor).reshape(-1) for tensor in tensors]))


# The threads that wait for operations. One that still waited while the interpreter ends would abort the process.
_threads: set[threading.Thread] = set()
_is_ending = threading.Event()
_LOOK_INTERVAL = 0.1  # seconds


def _start(function: Callable[..., None], *args: Any) -> None:
    def run() -> None:
        try:
            function(*args)
        finally:
            _threads.discard(threading.current_thread())

    thread = threading.Thread(target=run, daemon=True)
    _threads.add(thread)
    thread.start()


def _end_threads() -> None:
    _is_ending.set()
    for thread in list(_threads):
        thread.join()


atexit.register(_end_threads)


def _done(result: Any) -> Work:
    """Returns the work of an operation that was carried out."""
    future = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _apart(source: Tensor, target: Tensor) -> Tensor:
    """Returns what is sent, or a copy if the call writes to the same memory, as torch allows."""
    is_same = source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
    return source.clone() if is_same else source


class _CollectiveWork(Work):
    """A collective in progress. A work that torch makes of a future would not raise the future's error."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result, self._error = result, None
        self._is_done = threading.Event()
        # An exception that is set in a future is a value for torch's C++, which DDP would take for tensors. One that a
        # callback raises is an error there as well.
        self._ended = torch.futures.Future()
        self._future = self._ended.then(lambda _: self.result())

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._is_done.set()
        self._ended.set_result(None)

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        if not self._is_done.wait(seconds if seconds > 0 else None):
            raise dist.DistBackendError(f"wait timed out after {seconds} s; the operation goes on, until its own time limit")
        self.result()
        return True

    def is_completed(self) -> bool:
        return self._is_done.is_set()

    def get_future(self) -> torch.futures.Future:
        return self._future

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class _JointWork(Work):
    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class _MessageWork(Work):
    """A message in progress."""

    def __init__(self, group: FallbackGroup, work: Any, deliver: Callable[[], None] | None) -> None:
        super().__init__()
        self._group, self._work, self._deliver = group, work, deliver
        self._source = -1

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        try:
            message = self._work.wait(seconds if seconds > 0 else None)
        except ConvokeError as error:
            raise self._group.failed(error) from error
        if message is not None:
            self._source = message.source
        deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver()
        return True

    def is_completed(self) -> bool:
        return self._work.is_done()

    def _source_rank(self) -> int:
        return self._source


class FallbackGroup(ProcessGroup):
    """The methods that torch.distributed calls; c10d::ProcessGroup describes them."""

    def __init__(self, group: Group, timeout: float, name: str) -> None:
        super().__init__(group.rank, group.size)
        self._convoke, self._timeout, self._backend_name = group, timeout, name
        self.failure: ConvokeError | None = None
        self._coalesced: list[Work] | None = None

    def failed(self, error: ConvokeError) -> Exception:
        """Makes the exception that torch's scripts expect, and keeps an error that ends the group."""
        if error.ends_group and self.failure is None:
            self.failure = error
        kind = "convoke timeout error" if isinstance(error, Timeout) else "convoke"
        return dist.DistBackendError(f"{kind}: {error}")

    def getBackendName(self) -> str:
        # Not "gloo": for that name torch looks for a backend of its own.
        return "convoke"

    # torch asks the group's backends for what follows, and this group has none.

    def _get_backend(self, device: torch.device) -> FallbackGroup:
        return self

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> str:
        return self._group_name

    def name(self) -> str:
        return self._backend_name

    @property
    def supports_coalescing(self) -> bool:
        return False

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return _JointWork(works)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    @property
    def supports_splitting(self) -> bool:
        return False

    def abort(self) -> None:
        self._convoke.abort("the program called abort")

    def shutdown(self) -> None:
        self._convoke.close()

    def _range(self, title: str) -> Any:
        """Returns the range of an operation in profiles."""
        return record_function(f"{self._backend_name}:{title}")

    def _run(self, operation: Callable[..., Any], opts: Any, *args: Any, then: Any = None, result: Any = None, **kwargs: Any) -> Work:
        """Carries out an operation of `Group`, and then calls `then`. Waits, unless the options ask for a work."""
        limit = getattr(opts, "timeout", datetime.timedelta(0)).total_seconds()
        kwargs["timeout"] = limit if limit > 0 else self._timeout
        if getattr(opts, "asyncOp", True) or self._coalesced is not None:
            with self._range(operation.__name__):
                begun = operation(*args, async_op=True, **kwargs)
            work = _CollectiveWork(result)
            _start(self._complete, work, begun, then)
            if self._coalesced is not None:
                self._coalesced.append(work)
            return work
        try:
            with self._range(operation.__name__):
                operation(*args, **kwargs)
        except ConvokeError as error:
            raise self.failed(error) from error
        if then is not None:
            then()
        return _done(result)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        target = _Target(tensors)
        return self._run(self._convoke.broadcast, opts, target.memory, opts.rootRank, then=target.deliver, result=tensors)

    def allreduce(self, tensors: list[Tensor], opts: Any = AllreduceOptions()) -> Work:
        if tensors[0].is_sparse:
            return self._add_sparse(tensors, opts)
        return self.allreduce_coalesced(tensors, opts)

    def _add_sparse(self, tensors: list[Tensor], opts: Any) -> Work:
        if opts.reduceOp != dist.ReduceOp.SUM:
            raise RuntimeError("sparse tensors can only be added")
        mine = tensors[0].detach().coalesce()
        try:
            parts = self._convoke.all_gather_object((mine.indices(), mine.values()))
        except ConvokeError as error:
            raise self.failed(error) from error
        indices, values = (torch.cat(list(of_all), dim) for of_all, dim in zip(zip(*parts), (1, 0)))
        with torch.no_grad():
            tensors[0].copy_(torch.sparse_coo_tensor(indices, values, mine.shape).coalesce())
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Work:
        target = _Target(tensors)
        op = _reduction(opts.reduceOp, tensors[0])
        return self._run(self._convoke.all_reduce, opts, target.memory, op, then=target.deliver, result=tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        # The tensors of ranks that are not the root must not change.
        target = _Target(tensors) if opts.rootRank == self.rank() else None
        memory, then = (target.memory, target.deliver) if target else (_plain(tensors[0]).clone(), None)
        op = _reduction(opts.reduceOp, tensors[0])
        return self._run(self._convoke.reduce, opts, memory, opts.rootRank, op, then=then, result=tensors)

    def _gather_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any, result: Any) -> Work:
        target = _Target(outputs, False)
        return self._run(self._convoke.all_gather, opts, target.memory, _apart(_joined(inputs), target.memory), then=target.deliver, result=result)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = AllgatherOptions()) -> Work:
        return self._gather_all(outputs[0], inputs, opts, outputs)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = AllgatherOptions()) -> Work:
        return self._gather_all([output], [input], opts, [output])

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = AllgatherOptions()) -> Work:
        return self._gather_all([tensor for of_rank in outputs for tensor in of_rank], inputs, opts, outputs)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = AllgatherOptions()) -> Work:
        works = [self._allgather_base(output, input, opts) for output, input in zip(outputs, inputs)]
        return self._all(works, outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        target = _Target(outputs[0], False) if opts.rootRank == self.rank() else None
        out, then = (target.memory, target.deliver) if target else (None, None)
        return self._run(self._convoke.gather, opts, _joined(inputs), opts.rootRank, out=out, then=then, result=outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        target = _Target(outputs, False)
        array = _joined(inputs[0]) if opts.rootRank == self.rank() else None
        then = target.deliver
        return self._run(self._convoke.scatter, opts, target.memory, opts.rootRank, array=array, then=then, result=outputs)

    def _scatter_sum(self, output: Tensor, inputs: Sequence[Tensor], opts: Any) -> Work:
        target, op = _Target([output], False), _reduction(opts.reduceOp, output)
        scatter = self._convoke.reduce_scatter
        return self._run(scatter, opts, target.memory, _apart(_joined(inputs), target.memory), op, then=target.deliver, result=[output])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = ReduceScatterOptions()) -> Work:
        return self._scatter_sum(outputs[0], inputs[0], opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = ReduceScatterOptions()) -> Work:
        return self._scatter_sum(output, [input], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = ReduceScatterOptions()) -> Work:
        works = [self._scatter_sum(output, [input], opts) for output, input in zip(outputs, inputs)]
        return self._all(works, outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        counts = ([_sent(_plain(tensor)).numel() for tensor in inputs], [_sent(tensor).numel() for tensor in outputs])
        return self._exchange(outputs, inputs, counts, opts)

    def alltoall_base(self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any) -> Work:
        counts = (self._counts(input, input_splits), self._counts(output, output_splits))
        return self._exchange([output], [input], counts, opts)

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], counts: tuple[list[int], list[int]], opts: Any) -> Work:
        target = _Target(outputs, False)
        kwargs = {"send_counts": counts[0], "recv_counts": counts[1]}
        exchange, then = self._convoke.all_to_all, target.deliver
        return self._run(exchange, opts, target.memory, _apart(_joined(inputs), target.memory), then=then, result=list(outputs), **kwargs)

    def _counts(self, tensor: Tensor, splits: list[int]) -> list[int]:
        """Returns the number of elements for each rank, of sizes along the first dimension."""
        length = tensor.shape[0] if tensor.dim() else 1
        row = _sent(tensor).numel() // length if length else 1
        if not splits and length % self.size():
            raise RuntimeError(f"length {length} is not a multiple of {self.size()} ranks: give split sizes")
        return [split * row for split in splits or [length // self.size()] * self.size()]

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work:
        with self._range("send"):
            return _MessageWork(self, self._convoke.send(_joined(tensors), to, tag, async_op=True), None)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        # A message may be shorter than the tensor, whose rest then stays.
        target = _Target(tensors)
        with self._range("recv" if source is not None else "recvAnySource"):
            return _MessageWork(self, self._convoke.recv(target.memory, source, tag, async_op=True), target.deliver)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self.recv(tensors, None, tag)

    def barrier(self, opts: Any = BarrierOptions()) -> Work:
        return self._run(self._convoke.barrier, opts)

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        if seconds <= 0:
            raise dist.DistBackendError(f"Rank {self.rank()} timed out in monitoredBarrier: its time limit is {seconds} s")
        try:
            self._convoke.monitored_barrier(seconds)
        except Timeout as error:
            # Scripts know the texts of gloo.
            missing = error.missing if wait_all_ranks else error.missing[:1]
            ranks = f"Rank{'s' if wait_all_ranks else ''} {', '.join(map(str, missing))}"
            text = f"{ranks} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms"
            if self.rank() != 0:
                text = f"Rank {self.rank()} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
            raise dist.DistBackendError(f"{text}: {self.failed(error)}") from error
        except ConvokeError as error:
            raise self.failed(error) from error

    def gather_into_tensor(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        return self.gather([[output]], [input], opts)

    # The names of torch 2.15.
    gather_single = gather_into_tensor
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _all(self, works: list[Work], result: Any) -> Work:
        for work in works:
            work.wait()
        return _done(result)

    def _complete(self, work: _CollectiveWork, begun: Any, then: Callable[[], None] | None) -> None:
        error: Exception | None = None
        try:
            # The process cannot end while this waits in the runtime.
            while not begun._work.wait(_LOOK_INTERVAL)[0]:
                if _is_ending.is_set():
                    return
            if then is not None:
                then()
        except ConvokeError as failure:
            error = self.failed(failure)
        except Exception as failure:
            error = failure
        work.end(error)
