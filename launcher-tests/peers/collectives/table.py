#!/usr/bin/env python3
"""Writes what run_collectives.py has measured as tables for docs/measurements/performance.md.

  table.py OUT [CANDIDATE]      OUT: the folder with raw.csv; CANDIDATE: convoke:tcp if not given

One table for each peer, and for the best of several MPIs with one transport: its p50 over the candidate's of the same round, median over the rounds (above 1 the candidate
is faster), by collective, ranks and bytes; and one with the candidate's own times, p50 and p99. Below each: geometric means, the
cells below 0.95, and the cells in which the candidate's p99 is more than twice the peer's.
"""
import collections
import csv
import math
import statistics
import sys


# Peers that stand for the best of a group: the MPIs of Debian, and the newest ones.
BEST_OF = {"the better MPI": ("openmpi", "mpich"), "the newest MPIs": ("openmpi5", "mpich5", "intel")}


def read(path, quantile):
    """(collective, ranks, bytes) -> system -> round -> a quantile ("p50", "p99") in microseconds"""
    table = collections.defaultdict(lambda: collections.defaultdict(dict))
    with open(path) as file:
        for row in csv.DictReader(file):
            key = row["collective"], int(row["ranks"]), int(row["bytes"])
            table[key][f"{row['system']}:{row['transport']}"][int(row["round"])] = float(row[f"lat_us_{quantile}"])
    return table


def size(count):
    for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
        if count >= factor:
            return f"{count // factor}{unit}"
    return str(count)


def table(title, cells, sizes):
    """Lines of one table; `cells`: (collective, ranks) -> bytes -> text"""
    lines = [f"| {title} | ranks | " + " | ".join(size(count) for count in sizes) + " |", "|---|---|" + "---|" * len(sizes)]
    for (collective, ranks), by_size in cells.items():
        lines.append(f"| `{collective}` | {ranks} | " + " | ".join(by_size.get(count, "") for count in sizes) + " |")
    return lines


def short(number):
    return f"{number:.0f}" if number >= 20 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


class Results:
    """What one folder holds, as tables."""

    def __init__(self, out, candidate="convoke:tcp", collectives=None):
        self.results, self.tails = (
            {key: value for key, value in read(f"{out}/raw.csv", quantile).items() if not collectives or key[0] in collectives}
            for quantile in ("p50", "p99"))
        self.candidate = candidate
        order = list(dict.fromkeys(key[0] for key in self.results))
        self.keys = sorted(self.results, key=lambda key: (order.index(key[0]), key[1], key[2]))
        # A barrier has no bytes: it stands in the first column.
        self.sizes = sorted({bytes_ for _, _, bytes_ in self.results if bytes_}) or [0]
        self.better_mpi(self.results)
        self.better_mpi(self.tails)
        self.peers = [system for system in dict.fromkeys(system for systems in self.results.values() for system in systems)
                      if system != candidate]

    @staticmethod
    def better_mpi(results):
        """Adds the best MPI of each group in each cell and round, by transport, as a peer of its own."""
        for systems in results.values():
            for name, group in BEST_OF.items():
                for transport in ("shm", "tcp"):
                    there = [systems[f"{mpi}:{transport}"] for mpi in group if f"{mpi}:{transport}" in systems]
                    if len(there) == len(group):
                        turns = set.intersection(*map(set, there))
                        systems[f"{name}:{transport}"] = {turn: min(mpi[turn] for mpi in there) for turn in turns}

    def column(self, bytes_):
        return bytes_ or self.sizes[0]

    def own(self):
        """Lines of the table of the candidate's own times."""
        cells = collections.defaultdict(dict)
        for key in self.keys:
            if times := self.results[key].get(self.candidate):
                tails = self.tails[key][self.candidate]
                both = (short(statistics.median(found.values())) for found in (times, tails))
                cells[key[:2]][self.column(key[2])] = " / ".join(both)
        return table(f"{self.candidate.split(':')[0]}, µs: p50 / p99", cells, self.sizes)

    def turns(self, key, peer, results=None):
        """Of each round of a cell: the peer's time and the candidate's."""
        systems = (self.results if results is None else results).get(key, {})
        ours, theirs = systems.get(self.candidate, {}), systems.get(peer, {})
        return [(theirs[turn], ours[turn]) for turn in ours if turn in theirs]

    def ratios(self, peer, results=None):
        """(collective, ranks, bytes) -> median of the peer's time over the candidate's"""
        found = {key: [theirs / ours for theirs, ours in self.turns(key, peer, results)] for key in self.keys}
        return {key: statistics.median(ratios) for key, ratios in found.items() if ratios}

    @staticmethod
    def means(ratios):
        """collective -> geometric mean of its cells"""
        logs = collections.defaultdict(list)
        for (collective, _, _), ratio in ratios.items():
            logs[collective].append(math.log(ratio))
        return {collective: math.exp(sum(all_) / len(all_)) for collective, all_ in logs.items()}

    def against(self, peer):
        """Lines of the table of a peer's times over the candidate's, and of what follows from it."""
        cells, ratios = collections.defaultdict(dict), self.ratios(peer)
        for key, ratio in ratios.items():
            cells[key[:2]][self.column(key[2])] = short(ratio)
        means = ", ".join(f"{collective} {short(mean)}" for collective, mean in self.means(ratios).items())
        low = sorted((ratio, *key) for key, ratio in ratios.items() if ratio < 0.95)
        low = ", ".join(f"{collective} {size(bytes_)} at {ranks} ({ratio:.2f})" for ratio, collective, ranks, bytes_ in low)
        count = sum(ratio < 0.95 for ratio in ratios.values())
        tails = sorted((1 / ratio, *key) for key, ratio in self.ratios(peer, self.tails).items() if ratio < 0.5)
        tails = ", ".join(f"{collective} {size(bytes_)} at {ranks} ({times:.1f} times)" for times, collective, ranks, bytes_ in tails[::-1])
        name, _, transport = peer.partition(":")
        name = f"{name}, {transport}" if name in BEST_OF else peer
        return [*table(f"{name} / {self.candidate.split(':')[0]}", cells, self.sizes), "", f"Geometric means: {means}.", "",
                f"Of {len(ratios)} cells {count} are below 0.95: {low or 'none'}.", "",
                f"p99 more than twice the peer's: {tails or 'none'}."]

    def rounds(self, peer):
        """In how many rounds a peer was measured."""
        return len({turn for systems in self.results.values() for turn in systems.get(peer, {})})


def main():
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    results = Results(*sys.argv[1:])
    for lines in (results.own(), *map(results.against, results.peers)):
        print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
