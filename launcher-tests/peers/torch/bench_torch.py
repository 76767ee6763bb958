#!/usr/bin/env python3
"""gloo and convoke as backends of torch.distributed, interleaved on one machine.

    bench_torch.py --bin FOLDER --python PYTHON --out FOLDER [--rounds 7] [--ranks 1,2,4] [--what collectives,ddp]

FOLDER has convoke and convoke-perf; PYTHON has torch and convoke-dist. Prints a table of medians over the rounds: gloo,
convoke, their ratio, convoke-perf, which makes the same call in Rust, and the median of what the call takes longer in a round
from Python than from Rust.
"""

import argparse
import collections
import json
import os
import statistics
import subprocess

HERE = os.path.dirname(os.path.abspath(__file__))


def worker(o, ranks, backend, what, threads="1", **variables):
    command = [f"{o.bin}/convoke", "--standalone", f"--nproc-per-node={ranks}", f"{HERE}/worker.py", backend, what, threads]
    env = dict(os.environ, PYTHON_EXEC=o.python, **variables)
    if threads == "all":
        env["OMP_NUM_THREADS"] = str(os.cpu_count())
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"bench_torch: {' '.join(command)} failed:\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def perf(o, ranks):
    """The time of the same calls from Rust, by cell."""
    times = {}
    for collective in ["all_reduce"] + (["all_gather", "broadcast"] if ranks > 1 else []):
        # convoke-perf counts the result of an all_gather, and torch's worker what each rank passes.
        blocks = ranks if collective == "all_gather" else 1
        most = (64 if collective == "all_reduce" else 16) << 20
        command = [f"{o.bin}/convoke", "--standalone", f"--nproc-per-node={ranks}", f"{o.bin}/convoke-perf", collective, "--json"]
        sizes = ["-b", str(4 * blocks), "-e", str(most * blocks), "-f", "4"]
        done = subprocess.run([*command, "--no-pairs", *sizes], capture_output=True, text=True, timeout=600)
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                cell = json.loads(line)
                if "p50_us" in cell:
                    times[f"{cell['collective']} {cell['bytes'] // blocks}"] = cell["p50_us"]
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags = {"--bin": None, "--python": None, "--out": None, "--rounds": "7", "--ranks": "1,2,4", "--what": "collectives,ddp"}
    for flag, default in flags.items():
        parser.add_argument(flag, default=default, required=default is None)
    o = parser.parse_args()
    all_ranks = [int(ranks) for ranks in o.ranks.split(",")]
    times = collections.defaultdict(list)
    for number in range(int(o.rounds)):
        for ranks in all_ranks:
            runs = []
            if "collectives" in o.what:
                runs += [("gloo", "collectives", "1", {}), ("convoke", "collectives", "1", {})]
            if ranks > 1 and "ddp" in o.what:
                runs += [("gloo", "ddp", "1", {}), ("convoke", "ddp", "1", {})]
                runs += [("convoke", "ddp-average", "1", {})]
                runs += [("convoke", "ddp-shared", "1", {"DDP_DISABLE_COMM_MEM": "0"}), ("convoke", "ddp-average-shared", "1", {})]
                runs += [("gloo", "ddp", "all", {}), ("convoke", "ddp", "all", {})]
            for backend, what, threads, variables in runs if number % 2 == 0 else reversed(runs):
                for cell in worker(o, ranks, backend, what, threads, **variables):
                    name = cell["cell"] + (", threads on all cores" if threads == "all" else "")
                    times[ranks, name, backend].append(cell["us"])
            for cell, us in perf(o, ranks).items() if "collectives" in o.what else ():
                times[ranks, cell, "perf"].append(us)
    os.makedirs(o.out, exist_ok=True)
    with open(f"{o.out}/times.json", "w") as file:
        json.dump([[*key, values] for key, values in times.items()], file)
    print("| ranks | operation | gloo | convoke | gloo : convoke | convoke-perf | more than convoke-perf |\n|---|---|---|---|---|---|---|")
    for ranks, cell in dict.fromkeys(key[:2] for key in times):
        ours = times.get((ranks, cell, "convoke"))
        if not ours:
            continue
        us = statistics.median(ours)
        # Memory of the group is beside gloo's ordinary memory.
        theirs = times.get((ranks, cell, "gloo")) or times.get((ranks, cell.partition(", ")[0], "gloo"))
        rust = times.get((ranks, cell, "perf"))
        gloo = statistics.median(theirs) if theirs else None
        columns = [f"{gloo:.1f}", f"{us:.1f}", f"{gloo / us:.1f}"] if gloo else ["", f"{us:.1f}", ""]
        if rust:
            more = statistics.median(python - perf for python, perf in zip(ours, rust))
            columns += [f"{statistics.median(rust):.1f}", f"{more:.1f}"]
        else:
            columns += ["", ""]
        print(f"| {ranks} | {cell} | {' | '.join(columns)} |")


main()
