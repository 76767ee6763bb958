"""Helpers of the conformance suite: cases, launcher processes, assertions."""
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import textwrap
import threading
import time

LIB = os.path.dirname(os.path.abspath(__file__))
CASES = []  # every case: (name, group, function)


class Skip(Exception):
    """Raised by a case that does not apply to this launcher or machine."""


def case(group):
    """Register a function as a case of `group`; its docstring states the rule under test."""

    def register(fn):
        CASES.append((fn.__name__, group, fn))
        return fn

    return register


_handed_out = set()
_port_lock = threading.Lock()


def free_port():
    """A port that nobody listens on, and that nothing takes before the launcher does.

    The kernel gives every outgoing connection a port of its ephemeral range, so a port from `bind(0)` may be
    taken again by any connection of any case (or of a job beside us) before it is used: seen as a rare bind
    error of the launcher. Hence one below that range, and never the same one twice in a run.
    """
    with _port_lock:
        for _ in range(1000):
            port = random.randrange(10000, 32000)
            if port in _handed_out:
                continue
            with socket.socket() as s:
                try:
                    s.bind(("127.0.0.1", port))
                except OSError:
                    continue
            _handed_out.add(port)
            return port
    raise AssertionError("no free port between 10000 and 32000")


def wait_until(test, timeout, what):
    end = time.time() + timeout
    while True:
        value = test()
        if value:
            return value
        if time.time() > end:
            raise AssertionError(f"timed out after {timeout} s waiting for {what}")
        time.sleep(0.05)


def eq(actual, expected, what=""):
    if actual != expected:
        raise AssertionError(f"{what}: expected {expected!r}, got {actual!r}")


def has(text, needle, what="output"):
    if needle not in text:
        raise AssertionError(f"{what}: {needle!r} not found in:\n{text[-3000:]}")


def hasnt(text, needle, what="output"):
    if needle in text:
        raise AssertionError(f"{what}: unexpected {needle!r} in:\n{text[-3000:]}")


def matches(text, pattern, what="output"):
    found = re.search(pattern, text, re.M)
    if not found:
        raise AssertionError(f"{what}: /{pattern}/ not found in:\n{text[-3000:]}")
    return found


class Agent:
    """One launcher process (one "node"), with its output in files."""

    def __init__(self, argv, env, cwd, tag, preexec=None):
        self.tag = tag
        self._out = open(os.path.join(cwd, f"{tag}.stdout"), "w+b")
        self._err = open(os.path.join(cwd, f"{tag}.stderr"), "w+b")
        self.started = time.time()
        self.proc = subprocess.Popen(
            argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=self._out,
            stderr=self._err, start_new_session=True, preexec_fn=preexec,
        )

    def _read(self, f):
        with open(f.name, "rb") as g:
            return g.read().decode(errors="replace")

    @property
    def out(self):
        return self._read(self._out)

    @property
    def err(self):
        return self._read(self._err)

    @property
    def running(self):
        return self.proc.poll() is None

    def send(self, sig):
        self.proc.send_signal(sig)

    def wait(self, timeout=60):
        """Return the exit code (negative: killed by that signal)."""
        try:
            return self.proc.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"launcher {self.tag!r} still running after {timeout} s") from None

    def expect(self, code, timeout=60):
        got = self.wait(timeout)
        if got != code:
            raise AssertionError(f"launcher {self.tag!r}: exit code {got}, expected {code}\n"
                                 f"{self.out[-800:]}\n{self.err[-2500:]}")
        return self


class Case:
    """Everything that a running case may use."""

    def __init__(self, options):
        self.options = options
        self.launcher = shlex.split(options.launcher)
        self.is_torch = options.is_torch
        self.dir = tempfile.mkdtemp(prefix="conf-")
        self.outdir = os.path.join(self.dir, "out")
        os.mkdir(self.outdir)
        self.agents = []
        self.servers = []

    # --- starting things -------------------------------------------------

    def script(self, body, name="worker.py"):
        """Write a worker script; it starts with `from probe import *`."""
        path = os.path.join(self.dir, name)
        with open(path, "w") as f:
            f.write("from probe import *\n" + textwrap.dedent(body))
        return path

    def path(self, *names):
        return os.path.join(self.dir, *names)

    def start(self, *args, env=None, unset=(), node="a", launcher=None, preexec=None):
        """Start a launcher process with these arguments and return it."""
        environ = {k: v for k, v in os.environ.items()
                   if not k.startswith(("PET_", "TORCHELASTIC_")) and k not in
                   ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT",
                    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LOGLEVEL", "PYTHON_EXEC")}
        environ.update(CONF_OUT=self.outdir, CONF_NODE=node, PYTHONPATH=LIB,
                       PYTHONDONTWRITEBYTECODE="1", TMPDIR=self.dir)
        environ.update(env or {})
        for key in unset:
            environ.pop(key, None)
        agent = Agent([*(launcher or self.launcher), *map(str, args)], environ, self.dir,
                      f"{node}{len(self.agents)}", preexec)
        self.agents.append(agent)
        return agent

    def run(self, *args, code=0, timeout=60, **kw):
        """Start a launcher, wait for it and check its exit code."""
        return self.start(*args, **kw).expect(code, timeout)

    def etcd(self):
        """Start a private etcd on loopback and return its client endpoint."""
        if self.is_torch:
            raise Skip("torch needs the etcd v2 API and python-etcd")
        exe = shutil.which("etcd")
        if not exe:
            raise Skip("no etcd in PATH")
        client, peer = free_port(), free_port()
        proc = subprocess.Popen(
            [exe, "--data-dir", self.path("etcd"), "--log-level", "error",
             "--listen-client-urls", f"http://127.0.0.1:{client}",
             "--advertise-client-urls", f"http://127.0.0.1:{client}",
             "--listen-peer-urls", f"http://127.0.0.1:{peer}",
             "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
             "--initial-cluster", f"default=http://127.0.0.1:{peer}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.servers.append(proc)
        wait_until(lambda: listening(client), 20, "etcd")
        return f"127.0.0.1:{client}"

    # --- what the workers reported -----------------------------------------

    def records(self, **env_filter):
        """Records of all workers started so far, oldest first, filtered by environment."""
        found = []
        for name in os.listdir(self.outdir):
            if name.startswith("rec-"):
                with open(os.path.join(self.outdir, name)) as f:
                    rec = json.load(f)
                if all(rec["env"].get(k) == str(v) for k, v in env_filter.items()):
                    found.append(rec)
        return sorted(found, key=lambda r: r["time"])

    def wait_records(self, count, timeout=60, **env_filter):
        def enough():
            found = self.records(**env_filter)
            return found if len(found) >= count else None

        return wait_until(enough, timeout, f"{count} worker(s) with {env_filter}")

    def flag(self, name):
        """Content of a flag file, or None."""
        try:
            with open(os.path.join(self.outdir, name)) as f:
                return f.read()
        except FileNotFoundError:
            return None

    def wait_flag(self, name, timeout=60):
        wait_until(lambda: self.flag(name) is not None, timeout, f"flag {name}")
        return self.flag(name)

    def raise_flag(self, name):
        open(os.path.join(self.outdir, name), "w").close()

    def log_root(self, log_dir, run_id):
        """The one directory `<log_dir>/<run_id>_<random>` of this run."""
        dirs = [d for d in os.listdir(log_dir) if d.startswith(run_id + "_")]
        eq(len(dirs), 1, f"directories named {run_id}_* in the log dir")
        return os.path.join(log_dir, dirs[0])

    # --- clean up ----------------------------------------------------------

    def close(self, keep=False):
        groups = {a.proc.pid for a in self.agents} | {r["pgid"] for r in self.records()}
        for group in groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        for agent in self.agents:
            agent.proc.wait()
            agent._out.close()
            agent._err.close()
        for server in self.servers:
            server.kill()
            server.wait()
        if not keep:
            shutil.rmtree(self.dir, ignore_errors=True)


def listening(port, host="127.0.0.1"):
    try:
        socket.create_connection((host, port), 0.3).close()
        return True
    except OSError:
        return False


def read(path):
    with open(path, errors="replace") as f:
        return f.read()


def is_uuid(text):
    return bool(re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text))


def vals(records, key):
    return [r["env"].get(key) for r in records]
