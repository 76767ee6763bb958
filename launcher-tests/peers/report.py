#!/usr/bin/env python3
"""Rewrites the tables of docs/measurements/performance.md from what the benchmarks have written.

  report.py --results target/bench [--document docs/measurements/performance.md]    # writes the tables
  report.py --note target/bench/launch [--python PATH/bin/python]      # before a benchmark: notes machine and date

What stands between `<!-- bench:NAME -->` and `<!-- end -->` is written anew, the rest stays as it is. The names:

  launch machine, launch                      when and where; the table, from RESULTS/launch/launch.csv
  collectives machine, collectives            when and where; convoke's times, from RESULTS/collectives/raw.csv
  collectives SYSTEM                          SYSTEM against convoke, such as `collectives openmpi:tcp`
  memory machine, memory, memory SYSTEM       the same in shared memory, from RESULTS/memory/raw.csv; `the better MPI:shm` is one
  memory alloc                                all_reduce in memory of Group::alloc against the better MPI
  memory gloo                                 gloo's times over convoke's in memory, from RESULTS/memory-gloo
  memory limit                                all_reduce of many bytes beside what the machine could move in the same rounds
  memory occasions                            what is asked of all_reduce, with its range, and the geometric means of the
                                              others: a row for each occasion; earlier ones stay
  train hosts, train one-host-2 (or 4)        when and where, table and timeline, from RESULTS/train-hosts and so on

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
NAMES = {"openmpi:tcp": "Open MPI", "torch-gloo:tcp": "gloo", "the better MPI:shm": "The better of Open MPI and MPICH in each cell",
         "the newest MPIs:shm": "The best of Open MPI 5, MPICH 5 and Intel MPI in each cell",
         "the newest MPIs:tcp": "The best of Open MPI 5, MPICH 5 and Intel MPI in each cell"}
# What is measured and compared, and not shown on its own.
UNUSED = {"collectives the better MPI:tcp", "memory openmpi:shm", "memory mpich:shm", "memory convoke-alloc:shm"}
UNUSED |= {f"{area} {peer}:{way}" for peer in ("openmpi5", "mpich5", "intel", "oneccl") for area, way in (("collectives", "tcp"), ("memory", "shm"))}
# Title, test, metric.
LAUNCH = [
    ("from exec to the first worker's first instruction, ms", "start", "first worker"),
    ("from exec to exit, workers that do nothing, ms", "wall", "exec to exit"),
    ("from a worker's death to the last of 8 replacements, ms", "restart", "last replacement"),
    ("idle, summed PSS, MiB", "idle", "pss"),
    ("idle, CPU time, ms per s", "idle", "cpu"),
]
# A line takes 30 to 60 ns from a core to another within a cache, 150 and more to one that shares none.
FAR_NS = 100


def processor():
    """What the processor calls itself, in short."""
    with open("/proc/cpuinfo") as file:
        told = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", file.read(), re.MULTILINE))
    name = re.sub(r"\((R|TM)\)|@.*|CPU|Processor", "", told.get("model name", "")).split()
    return " ".join(name + [f"family {told['cpu family']} model {told['model']}"] if "cpu family" in told else name)


def machine(python=None, when=None):
    """When and where something is measured, as a sentence."""
    cores = len(os.sched_getaffinity(0))
    words = [f"{cores} core{'s' if cores > 1 else ''} of {processor() or platform.machine()}", f"Linux {re.match(r'[0-9.]+', platform.release())[0]}"]
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


def apart(folder):
    """How many runs of each system were between cores far from each other, as percentages."""
    runs = {}
    with open(f"{folder}/raw.csv") as file:
        for row in csv.DictReader(file):
            if lines := [float(ns) for ns in row.get("line_ns", "").split("/") if ns]:
                runs.setdefault(row["system"], {})[row["collective"], row["ranks"], row["round"]] = max(lines) > FAR_NS
    shares = [f"{sum(runs[system].values()) / len(runs[system]):.0%}" for system in ("convoke", "openmpi", "mpich") if system in runs]
    return ", ".join(shares)


def occasion(folder, when):
    """What is asked of collectives in memory, as a row of each of two tables."""
    mpi, ranged = "the better MPI:shm", lambda values, form: f"{form(statistics.median(values))} ({form(min(values))} to {form(max(values))})"
    plain, shared = table.Results(folder, "convoke:shm"), table.Results(folder, "convoke-alloc:shm", ["all_reduce"])
    ratio = lambda of, ranks, size: ranged([theirs / ours for theirs, ours in of.turns(("all_reduce", ranks, size), mpi)], table.short)
    behind = ranged([ours - theirs for theirs, ours in plain.turns(("all_reduce", 2, 4), mpi)], lambda us: f"{us:.2f}")
    ratios = plain.ratios(mpi)
    four = plain.means({key: value for key, value in ratios.items() if key[:2] == ("all_reduce", 4)})
    asked = [behind, *(ratio(plain, 2, size << 10) for size in (64, 256, 1024, 16384, 65536)), ratio(plain, 4, 64 << 10),
             table.short(four["all_reduce"]), ratio(shared, 2, 1 << 20), ratio(shared, 2, 64 << 20), apart(folder)]
    means = [table.short(mean) for mean in plain.means(ratios).values()]
    return [f"| {when} | " + " | ".join(cells) + " |" for cells in (asked, means)], list(plain.means(ratios))


def occasions(folder, when, document):
    """The same beside those of earlier occasions, which `document` has."""
    before = next((text for _, name, text, _ in MARKED.findall(document) if name == "memory occasions"), "")
    rows, collectives = occasion(folder, when)
    earlier = [re.findall(r"^\| (?!occasion|-).*$", part, re.MULTILINE) for part in before.split("| occasion |")[1:]] or [[], []]
    heads = [["4 B, 2: µs behind", *(f"{size}, 2" for size in ("64K", "256K", "1M", "16M", "64M")), "64K, 4", "mean, 4", "`alloc` 1M, 2", "`alloc` 64M, 2",
              "cores apart: convoke, Open MPI, MPICH"], collectives]
    lines = []
    for head, old, row in zip(heads, earlier, rows):
        kept = [line for line in old if not line.startswith(f"| {when} |")]
        lines += ["| occasion | " + " | ".join(head) + " |", "|---|" + "---|" * len(head), *kept, row, ""]
    return lines[:-1]


def limit(folder):
    """An all_reduce of many bytes beside what the machine can move, by the rates of the same rounds, in FOLDER/limits.csv."""
    rates = {}
    with open(f"{folder}/limits.csv") as file:
        for row in csv.DictReader(file):
            rates.setdefault((row["test"], row["detail"].split(" ")[0]), {})[int(row["ranks"]), int(row["round"])] = float(row["GBps"])
    lines = ["| `all_reduce` | ranks | copied, added (S: bytes of the buffer) | limit, ms | convoke, ms | of the limit | range |", "|---|---|---|---|---|---|---|"]
    for candidate, name in (("convoke", ""), ("convoke-alloc", ", `alloc`")):
        of = table.Results(folder, f"{candidate}:shm", ["all_reduce"])
        for ranks in (2, 4):
            copies, sums = (2 * ranks - 1, ranks - 1) if candidate == "convoke" else (ranks - 1, ranks - 1)
            for size, where in ((16 << 20, "16MiB"), (64 << 20, "256MiB")):
                # GB/s are bytes in a microsecond, times 1000.
                least = lambda turn: size * (copies / rates["memcpy", where][ranks, turn] + sums / rates["add_f32", where][ranks, turn]) / 1e6
                turns = [(least(turn), took / 1e3) for turn, took in of.results["all_reduce", ranks, size][f"{candidate}:shm"].items()]
                limits, times, shares = zip(*((limit, took, limit / took) for limit, took in turns))
                cells = [f"{table.size(size)}{name}", str(ranks), f"{copies} S, {sums} S", f"{statistics.median(limits):.2f}", f"{statistics.median(times):.2f}",
                         f"{statistics.median(shares):.0%}", f"{min(shares):.0%} to {max(shares):.0%}"]
                lines.append(f"| {' | '.join(cells)} |")
    middle = {key: statistics.median(turns.values()) for key, turns in rates.items()}
    moved = ", ".join(f"{what} {middle[test, f'{size}MiB']:.0f} GB/s at {size} MiB" for size in (16, 256) for test, what in (("memcpy", "copies"), ("add_f32", "adds")))
    return [*lines, "", f"Two cores together, medians: {moved}."]


def blocks(results, document):
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
            when = time.strftime("%-d %b, %H:%M", time.gmtime(os.path.getmtime(f"{folder}/raw.csv")))
            if os.path.exists(f"{folder}/limits.csv"):
                found["memory limit"] = limit(folder)
            found["memory occasions"] = occasions(folder, f"{when}, {processor()}", document)
    if os.path.exists(f"{results}/memory-gloo/raw.csv"):
        tables = table.Results(f"{results}/memory-gloo", "convoke:shm")
        found["memory gloo"] = [f"{tables.rounds('torch-gloo:tcp')} rounds:", "", *tables.against("torch-gloo:tcp")]
    for place in ("hosts", "one-host-2", "one-host-4"):
        folder = f"{results}/train-{place}"
        if os.path.exists(f"{folder}/table.md"):
            read = lambda name: open(f"{folder}/{name}").read().splitlines()
            lines = [noted(folder, "table.md"), "", *read("table.md"), "", "```text", *read("timeline.txt"), "```"]
            found[f"train {place}"] = lines
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--results", help="folder with those of each benchmark")
    p.add_argument("--document", default="docs/measurements/performance.md")
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
    known, found = {match[2] for match in MARKED.finditer(text)}, blocks(o.results, text)
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
