"""Runs torch's own DistributedTest on the backend, in the place of gloo.

    python tests/torch_oracle.py [--world-size N] [--backend convoke|gloo] [--spawn] [TEST...]

Prints a line for each test, and a summary as JSON. Exit code 1 if a test failed. torch's tests know gloo by its name, so
convoke takes the name: then nothing is skipped that gloo runs.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import unittest

# Forked ranks inherit what is set and imported here.
parser = argparse.ArgumentParser()
parser.add_argument("--world-size", default="3")
parser.add_argument("--backend", choices=["convoke", "gloo"], default="convoke")
parser.add_argument("--spawn", action="store_true")
parser.add_argument("--list", action="store_true", help="only print the names of the tests")
parser.add_argument("tests", nargs="*")

if __name__ == "__main__":
    arguments = parser.parse_args()
    os.environ["ORACLE_BACKEND"] = arguments.backend
    os.environ["ORACLE_SPAWN"] = str(int(arguments.spawn))
    os.environ["WORLD_SIZE"] = arguments.world_size
    os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="torch-oracle-")
os.environ["BACKEND"] = "gloo"
os.environ.setdefault("OMP_NUM_THREADS", "1")
if os.environ["ORACLE_BACKEND"] == "convoke":
    os.environ["CONVOKE_AS_GLOO"] = "1"
    import convoke_dist.torch

import torch  # noqa: E402
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402


# Tests that fail whatever the backend does, with the reason.
EXCEPTIONS = {
    "test_ddp_logging_data_cpu": "torch logs the type of each backend that is not its own as custom",
}


# Words in the names of tests that fail if the backend has no C++ part, with the reason.
IN_PYTHON = {
    "_profiler": "ranges in profiles are not asynchronous",
    "monitored_barrier": "torch asks for a backend of CPU tensors in the group, and the whole group is in Python",
}
is_in_python = os.environ["ORACLE_BACKEND"] == "convoke" and os.environ.get("CONVOKE_TORCH_SHIM") == "python"


class TestBackend(TestDistBackend, DistributedTest._DistTestBase):
    def call_dist_op(self, *args, expect_event=True, **kwargs):
        # Without a C++ part, ranges in profiles are not asynchronous.
        super().call_dist_op(*args, expect_event=expect_event and not is_in_python, **kwargs)

    def setUp(self):
        super().setUp()
        if os.environ["ORACLE_SPAWN"] == "1":
            self._spawn_processes()
        else:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)


class Result(unittest.TestResult):
    """Prints each result with its time."""

    def __init__(self):
        super().__init__()
        self.passed, self.failed, self.excepted, self.skips = [], [], [], {}

    def startTest(self, test):
        super().startTest(test)
        self.began = time.monotonic()

    def _print(self, what, test, note=""):
        name = test._testMethodName
        print(f"{what:6} {time.monotonic() - self.began:6.1f} s {name} {note}", flush=True)
        return name

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed.append(self._print("pass", test))

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.skips[self._print("skip", test, reason)] = reason

    def _fail(self, test, text):
        known = {**EXCEPTIONS, **IN_PYTHON} if is_in_python else EXCEPTIONS
        reason = next((reason for word, reason in known.items() if word in test._testMethodName), None)
        if arguments.backend == "convoke" and reason:
            self.excepted.append(self._print("except", test, reason))
        else:
            self.failed.append(self._print("FAILED", test, "\n" + text))

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self._fail(test, self.failures[-1][1])

    def addError(self, test, error):
        super().addError(test, error)
        self._fail(test, self.errors[-1][1])


def main():
    names = unittest.TestLoader().getTestCaseNames(TestBackend)
    if arguments.list:
        print("\n".join(names))
        return
    result = Result()
    suite = unittest.TestSuite(TestBackend(name) for name in arguments.tests or names)
    suite.run(result)
    summary = {
        "backend": arguments.backend,
        "world_size": int(arguments.world_size),
        "passed": len(result.passed),
        "failed": result.failed,
        "excepted": result.excepted,
        "skipped": sorted(result.skips),
    }
    print(json.dumps(summary))
    sys.exit(1 if result.failed else 0)


if __name__ == "__main__":
    main()
