"""Several launchers with a dynamic backend: c10d, and the same rules again with etcd."""
import os
import signal
import time

from harness import Skip, case, eq, free_port, listening, vals, wait_until

FAST = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60,close_timeout=5"


class Job:
    """Launchers of one elastic job; the endpoint is private to the case."""

    def __init__(self, ctx, backend, run_id="job", conf=FAST):
        self.ctx, self.backend, self.run_id, self.conf = ctx, backend, run_id, conf
        self.endpoint = ctx.etcd() if backend.startswith("etcd") else f"127.0.0.1:{free_port()}"

    def node(self, name, nnodes, worker, *args, conf=None, **kw):
        return self.ctx.start(f"--nnodes={nnodes}", f"--rdzv-backend={self.backend}",
                              f"--rdzv-endpoint={self.endpoint}", f"--rdzv-id={self.run_id}",
                              f"--rdzv-conf={conf or self.conf}", *args, worker, node=name, **kw)

    def wait_ready(self):
        """Wait until the endpoint is served (by the node started first, with c10d)."""
        port = int(self.endpoint.rsplit(":", 1)[1])
        wait_until(lambda: listening(port), 30, "the rendezvous store")


def dynamic(fn):
    """Register fn(ctx, backend) as <name>_c10d and <name>_etcd."""
    for backend in ("c10d", "etcd"):
        def run(ctx, backend=backend):
            fn(ctx, backend)
        run.__name__, run.__doc__ = f"{fn.__name__}_{backend}", fn.__doc__
        case(backend)(run)
    return fn


def newcomer_env(ctx):
    """torch 2.15 deadlocks when a node joins a later round (rank 0 publishes MASTER_ADDR in
    the first round only), except with store sharing switched off. Other launchers must just work."""
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if ctx.is_torch else {}


def kill_node(ctx, agent, name):
    """Simulate the loss of a node: its launcher and its workers vanish."""
    agent.send(signal.SIGKILL)
    agent.wait()
    for rec in ctx.records(CONF_NODE=name):
        try:
            os.killpg(rec["pgid"], signal.SIGKILL)
        except ProcessLookupError:
            pass


@dynamic
def two_nodes(ctx, backend):
    """Group ranks 0 and 1, contiguous ranks, one master endpoint that is not the rendezvous endpoint."""
    job = Job(ctx, backend)
    agents = [job.node(n, 2, ctx.script(""), "--nproc-per-node=2", "--local-addr=127.0.0.1") for n in "ab"]
    for agent in agents:
        agent.expect(0)
    recs = ctx.records()
    eq(sorted(vals(recs, "RANK")), ["0", "1", "2", "3"])
    for rec in recs:
        eq(int(rec["env"]["RANK"]), 2 * int(rec["env"]["GROUP_RANK"]) + int(rec["env"]["LOCAL_RANK"]))
    for key, value in {"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job",
                       "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}.items():
        eq(set(vals(recs, key)), {value}, key)
    eq(len(set(vals(recs, "MASTER_PORT"))), 1)
    assert recs[0]["env"]["MASTER_PORT"] != job.endpoint.rsplit(":")[1]


@dynamic
def different_nproc(ctx, backend):
    """Nodes with 1 and 3 workers: cumulative ranks in group-rank order."""
    job = Job(ctx, backend)
    agents = [job.node("a", 2, ctx.script(""), "--nproc-per-node=1"),
              job.node("b", 2, ctx.script(""), "--nproc-per-node=3")]
    for agent in agents:
        agent.expect(0)
    recs = sorted(ctx.records(), key=lambda r: int(r["env"]["RANK"]))
    eq(vals(recs, "RANK"), ["0", "1", "2", "3"])
    order = vals(recs, "CONF_NODE")
    assert order in (["a", "b", "b", "b"], ["b", "b", "b", "a"]), order
    eq(sorted(vals(ctx.records(CONF_NODE="b"), "LOCAL_RANK")), ["0", "1", "2"])


@dynamic
def last_call(ctx, backend):
    """With MIN reached the round stays open for last_call_timeout, then starts without MAX."""
    job = Job(ctx, backend, conf="last_call_timeout=6,join_timeout=60")
    start = time.time()
    agents = [job.node(n, "1:3", ctx.script(""), conf=job.conf) for n in "ab"]
    for agent in agents:
        agent.expect(0)
    recs = ctx.records()
    eq(vals(recs, "WORLD_SIZE"), ["2", "2"])
    assert recs[0]["time"] - start >= 6, "started before the last call ended"


@dynamic
def full_round_starts_at_once(ctx, backend):
    """With MAX reached nobody waits for the last call."""
    job = Job(ctx, backend, conf="last_call_timeout=300,join_timeout=60")
    agents = [job.node(n, "1:2", ctx.script("")) for n in "ab"]
    for agent in agents:
        agent.expect(0, 45)
    eq(vals(ctx.records(), "WORLD_SIZE"), ["2", "2"])


@dynamic
def join_timeout(ctx, backend):
    """Fewer than MIN nodes: after join_timeout the launcher exits 1 and no worker has started."""
    job = Job(ctx, backend, conf="join_timeout=4,last_call_timeout=1")
    start = time.time()
    job.node("a", 2, ctx.script("")).expect(1, 40)
    assert time.time() - start >= 4
    eq(ctx.records(), [])


@dynamic
def late_joiner(ctx, backend):
    """Scale up: a late node makes the running nodes restart, without using up a restart."""
    job = Job(ctx, backend)
    worker = ctx.script("""
        if WORLD_SIZE == 1:
            touch("alone")
            time.sleep(60)
    """)
    first = job.node("a", "1:2", worker, env=newcomer_env(ctx))
    ctx.wait_flag("alone")
    second = job.node("b", "1:2", worker, env=newcomer_env(ctx))
    first.expect(0)
    second.expect(0)
    eq(sorted((r["env"]["CONF_NODE"], r["env"]["WORLD_SIZE"], r["env"]["TORCHELASTIC_RESTART_COUNT"])
              for r in ctx.records()), [("a", "1", "0"), ("a", "2", "0"), ("b", "2", "0")])


@dynamic
def failure_restarts_all_nodes(ctx, backend):
    """A worker failure on one node restarts the workers of all nodes; only that node's count goes up."""
    job = Job(ctx, backend)
    worker = ctx.script("""
        if NODE == "b" and RESTART == 0:
            wait_for("a_up")
            sys.exit(1)
        touch(NODE + "_up")
        wait_for("b_up")       # node b gets there in its second attempt only
    """)
    agents = [job.node(n, 2, worker, "--max-restarts=2") for n in "ab"]
    for agent in agents:
        agent.expect(0)
    eq(sorted((r["env"]["CONF_NODE"], r["env"]["WORLD_SIZE"], r["env"]["TORCHELASTIC_RESTART_COUNT"])
              for r in ctx.records()), [("a", "2", "0"), ("a", "2", "0"), ("b", "2", "0"), ("b", "2", "1")])


@dynamic
def node_loss_scales_down(ctx, backend):
    """A node vanishes: the survivor's failed workers restart alone once its keep-alive has expired."""
    job = Job(ctx, backend)
    worker = ctx.script("""
        touch(f"up-{NODE}-{WORLD_SIZE}")
        if WORLD_SIZE == 2:
            wait_for("lost")       # stands for a collective that fails with the peer
            sys.exit(1)
    """)
    first = job.node("a", "1:2", worker, "--max-restarts=2")
    job.wait_ready()  # so that node a, which survives, hosts the c10d store
    second = job.node("b", "1:2", worker, "--max-restarts=2")
    wait_until(lambda: ctx.flag("up-a-2") is not None and ctx.flag("up-b-2") is not None, 60, "both nodes")
    kill_node(ctx, second, "b")
    ctx.raise_flag("lost")
    first.expect(0, 60)
    last = ctx.records(CONF_NODE="a")[-1]["env"]
    eq((last["WORLD_SIZE"], last["RANK"], last["TORCHELASTIC_RESTART_COUNT"]), ("1", "0", "1"))


@dynamic
def node_replacement(ctx, backend):
    """A lost node is replaced: the new node joins after keep-alive expiry, survivors restart for free."""
    job = Job(ctx, backend)
    worker = ctx.script("""
        touch(f"up-{NODE}-{WORLD_SIZE}")
        wait_for("up-c-2", 90)  # not a look and a sleep: all workers of the new round start at the same time
    """)
    first = job.node("a", 2, worker, env=newcomer_env(ctx))
    job.wait_ready()
    second = job.node("b", 2, worker, env=newcomer_env(ctx))
    wait_until(lambda: ctx.flag("up-a-2") is not None and ctx.flag("up-b-2") is not None, 60, "both nodes")
    kill_node(ctx, second, "b")
    third = job.node("c", 2, worker, env=newcomer_env(ctx))
    first.expect(0, 60)
    third.expect(0, 60)
    last = ctx.records(CONF_NODE="a")[-1]["env"]
    eq((last["WORLD_SIZE"], last["TORCHELASTIC_RESTART_COUNT"]), ("2", "0"))


@dynamic
def sigterm_leaves_the_job_open(ctx, backend):
    """SIGTERM of one launcher stops its workers with exit code 1; the others go on, without it and from the beginning.

    The workers of torchrun's other nodes run on with a rank missing, until a time-out of theirs.
    """
    job = Job(ctx, backend)
    worker = ctx.script("""
        on_signal(signal.SIGTERM, "term-" + NODE)
        touch("up-" + NODE)
        if int(os.environ["WORLD_SIZE"]) == 1 and os.path.exists(f"{OUT}/up-b"):
            touch("alone-" + NODE)
            sys.exit(0)
        wait_for("finish")
    """)
    first = job.node("a", "1:2", worker)
    job.wait_ready()
    second = job.node("b", "1:2", worker)
    ctx.wait_flag("up-a")
    ctx.wait_flag("up-b")
    second.send(signal.SIGTERM)
    second.expect(1, 30)
    ctx.wait_flag("term-b", 5)
    ctx.wait_flag("alone-a", 30)
    first.expect(0, 30)


@dynamic
def exit_barrier(ctx, backend):
    """A node that finishes first waits for the others; then all exit 0."""
    job = Job(ctx, backend)
    agents = [job.node(n, 2, ctx.script("""
        if NODE == "b":
            wait_for("go")
        touch("done-" + NODE)
    """)) for n in "ab"]
    ctx.wait_flag("done-a")
    time.sleep(3)
    assert agents[0].running, "node a left before node b was done"
    ctx.raise_flag("go")
    for agent in agents:
        agent.expect(0)


@dynamic
def separate_run_ids(ctx, backend):
    """Two jobs with different run ids share an endpoint without mixing."""
    job = Job(ctx, backend)
    first = job.node("a", 1, ctx.script("touch('up'); wait_for('second'); time.sleep(1)"))
    ctx.wait_flag("up")
    job.run_id = "other"
    second = job.node("b", 1, ctx.script("touch('second')", name="w2.py"))
    second.expect(0)
    first.expect(0)
    eq(sorted(zip(vals(ctx.records(), "TORCHELASTIC_RUN_ID"), vals(ctx.records(), "WORLD_SIZE"))),
       [("job", "1"), ("other", "1")])


@dynamic
def store_reachable_in_every_attempt(ctx, backend):
    """The agent store serves MASTER_ADDR:MASTER_PORT in the first attempt and after each restart."""
    job = Job(ctx, backend)
    job.node("a", 1, ctx.script("""
        from storeclient import StoreClient
        StoreClient().ping()
        sys.exit(RESTART < 2)
    """), "--max-restarts=2").expect(0)
    eq(vals(ctx.records(), "TORCHELASTIC_RESTART_COUNT"), ["0", "1", "2"])


# ---- rules of the c10d backend only -----------------------------------------

@case("c10d")
def endpoint_is_hosted_by_a_node(ctx):
    """The first node on the endpoint's host serves a TCPStore at the endpoint."""
    job = Job(ctx, "c10d")
    agent = job.node("a", 1, ctx.script(f"""
        from storeclient import StoreClient
        c = StoreClient({job.endpoint.rsplit(':', 1)[0]!r}, {job.endpoint.rsplit(':', 1)[1]})
        touch("keys", " ".join(sorted(k.decode() for k in c.list_keys())))
    """))
    agent.expect(0)
    keys = ctx.flag("keys").split()
    assert "/torch.rendezvous.job" in keys or not ctx.is_torch, keys


@case("c10d")
def is_host_false(ctx):
    """is_host=false: nobody serves the endpoint, so joining fails with exit code 1."""
    job = Job(ctx, "c10d", conf="is_host=false,read_timeout=4,join_timeout=8")
    job.node("a", 1, ctx.script("")).expect(1, 60)
    eq(ctx.records(), [])


@case("c10d")
def file_store(ctx):
    """store_type=file: the endpoint is a file path shared by the nodes."""
    job = Job(ctx, "c10d", conf="store_type=file," + FAST)
    job.endpoint = ctx.path("rdzv_file")
    agents = [job.node(n, 2, ctx.script("")) for n in "ab"]
    for agent in agents:
        agent.expect(0)
    eq(vals(ctx.records(), "WORLD_SIZE"), ["2", "2"])
    assert os.path.exists(job.endpoint)


@case("c10d")
def closed_job_rejects_newcomers(ctx):
    """When a job has ended its run id is closed: a newcomer exits 1 without starting workers."""
    job = Job(ctx, "c10d", conf="store_type=file," + FAST)
    job.endpoint = ctx.path("rdzv_file")
    job.node("a", 1, ctx.script("")).expect(0)
    job.node("b", 1, ctx.script("")).expect(1)
    eq(len(ctx.records()), 1)


@case("c10d")
def bad_store_type(ctx):
    """store_type must be tcp or file (exit code 1)."""
    Job(ctx, "c10d", conf="store_type=x").node("a", 1, ctx.script("")).expect(1)


@case("c10d")
def host_loss_ends_the_job(ctx):
    """When the node that hosts the store vanishes, the other launchers stop their workers and exit 1."""
    job = Job(ctx, "c10d")
    worker = ctx.script("""
        on_signal(signal.SIGTERM, "term-" + NODE)
        touch("up-" + NODE)
        time.sleep(90)
    """)
    first = job.node("a", 2, worker)
    job.wait_ready()
    second = job.node("b", 2, worker)
    ctx.wait_flag("up-a")
    ctx.wait_flag("up-b")
    kill_node(ctx, first, "a")
    second.expect(1, 60)
    ctx.wait_flag("term-b", 5)


@case("c10d")
def spare_node_waits(ctx):
    """More nodes than MAX: the spare one waits without disturbing the running ones."""
    job = Job(ctx, "c10d")
    worker = ctx.script("touch('up-' + NODE); wait_for('finish')")
    first = job.node("a", 1, worker)
    ctx.wait_flag("up-a")
    spare = job.node("b", 1, worker)
    time.sleep(6)
    assert spare.running and first.running
    eq(len(ctx.records()), 1, "workers")
    ctx.raise_flag("finish")
    first.expect(0)
    spare.wait(30)
    eq(len(ctx.records()), 1, "workers")


# ---- rules of the etcd backends only ----------------------------------------

@case("etcd")
def etcd_v2_name(ctx):
    """--rdzv-backend=etcd-v2 is accepted as well."""
    job = Job(ctx, "etcd-v2")
    agents = [job.node(n, 2, ctx.script("")) for n in "ab"]
    for agent in agents:
        agent.expect(0)
    eq(vals(ctx.records(), "WORLD_SIZE"), ["2", "2"])


@case("etcd")
def etcd_closed_job(ctx):
    """A finished job stays closed in etcd: a newcomer with its run id exits 1; another id works."""
    job = Job(ctx, "etcd")
    job.node("a", 1, ctx.script("")).expect(0)
    job.node("b", 1, ctx.script("")).expect(1)
    job.run_id = "fresh"
    job.node("c", 1, ctx.script("")).expect(0)
    eq(len(ctx.records()), 2)


@case("etcd")
def etcd_survives_loss_of_rank0(ctx):
    """With an external store any node may vanish, also group rank 0."""
    job = Job(ctx, "etcd")
    worker = ctx.script("""
        touch(f"up-{NODE}-{WORLD_SIZE}", os.environ["GROUP_RANK"])
        if WORLD_SIZE == 2:
            wait_for("lost")
            sys.exit(1)
    """)
    agents = {n: job.node(n, "1:2", worker, "--max-restarts=3") for n in "ab"}
    wait_until(lambda: ctx.flag("up-a-2") is not None and ctx.flag("up-b-2") is not None, 60, "both nodes")
    lost, left = ("a", "b") if ctx.flag("up-a-2") == "0" else ("b", "a")
    kill_node(ctx, agents[lost], lost)
    ctx.raise_flag("lost")
    agents[left].expect(0, 60)
    eq(ctx.records(CONF_NODE=left)[-1]["env"]["WORLD_SIZE"], "1")


@case("etcd")
def etcd_unreachable(ctx):
    """No etcd at the endpoint: exit code 1 after read_timeout."""
    if ctx.is_torch:
        raise Skip("torch needs the etcd v2 API and python-etcd")
    ctx.run("--rdzv-backend=etcd", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=x",
            "--rdzv-conf=read_timeout=3,join_timeout=6", ctx.script(""), code=1, timeout=60)
