#!/usr/bin/env python3
"""Every flag of the installed torchrun, with every choice that it lists, is a flag of convoke.

Run with a Python that has torch. CONVOKE is the path of convoke (default: target/release). Prints what is missing and,
as its last line, `N passed, M failed`; the exit code is 1 if something failed.
"""
import os
import subprocess
import sys

from torch.distributed.run import get_args_parser

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TARGET = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
CONVOKE = os.environ.get("CONVOKE", os.path.join(TARGET, "release", "convoke"))


def convoke(*arguments):
    return subprocess.run([CONVOKE, *arguments], capture_output=True, text=True, timeout=20)


def main():
    known = set(convoke("--help").stdout.replace(",", " ").replace("=", " ").replace("[", " ").split())
    passed, failed = 0, []
    for action in get_args_parser()._actions:
        for spelling in action.option_strings:
            if spelling in known:
                passed += 1
            elif "_" not in spelling:
                failed.append(f"{spelling} is not in convoke's help")
            # Not in the help, and refused here only for its value, if at all.
            elif "unknown flag" in convoke(f"{spelling}=1", "--dry-run", "train.py").stderr:
                failed.append(f"{spelling} is unknown to convoke")
            else:
                passed += 1
        # Completions are printed by convoke alone.
        if not action.option_strings or "--print-completion" in action.option_strings:
            continue
        for choice in action.choices or []:
            for spelling in action.option_strings:
                run = convoke(f"{spelling}={choice}", "--nproc-per-node=1", "--dry-run", "train.py")
                # torchrun too binds to the NUMA nodes of accelerators only.
                if run.returncode == 0 or "there is no accelerator to bind to" in run.stderr:
                    passed += 1
                else:
                    failed.append(f"{spelling}={choice} is refused: {run.stderr.strip()}")
    print(*failed, sep="\n", end="\n" if failed else "")
    print(f"{passed} passed, {len(failed)} failed")
    return 1 if failed or passed < 60 else 0


if __name__ == "__main__":
    sys.exit(main())
