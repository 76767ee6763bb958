#!/usr/bin/env python3
"""Writes what run_collectives.py has measured as tables for docs/performance.md.

  table.py OUT [CANDIDATE]      OUT: the folder with raw.csv; CANDIDATE: convoke:tcp if not given

One table for each peer: its p50 over the candidate's of the same round, median over the rounds (above 1 the candidate
is faster), by collective, ranks and bytes; and one with the candidate's own times. Below each: geometric means, and
the cells below 0.95.
"""
import collections
import csv
import math
import statistics
import sys


def read(path):
    """(collective, ranks, bytes) -> system -> round -> p50 in microseconds"""
    table = collections.defaultdict(lambda: collections.defaultdict(dict))
    with open(path) as file:
        for row in csv.DictReader(file):
            key = row["collective"], int(row["ranks"]), int(row["bytes"])
            table[key][f"{row['system']}:{row['transport']}"][int(row["round"])] = float(row["lat_us_p50"])
    return table


def size(count):
    for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
        if count >= factor:
            return f"{count // factor}{unit}"
    return str(count)


def rows(title, cells, sizes):
    """Prints one table; `cells`: (collective, ranks) -> bytes -> text"""
    print(f"\n| {title} | ranks | " + " | ".join(size(count) if count else "-" for count in sizes) + " |")
    print("|---|---|" + "---|" * len(sizes))
    for (collective, ranks), by_size in cells.items():
        print(f"| `{collective}` | {ranks} | " + " | ".join(by_size.get(count, "") for count in sizes) + " |")


def short(number):
    return f"{number:.0f}" if number >= 20 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def main():
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    table, candidate = read(f"{sys.argv[1]}/raw.csv"), (sys.argv + ["convoke:tcp"])[2]
    # A barrier has no bytes: it stands in the first column.
    sizes = sorted({bytes_ for _, _, bytes_ in table if bytes_})
    column = lambda bytes_: bytes_ or sizes[0]
    order = list(dict.fromkeys(key[0] for key in table))
    keys = sorted(table, key=lambda key: (order.index(key[0]), key[1], key[2]))
    cells = collections.defaultdict(dict)
    for key in keys:
        times = table[key].get(candidate)
        if times:
            cells[key[:2]][column(key[2])] = short(statistics.median(times.values()))
    rows("convoke, µs", cells, sizes)
    for peer in dict.fromkeys(system for systems in table.values() for system in systems):
        if peer == candidate:
            continue
        cells, ratios = collections.defaultdict(dict), {}
        for key in keys:
            ours, theirs = table[key].get(candidate, {}), table[key].get(peer, {})
            both = [theirs[turn] / ours[turn] for turn in ours if turn in theirs]
            if both:
                ratios[key] = statistics.median(both)
                cells[key[:2]][column(key[2])] = short(ratios[key])
        rows(f"{peer} / convoke", cells, sizes)
        means = collections.defaultdict(list)
        for (collective, _, _), ratio in ratios.items():
            means[collective].append(math.log(ratio))
        print("\nGeometric means: " + ", ".join(f"{collective} {short(math.exp(sum(logs) / len(logs)))}"
                                                for collective, logs in means.items()) + ".")
        low = sorted((ratio, *key) for key, ratio in ratios.items() if ratio < 0.95)
        print(f"\nOf {len(ratios)} cells {len(low)} are below 0.95: "
              + (", ".join(f"{collective} {size(bytes_)} at {ranks} ({ratio:.2f})" for ratio, collective, ranks, bytes_ in low) or "none")
              + ".")


main()
