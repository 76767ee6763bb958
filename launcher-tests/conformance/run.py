#!/usr/bin/env python3
"""Conformance suite for torchrun-compatible launchers.

    run.py --launcher torchrun
    run.py --launcher target/release/convoke --group c10d --group etcd -j 4
    run.py --launcher convoke --group torch --python VENV/bin/python

Each case runs real launcher processes with tiny standard-library workers on
loopback. One line per case, then `N passed, M failed, K skipped`; the exit code
is 1 if any case failed, 2 if the choice of cases makes no sense. The rule that a
case tests is its docstring (`--list` prints them all): what torchrun of torch 2.15
does, but for the few points where it has defects that nobody should copy.
"""
import argparse
import concurrent.futures
import importlib
import os
import pkgutil
import shlex
import subprocess
import sys
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "lib"))
sys.path.insert(0, HERE)
sys.dont_write_bytecode = True

import cases  # noqa: E402
from harness import CASES, Case, Skip  # noqa: E402

OPTIONAL_GROUPS = {"torch"}  # only run when asked for with --group


def parse_args():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--launcher", required=True, help="command prefix of the launcher under test")
    p.add_argument("--legacy-launcher", default="",
                   help="command prefix that replaces `python -m torch.distributed.launch`")
    p.add_argument("--torchrun", default="", help="a real torchrun, for the mixed jobs of the torch group")
    p.add_argument("--python", default="", help="python with torch, for the torch group")
    p.add_argument("--group", action="append", default=[], help="only these groups (repeatable)")
    p.add_argument("-k", dest="pattern", default="", help="only cases whose name contains this")
    p.add_argument("--skip", action="append", default=[], metavar="CASE",
                   help="leave this case out and say so (repeatable)")
    p.add_argument("-j", dest="jobs", type=int, default=2, help="cases run at the same time")
    p.add_argument("--keep", action="store_true", help="keep the directories of failed cases")
    p.add_argument("--list", action="store_true", help="list the cases and their rules")
    return p.parse_args()


def usage_error(text):
    print(f"run.py: {text}", file=sys.stderr)
    sys.exit(2)


def absolute(command):
    """Make a relative program path absolute, as cases run in their own directories."""
    words = shlex.split(command)
    if words and os.path.sep in words[0]:
        words[0] = os.path.abspath(words[0])
    return shlex.join(words)


def choose(options):
    """The cases asked for. A group, pattern or name that fits none is an error: a misspelled choice must not pass."""
    groups = {group for _, group, _ in CASES}
    for group in options.group:
        if group not in groups:
            usage_error(f"no group {group!r}; there are: {', '.join(sorted(groups))}")
    for name in options.skip:
        if name not in {case[0] for case in CASES}:
            usage_error(f"no case {name!r} to skip; --list shows them")
    chosen = [c for c in CASES
              if (c[1] in options.group if options.group else c[1] not in OPTIONAL_GROUPS)
              and options.pattern in c[0]]
    if not chosen:
        usage_error("no case fits this choice; --list shows them")
    return chosen


def run_case(entry, options):
    name, group, fn = entry
    if name in options.skip:
        return name, group, "SKIP", "left out by --skip", 0.0
    ctx = Case(options)
    start = time.time()
    status, detail = "PASS", ""
    try:
        fn(ctx)
    except Skip as e:
        status, detail = "SKIP", str(e)
    except AssertionError as e:
        status, detail = "FAIL", str(e)
    except Exception:
        status, detail = "FAIL", traceback.format_exc()
    if status == "FAIL" and options.keep:
        detail += f"\nkept: {ctx.dir}"
    ctx.close(keep=options.keep and status == "FAIL")
    return name, group, status, detail, time.time() - start


def main():
    options = parse_args()
    for module in pkgutil.iter_modules(cases.__path__):
        importlib.import_module(f"cases.{module.name}")
    for name in ("launcher", "legacy_launcher", "torchrun"):
        setattr(options, name, absolute(getattr(options, name)))

    chosen = choose(options)
    if options.list:
        for name, group, fn in chosen:
            print(f"{group:9} {name:38} {' '.join((fn.__doc__ or '').split())}")
        return 0

    try:
        usage = subprocess.run([*shlex.split(options.launcher), "--help"], capture_output=True, text=True)
    except OSError as e:
        usage_error(f"cannot execute the launcher: {e}")
    options.is_torch = "Torch Distributed Elastic Training Launcher" in usage.stdout

    count = {"PASS": 0, "FAIL": 0, "SKIP": 0}
    left_out = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(run_case, c, options) for c in chosen]
        for future in concurrent.futures.as_completed(futures):
            name, group, status, detail, took = future.result()
            count[status] += 1
            print(f"{status} {group:9} {name:38} {took:5.1f}s", flush=True)
            if status == "SKIP":
                left_out.append(f"{name}: {detail}")
            if status == "FAIL":
                print("    " + detail.strip().replace("\n", "\n    "), flush=True)
    for line in left_out:  # once more at the end, where it is seen
        print(f"NOT TESTED: {line}")
    print(f"{count['PASS']} passed, {count['FAIL']} failed, {count['SKIP']} skipped")
    return 1 if count["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
