"""Start time of a job on hosts by ssh (`convoke --hosts`), against as many plain ssh at once.

    bench_ssh.py CONVOKE [--hosts N] [--rounds R]

Each of N simulated hosts has its own sshd. A round measures, one after the other, the time until the slowest of N plain
`ssh HOST date` that start at once has run its command, and the time until the last worker of `convoke --hosts` runs. Fails if
the median of the second is above 1.2 times that of the first. Needs root.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

LIMIT = 1.2
TESTBED = pathlib.Path(__file__).resolve().parents[2] / "testbed/hosts.sh"
SSH_CONFIG = """IdentityFile {folder}/user_key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile /dev/null
StrictHostKeyChecking yes
User root
LogLevel ERROR
"""
SSHD_CONFIG = """HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
PidFile none
SetEnv XDG_CACHE_HOME={folder}/cache
"""


class Hosts:
    """Simulated hosts with sshd; commands run on h0."""

    def __init__(self, folder, count):
        self.folder, self.count = folder, count
        self.environment = dict(os.environ, TESTBED_DIR=str(folder / "bed"))

    def run(self, *words):
        run = subprocess.run(words, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            sys.exit(f"{' '.join(map(str, words))}: {run.stdout}{run.stderr}")

    def up(self):
        self.run(TESTBED, "up", str(self.count))
        for key in ("host_key", "user_key"):
            self.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key)
        public = (self.folder / "host_key.pub").read_text()
        names = [f"h{number}" for number in range(1, self.count + 1)]
        files = {
            "authorized_keys": (self.folder / "user_key.pub").read_text(),
            "known_hosts": "".join(f"{name} {public}" for name in names),
            "ssh_config": SSH_CONFIG.format(folder=self.folder),
            "sshd_config": SSHD_CONFIG.format(folder=self.folder),
            "worker.sh": f"#!/bin/sh\ndate +%s.%N > {self.folder}/up.$RANK\n",
            "plain.sh": "#!/bin/sh\n"
            + "".join(f"ssh -F ssh_config -o BatchMode=yes -T {name} 'date +%s.%N > {self.folder}/up.{name}' < /dev/null &\n" for name in names)
            + "wait\n",
        }
        for name, text in files.items():
            (self.folder / name).write_text(text)
        (self.folder / "worker.sh").chmod(0o755)
        for number in range(1, self.count + 1):
            start = f"mkdir -p /run/sshd && /usr/sbin/sshd -f {self.folder}/sshd_config"
            self.run(TESTBED, "exec", str(number), "sh", "-c", start)

    def last_start(self, *words):
        """Runs a command on h0, and returns the seconds until the last host ran its part."""
        begun = time.time()
        self.run(TESTBED, "exec", "0", *words)
        marks = list(self.folder.glob("up.*"))
        assert len(marks) == self.count, f"{len(marks)} of {self.count} hosts ran"
        last = max(float(mark.read_text()) for mark in marks)
        for mark in marks:
            mark.unlink()
        return last - begun


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("convoke", type=pathlib.Path)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="convoke-bench-ssh-") as folder:
        hosts = Hosts(pathlib.Path(folder), arguments.hosts)
        plain, job = [], []
        try:
            hosts.up()
            command = [arguments.convoke.resolve(), f"--hosts=h[1-{arguments.hosts}]", "--rsh=ssh -F ssh_config", "./worker.sh"]
            for _ in range(arguments.rounds):
                plain.append(hosts.last_start("sh", "plain.sh"))
                job.append(hosts.last_start(*command))
                print(f"plain ssh {plain[-1]:.2f} s, convoke {job[-1]:.2f} s", flush=True)
        finally:
            hosts.run(TESTBED, "down")
    ratio = statistics.median(job) / statistics.median(plain)
    print(f"{arguments.hosts} hosts: medians {statistics.median(plain):.2f} s and {statistics.median(job):.2f} s, ratio {ratio:.2f}, at most {LIMIT}")
    sys.exit(ratio > LIMIT)


main()
