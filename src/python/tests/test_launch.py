"""`launch`, and the launcher as a module."""

import os
import signal
import subprocess
import sys
import time

import convoke_dist
import pytest
from convoke_dist import LaunchError, launch


def _value(factor, offset=0):
    return convoke_dist.init().rank * factor + offset


def _fails():
    world = convoke_dist.init()
    if world.rank == 1:
        raise ValueError("no such batch")
    world.barrier()


def _dies():
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)


def _exits():
    if os.environ["RANK"] == "0":
        os._exit(7)
    time.sleep(60)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_results_are_returned_by_rank(method):
    assert launch(_value, 3, start_method=method)(10, offset=1) == [1, 11, 21]


def test_exception_of_one_rank_is_the_cause_not_its_consequences():
    with pytest.raises(LaunchError) as caught:
        launch(_fails, 3, start_method="fork")()
    error = caught.value
    assert error.rank == 1 and "no such batch" in str(error) and "in _fails" in error.traceback
    assert isinstance(error.error, ValueError) and isinstance(error.__cause__, ValueError)


@pytest.mark.parametrize("fn, text, code", [(_dies, "SIGSEGV", -11), (_exits, "exited with code 7", 7)])
def test_rank_that_dies_ends_the_others_at_once(fn, text, code):
    began = time.monotonic()
    with pytest.raises(LaunchError, match=text) as caught:
        launch(fn, 2, start_method="fork")()
    assert caught.value.exit_code == code and time.monotonic() - began < 20


def test_ranks_end_with_their_parent():
    code = "\n".join(
        [
            "import os, time, convoke_dist",
            "def wait():",
            "    os.write(1, b'%d\\n' % os.getpid())",
            "    time.sleep(60)",
            "convoke_dist.launch(wait, 2, start_method='fork')()",
        ]
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    ranks = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(_runs(rank) for rank in ranks):
        assert time.monotonic() < deadline, "a rank outlives its parent"
        time.sleep(0.05)
    parent.stdout.close()


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_launcher_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "convoke_dist.run", "--standalone", "--nproc-per-node=2", "--no-python", sys.executable]
        + ["-c", "import os, convoke_dist; os.write(1, b'size %d\\n' % convoke_dist.init().size)"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stdout.count("size 2") == 2, done.stdout
