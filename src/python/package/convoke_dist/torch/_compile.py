"""The command that compiles the C++ part of the backend. It needs no torch: the wheel's build uses it as well."""

from __future__ import annotations

import os
import pathlib
import shutil

FOLDER = pathlib.Path(__file__).parent
# The first includes the others.
SOURCES = (FOLDER / "shim.cpp", *sorted(FOLDER.glob("*.hpp")), FOLDER / "convoke.h")
# The minors of torch whose C++ interface the source knows.
OLDEST = (2, 7)


def compiler() -> str | None:
    """Returns the C++ compiler: CXX, or the first that is installed."""
    wanted = os.environ.get("CXX")
    found = (shutil.which(name) for name in ([wanted] if wanted else ["g++", "c++", "clang++"]))
    return next(filter(None, found), None)


def command(compiler: str, include: pathlib.Path, libraries: pathlib.Path, output: pathlib.Path, abi: bool = True) -> list[str]:
    """Returns the command. `include` and `libraries` are torch's folders; `abi`: torch uses C++11's strings."""
    return [
        compiler,
        "-std=c++20",
        "-O2",
        "-g0",
        "-s",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(abi)}",
        f"-I{FOLDER}",
        f"-I{include}",
        f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
        str(SOURCES[0]),
        f"-L{libraries}",
        "-Wl,--no-as-needed",
        "-lc10",
        "-ltorch_cpu",
        "-o",
        str(output),
    ]
