#!/usr/bin/env python3
"""Time of a training step: gradients in buckets beside the backward pass, after it, and averaged by hand.

  bench_train.py --bin target/release --out out/                     # 2 hosts, 1 Gbit/s between them, one worker each
  bench_train.py --bin target/release --out out/ --hosts 1 --workers 4   # 4 workers on this host: in memory, and over TCP

Runs the `digits` example with a network that is large enough (--hidden) on --hosts simulated hosts
(testbed/hosts.sh; needs root) whose links are limited to --mbit (0: no limit), or on this one with --hosts 1. The ways
take turns in each round. A ratio is a way's time over that of `ddp` in the same round, median over the rounds: above 1
`ddp` takes less. Written to --out: raw.csv, table.md, trace.json of one run with `ddp` (https://ui.perfetto.dev), and
timeline.txt, a step of rank 0 in it.
"""
import argparse
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
HOSTS = os.path.join(HERE, "../../testbed/hosts.sh")
WAYS = ("ddp", "late", "by-hand")
# The same as `ddp`, though the workers could share memory.
OVER_TCP = "ddp over TCP"


def job(o, env, way, extra=()):
    """Runs digits on all hosts; microseconds a step, and the hash of the parameters."""
    procs = []
    if way == OVER_TCP:
        way, env = "ddp", {**env, "CONVOKE_SHM": "off"}
    for host in range(1, o.hosts + 1):
        place = [HOSTS, "exec", str(host)] if o.hosts > 1 else []
        nodes = [f"--nnodes={o.hosts}", f"--node-rank={host - 1}", "--master-addr=h1", "--master-port=29500"]
        command = [*place, f"{o.bin}/convoke", *(nodes if o.hosts > 1 else ["--standalone"]),
                   f"--nproc-per-node={o.workers}", f"{o.bin}/digits", f"--epochs={o.epochs}", f"--batch={o.batch}",
                   f"--hidden={o.hidden}", f"--bucket-bytes={o.bucket_bytes}", f"--gradients={way}", "--lr=0.01", *extra]
        procs.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        outs = [p.communicate(timeout=o.timeout) for p in procs]
    finally:
        for p in procs:
            p.kill()
    if any(p.returncode for p in procs):
        raise SystemExit(f"bench: {way} failed:\n" + "".join(out + err for out, err in outs))
    text = outs[0][0]
    return float(re.search(r"(\d+) µs a step", text)[1]), re.search(r"parameter hash (\w+)", text)[1]


def timeline(path, columns=64):
    """The step of rank 0 in the middle of a trace, as lines of text."""
    with open(path) as f:
        spans = [e for e in json.load(f)["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
    begins = sorted(e["ts"] for e in spans if e["name"] == "forward")
    if len(begins) < 3:
        return "too few steps for a timeline"
    begin, end = begins[len(begins) // 2], begins[len(begins) // 2 + 1]
    spans = sorted((e for e in spans if begin <= e["ts"] < end), key=lambda e: (e["tid"], e["ts"]))
    column = (end - begin) / columns
    lines = [f"one column is {column / 1e3:.2f} ms"]
    for e in spans:
        first, last = (e["ts"] - begin) / column, (e["ts"] + e["dur"] - begin) / column
        bar = " " * round(first) + "#" * max(1, round(last) - round(first))
        size = f"  {int(e['args']['bytes']) / 1e6:.1f} MB" if "bytes" in e["args"] else ""
        lines.append(f"{e['name']:9} {bar}{size}")
    return "\n".join(lines)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bin", required=True, help="folder of convoke and digits")
    p.add_argument("--out", required=True)
    p.add_argument("--hosts", type=int, default=2)
    p.add_argument("--workers", type=int, default=1, help="on each host")
    p.add_argument("--mbit", type=int, default=1000, help="limit of each host's link, each way; 0 for none")
    p.add_argument("--hidden", default="512,512,512,512")
    p.add_argument("--batch", type=int, default=64, help="examples of all workers together")
    p.add_argument("--bucket-bytes", type=int, default=1 << 20)
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--timeout", type=float, default=300, help="for one job, seconds")
    o = p.parse_args()
    o.bin = os.path.abspath(o.bin)
    os.makedirs(o.out, exist_ok=True)
    ways = WAYS if o.hosts > 1 else (*WAYS, OVER_TCP)
    times, hashes, raw = {way: [] for way in ways}, set(), []
    with tempfile.TemporaryDirectory(prefix="bench-train-") as state:
        # The hosts end with this process, however it ends.
        leash, env = os.pipe(), {**os.environ, "TESTBED_DIR": state, "TESTBED_LEASH": "1"}
        tell = lambda *words: subprocess.run([HOSTS, *map(str, words)], env=env, check=True, stdin=leash[0],
                                             stdout=subprocess.DEVNULL)
        try:
            if o.hosts > 1:
                tell("up", o.hosts)
                for host in range(1, o.hosts + 1):
                    if o.mbit:
                        tell("rate", host, o.mbit)
            for round_ in range(o.rounds):
                turn = round_ % len(ways)
                for way in ways[turn:] + ways[:turn]:
                    micros, digest = job(o, env, way)
                    times[way].append(micros)
                    hashes.add(digest)
                    raw.append({"round": round_, "way": way, "us_per_step": micros, "hash": digest})
                print(f"round {round_ + 1} of {o.rounds}", file=sys.stderr)
            with open(f"{o.out}/raw.csv", "w", newline="") as f:
                writer = csv.DictWriter(f, raw[0].keys())
                writer.writeheader()
                writer.writerows(raw)
            job(o, env, "ddp", [f"--trace={os.path.abspath(o.out)}/trace.json", "--epochs=1"])
            with open(f"{o.out}/timeline.txt", "w") as f:
                f.write(timeline(f"{o.out}/trace.json") + "\n")
        finally:
            if o.hosts > 1:
                tell("down")
    lines = ["| gradients | ms a step | range | over `ddp` |", "|---|---|---|---|"]
    for way in ways:
        ratio = statistics.median(mine / base for mine, base in zip(times[way], times["ddp"]))
        low, high = min(times[way]) / 1e3, max(times[way]) / 1e3
        lines.append(f"| `{way}` | {statistics.median(times[way]) / 1e3:.1f} | {low:.1f} to {high:.1f} | {ratio:.2f} |")
    table = "\n".join(lines)
    with open(f"{o.out}/table.md", "w") as f:
        f.write(table + "\n")
    print(table)
    # With two workers there is only one order to add in, so all ways end with the same parameters.
    print(f"parameters in the end: {'the same' if len(hashes) == 1 else f'{len(hashes)} different'} in all {len(raw)} runs")


if __name__ == "__main__":
    main()
