"""Runs a function as several ranks, each a process of this machine."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from . import _core
from .errors import Aborted, PeerLost

__all__ = ["LaunchError", "launch"]

# Longest wait for the other ranks after a failure: their errors may show which rank failed first.
_GATHER_SECONDS = 2.0
# Longest wait after SIGTERM until SIGKILL.
_GRACE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_environment = threading.Lock()


class LaunchError(RuntimeError):
    """A rank has failed, and the others were ended.

    `rank` is the rank that failed first; `exit_code` is negative for a signal; `traceback` is the text of its exception,
    and `error` the exception itself if it could be pickled.
    """

    def __init__(self, rank: int, what: str, exit_code: int | None, trace: str | None, error: BaseException | None) -> None:
        super().__init__(f"rank {rank} {what}" + (f"\n\n{trace}" if trace else ""))
        self.rank, self.exit_code, self.traceback, self.error = rank, exit_code, trace, error


def launch(fn: Callable[..., Any], nproc: int | None = None, *, start_method: str | None = None) -> Callable[..., list[Any]]:
    """Returns a function that calls `fn` with its arguments in `nproc` processes, and returns all results by rank.

    Each process is a rank of a world: `convoke_dist.init()` and `torch.distributed.init_process_group()` join it. `nproc`
    is the number of CPUs by default. `start_method` is "spawn" or "fork". With "spawn", `fn` must be importable. "fork" is the
    default where there is no script, as in a notebook. It must not follow work with threads, such as that of torch.

    Raises `LaunchError` if a rank raises an exception or dies. The other ranks are then ended.
    """
    if nproc is None:
        nproc = len(os.sched_getaffinity(0))
    if nproc < 1:
        raise ValueError(f"nproc is {nproc}; it must be 1 or more")
    if start_method is None:
        start_method = "spawn" if hasattr(sys.modules["__main__"], "__file__") else "fork"
    context = multiprocessing.get_context(start_method)

    def run(*args: Any, **kwargs: Any) -> list[Any]:
        return _run(context, fn, nproc, args, kwargs)

    return run


@contextlib.contextmanager
def _environ(variables: dict[str, str | None]) -> Iterator[None]:
    """Sets or removes variables of this process for a moment: a child inherits them before it imports anything."""
    with _environment:
        before = {name: os.environ.get(name) for name in variables}
        _set(variables)
        try:
            yield
        finally:
            _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _rank(fn: Callable[..., Any], args: Any, kwargs: Any, results: Connection, parent: int) -> None:
    """The main function of a rank."""
    # The kernel ends this process with its parent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    try:
        value = fn(*args, **kwargs)
        data = pickle.dumps((True, value))
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            data = pickle.dumps((True, None))
        else:
            data = _describe(error)
    results.send_bytes(data)
    results.close()


def _describe(error: BaseException) -> bytes:
    text = traceback.format_exc()
    what = f"raised {type(error).__name__}: {error}"
    is_consequence = isinstance(error, (PeerLost, Aborted)) or type(error).__name__ == "DistBackendError"
    for kept in (error, None):
        with contextlib.suppress(Exception):
            data = pickle.dumps((False, (what, text, kept, is_consequence)))
            pickle.loads(data)
            return data
    raise AssertionError("texts can be pickled")


class _Failure:
    def __init__(self, rank: int, exit_code: int | None, report: Any) -> None:
        self.rank, self.exit_code = rank, exit_code
        self.what, self.traceback, self.error, self.is_consequence = report or (_ended(exit_code), None, None, False)


def _ended(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"exited with code {exit_code} before its function returned"


def _run(context: Any, fn: Callable[..., Any], nproc: int, args: Any, kwargs: Any) -> list[Any]:
    server = _core.StoreServer("127.0.0.1", 0)
    processes, connections = [], []
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    try:
        for rank, variables in enumerate(_core.local_world(nproc, server.port)):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(fn, args, kwargs, theirs, os.getpid()), name=f"rank {rank}", daemon=False
            )
            with _environ(variables | {"OMP_NUM_THREADS": threads}):
                process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        return _collect(processes, connections)
    finally:
        _end(processes)
        for connection in connections:
            connection.close()


def _collect(processes: list[Any], connections: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    pending = dict(zip(connections, range(len(processes))))
    deadline = None
    while pending:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(pending), timeout)
        if not ready:
            break
        for connection in ready:
            rank = pending.pop(connection)
            try:
                is_ok, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                processes[rank].join()
                is_ok, value = False, None
            if is_ok:
                results[rank] = value
            else:
                failures.append(_Failure(rank, processes[rank].exitcode, value))
                deadline = deadline or time.monotonic() + _GATHER_SECONDS
        if failures and not all(failure.is_consequence for failure in failures):
            # The first failure is known, and the others wait for it in vain.
            break
    if failures:
        first = next((failure for failure in failures if not failure.is_consequence), failures[0])
        raise LaunchError(first.rank, first.what, first.exit_code, first.traceback, first.error) from first.error
    for process in processes:
        process.join()
    return [results[rank] for rank in range(len(processes))]


def _end(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
