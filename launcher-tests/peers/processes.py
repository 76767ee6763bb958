"""The processes of a benchmark: finds those that a process has started, and ends them."""
import os
import signal


def tree(pid):
    """pid and all its descendants."""
    kids = {}
    for d in os.listdir("/proc"):
        if d.isdigit():
            try:
                f = open(f"/proc/{d}/stat").read().rsplit(")", 1)[1].split()
                kids.setdefault(int(f[1]), []).append(int(d))
            except OSError:
                pass
    out, todo = [], [pid]
    while todo:
        out.append(todo.pop())
        todo += kids.get(out[-1], [])
    return out


def kill(pids):
    """Ends the processes and all their descendants. A launcher that is killed alone leaves its ranks running, if it has
    given them process groups of their own, as MPICH's has."""
    for pid in {descendant for pid in pids for descendant in tree(pid)}:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
