"""Finds or compiles the C++ part of the backend, which must match the installed torch.

Parts for the releases of some minors of torch are in `shims/` of this folder, compressed. For another torch the part is
compiled. Either way the result is kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import lzma
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import torch

from . import _compile

_MINOR = tuple(int(number) for number in torch.__version__.split(".")[:2])
_ABI = torch.compiled_with_cxx11_abi()
# A build of torch's own, and not a nightly or somebody's build, whose C++ interface may differ.
_IS_RELEASE = re.fullmatch(r"\d+\.\d+\.\d+(\+(cpu|cu\d+|rocm[\d.]+|xpu))?", torch.__version__) is not None
_CHOICES = ("", "prebuilt", "compile", "python")


class LoadError(RuntimeError):
    """The C++ part cannot be had: what was tried, and why it failed."""


def load() -> str:
    """Loads the C++ part, and returns how it was had: "prebuilt" or "compiled".

    CONVOKE_TORCH_SHIM chooses: "prebuilt" or "compile" allow only that, "python" neither, and a path loads that file.
    """
    wanted = os.environ.get("CONVOKE_TORCH_SHIM", "")
    if os.sep in wanted:
        _open(pathlib.Path(wanted))
        return "prebuilt"
    if wanted not in _CHOICES:
        raise LoadError(f"CONVOKE_TORCH_SHIM is {wanted!r}: set a path, or one of {', '.join(_CHOICES[1:])}")
    if wanted == "python":
        raise LoadError("CONVOKE_TORCH_SHIM=python asks for none")
    reasons = []
    for choice, how, part in (("prebuilt", "prebuilt", prebuilt), ("compile", "compiled", compiled)):
        if wanted in ("", choice):
            try:
                _open(part())
                return how
            except (LoadError, OSError) as error:
                reasons.append(str(error))
    raise LoadError("; ".join(reasons))


def _open(path: pathlib.Path) -> None:
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise LoadError(f"{path} does not load: {error}") from None


def prebuilt() -> pathlib.Path:
    """Returns the C++ part of this package for the installed torch."""
    packed = _compile.FOLDER / "shims" / f"{_MINOR[0]}.{_MINOR[1]}.so.xz"
    if not packed.exists():
        raise LoadError(f"this package has no C++ part for torch {_MINOR[0]}.{_MINOR[1]}")
    if not _IS_RELEASE or not _ABI:
        raise LoadError(f"the package's C++ part is for releases of torch, and this is {torch.__version__}")
    data = packed.read_bytes()
    return _cached(hashlib.sha256(data), lambda path: path.write_bytes(lzma.decompress(data)))


def compiled() -> pathlib.Path:
    """Returns the C++ part, compiled on this machine."""
    if _MINOR < _compile.OLDEST:
        oldest = ".".join(map(str, _compile.OLDEST))
        raise LoadError(f"the backend needs torch {oldest} or newer, and this is {torch.__version__}")
    digest = hashlib.sha256()
    for part in (torch.__version__, torch.version.git_version, str(_ABI), os.uname().machine):
        digest.update(f"{part}\n".encode())
    for source in _compile.SOURCES:
        digest.update(source.read_bytes())
    return _cached(digest, _compile_to)


def _compile_to(path: pathlib.Path) -> None:
    compiler = _compile.compiler()
    if compiler is None:
        wanted = os.environ.get("CXX", "g++")
        raise LoadError(f"there is no C++ compiler ({wanted}): install one, or use a torch for which a part is prebuilt")
    print(f"convoke: compiling the backend for torch {torch.__version__}, once (about 30 s)", file=sys.stderr, flush=True)
    root = pathlib.Path(torch.__file__).parent
    command = _compile.command(compiler, root / "include", root / "lib", path, _ABI)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stdout.splitlines() if "error" in line] or done.stdout.splitlines()
        listed = "\n".join(errors[:5])
        raise LoadError(f"the C++ part does not compile with torch {torch.__version__}:\n{listed}")


def _cached(digest: hashlib._Hash, make: Callable[[pathlib.Path], object]) -> pathlib.Path:
    """Returns the file of this digest in the cache; makes it first if it is not there."""
    folder = _cache_folder()
    path = folder / f"convoke_torch-{digest.hexdigest()[:24]}.so"
    if path.exists():
        return path
    with _locked(path.with_suffix(".lock")):
        # Another process may have made it meanwhile.
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as made:
                part = pathlib.Path(made) / path.name
                make(part)
                # Processes that look for the file see it whole or not at all.
                os.rename(part, path)
    return path


def _cache_folder() -> pathlib.Path:
    """Returns a folder that only this user can write to."""
    base = os.environ.get("CONVOKE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    folders = [pathlib.Path(base) / "convoke"] if base else [pathlib.Path.home() / ".cache" / "convoke"]
    folders.append(pathlib.Path(tempfile.gettempdir()) / f"convoke-{os.getuid()}")
    reasons = []
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise PermissionError(f"other users can write to {folder}")
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(f"{folder} is not writable")
            return folder
        except OSError as error:
            reasons.append(str(error))
    raise LoadError(f"no folder for the C++ part ({'; '.join(reasons)}): set CONVOKE_CACHE to a folder of yours")


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
