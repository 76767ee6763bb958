#!/usr/bin/env python3
"""Rewrites the tables of docs/performance.md from what the benchmarks have written.

  report.py --results target/bench [--document docs/performance.md]    # writes the tables
  report.py --note target/bench/launch [--python PATH/bin/python]      # before a benchmark: notes machine and date

What stands between `<!-- bench:NAME -->` and `<!-- end -->` is written anew, the rest stays as it is. The names:

  launch machine, launch                      when and where; the table, from RESULTS/launch/launch.csv
  collectives machine, collectives            when and where; convoke's times, from RESULTS/collectives/raw.csv
  collectives SYSTEM                          SYSTEM against convoke, such as `collectives openmpi:tcp`
  memory machine, memory, memory SYSTEM       the same in shared memory, from RESULTS/memory/raw.csv; `the better MPI:shm` is one
  memory alloc                                all_reduce in memory of Group::alloc against the better MPI
  train hosts, train loopback                 when and where, table and timeline, from RESULTS/train-hosts and so on

A table whose benchmark has not run, or not with that peer, is left alone and named on stderr.
"""
import argparse
import csv
import os
import platform
import re
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "collectives"))
import table  # noqa: E402

MARKED = re.compile(r"(<!-- bench:([^\n]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NAMES = {"openmpi:tcp": "Open MPI", "torch-gloo:tcp": "gloo", "the better MPI:shm": "The better of Open MPI and MPICH in each cell"}
# What is measured and compared, and not shown on its own.
UNUSED = {"collectives the better MPI:tcp", "memory openmpi:shm", "memory mpich:shm", "memory convoke-alloc:shm"}
# Title, test, metric.
LAUNCH = [
    ("from exec to the first worker's first instruction, ms", "start", "first worker"),
    ("from exec to exit, workers that do nothing, ms", "wall", "exec to exit"),
    ("from a worker's death to the last of 8 replacements, ms", "restart", "last replacement"),
    ("idle, summed PSS, MiB", "idle", "pss"),
    ("idle, CPU time, ms per s", "idle", "cpu"),
]


def machine(python=None, when=None):
    """When and where something is measured, as a sentence."""
    cores = len(os.sched_getaffinity(0))
    words = [f"{cores} core{'s' if cores > 1 else ''}", platform.machine(), f"Linux {re.match(r'[0-9.]+', platform.release())[0]}"]
    if python:
        show = [python, "-c", "import torch; print(torch.__version__)"]
        version = subprocess.run(show, capture_output=True, text=True).stdout.strip()
        words += [f"torch {version}"] if version else []
    return f"Measured on {time.strftime('%-d %B %Y', time.gmtime(when))}: {', '.join(words)}."


def noted(folder, results):
    """What was noted before the benchmark; else this machine, and when the results were written."""
    try:
        with open(f"{folder}/machine.txt") as file:
            return file.read().strip()
    except FileNotFoundError:
        return machine(when=os.path.getmtime(f"{folder}/{results}"))


def ms(number):
    return f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"


def launch(path):
    """Lines of the table of launchers."""
    values = {}
    with open(path) as file:
        for row in csv.DictReader(file):
            if row["value"] != "none":
                key = row["test"], row["metric"], int(row["parameter"].split()[0]) if row["parameter"][0].isdigit() else 0
                values.setdefault(key, {}).setdefault(row["launcher"], []).append(float(row["value"]))
    lines = ["| | workers | bare | convoke | torchrun | torchrun / convoke | convoke / bare |", "|---|---|---|---|---|---|---|"]
    for title, test, metric in LAUNCH:
        for count in sorted(count for known, what, count in values if (known, what) == (test, metric)):
            of = {name: statistics.median(all_) for name, all_ in values[test, metric, count].items()}
            times = [ms(of[name]) if name in of else "" for name in ("bare", "convoke", "torchrun")]
            over = lambda a, b: table.short(of[a] / of[b]) if a in of and of.get(b) else ""
            ratios = [over("torchrun", "convoke"), over("convoke", "bare")]
            lines.append(f"| {title} | {count} | " + " | ".join(times + ratios) + " |")
            title = ""
    return [re.sub(r"\|  (?=\|)", "| ", line) for line in lines]


def blocks(results):
    """What can be written: name -> lines."""
    found = {}
    folder = f"{results}/launch"
    if os.path.exists(f"{folder}/launch.csv"):
        found["launch machine"] = [noted(folder, "launch.csv")]
        found["launch"] = launch(f"{folder}/launch.csv")
    for name, candidate in (("collectives", "convoke:tcp"), ("memory", "convoke:shm")):
        folder = f"{results}/{name}"
        if not os.path.exists(f"{folder}/raw.csv"):
            continue
        tables = table.Results(folder, candidate)
        found[f"{name} machine"] = [noted(folder, "raw.csv")]
        found[name] = tables.own()
        for peer in tables.peers:
            found[f"{name} {peer}"] = [f"{NAMES.get(peer, peer)}, {tables.rounds(peer)} rounds:", "", *tables.against(peer)]
        if name == "memory":
            tables = table.Results(folder, "convoke-alloc:shm", ["all_reduce"])
            found["memory alloc"] = [*tables.own(), "", *tables.against("the better MPI:shm")]
    for place in ("hosts", "loopback"):
        folder = f"{results}/train-{place}"
        if os.path.exists(f"{folder}/table.md"):
            read = lambda name: open(f"{folder}/{name}").read().splitlines()
            lines = [noted(folder, "table.md"), "", *read("table.md"), "", "```text", *read("timeline.txt"), "```"]
            found[f"train {place}"] = lines
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--results", help="folder with those of each benchmark")
    p.add_argument("--document", default="docs/performance.md")
    p.add_argument("--note", metavar="FOLDER", help="note machine and date there")
    p.add_argument("--python", help="interpreter with torch")
    o = p.parse_args()
    if o.note:
        os.makedirs(o.note, exist_ok=True)
        with open(f"{o.note}/machine.txt", "w") as file:
            file.write(machine(o.python) + "\n")
    if not o.results:
        return
    with open(o.document) as file:
        text = file.read()
    known, found = {match[2] for match in MARKED.finditer(text)}, blocks(o.results)
    for name in sorted(known - set(found)):
        print(f"report: no results for `{name}`: left as it is", file=sys.stderr)
    for name in sorted(set(found) - known - UNUSED):
        print(f"report: {o.document} has no place for `{name}`", file=sys.stderr)
    write = lambda match: "".join([match[1], "\n", *(f"{line}\n" for line in found[match[2]]), "\n", match[4]])
    text = MARKED.sub(lambda match: write(match) if match[2] in found else match[0], text)
    with open(o.document, "w") as file:
        file.write(text)
    print(f"report: {len(known & set(found))} of {len(known)} parts of {o.document} written", file=sys.stderr)


if __name__ == "__main__":
    main()
