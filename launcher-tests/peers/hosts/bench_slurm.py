"""Start time of a job in Slurm: srun with a bare program, and srun with convoke.

    bench_slurm.py CONVOKE [--nodes N] [--rounds R]

A real Slurm runs on N simulated hosts. A round measures, one after the other, the time from the start of srun until the
first and until the last task or worker runs. Fails if convoke adds more than 100 ms to the median until the first. Needs root.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

LIMIT_S = 0.1
SLURM = pathlib.Path(__file__).resolve().parents[2] / "testbed/slurm.sh"
PROGRAM = "#!/bin/sh\ndate +%s.%N > {folder}/up.$(hostname)\n"


def starts(folder, count, command):
    """Runs a step, and returns the seconds from the start of srun until its first and its last task ran."""
    begun = time.time()
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    marks = list(folder.glob("up.*"))
    if run.returncode != 0 or len(marks) != count:
        sys.exit(f"{len(marks)} of {count} nodes ran: {run.stdout}{run.stderr}")
    times = [float(mark.read_text()) - begun for mark in marks]
    for mark in marks:
        mark.unlink()
    return min(times), max(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("convoke", type=pathlib.Path)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="convoke-bench-slurm-") as name:
        folder = pathlib.Path(name)
        program = folder / "program.sh"
        program.write_text(PROGRAM.format(folder=folder))
        program.chmod(0o755)
        os.environ["TESTBED_DIR"] = str(folder / "bed")
        step = [SLURM, "exec", "srun", f"-N{arguments.nodes}", "--ntasks-per-node=1"]
        commands = {"srun": [*step, program], "srun convoke": [*step, arguments.convoke.resolve(), program]}
        taken = {way: [] for way in commands}
        try:
            up = subprocess.run([SLURM, "up", str(arguments.nodes)], capture_output=True, text=True, check=False)
            if up.returncode != 0:
                sys.exit(f"Slurm does not start: {up.stderr}")
            for _ in range(arguments.rounds):
                for way, command in commands.items():
                    taken[way].append(starts(folder, arguments.nodes, command))
        finally:
            subprocess.run([SLURM, "down"], capture_output=True, check=False)
    first = {way: statistics.median(times[0] for times in taken[way]) for way in commands}
    last = {way: statistics.median(times[1] for times in taken[way]) for way in commands}
    for way in commands:
        print(f"{way}: first after {first[way] * 1e3:.0f} ms, last after {last[way] * 1e3:.0f} ms")
    added = first["srun convoke"] - first["srun"]
    print(f"{arguments.nodes} nodes, {arguments.rounds} rounds: convoke adds {added * 1e3:.0f} ms, at most {LIMIT_S * 1e3:.0f} ms")
    sys.exit(added > LIMIT_S)


main()
