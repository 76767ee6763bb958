//! The output that users see: docs/reference/screens.md contains the output of this test.
//!
//! Numbers, host and paths differ from run to run, so the test ignores them. After an intended change,
//! CONVOKE_WRITE_SCREENS=1 rewrites the document.

use std::fmt::Write;
use std::fs;
use std::process::Command;

use convoke_launcher_tests::harness::{Job, Launcher, ProcessOutput};
use convoke_launcher_tests::worker_command;
use convoke_testkit::programs::{repository_root, user_program};
use convoke_testkit::{free_port, wait_until};
use nix::sys::signal::Signal;

const PAGE_HEADER: &str = "# Screens
This page shows the output of `convoke` for successful and failed jobs. A test makes these screens and compares them
with this page, except numbers, host names and paths. [The command line](cli.md#output) says where output goes. The
[failure model](failure-model.md#causes) lists the causes.
";

#[derive(Clone)]
struct Screen {
    title: &'static str,
    /// The command line that the user typed.
    command_line: &'static str,
    text: String,
}

fn screen(
    title: &'static str,
    command_line: &'static str,
    job: &Job,
    ended: &ProcessOutput,
    code: i32,
) -> Screen {
    assert_eq!(ended.status.code(), Some(code), "{title}: {}", ended.stderr);
    let text = format!("{}{}", ended.stderr, ended.stdout);
    Screen { title, command_line, text: without_host_names(&text, job) }
}

/// Replaces the names and paths of this machine.
fn without_host_names(text: &str, job: &Job) -> String {
    let [worker, _] = worker_command("plain");
    let host = nix::unistd::gethostname().unwrap().into_string().unwrap();
    let me = std::env::current_exe().unwrap().file_name().unwrap().to_string_lossy().into_owned();
    // /proc keeps 15 bytes of a process name.
    let me = &me[..me.len().min(15)];
    let folder = job.path("");
    let text =
        text.replace(folder.to_str().unwrap(), "/job/").replace(&worker, "worker").replace(me, "jupyter");
    let words = text.split_inclusive(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '.');
    words
        .map(|word| {
            if word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()) == host {
                word.replace(&host, "node1")
            } else {
                word.to_owned()
            }
        })
        .collect()
}

/// Returns the text without the parts that may differ: numbers, lists of numbers, and lengths of horizontal
/// lines.
fn without_numbers(text: &str) -> String {
    let mut shape = String::new();
    // Some versions of Python do not mark the position in a line.
    let is_mark = |line: &&str| !line.trim().is_empty() && line.trim().chars().all(|c| c == '^' || c == '~');
    for line in text.lines().filter(|line| !is_mark(line)) {
        // The name of a run contains random characters.
        let mut rest = line.find("/job/logs/").map_or(line, |at| &line[..at]);
        if line.len() > 3 && line.chars().all(|c| c == '=' || c == '-') {
            rest = &line[..3];
        }
        while let Some(at) = rest.find(|c: char| c.is_ascii_digit()) {
            let number = rest[at..]
                .find(|c: char| !c.is_ascii_digit() && !",-.".contains(c))
                .unwrap_or(rest.len() - at);
            shape.push_str(&rest[..at]);
            shape.push('#');
            rest = &rest[at + number..];
        }
        shape.push_str(rest);
        shape.push('\n');
    }
    // Runs may differ in the number of ranks and in the unit of time.
    shape.replace("ranks #", "rank #").replace("# ms", "# s")
}

fn python(job: &Job, name: &str, text: &str) -> String {
    let path = job.path(name);
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn with_workers() -> Vec<Screen> {
    let mut screens = Vec::new();
    let mut add = |title, command_line, arguments: &[&str], script: &str, code| {
        let job = Job::new();
        let train = python(&job, "train.py", script);
        let mut command = job.command(arguments);
        command.arg(&train).env("HERE", job.path(""));
        screens.push(screen(title, command_line, &job, &job.start(command).wait(), code));
    };
    add(
        "A good run",
        "convoke --standalone --nproc-per-node=2 train.py",
        &["--standalone", "--nproc-per-node=2"],
        // One write: with PYTHONUNBUFFERED=1, print writes the end of the line separately.
        "print('loss 0.25\\n', end='')\n",
        0,
    );
    add(
        "An exception on one rank",
        "convoke --nproc-per-node=4 train.py",
        &["--nproc-per-node=4"],
        "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('the learning rate is negative')\ntime.sleep(100)\n",
        1,
    );
    add(
        "The same exception on all ranks",
        "convoke --nproc-per-node=64 --redirects=2 train.py",
        &["--nproc-per-node=64", "--redirects=2", "--log-dir=logs", "--monitor-interval=60"],
        "import os, time\nhere = os.environ['HERE']\nopen(f\"{here}/up.{os.environ['RANK']}\", 'w').close()\n\
         while sum(name.startswith('up.') for name in os.listdir(here)) < 64: time.sleep(0.05)\nimport transformer_engine\n",
        1,
    );
    add(
        "Out of memory",
        "convoke train.py",
        &[],
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\nbatch = bytearray(2 << 30)\n",
        1,
    );
    add(
        "A restart loop",
        "convoke --max-restarts=100 --restart-stop-after-same=3 train.py",
        &["--max-restarts=100", "--restart-stop-after-same=3"],
        "raise SystemExit(3)\n",
        1,
    );
    screens
}

fn rust_workers() -> Vec<Screen> {
    let mut screens = Vec::new();
    for (how, title) in [("error", "An error in Rust"), ("panic", "A panic in Rust")] {
        let job = Job::new();
        let mut command = job.command(["--nproc-per-node=1"]);
        command.args(worker_command("exit")).args([how, "0", "reduce"]);
        screens.push(screen(title, "convoke ./worker", &job, &job.start(command).wait(), 1));
    }
    screens
}

fn before_the_first_worker() -> Vec<Screen> {
    let job = Job::new();
    let ended = job.run(["--nproc-pernode=2", "train.py"]);
    let flag = screen("A wrong flag", "convoke --nproc-pernode=2 train.py", &job, &ended, 2);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let ended = job.run(["--master-port", &port, "true"]);
    let port = screen("A port in use", "convoke --master-port=29500 train.py", &job, &ended, 1);
    let words = ["sh", "-c", "ulimit -n 40; exec \"$@\"", "sh"];
    let command = job.wrapped_command(&words, ["--nproc-per-node=24", "--tee=3", "--log-dir=logs", "true"]);
    let ended = job.start(command).wait();
    let files = screen(
        "Too few open files",
        "convoke --nproc-per-node=24 --tee=3 --log-dir=logs train.py",
        &job,
        &ended,
        1,
    );
    vec![flag, port, files]
}

fn while_running() -> Vec<Screen> {
    let job = Job::new();
    let worker = job.script("echo 1 > \"$JOB/up\"\nexec sleep 1000\n");
    let launcher = job.start(job.command([&worker]));
    job.wait_for_file("up");
    launcher.signal(Signal::SIGINT);
    let stopped = screen("Ctrl-C", "convoke train.py", &job, &launcher.wait(), 1);

    let job = Job::new();
    let mut command = job.command(["--nproc-per-node=4", "--log-dir=logs"]);
    command.args(worker_command("comm")).arg("late").arg(job.dir.path());
    let launcher = job.start(command);
    wait_until("three ranks to wait for the fourth", || {
        let seen = Command::new(user_program("convoke-flight")).arg(job.path("logs")).output().unwrap();
        let seen = String::from_utf8_lossy(&seen.stdout).into_owned();
        (seen.contains("ranks 0,1,3 wait in seq 1 ") && seen.contains(" for rank 2")).then_some(())
    });
    launcher.signal(Signal::SIGINT);
    let hang = screen(
        "A hang, ended by Ctrl-C",
        "convoke --nproc-per-node=4 --log-dir=logs ./worker",
        &job,
        &launcher.wait(),
        1,
    );

    let job = Job::new();
    let worker = job.script("echo 1 > \"$JOB/up.$RANK\"\nexec sleep 1000\n");
    let port = free_port().to_string();
    let node = |rank: &str| -> Launcher {
        let flags = ["--nnodes=2", "--node-rank", rank, "--master-addr=127.0.0.1", "--master-port", &port];
        let mut command = job.command(flags);
        command.arg(&worker);
        job.start(command)
    };
    let nodes = [node("0"), node("1")];
    ["up.0", "up.1"].iter().for_each(|name| _ = job.wait_for_file(name));
    nodes[1].signal(Signal::SIGKILL);
    let [first, second] = nodes;
    let lost = screen(
        "A node is lost",
        "convoke --nnodes=2 --node-rank=0 --master-addr=node1 train.py",
        &job,
        &first.wait(),
        1,
    );
    drop(second.wait());
    vec![stopped, hang, lost]
}

#[test]
fn screens_match_the_docs() {
    let screens = [with_workers(), rust_workers(), before_the_first_worker(), while_running()].concat();
    let mut page = PAGE_HEADER.to_owned();
    for Screen { title, command_line, text } in &screens {
        let _ = write!(page, "\n## {title}\n```text\n$ {command_line}\n{}\n```\n", text.trim_matches('\n'));
    }
    let path = repository_root().join("docs/reference/screens.md");
    if std::env::var_os("CONVOKE_WRITE_SCREENS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let docs = fs::read_to_string(&path).unwrap();
    let (docs, seen) = (without_numbers(&docs), without_numbers(&page));
    if let Some((docs, seen)) = docs.lines().zip(seen.lines()).find(|(docs, seen)| docs != seen) {
        panic!("docs/reference/screens.md shows\n  {docs}\nthe screen is\n  {seen}\nof the page\n{page}");
    }
    assert_eq!(docs.lines().count(), seen.lines().count());
    assert!(screens.iter().all(|screen| screen.text.lines().count() <= 50));
}
