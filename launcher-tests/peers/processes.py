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
    """Ends these processes, which lead process groups, with their groups and all their descendants. MPICH's launcher
    gives its ranks groups of their own. A rank whose parent has ended is in its group only."""
    pids = list(pids)
    descendants = {descendant for pid in pids for descendant in tree(pid)}
    for end, number in [(os.killpg, pid) for pid in pids] + [(os.kill, pid) for pid in descendants]:
        try:
            end(number, signal.SIGKILL)
        except ProcessLookupError:
            pass
