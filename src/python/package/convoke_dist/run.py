"""The launcher: `python -m convoke_dist.run` is the program `convoke` of this installation."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig


def program() -> str:
    """Returns the path of the program `convoke` that was installed with this package."""
    schemes = [sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")]
    for folder in [sysconfig.get_path("scripts", scheme) for scheme in schemes]:
        path = os.path.join(folder, "convoke")
        if os.access(path, os.X_OK):
            return path
    found = shutil.which("convoke")
    if found is None:
        raise FileNotFoundError("the program `convoke` is not installed beside this package, and is not in PATH")
    return found


def main() -> None:
    try:
        path = program()
    except FileNotFoundError as error:
        sys.exit(f"convoke_dist.run: {error}")
    # Workers run in this Python, as torchrun's do.
    os.environ.setdefault("PYTHON_EXEC", sys.executable)
    os.execv(path, [path, *sys.argv[1:]])


if __name__ == "__main__":
    main()
