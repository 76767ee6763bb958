"""Ctrl-C for a program that waits."""

import os
import signal
import threading
import time


def interrupt_when_asleep():
    """Sends SIGINT to this process once its main thread has slept for a while, as it does in a call that waits."""
    main = threading.main_thread().native_id

    def run():
        asleep = 0
        while asleep < 20:
            time.sleep(0.01)
            with open(f"/proc/self/task/{main}/stat") as stat:
                asleep = asleep + 1 if stat.read().rpartition(")")[2].split()[0] == "S" else 0
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=run, daemon=True).start()


def interruption(wait):
    """Calls `wait`, which a SIGINT interrupts. Returns the error with which it ended; "None" if there is no other error.

    Python raises its exception before one of the next jumps.
    """
    error = None
    try:
        try:
            wait()
        except Exception as raised:
            error = raised
        for _ in range(100_000):
            pass
    except KeyboardInterrupt as interrupt:
        return str(error or interrupt.__cause__ or interrupt.__context__)
    raise AssertionError("nothing was interrupted")
