#!/usr/bin/env python3
"""Collectives between simulated hosts: one algorithm against the other, and the bytes that leave a host.

  bench_hosts.py --bin target/release --out out/                  # all_reduce, hierarchy against ring, 1 Gbit/s
  bench_hosts.py ... --collectives all_gather --algorithms hierarchy,ring,direct --mbit 10000 --min-bytes 4096

Brings up --hosts simulated hosts (testbed/hosts.sh; needs root) with --ranks ranks each, limits their links to --mbit
(0: no limit), and lets the algorithms take turns: in each round every one runs the same sizes, in an order that
rotates. The first algorithm is the one that the others are compared with: a ratio is its rival's time over its own in
the same round, then the median over the rounds. Written to --out: raw.csv (each run), summary.csv.

Bytes are those that the network interfaces count, all hosts together, headers of Ethernet, IP and TCP and
acknowledgements included: the difference between a job of many calls and one of few, for one call. `theory` is what
the payload must be: 2·S·(H-1) for all_reduce by hierarchy, and so on.
"""
import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
HOSTS = os.path.join(HERE, "../../testbed/hosts.sh")
PORT = "29500"


class Testbed:
    """Hosts with a job of one launcher each; the first is the master."""

    def __init__(self, o, state):
        self.o, self.env = o, {**os.environ, "TESTBED_DIR": state}
        # The hosts end with this process, however it ends.
        self.leash = os.pipe()

    def tell(self, *words):
        env = {**self.env, "TESTBED_LEASH": "1"}
        subprocess.run([HOSTS, *map(str, words)], env=env, check=True, stdin=self.leash[0], stdout=subprocess.DEVNULL)

    def sent(self):
        """Bytes that all hosts have sent so far."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        read = lambda host: subprocess.run([HOSTS, "exec", host, "cat", path], env=self.env, check=True, capture_output=True)
        return sum(int(read(str(host)).stdout) for host in self.numbers())

    def numbers(self):
        return range(1, self.o.hosts + 1)

    def job(self, collective, algorithm, arguments):
        """Runs convoke-perf on all hosts; its rows."""
        procs = []
        for host in self.numbers():
            command = [HOSTS, "exec", str(host), "env", f"CONVOKE_ALGO={collective}:{algorithm}" if algorithm != "table" else "CONVOKE_ALGO=",
                       "OMP_NUM_THREADS=1", f"{self.o.bin}/convoke", f"--nnodes={self.o.hosts}", f"--node-rank={host - 1}",
                       "--master-addr=h1", f"--master-port={PORT}", f"--nproc-per-node={self.o.ranks}",
                       f"{self.o.bin}/convoke-perf", collective, "--csv", "--system", algorithm, *map(str, arguments)]
            procs.append(subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        outs = [p.communicate(timeout=self.o.timeout) for p in procs]
        if any(p.returncode for p in procs):
            raise SystemExit(f"bench: {collective}:{algorithm} failed:\n" + "".join(err for _, err in outs))
        return [line.split(",") for line in outs[0][0].splitlines() if line.startswith(algorithm + ",")]


def sizes(o):
    size = o.min_bytes
    while size <= o.max_bytes:
        yield size
        size *= 4


def theory(o, collective, algorithm, size):
    """Payload bytes that leave the hosts in one call, all hosts together; None where nobody worked it out."""
    ranks, hosts = o.ranks * o.hosts, o.hosts
    table = {
        ("all_reduce", "hierarchy"): 2 * size * (hosts - 1),
        ("all_reduce", "ring"): 2 * size * (ranks - 1) / ranks * hosts,
        ("all_gather", "hierarchy"): size * (hosts - 1),
        ("all_gather", "ring"): size * (ranks - 1) / ranks * hosts,
        ("reduce_scatter", "hierarchy"): size * (hosts - 1),
        ("reduce_scatter", "ring"): size * (ranks - 1) / ranks * hosts,
    }
    return table.get((collective, algorithm))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bin", required=True, help="folder of convoke and convoke-perf")
    p.add_argument("--out", required=True)
    p.add_argument("--hosts", type=int, default=2)
    p.add_argument("--ranks", type=int, default=4, help="ranks on each host")
    p.add_argument("--mbit", type=int, default=1000, help="limit of each host's link, each way; 0 for none")
    p.add_argument("--collectives", default="all_reduce")
    p.add_argument("--algorithms", default="hierarchy,ring", help="as in CONVOKE_ALGO, or `table` for no override")
    p.add_argument("--min-bytes", type=int, default=16 << 20, help="each further size is four times the one before")
    p.add_argument("--max-bytes", type=int, default=64 << 20)
    p.add_argument("--time-ms", type=float, default=1500, help="timed loop per size, about")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--timeout", type=float, default=300, help="for one job, seconds")
    p.add_argument("--count", action=argparse.BooleanOptionalAction, default=True, help="count bytes")
    o = p.parse_args()
    os.makedirs(o.out, exist_ok=True)
    algorithms = o.algorithms.split(",")
    raw, rows = [], []
    with tempfile.TemporaryDirectory(prefix="bench-hosts-") as state:
        testbed = Testbed(o, state)
        try:
            testbed.tell("up", o.hosts)
            for host in testbed.numbers():
                if o.mbit:
                    testbed.tell("rate", host, o.mbit)
            for collective in o.collectives.split(","):
                rows += measure(o, testbed, collective, algorithms, raw)
        finally:
            testbed.tell("down")
    for name, lines in (("raw", raw), ("summary", rows)):
        with open(f"{o.out}/{name}.csv", "w", newline="") as f:
            writer = csv.DictWriter(f, lines[0].keys())
            writer.writeheader()
            writer.writerows(lines)


def measure(o, testbed, collective, algorithms, raw):
    times = {}  # (algorithm, size) -> one for each round
    span = ["--min-bytes", o.min_bytes, "--max-bytes", o.max_bytes]
    for round_ in range(o.rounds):
        turn = round_ % len(algorithms)
        for algorithm in algorithms[turn:] + algorithms[:turn]:
            for row in testbed.job(collective, algorithm, [*span, "--time-ms", o.time_ms]):
                size, p50 = int(row[5]), float(row[7])
                times.setdefault((algorithm, size), []).append(p50)
                raw.append({"round": round_, "collective": collective, "algorithm": algorithm, "bytes": size, "us_p50": p50})
        print(f"{collective}: round {round_ + 1} of {o.rounds}", file=sys.stderr)
    first, rows = algorithms[0], []
    for algorithm, size in sorted(times, key=lambda key: (key[1], algorithms.index(key[0]))):
        mine, base = times[algorithm, size], times[first, size]
        ratio = statistics.median(theirs / ours for theirs, ours in zip(mine, base))
        row = {"collective": collective, "hosts": o.hosts, "ranks": o.hosts * o.ranks, "mbit": o.mbit, "bytes": size,
               "algorithm": algorithm, "us": round(statistics.median(mine), 1), f"over_{first}": round(ratio, 3),
               "sent": "", "theory": "", "sent_over_theory": ""}
        if o.count:
            row["sent"] = count(o, testbed, collective, algorithm, size)
            if payload := theory(o, collective, algorithm, size):
                row["theory"], row["sent_over_theory"] = round(payload), round(row["sent"] / payload, 3)
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items() if value != ""), flush=True)
    return rows


def count(o, testbed, collective, algorithm, size):
    """Bytes that the hosts' interfaces send for one call."""
    def of(calls):
        before = testbed.sent()
        testbed.job(collective, algorithm, ["--min-bytes", size, "--max-bytes", size, "--iters", calls, "--warmup", 1])
        return testbed.sent() - before
    # As many with each root.
    calls = o.hosts * o.ranks
    return round((of(2 * calls) - of(calls)) / calls)


if __name__ == "__main__":
    main()
