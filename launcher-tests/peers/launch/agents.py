#!/usr/bin/env python3
"""Many agents on one machine that meet in one job of one worker each (`true`), with their guards.

    agents.py --launcher COMMAND [--count 1000] [--endpoint c10d|etcd] [--reps 3]

Measures from the exec of the last agent to the start of the last worker, and to the end of the last agent. For `etcd`
it starts one on loopback (launcher-tests/testbed/etcd.sh). Run it in a network of its own (`unshare -n`, loopback up).
"""

import argparse
import os
import resource
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def once(o, worker, folder):
    if o.endpoint == "etcd":
        state = os.path.join(folder, "etcd")
        env = dict(os.environ, TESTBED_DIR=state, TB_ETCD_PORT_BASE="24790")
        etcd = os.path.join(HERE, "../../testbed/etcd.sh")
        subprocess.run([etcd, "up", "1"], env=env, check=True, stdout=subprocess.DEVNULL)
        meet = ["--rdzv-backend=etcd", "--rdzv-endpoint=127.0.0.1:24791"]
    else:
        meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    log = os.path.join(folder, "started")
    open(log, "w").close()
    command = shlex.split(o.launcher) + meet + [
        f"--nnodes={o.count}", "--rdzv-id=many", "--rdzv-conf=join_timeout=100,last_call_timeout=100",
        "--local-addr=127.0.0.1", "--log-dir=/dev/null", worker]
    env = dict(os.environ, STARTED=log, OMP_NUM_THREADS="1")
    agents = []
    try:
        agents += [subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE if i == 0 else subprocess.DEVNULL) for i in range(o.count)]
        last = time.clock_gettime(time.CLOCK_MONOTONIC)
        codes = [agent.wait(timeout=200) for agent in agents]
        ended = time.clock_gettime(time.CLOCK_MONOTONIC)
        if any(codes):
            said = agents[0].stderr.read().decode()
            sys.exit(f"{sum(1 for c in codes if c)} of {o.count} agents failed\n{said}")
        with open(log, "rb") as f:
            data = f.read()
        times = [int.from_bytes(data[i:i + 8], "little") / 1e9 for i in range(0, len(data), 8)]
        if len(times) != o.count:
            sys.exit(f"{len(times)} workers of {o.count} were started")
        return max(times) - last, ended - last
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
        if o.endpoint == "etcd":
            subprocess.run([etcd, "down"], env=env | {"TESTBED_DIR": state}, check=True, stdout=subprocess.DEVNULL)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--launcher", required=True)
    p.add_argument("--count", type=int, default=1000)
    p.add_argument("--endpoint", default="c10d", choices=["c10d", "etcd"])
    p.add_argument("--reps", type=int, default=3)
    o = p.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="convoke-agents-") as folder:
        worker = os.path.join(folder, "worker")
        subprocess.run(["cc", "-O1", "-o", worker, os.path.join(HERE, "true.c")], check=True)
        results = []
        for rep in range(o.reps):
            workers, agents = once(o, worker, folder)
            results.append((workers, agents))
            print(f"{o.endpoint}, {o.count} agents, run {rep + 1}: last worker {workers:.2f} s, last agent's end "
                  f"{agents:.2f} s after the last agent's start", flush=True)
        print(f"median: {statistics.median(w for w, _ in results):.2f} s, "
              f"{statistics.median(a for _, a in results):.2f} s")


if __name__ == "__main__":
    main()
