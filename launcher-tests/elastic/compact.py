#!/usr/bin/env python3
"""compact.py ROWS: the rows of `--test elastic` as the table of docs/measurements/faults.md, a fault in each line."""

import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
BACKENDS = ["c10d", "file", "etcd, 1", "etcd, 3"]
PREFIX = {"ends, exit code 1": "ends", "waits, then goes on": "waits, then", "goes on when etcd does": "waits for it, then"}


def cell(outcome, noticed, again):
    if outcome == "runs on":
        return outcome
    # A job that ends has no second time; a dash stands for a first one that does not say anything.
    times = noticed if outcome.startswith("ends") else f"{noticed or '–'} / {again}".removeprefix("– " * (outcome in PREFIX))
    return f"{PREFIX.get(outcome, '')} {times}".strip()


def short(said):
    said = said.replace(", or its host or the network is down", ", …")
    return re.sub(r"etcd at .*; workers", "etcd at …; workers", re.sub(r" \([^()]*:\d+: .*\); this", "; this", said))


def main():
    faults = {}
    with open(sys.argv[1], encoding="utf-8") as rows:
        for row in rows:
            fault, backend, outcome, noticed, again, said = (part.strip() for part in row.strip().strip("|").split(" |", 5))
            cells = faults.setdefault(fault, {"said": said})
            cells[backend] = cell(outcome, noticed, again)
            # Of several, what is said where the job goes on.
            if backend == "file" or not cells["said"]:
                cells["said"] = said
    # In the order of the source: tests run by name.
    source = "".join(open(os.path.join(HERE, file), encoding="utf-8").read() for file in ("cases.rs", "addresses.rs"))
    faults = dict(sorted(faults.items(), key=lambda fault: source.find(f'"{fault[0]}"') % 10**9))
    print("| fault | c10d | file | etcd, 1 member | etcd, 3 members | what a survivor says |")
    print("|---|---|---|---|---|---|")
    for fault, cells in faults.items():
        print("| " + " | ".join([fault, *(cells.get(name, "") for name in BACKENDS), short(cells["said"])]) + " |")


if __name__ == "__main__":
    main()
