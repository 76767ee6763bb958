"""Log directory, redirects, tee, prefixes and filters."""
import os
import socket

from harness import case, eq, free_port, hasnt, matches, read, wait_until

TALK = """
    say(f"out {LOCAL_RANK}")
    say(f"err {LOCAL_RANK}", sys.stderr)
"""


def talk(ctx, *args, nproc=2, **kw):
    """Run the talking worker with a log dir; return (launcher, directory of attempt 0)."""
    agent = ctx.run(f"--nproc-per-node={nproc}", "--log-dir", ctx.path("logs"), "--rdzv-id=job",
                    "--master-port", free_port(), *args, ctx.script(TALK), **kw)
    return agent, os.path.join(ctx.log_root(ctx.path("logs"), "job"), "attempt_0")


@case("logs")
def layout_without_redirects(ctx):
    """<log_dir>/<run_id>_<random>/attempt_0/<local_rank>/ exists; output is on the console."""
    agent, attempt = talk(ctx)
    eq(sorted(os.listdir(attempt)), ["0", "1"])
    eq(os.listdir(os.path.join(attempt, "0")), [], "files of rank 0")
    eq(sorted(agent.out.split("\n")), ["", "out 0", "out 1"], "stdout without prefix")
    for i in (0, 1):
        matches(agent.err, f"^err {i}$")


@case("logs")
def default_log_dir(ctx):
    """Without --log-dir: a directory torchelastic_<random> under TMPDIR."""
    ctx.run(ctx.script("""
        assert os.path.isdir(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])), "the directory exists"
    """))
    path = ctx.records()[0]["env"]["TORCHELASTIC_ERROR_FILE"]
    assert path.startswith(ctx.path("torchelastic_")), path
    # torchrun leaves it there though it is empty.
    assert not os.path.exists(os.path.dirname(path)), "an empty directory does not stay"


@case("logs")
def redirect_both(ctx):
    """-r 3: both streams go to files only."""
    agent, attempt = talk(ctx, "-r", "3")
    eq(agent.out, "")
    for i in "01":
        eq(read(os.path.join(attempt, i, "stdout.log")), f"out {i}\n")
        eq(read(os.path.join(attempt, i, "stderr.log")), f"err {i}\n")
    hasnt(agent.err, "err 0")


@case("logs")
def redirect_one_stream(ctx):
    """-r 1 redirects stdout only; stderr stays on the console and has no file."""
    agent, attempt = talk(ctx, "--redirects=1")
    eq(agent.out, "")
    matches(agent.err, "^err 1$")
    eq(os.listdir(os.path.join(attempt, "1")), ["stdout.log"])


@case("logs")
def redirect_per_rank(ctx):
    """-r 0:1,1:2: stdout of local rank 0 and stderr of local rank 1; unnamed ranks are untouched."""
    agent, attempt = talk(ctx, "-r", "0:1,1:2", nproc=3)
    eq(os.listdir(os.path.join(attempt, "0")), ["stdout.log"])
    eq(os.listdir(os.path.join(attempt, "1")), ["stderr.log"])
    eq(os.listdir(os.path.join(attempt, "2")), [])
    eq(sorted(agent.out.split()), ["1", "2", "out", "out"])
    hasnt(agent.err, "err 1")


@case("logs")
def tee_both(ctx):
    """-t 3: files plus console lines prefixed `[<role><local_rank>]:` (no space)."""
    agent, attempt = talk(ctx, "-t", "3", "--role=trainer")
    eq(sorted(agent.out.splitlines()), ["[trainer0]:out 0", "[trainer1]:out 1"])
    for i in "01":
        matches(agent.err, rf"^\[trainer{i}\]:err {i}$")
        eq(read(os.path.join(attempt, i, "stdout.log")), f"out {i}\n", "file has no prefix")


@case("logs")
def tee_plus_redirect(ctx):
    """-r 3 -t 1: both streams in files, only stdout echoed."""
    agent, attempt = talk(ctx, "-r", "3", "-t", "1")
    eq(sorted(agent.out.splitlines()), ["[default0]:out 0", "[default1]:out 1"])
    hasnt(agent.err, "err 0")
    eq(sorted(os.listdir(os.path.join(attempt, "0"))), ["stderr.log", "stdout.log"])


@case("logs")
def tee_per_rank(ctx):
    """-t 0:1: only local rank 0 is teed; others write to the console without prefix."""
    agent, _ = talk(ctx, "-t", "0:1")
    eq(sorted(agent.out.splitlines()), ["[default0]:out 0", "out 1"])


@case("logs")
def tee_last_line_without_newline(ctx):
    """A last line without newline is still echoed, with prefix."""
    agent = ctx.run("-t", "1", ctx.script("sys.stdout.write('one\\ntwo')"))
    eq(agent.out, "[default0]:one\n[default0]:two")


@case("logs")
def tee_many_lines(ctx):
    """Nothing is lost at exit: 20000 lines of 2 workers arrive complete and in order per worker."""
    worker = ctx.script("""
        sys.stdout.write("".join(f"{LOCAL_RANK} {i}\\n" for i in range(20000)))
        sys.stdout.flush()
    """)
    lines = ctx.run("--nproc-per-node=2", "-t", "1", worker).out.splitlines()
    for rank in "01":
        got = [line for line in lines if line.startswith(f"[default{rank}]:")]
        eq(got == [f"[default{rank}]:{rank} {i}" for i in range(20000)], True, f"lines of {rank}")


@case("logs")
def tee_is_live(ctx):
    """Teed lines reach the console while the worker is still running."""
    agent = ctx.start("-t", "1", ctx.script("""
        say("early")
        wait_for("seen")
    """))
    wait_until(lambda: "[default0]:early" in agent.out, 30, "the teed line")
    ctx.raise_flag("seen")
    agent.expect(0)


@case("logs")
def prefix_template_flag(ctx):
    """--log-line-prefix-template with its four macros; unknown macros stay as they are."""
    agent, _ = talk(ctx, "-t", "1", "--log-line-prefix-template",
                    "<${role_name}|${local_rank}|${rank}|${hostname}|${x}> ")
    host = socket.gethostname().split(".")[0]  # ${hostname} is the short name, also on a host called a.b
    eq(sorted(agent.out.splitlines()), [f"<default|{i}|{i}|{host}|${{x}}> out {i}" for i in (0, 1)])


@case("logs")
def prefix_template_variable(ctx):
    """TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE does the same; the flag wins."""
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "E${rank}:"}
    worker = ctx.script(TALK)
    eq(ctx.run("-t", "1", worker, env=env).out, "E0:out 0\n")
    eq(ctx.run("-t", "1", "--log-line-prefix-template=F${rank}:", worker, env=env).out, "F0:out 0\n")


@case("logs")
def local_ranks_filter_console(ctx):
    """--local-ranks-filter silences unredirected output of the other local ranks."""
    agent, attempt = talk(ctx, "--local-ranks-filter=1")
    eq(agent.out, "out 1\n")
    hasnt(agent.err, "err 0")
    eq(os.listdir(os.path.join(attempt, "0")), [])


@case("logs")
def local_ranks_filter_tee(ctx):
    """With tee, filtered ranks still get their files but no console lines."""
    agent, attempt = talk(ctx, "-t", "3", "--local-ranks-filter=0")
    eq(agent.out, "[default0]:out 0\n")
    eq(read(os.path.join(attempt, "1", "stdout.log")), "out 1\n")


@case("logs")
def duplicate_stdout_filters(ctx):
    """Teed lines with one of the strings are copied, prefixed, to attempt_N/filtered_stdout.log."""
    worker = ctx.script("""
        for word in ("apple", "pear", "a,b", "plum"):
            say(f"{word} {LOCAL_RANK}")
        say("apple err", sys.stderr)
    """)
    ctx.run("--nproc-per-node=2", "-t", "3", "--log-dir", ctx.path("logs"), "--rdzv-id=job", "--master-port",
            free_port(), "--duplicate-stdout-filters=apple,a,,b", "--duplicate-stderr-filters=err", worker)
    attempt = os.path.join(ctx.log_root(ctx.path("logs"), "job"), "attempt_0")
    eq(sorted(read(os.path.join(attempt, "filtered_stdout.log")).splitlines()),
       sorted(f"[default{i}]:{w} {i}" for i in (0, 1) for w in ("apple", "a,b")))
    eq(sorted(read(os.path.join(attempt, "filtered_stderr.log")).splitlines()),
       ["[default0]:apple err", "[default1]:apple err"])


@case("logs")
def duplicate_filters_need_tee(ctx):
    """Without tee the filtered file exists but stays empty."""
    _, attempt = talk(ctx, "-r", "3", "--duplicate-stdout-filters=out")
    eq(read(os.path.join(attempt, "filtered_stdout.log")), "")


@case("logs")
def attempts_have_their_own_directories(ctx):
    """Each restart writes to attempt_<restart_count> of the same run directory."""
    worker = ctx.script("""
        say(f"try {RESTART}")
        sys.exit(RESTART < 2)
    """)
    ctx.run("--max-restarts=3", "-r", "3", "--log-dir", ctx.path("logs"), "--rdzv-id=job", "--master-port",
            free_port(), worker)
    root = ctx.log_root(ctx.path("logs"), "job")
    eq(sorted(os.listdir(root)), ["attempt_0", "attempt_1", "attempt_2"])
    for n in range(3):
        eq(read(os.path.join(root, f"attempt_{n}", "0", "stdout.log")), f"try {n}\n")


@case("logs")
def log_dir_is_reused(ctx):
    """Two runs with one --log-dir and id get two run directories."""
    for _ in range(2):
        ctx.run("--log-dir", ctx.path("a/b/logs"), "--rdzv-id=job", "--master-port", free_port(), ctx.script(""))
    eq(len([d for d in os.listdir(ctx.path("a/b/logs")) if d.startswith("job_")]), 2)


@case("logs")
def log_dir_is_a_file(ctx):
    """A --log-dir that is a file: exit code 1."""
    open(ctx.path("file"), "w").close()
    ctx.run("--log-dir", ctx.path("file"), ctx.script(""), code=1)


@case("logs")
def log_dir_dev_null(ctx):
    """--log-dir=/dev/null: no files, empty TORCHELASTIC_ERROR_FILE, console output."""
    agent = ctx.run("--log-dir=/dev/null", ctx.script("say('x')"))
    eq(agent.out, "x\n")
    eq(ctx.records()[0]["env"]["TORCHELASTIC_ERROR_FILE"], "")
