"""Finds or compiles the C++ part of the backend, which must match the installed torch.

Prebuilt parts for some minors of torch are in `shims/` of this folder. For another torch the part is compiled at first
use and kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import torch

_FOLDER = pathlib.Path(__file__).parent
_SOURCES = [_FOLDER / "shim.cpp", _FOLDER / "convoke.h"]
_MINOR = ".".join(torch.__version__.split(".")[:2])


class LoadError(RuntimeError):
    """The C++ part cannot be had: what was tried, and why it failed."""


def load() -> str:
    """Loads the C++ part, and returns how: "prebuilt" or "compiled".

    CONVOKE_TORCH_SHIM chooses: "prebuilt" or "compile" allow only that, and a path loads that file.
    """
    wanted = os.environ.get("CONVOKE_TORCH_SHIM", "")
    if os.sep in wanted:
        torch.ops.load_library(wanted)
        return "prebuilt"
    prebuilt = _FOLDER / "shims" / f"convoke_torch-{_MINOR}.so"
    if wanted != "compile" and prebuilt.exists():
        torch.ops.load_library(str(prebuilt))
        return "prebuilt"
    if wanted == "prebuilt":
        raise LoadError(f"this package has no C++ part for torch {_MINOR}: {prebuilt} does not exist")
    torch.ops.load_library(str(compiled()))
    return "compiled"


def compiled() -> pathlib.Path:
    """Returns the C++ part from the cache; compiles it first if it is not there."""
    name = f"convoke_torch-{_key()}.so"
    folder = _cache_folder()
    path = folder / name
    if path.exists():
        return path
    with _locked(folder / f"{name}.lock"):
        # Another process may have compiled it meanwhile.
        if not path.exists():
            _compile(path)
    return path


def _key() -> str:
    """Names the torch and the source for which a compiled part is good."""
    digest = hashlib.sha256()
    for part in (torch.__version__, torch.version.git_version, str(torch.compiled_with_cxx11_abi()), os.uname().machine):
        digest.update(f"{part}\n".encode())
    for source in _SOURCES:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


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
    raise LoadError(f"no folder for the compiled part ({'; '.join(reasons)}): set CONVOKE_CACHE to a folder of yours")


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compiler() -> str:
    """Returns the C++ compiler."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "c++", "clang++"]:
        found = shutil.which(name)
        if found:
            return found
    raise LoadError(f"there is no C++ compiler ({wanted or 'g++'}): install one, or use a torch for which a part is prebuilt")


def command(output: pathlib.Path) -> list[str]:
    """Returns the command that compiles the C++ part."""
    root = pathlib.Path(torch.__file__).parent
    return [
        compiler(),
        "-std=c++20",
        "-O2",
        "-g0",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{_FOLDER}",
        f"-I{root / 'include'}",
        f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
        str(_SOURCES[0]),
        f"-L{root / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        "-o",
        str(output),
    ]


def _compile(path: pathlib.Path) -> None:
    print(f"convoke: compiling the backend for torch {torch.__version__}, once (about 30 s)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = pathlib.Path(folder) / path.name
        done = subprocess.run(command(made), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            last = "\n".join(done.stdout.splitlines()[-20:])
            raise LoadError(f"the C++ part does not compile with torch {torch.__version__}:\n{last}")
        # Processes that look for the file see it whole or not at all.
        os.rename(made, path)
