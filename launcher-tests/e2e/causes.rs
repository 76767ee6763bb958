//! A collection of failures: in each case the report must name the right rank and the right class.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use nix::sys::signal::Signal;
use serde_json::Value;

use convoke_launcher_tests::harness::{Job, ProcessOutput, children};
use convoke_launcher_tests::worker_command;
use convoke_testkit::{free_port, skip, wait_until};

/// One kind of failure.
struct Case {
    name: &'static str,
    /// The script of every worker; its first line is `sh` or `py`.
    script: &'static str,
    /// Flags before SCRIPT.
    flags: &'static [&'static str],
    /// A program to run instead of the script, and its arguments.
    run: &'static [&'static str],
    rank: usize,
    class: &'static str,
    /// Texts that the report on the terminal contains.
    expected_texts: &'static [&'static str],
}

const fn case(name: &'static str, rank: usize, class: &'static str, script: &'static str) -> Case {
    Case { name, script, flags: &[], run: &[], rank, class, expected_texts: &[] }
}

impl Case {
    const fn flags(mut self, flags: &'static [&'static str]) -> Self {
        self.flags = flags;
        self
    }
    const fn run(mut self, run: &'static [&'static str]) -> Self {
        self.run = run;
        self
    }
    const fn expect_text(mut self, texts: &'static [&'static str]) -> Self {
        self.expected_texts = texts;
        self
    }
}

/// Prologues of the scripts.
const SH: &str = r#"only() { [ "$RANK" = "$1" ] || exec sleep 1000; }
await() { while [ ! -e "$JOB/$1" ]; do sleep 0.01; done; }
"#;
const PY: &str = "\
import ctypes, json, os, signal, socket, sys, time
RANK, JOB = int(os.environ['RANK']), os.environ['JOB']
def only(rank):
    if RANK != rank:
        time.sleep(1000)
def touch(name, text=''):
    with open(f'{JOB}/{name}.partial', 'w') as f:
        f.write(text)
    os.rename(f'{JOB}/{name}.partial', f'{JOB}/{name}')
def wait_for(name):
    while not os.path.exists(f'{JOB}/{name}'):
        time.sleep(0.01)
    return open(f'{JOB}/{name}').read()
def ended(pid):
    try:
        return open(f'/proc/{pid}/stat').read().split()[2] == 'Z'
    except FileNotFoundError:
        return True
def account(message, stamp):
    text = {'message': {'message': message, 'extraInfo': {'py_callstack': message, 'timestamp': str(int(stamp))}}}
    with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as f:
        json.dump(text, f)
";

/// Connects two ranks; both get a socket `peer`.
const CONNECTED: &str = "
if RANK == 0:
    server = socket.create_server(('127.0.0.1', 0))
    touch('port', str(server.getsockname()[1]))
    peer = server.accept()[0]
else:
    peer = socket.create_connection(('127.0.0.1', int(wait_for('port'))))
    peer.sendall(b'x')
";

const CASES: &[Case] = &[
    // Python
    case("exception", 1, "exception", "py\nonly(1)\nprint('noise', file=sys.stderr)\nraise ValueError('bad thing')").expect_text(&[
        "rank      : 1 (local_rank: 1)\n",
        "traceback : Traceback (most recent call last):\n",
        "cause     : exception: ValueError: bad thing\n",
        "    noise\n",
        "  ranks 0,2 on ",
        ": stopped by the launcher, after another had failed\n",
    ]),
    case("chained exception", 2, "exception", "py\nonly(2)\ntry:\n    {}['k']\nexcept KeyError as e:\n    raise RuntimeError('outer') from e")
        .expect_text(&["KeyError: 'k'\n", "direct cause", "cause     : exception: RuntimeError: outer"]),
    case("syntax error", 0, "exception", "py\ndef f(:\n").expect_text(&["SyntaxError: invalid syntax"]),
    case("import error", 1, "import-error", "py\nonly(1)\nimport no_such_module").expect_text(&["No module named 'no_such_module'"]),
    case("missing module", 0, "import-error", "").flags(&["-m"]).run(&["no.such.module"]),
    case("missing script", 0, "missing-program", "").run(&["no-such-script.py"]).expect_text(&["can't open file", "advice    : does the script exist"]),
    case("missing program, taken for a script", 0, "missing-program", "").run(&["no-such-worker", "--lr", "0.1"]).expect_text(&[
        "can't open file",
        "advice    : no such file here and no program of that name in PATH, so it was given to Python",
    ]),
    case("a script that its worker lacks", 0, "missing-program", "sh\nexec python3 no-such-script")
        .expect_text(&["can't open file", "advice    : does the script exist"]),
    case("exit code", 2, "exit", "py\nonly(2)\nsys.exit(3)").expect_text(&["exitcode  : 3 (pid: "]),
    case("os.abort", 1, "abort", "py\nonly(1)\nos.abort()").expect_text(&["exitcode  : -6", "(SIGABRT)"]),
    case("faulthandler", 1, "segfault", "py\nonly(1)\nimport faulthandler\nfaulthandler.enable()\nctypes.string_at(0)")
        .expect_text(&["exitcode  : -11 (pid: ", "  (SIGSEGV)\n", "Fatal Python error: Segmentation fault"]),
    case("MemoryError", 1, "out-of-memory", "py\nonly(1)\nimport resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\nbytearray(2 << 30)")
        .expect_text(&["cause     : out-of-memory: host memory: MemoryError"]),
    case("device memory", 1, "device-out-of-memory", "py\nonly(1)\nclass OutOfMemoryError(RuntimeError): pass\nraise OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')"),
    case("disk full", 1, "disk-full", "py\nonly(1)\nwith open('/dev/full', 'w') as f: f.write('x')").expect_text(&["No space left on device", "df -h"]),
    case("address in use", 1, "address-in-use", "py\nonly(1)\na = socket.create_server(('127.0.0.1', 0))\nsocket.create_server(a.getsockname())"),
    case("error file", 1, "exception", "py\nonly(1)\naccount('Traceback (most recent call last):\\n  File \"x\", line 1\\nOSError: from the file', time.time())\nsys.exit(1)")
        .expect_text(&["cause     : exception: OSError: from the file"]),
    case("split traceback", 1, "exception", "py\nonly(1)\nfor c in 'Traceback (most recent call last):\\n  File \"x\", line 1\\nValueError: in pieces\\n': os.write(2, c.encode())\nos._exit(1)"),
    case("megabyte line", 1, "exception", "py\nonly(1)\nsys.stderr.write('x' * (1 << 20) + '\\n')\nraise ValueError('after much')"),
    case("megabyte line last", 1, "exit", "py\nonly(1)\nsys.stderr.write('x' * (1 << 20))\nsys.stderr.flush()\nos._exit(4)").expect_text(&["xxx [...] xxx"]),
    case("garbage", 1, "exit", "py\nonly(1)\nos.write(2, bytes(range(256)) * 300)\nos._exit(5)").expect_text(&["exitcode  : 5"]),
    case("nothing but tracebacks that were handled", 1, "segfault", "py\nonly(1)\nimport traceback\ntry: 1/0\nexcept Exception: traceback.print_exc()\nos.kill(os.getpid(), 11)"),
    // The rank that failed first
    case(
        "skewed clock in an error file", 0, "exit",
        "py\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nif RANK == 0:\n    touch('first', str(os.getpid()))\n    wait_for('ready')\n    sys.exit(7)\n\
         pid = int(wait_for('first'))\ntouch('ready')\n\
         while not ended(pid): time.sleep(0.01)\n\
         time.sleep(0.3)\naccount('KeyError: late', 978307200)\nsys.exit(1)",
    )
    .flags(&["--nproc-per-node=2", "--monitor-interval=5"]),
    case(
        "skewed clocks on both sides", 1, "exit",
        "py\naccount(f'rank {RANK}', 978307200 - RANK)\ntouch(f'told{RANK}')\nwait_for('told0'), wait_for('told1')\nsys.exit(1)",
    )
    .flags(&["--nproc-per-node=2", "--monitor-interval=1"]),
    case("exit 0 too early", 0, "early-exit", "py\nconnected()\nif RANK == 0: peer.close(); sys.exit(0)\ntime.sleep(0.2)\npeer.recv(1)\npeer.sendall(b'x')\npeer.recv(1)")
        .flags(&["--nproc-per-node=2"])
        .expect_text(&["exited with code 0 while the others continued"]),
    case(
        "a consequence that is seen first", 0, "exception",
        "py\nconnected()\nif RANK == 0:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    touch('deaf')\n    peer.close()\n    pid = int(wait_for('lost'))\n    while not ended(pid): time.sleep(0.01)\n    raise ValueError('the reason')\n\
         wait_for('deaf')\ntry:\n    peer.recv(1)\n    peer.sendall(b'x')\n    peer.recv(1)\nfinally:\n    touch('lost', str(os.getpid()))",
    )
    .flags(&["--nproc-per-node=2"])
    .expect_text(&[": exited with code 1 (peer-lost: a consequence of another worker's end: ", "cause     : exception: ValueError: the reason"]),
    case(
        "a peer's loss as the runtime tells it", 1, "exit",
        "sh\n[ $RANK = 0 ] && exec sleep 1000\nif [ $RANK = 1 ]; then await lost; exit 9; fi\n\
         echo 'Error: rank 1 at 127.0.0.1:4000 exited with code 9; group world, call 4 all_reduce, 0 of 8 bytes received, reported by rank 2' >&2\n: > \"$JOB/lost\"; exit 1",
    )
    .flags(&["--nproc-per-node=3", "--monitor-interval=2"])
    .expect_text(&["peer-lost"]),
    // Signals
    case("segfault", 2, "segfault", "sh\nonly 2\nkill -SEGV $$").expect_text(&["exitcode  : -11", "(SIGSEGV)"]),
    case("bus error", 1, "bus-error", "sh\nonly 1\nkill -BUS $$").expect_text(&["/dev/shm"]),
    case("illegal instruction", 1, "illegal-instruction", "sh\nonly 1\nkill -ILL $$"),
    case("arithmetic error", 1, "arithmetic-error", "sh\nonly 1\nkill -FPE $$"),
    case("assertion", 0, "abort", "sh\nonly 0\necho \"w: w.c:3: main: Assertion \\`x == 1' failed.\" >&2\nkill -ABRT $$").expect_text(&["Assertion `x == 1' failed."]),
    case("a thread that outlives the program", 2, "abort", "sh\nonly 2\necho 'terminate called without an active exception' >&2\nkill -ABRT $$")
        .expect_text(&["advice    : a thread of a library still ran while the program ended", "dist.destroy_process_group()", "or run it with --as-gloo"]),
    case("kill -9", 1, "killed", "sh\nonly 1\nkill -KILL $$").expect_text(&["cause     : killed: SIGKILL from outside"]),
    case("kill -9 behind a wrapper", 1, "killed", "sh\nonly 1\nsh -c 'kill -KILL $$'\nexit $?").expect_text(&["exit code 137 = 128 + 9"]),
    case("a hang, then SIGTERM from outside", 1, "terminated", "sh\nonly 1\n(sleep 0.2; kill -TERM $$) &\nwhile :; do sleep 1000; done").expect_text(&["SIGTERM from outside"]),
    case("CPU limit", 1, "cpu-limit", "sh\nonly 1\nulimit -S -t 1\nwhile :; do :; done").expect_text(&["ulimit -t"]),
    case("file size limit", 1, "file-size-limit", "sh\nonly 1\nulimit -f 1\nexec dd if=/dev/zero of=\"$JOB/large\" bs=65536 count=10").expect_text(&["ulimit -f"]),
    // Programs
    case("command not found", 1, "missing-program", "sh\nonly 1\nno-such-command").expect_text(&["not found"]),
    case("not executable", 1, "not-executable", "sh\nonly 1\n: > \"$JOB/data\"\n\"$JOB/data\"").expect_text(&["Permission denied"]),
    case("no such program", 0, "missing-program", "").flags(&["--no-python"]).run(&["/no/such/program"]).expect_text(&["could not be started"]),
    case("no program", 0, "not-executable", "").flags(&["--no-python"]).run(&["/etc"]).expect_text(&["could not be started"]),
    case("unknown --local-rank", 0, "usage-error", "py\nimport argparse\nargparse.ArgumentParser().parse_args()")
        .flags(&["--pass-local-rank"])
        .expect_text(&["unrecognized arguments: --local-rank=0", "--use-env"]),
    case("unknown --local_rank", 0, "usage-error", "py\nimport argparse\nargparse.ArgumentParser().parse_args()")
        .flags(&["--pass-local-rank=underscore"])
        .expect_text(&["unrecognized arguments: --local_rank=0", "--pass-local-rank=dash"]),
    case("usage", 1, "usage-error", "sh\nonly 1\necho 'usage: w [-x]' >&2\nexit 2"),
    // Rust
    case("panic", 1, "panic", "").run(&["failing", "panic"]).expect_text(&["index out of bounds: the len is 3 but the index is 7", "failing.rs:"]),
    case("panic of a thread", 1, "panic", "").run(&["failing", "thread"]).expect_text(&["thread 'loader'", "index out of bounds"]),
    case("stack overflow", 1, "abort", "").run(&["failing", "overflow"]).expect_text(&["has overflowed its stack"]),
    case("error from main", 1, "exit", "").run(&["failing", "error"]).expect_text(&["the data set is empty"]),
    // The cause is found wherever stderr goes
    case("redirected", 1, "exception", "py\nonly(1)\nraise ValueError('in a file')").flags(&["--nproc-per-node=3", "-r3"]).expect_text(&["cause     : exception: ValueError: in a file"]),
    case("teed", 1, "exception", "py\nonly(1)\nraise ValueError('twice')").flags(&["--nproc-per-node=3", "-t3"]).expect_text(&["[default1]:ValueError: twice"]),
    case("filtered", 1, "exception", "py\nonly(1)\nraise ValueError('unseen')").flags(&["--nproc-per-node=3", "--local-ranks-filter=0"]).expect_text(&["cause     : exception: ValueError: unseen"]),
];

/// Writes the worker of `case` and returns the command line to launch.
fn program(job: &Job, case: &Case) -> Vec<PathBuf> {
    if let [role @ "failing", how] = case.run {
        return worker_command(role).map(PathBuf::from).into_iter().chain([how.into()]).collect();
    }
    if !case.run.is_empty() {
        return case.run.iter().map(PathBuf::from).collect();
    }
    if let Some(script) = case.script.strip_prefix("sh\n") {
        return vec![job.script(&format!("{SH}{script}\n"))];
    }
    let script = case.script.strip_prefix("py\n").unwrap_or(case.script).replace("connected()", CONNECTED);
    let path = job.path("worker.py");
    std::fs::write(&path, format!("{PY}\n{script}\n")).unwrap();
    vec![path]
}

/// Builds the launcher command for `case`, with three workers unless its flags set another number.
fn launcher(job: &Job, case: &Case) -> Command {
    let mut command = job.command(["--report-file=report.json"]);
    if case.rank > 0 && !case.flags.iter().any(|flag| flag.starts_with("--nproc-per-node")) {
        command.arg("--nproc-per-node=3");
    }
    command.args(case.flags).args(program(job, case));
    command.env("FAILING_RANK", case.rank.to_string()).env("PYTHONDONTWRITEBYTECODE", "1");
    command.env_remove("RUST_BACKTRACE");
    command
}

fn report(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Returns a description of the errors in the report of `case`, or `None`.
fn mismatch(case: &Case, ended: &ProcessOutput, report: &Value) -> Option<String> {
    let root = report["root_cause"].as_u64().map(|at| &report["failures"][at as usize]);
    let reported =
        root.map(|root| (root["rank"].as_u64().unwrap_or(99) as usize, root["class"].as_str().unwrap_or("")));
    let missing = case.expected_texts.iter().find(|text| !ended.stderr.contains(**text));
    let control = ended
        .stderr
        .split("FAILED\n")
        .nth(1)
        .unwrap_or("")
        .chars()
        .find(|c| c.is_control() && !"\n\t".contains(*c));
    let what = match (ended.status.code(), reported, missing, control) {
        (Some(1), reported, None, None) if reported == Some((case.rank, case.class)) => return None,
        (Some(1), reported, _, None) if reported != Some((case.rank, case.class)) => {
            format!("told {reported:?}")
        }
        (Some(1), _, Some(text), None) => format!("does not say {text:?}"),
        (Some(1), _, _, Some(c)) => format!("shows {c:?}"),
        _ => format!("ended with {}", ended.status),
    };
    let shown: String = ended.stderr.chars().rev().take(3000).collect::<Vec<_>>().into_iter().rev().collect();
    Some(format!("{}: {what}, wanted ({}, {:?})\n{shown}\n{report:#}", case.name, case.rank, case.class))
}

#[test]
fn report_names_every_cause() {
    let next = Mutex::new(CASES.iter());
    let mismatches = Mutex::new(Vec::new());
    // Four cases run at a time, because they mostly wait for processes.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let Some(case) = next.lock().unwrap().next() else { return };
                    let job = Job::new();
                    let ended = job.start(launcher(&job, case)).wait();
                    mismatches.lock().unwrap().extend(mismatch(
                        case,
                        &ended,
                        &report(&job.path("report.json")),
                    ));
                }
            });
        }
    });
    let mismatches = mismatches.into_inner().unwrap();
    assert!(CASES.len() >= 30);
    assert!(mismatches.is_empty(), "{} of {}:\n{}", mismatches.len(), CASES.len(), mismatches.join("\n\n"));
}

/// Runs two static nodes; each node's workers run their own script.
fn two_nodes(job: &Job, scripts: [&Path; 2]) -> [(ProcessOutput, Value); 2] {
    let port = free_port().to_string();
    let nodes = [0, 1].map(|rank| {
        let mut command = job.command(["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1"]);
        command.args([format!("--node-rank={rank}"), format!("--report-file=report{rank}.json")]);
        command.args(["--master-port", &port]).arg(scripts[rank]);
        job.start(command)
    });
    let mut rank = 0;
    nodes.map(|node| {
        let ended = node.wait().expect_exit_code(1);
        rank += 1;
        (ended, report(&job.path(&format!("report{}.json", rank - 1))))
    })
}

#[test]
fn bad_import_on_one_node_is_reported_with_that_node() {
    let job = Job::new();
    let [good, bad] = [("good.py", "time.sleep(1000)"), ("bad.py", "only(3)\nimport only_on_the_other_node")]
        .map(|(name, script)| {
            let path = job.path(name);
            std::fs::write(&path, format!("{PY}\n{script}\n")).unwrap();
            path
        });
    let [(zero, zero_report), (one, one_report)] = two_nodes(&job, [&good, &bad]);
    let root = &one_report["failures"][one_report["root_cause"].as_u64().unwrap() as usize];
    assert_eq!((&root["rank"], &root["local_rank"], &root["node"]), (&3.into(), &1.into(), &1.into()));
    assert_eq!(root["class"], "import-error", "{}", one.stderr);
    assert_eq!(zero_report["outcome"], "failed");
    assert!(zero.stderr.contains("rank 3"), "{}", zero.stderr);
}

#[test]
fn both_nodes_report_a_segfault_on_the_second_node() {
    let job = Job::new();
    let worker = job.script(&format!("{SH}only 2\nkill -SEGV $$\n"));
    let [(zero, _), (one, one_report)] = two_nodes(&job, [&worker, &worker]);
    let root = &one_report["failures"][one_report["root_cause"].as_u64().unwrap() as usize];
    assert_eq!((&root["rank"], &root["class"]), (&2.into(), &"segfault".into()), "{}", one.stderr);
    assert!(zero.stderr.contains("rank 2"), "{}", zero.stderr);
}

#[test]
fn a_missing_library_is_named() {
    let job = Job::new();
    let compile = |arguments: &[&str]| {
        let mut cc = Command::new("cc");
        cc.args(arguments).current_dir(job.dir.path());
        cc.status().is_ok_and(|status| status.success())
    };
    std::fs::write(job.path("lib.c"), "int f(void) { return 0; }\n").unwrap();
    std::fs::write(job.path("main.c"), "int f(void);\nint main(void) { return f(); }\n").unwrap();
    if !compile(&["-shared", "-fPIC", "-o", "libgone.so", "lib.c"])
        || !compile(&["-o", "needs-it", "main.c", "-L.", "-lgone"])
    {
        skip("no C compiler");
        return;
    }
    std::fs::remove_file(job.path("libgone.so")).unwrap();
    let case = case("missing library", 0, "missing-library", "")
        .run(&["./needs-it"])
        .expect_text(&["libgone.so", "ldd"]);
    let ended = job.start(launcher(&job, &case)).wait();
    assert_eq!(mismatch(&case, &ended, &report(&job.path("report.json"))), None);
}

/// A memory cgroup (version 1); it is removed on drop.
struct Cgroup(PathBuf);

impl Cgroup {
    fn with_limit(name: &str, bytes: u64) -> std::io::Result<Self> {
        let path = Path::new("/sys/fs/cgroup/memory").join(format!("convoke-{name}-{}", std::process::id()));
        std::fs::create_dir(&path)?;
        // The value exists only after the folder was created, so that drop removes only this test's folder.
        let group = Self(path);
        std::fs::write(group.0.join("memory.limit_in_bytes"), bytes.to_string())?;
        // Without swap accounting this file does not exist; without swap it is not needed.
        let _ = std::fs::write(group.0.join("memory.memsw.limit_in_bytes"), bytes.to_string());
        Ok(group)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The last process of the cgroup may still be exiting.
        wait_until("the cgroup to be empty", || std::fs::remove_dir(&self.0).ok());
    }
}

#[test]
fn oom_killed_worker_is_reported_with_memory_numbers() {
    let cgroup = match Cgroup::with_limit("oom", 96 << 20) {
        Ok(cgroup) => cgroup,
        Err(error) => {
            let why = format!("no memory cgroup of version 1 can be made: {error}");
            skip(format!("out of memory in a cgroup: {why}"));
            return;
        }
    };
    let job = Job::new();
    let case = case(
        "out of memory",
        1,
        "out-of-memory",
        "py\nonly(1)\nx = bytearray(512 << 20)\nx[::4096] = b'x' * len(x[::4096])\n",
    )
    .expect_text(&["out of memory, likely: SIGKILL", "ended 1 process(es)", "limit 96 MiB"]);
    let launched = launcher(&job, &case);
    let mut command = job.command([""; 0]);
    let mut inside = Command::new("sh");
    inside.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(cgroup.0.join("cgroup.procs"));
    inside.arg(launched.get_program()).args(launched.get_args());
    for (name, value) in command.get_envs().chain(launched.get_envs()) {
        match value {
            Some(value) => inside.env(name, value),
            None => inside.env_remove(name),
        };
    }
    inside.current_dir(job.dir.path());
    command = inside;
    let ended = job.start(command).wait();
    assert_eq!(mismatch(&case, &ended, &report(&job.path("report.json"))), None);
}

#[test]
fn first_failure_stays_root_cause_after_guard_is_lost() {
    let job = Job::new();
    let worker = job.script(
        "[ $RANK = 1 ] && { while [ ! -e \"$JOB/up\" ]; do sleep 0.01; done; echo why >&2; exit 3; }\n\
         trap 'echo > \"$JOB/told\"' TERM\necho > \"$JOB/up\"\nwhile :; do sleep 0.01; done\n",
    );
    let mut command = job.command(["--nproc-per-node=2", "--report-file=r.json"]);
    command.arg(&worker);
    let launcher = job.start(command);
    job.wait_for_file("told");
    nix::sys::signal::kill(launcher.guard(), Signal::SIGKILL).unwrap();
    let ended = launcher.wait().expect_exit_code(1);
    let reported = report(&job.path("r.json"));
    let roles =
        |at: usize| (reported["failures"][at]["rank"].clone(), reported["failures"][at]["class"].clone());
    assert_eq!((&reported["outcome"], &reported["root_cause"]), (&"error".into(), &0.into()), "{reported:#}");
    assert_eq!(
        (roles(0), roles(1)),
        ((1.into(), "exit".into()), (0.into(), "stopped".into())),
        "{reported:#}"
    );
    for text in ["error: the guard process (pid ", "Root Cause", "    why\n"] {
        assert!(ended.stderr.contains(text), "{}", ended.stderr);
    }
}

#[test]
fn guard_lost_after_workers_exit_is_not_a_failure() {
    let job = Job::new();
    let port = free_port().to_string();
    let mut command = job.command(["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1"]);
    command.args(["--master-port", &port, "--report-file=r.json", "sh", "-c", "echo > \"$JOB/ran\""]);
    let first = job.start(command);
    let mut command = job.command(["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1"]);
    command.args(["--master-port", &port, "sh", "-c", "echo > \"$JOB/up\"; exec sleep 1000"]);
    let second = job.start(command);
    job.wait_for_file("ran");
    job.wait_for_file("up");
    let guard = first.guard();
    wait_until("the first node's worker to be reaped", || children(guard).is_empty().then_some(()));
    nix::sys::signal::kill(guard, Signal::SIGKILL).unwrap();
    let ended = first.wait().expect_exit_code(1);
    assert!(ended.stderr.contains("was killed by SIGKILL\n"), "{}", ended.stderr);
    let reported = report(&job.path("r.json"));
    assert_eq!(
        (&reported["outcome"], &reported["failures"]),
        (&"error".into(), &Value::Array(vec![])),
        "{reported:#}"
    );
    second.wait().expect_exit_code(1);
}

#[test]
fn successful_and_stopped_jobs_also_write_a_report() {
    let job = Job::new();
    let worker = job.script("exit 0\n");
    let run = |flag: &str| job.run([flag.as_ref(), worker.as_os_str()]).expect_exit_code(0);
    assert_eq!(run("--report-file=r.json").stderr, "");
    let reported = report(&job.path("r.json"));
    assert_eq!(
        (&reported["version"], &reported["outcome"], &reported["failures"]),
        (&1.into(), &"succeeded".into(), &Value::Array(vec![]))
    );
    let ended = run("--report-file=no/such/folder/r.json");
    assert!(
        ended.stderr.contains("warning: cannot write the report to no/such/folder/r.json: No such file"),
        "{}",
        ended.stderr
    );

    let worker = job.script("echo > \"$JOB/up\"\nexec sleep 1000\n");
    let mut command = job.command([""; 0]);
    command.env("PET_REPORT_FILE", "stopped.json").arg(&worker);
    let launcher = job.start(command);
    job.wait_for_file("up");
    launcher.signal(Signal::SIGTERM);
    launcher.wait().expect_exit_code(1);
    let reported = report(&job.path("stopped.json"));
    assert_eq!(
        (&reported["outcome"], &reported["message"]),
        (&"stopped".into(), &"stopped by SIGTERM".into())
    );
}

#[test]
fn restart_message_states_the_reason() {
    let job = Job::new();
    let worker = job.script("[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0\nkill -SEGV $$\n");
    let ended = job.run(["--max-restarts=1".as_ref(), worker.as_os_str()]).expect_exit_code(0);
    assert!(
        ended.stderr.contains("rank 0 (local_rank 0) was killed by SIGSEGV (segfault); restarting"),
        "{}",
        ended.stderr
    );
}

#[test]
fn stderr_passes_unchanged_and_capture_can_be_disabled() {
    let job = Job::new();
    // Two workers at once write 64 MiB with escape sequences, which the launcher must not change.
    let worker = job.script("yes \"rank $RANK \u{1b}[1m\" | head -c 33554432 >&2\n");
    let ended = job.run(["--nproc-per-node=2".as_ref(), worker.as_os_str()]).expect_exit_code(0);
    // `head` writes blocks that end within lines. A line of the other worker may come between two blocks.
    let count = |rank| ended.stderr.matches(&format!("rank {rank} \u{1b}[1m\n")).count();
    let whole = 33_554_432 / "rank 0 \u{1b}[1m\n".len();
    assert!(count(0) > whole - 1000 && count(1) > whole - 1000, "{} and {} of {whole}", count(0), count(1));
    let own = ended.stderr.lines().find(|line| line.contains("convoke: ")).map_or(0, |line| line.len() + 1);
    assert_eq!(ended.stderr.len(), 2 * 33_554_432 + own);

    let worker = job.script("readlink /proc/self/fd/2\n");
    let kind = |flag: &str| job.run([flag.as_ref(), worker.as_os_str()]).expect_exit_code(0).stdout;
    assert!(kind("--stderr-tail=1").starts_with("pipe:"));
    assert!(kind("--stderr-tail=0").ends_with(".err\n"));
    assert!(kind("--orphans=keep").ends_with(".err\n"));
}
