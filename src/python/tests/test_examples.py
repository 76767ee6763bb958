"""The examples run as their heads say."""

import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def run(name, *arguments, flags=()):
    command = [sys.executable, "-m", "convoke_dist.run", "--standalone", *flags, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_average():
    out = run("average.py", flags=["--nproc-per-node=4"])
    assert out == "average 1.5\nthe ranks to the left add up to 6\n"


@pytest.mark.parametrize("arguments, flags", [([], []), (["gloo"], []), (["gloo"], ["--as-gloo"])])
def test_train(arguments, flags):
    pytest.importorskip("torch")
    out = run("train.py", *arguments, flags=["--nproc-per-node=2", *flags]).splitlines()
    losses = [float(line.split()[-1]) for line in out[:3]]
    assert losses[0] > losses[2] and losses[2] < 0.1, out
    assert out[3] == "all 2 ranks have the same weights: True"
