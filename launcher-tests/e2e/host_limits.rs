//! The launcher on unusual machines and with unusual programs: it runs them correctly, or refuses before the
//! first worker with a remedy.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use convoke_launcher_tests::harness::{Job, ProcessOutput};
use convoke_testkit::programs::user_program;
use convoke_testkit::{free_port, skip};

fn executable(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Builds a launcher command that starts after the shell commands `script`.
fn command_after(job: &Job, script: &str, arguments: &[&str]) -> Command {
    let script = format!("set -e\n{script}\nexec \"$@\"\n");
    job.wrapped_command(&["sh", "-c", &script, "sh"], arguments)
}

/// Runs `script` and then the launcher in a new namespace. Reports a skipped test and returns `None` if that
/// is impossible here.
fn run_in_namespace(job: &Job, namespace: &str, script: &str, arguments: &[&str]) -> Option<ProcessOutput> {
    let possible = Command::new("unshare").args([namespace, "true"]).output();
    if !possible.is_ok_and(|output| output.status.success()) {
        skip(format!("namespaces: unshare {namespace} is not possible"));
        return None;
    }
    let script = format!("set -e\n{script}\nexec \"$@\"\n");
    let command = job.wrapped_command(&["unshare", namespace, "sh", "-c", &script, "sh"], arguments);
    Some(job.start(command).wait())
}

#[test]
fn non_executable_programs_are_refused_with_reason_and_remedy() {
    let job = Job::new();
    let mut foreign = b"\x7fELF\x01\x01\x01".to_vec();
    foreign.resize(64, 0);
    // Machine type 22 is IBM S/390.
    foreign[18] = 22;
    executable(&job.path("foreign"), &foreign);
    executable(&job.path("windows"), b"#!/bin/sh\r\nexit 0\r\n");
    executable(&job.path("lost"), b"#!/no/such/interpreter -x\n");
    fs::write(job.path("plain"), "exit 0\n").unwrap();
    for (flags, why, remedy) in [
        (&["./foreign"][..], "a program for s390x, and this host is", "build it for this host"),
        (&["--no-python", "./foreign"], "a program for s390x, and this host is", "build it for this host"),
        (&["--no-python", "./windows"], "its interpreter is `/bin/sh\\r`", "dos2unix ./windows"),
        (&["./windows"], "its interpreter is `/bin/sh\\r`", "dos2unix ./windows"),
        (&["./lost"], "its #! line names /no/such/interpreter, which is not there", "install that"),
        (&["--no-python", "./plain"], "it has no permission to be executed", "chmod +x ./plain"),
        (
            &["--no-python", "foreign"],
            "it is in the current folder, and only looked for in PATH",
            "write ./foreign",
        ),
        (&["--no-python", "/"], "it is a folder", "name the program in it"),
    ] {
        let ended = job.run(flags).expect_exit_code(1);
        assert!(ended.stderr.contains(why) && ended.stderr.contains(remedy), "{flags:?}: {}", ended.stderr);
        assert!(ended.stderr.lines().count() <= 2, "{}", ended.stderr);
    }
}

#[test]
fn shell_script_needs_no_execute_permission() {
    let job = Job::new();
    fs::write(job.path("run.sh"), "#!/bin/sh -e\necho \"rank $RANK: $1\"\n").unwrap();
    let ended = job.run(["run.sh", "word"]).expect_exit_code(0);
    assert_eq!(ended.stdout, "rank 0: word\n");
}

#[test]
fn launcher_in_a_virtual_environment_uses_its_python() {
    let job = Job::new();
    let bin = job.path("venv/bin");
    fs::create_dir_all(&bin).unwrap();
    fs::write(job.path("venv/pyvenv.cfg"), "home = /usr/bin\n").unwrap();
    executable(&bin.join("python"), b"#!/bin/sh\necho \"of the environment: $*\"\n");
    symlink(user_program("convoke"), bin.join("torchrun")).unwrap();
    let ended =
        job.start(job.command_for_program(bin.join("torchrun"), ["train.py"])).wait().expect_exit_code(0);
    assert_eq!(ended.stdout, "of the environment: -u train.py\n");
    // The first command finds the program in PATH; the second uses an activated virtual environment.
    let mut named = job.command_for_program("torchrun", ["train.py"]);
    named.env("PATH", format!("{}:/usr/bin:/bin", bin.display()));
    let mut active = job.command(["train.py"]);
    active.env("VIRTUAL_ENV", job.path("venv"));
    for command in [named, active] {
        let ended = job.start(command).wait().expect_exit_code(0);
        assert_eq!(ended.stdout, "of the environment: -u train.py\n");
    }
}

#[test]
fn noexec_file_system_is_named() {
    let job = Job::new();
    let script = "mkdir disk\nmount -t tmpfs -o noexec tmpfs disk\n\
                 printf '#!/bin/sh\\nexit 0\\n' > disk/run\nchmod +x disk/run";
    let Some(ended) = run_in_namespace(&job, "-m", script, &["disk/run"]) else { return };
    let ended = ended.expect_exit_code(1);
    for part in ["mounted noexec", "findmnt -T disk/run", "--no-python /bin/sh disk/run"] {
        assert!(ended.stderr.contains(part), "{}", ended.stderr);
    }
}

#[test]
fn too_large_environment_is_reported_with_its_size() {
    let job = Job::new();
    // The kernel allows a quarter of the stack, 256 KiB, for arguments and variables. The loop finds the
    // largest environment with which the launcher starts. It is too large for a worker, which has more
    // variables.
    let most = (0..500).map(|step| 64_000 - step * 128).find_map(|bytes| {
        let mut command = command_after(&job, "ulimit -s 1024", &["--no-python", "true"]);
        for (name, bytes) in [("FIRST", 100_000), ("SECOND", 100_000), ("THIRD", bytes)] {
            command.env(name, "x".repeat(bytes));
        }
        let ended = job.start(command).wait();
        (ended.status.code() == Some(1)).then_some(ended)
    });
    let stderr = most.expect("a size with which the launcher starts").stderr;
    for part in [
        "Argument list too long",
        "its environment variables 2",
        "of which ",
        "unset variables that the workers do not need",
    ] {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
}

#[test]
fn launcher_raises_soft_limits_but_workers_keep_the_original() {
    let job = Job::new();
    let worker = job.script("ulimit -n > \"$JOB/limit.$RANK\"\n");
    let worker = worker.to_str().unwrap();
    let flags = ["--nproc-per-node=24", "--tee=3", "--log-dir=logs", worker];
    let mut command = command_after(&job, "ulimit -Sn 40", &flags);
    command.env("OMP_NUM_THREADS", "1");
    assert_eq!(job.start(command).wait().expect_exit_code(0).stderr, "");
    for rank in 0..24 {
        assert_eq!(fs::read_to_string(job.path(&format!("limit.{rank}"))).unwrap(), "40\n");
    }
    // A limit that the launcher may not raise is reported at once.
    let mut command = command_after(&job, "ulimit -n 40", &flags);
    command.env("OMP_NUM_THREADS", "1");
    let ended = job.start(command).wait().expect_exit_code(1);
    assert!(
        ended.stderr.starts_with("convoke: error: 24 workers need 152 open files, and 40 are allowed"),
        "{}",
        ended.stderr
    );
    assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
}

#[test]
fn log_stops_at_its_size_limit_and_job_continues() {
    let job = Job::new();
    let worker = job.script("seq 20000\n");
    let mut command =
        command_after(&job, "ulimit -f 16", &["--tee=1", "--log-dir=logs", worker.to_str().unwrap()]);
    command.env("OMP_NUM_THREADS", "1");
    let ended = job.start_with_stdout(command, Some(Stdio::null())).wait().expect_exit_code(0);
    assert!(ended.stderr.contains("warning: a file may have 8 KiB"), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("File too large") && ended.stderr.contains("the job continues"),
        "{}",
        ended.stderr
    );
}

/// A control group; it is removed on drop.
struct Cgroup(PathBuf);

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Creates a cgroup (version 1) of this controller. Reports a skipped test and returns `None` if that is
/// impossible here.
fn create_cgroup(controller: &str, files: &[(&str, &str)]) -> Option<Cgroup> {
    let path = format!("/sys/fs/cgroup/{controller}/convoke-test-{}", std::process::id());
    let made = fs::create_dir(&path).map(|()| Cgroup(path.into()));
    let written = made.and_then(|group| {
        files.iter().try_for_each(|(file, text)| fs::write(group.0.join(file), text)).map(|()| group)
    });
    written.inspect_err(|error| skip(format!("a control group of {controller}: {error}"))).ok()
}

#[test]
fn process_limit_is_reported_before_the_first_worker_starts() {
    let Some(group) = create_cgroup("pids", &[("pids.max", "9")]) else { return };
    let job = Job::new();
    let script = format!("echo $$ > {}", group.0.join("cgroup.procs").display());
    let ended =
        job.start(command_after(&job, &script, &["--nproc-per-node=8", "true"])).wait().expect_exit_code(1);
    let wanted = format!("8 workers need 12 more processes and threads, and {} allows 9", group.0.display());
    assert!(
        ended.stderr.contains(&wanted) && ended.stderr.contains("docker run --pids-limit"),
        "{}",
        ended.stderr
    );
}

#[test]
fn cpu_quota_limits_the_workers_of_a_node() {
    let files = [("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "100000")];
    let Some(group) = create_cgroup("cpu", &files) else { return };
    let job = Job::new();
    let script = format!("echo $$ > {}", group.0.join("cgroup.procs").display());
    let worker = "echo $WORLD_SIZE";
    let ended = job
        .start(command_after(&job, &script, &["--nproc-per-node=cpu", "sh", "-c", worker]))
        .wait()
        .expect_exit_code(0);
    assert_eq!(ended.stdout, "1\n");
}

#[test]
fn disabled_loopback_is_reported_at_once() {
    let port = free_port().to_string();
    let expected = "the loopback interface is down";
    let fixed = ["--nnodes=2", "--master-addr=127.0.0.1", "--master-port", &port, "true"];
    let elastic = ["--nnodes=1", "--rdzv-backend=c10d", "true"];
    for (flags, code) in [(&["true"][..], 0), (&fixed, 1), (&elastic, 1)] {
        let job = Job::new();
        let start = Instant::now();
        let Some(ended) = run_in_namespace(&job, "-n", "", flags) else { return };
        let ended = ended.expect_exit_code(code);
        assert!(
            ended.stderr.contains(expected) && ended.stderr.contains("ip link set lo up"),
            "{}",
            ended.stderr
        );
        assert!(start.elapsed() < Duration::from_secs(20), "{flags:?} took {:?}", start.elapsed());
    }
}

#[test]
fn missing_route_to_own_address_is_reported_at_once() {
    let job = Job::new();
    // The routing table of this host declares its own address unreachable.
    let script = "ip link set lo up\nip link add d0 type dummy 2>/dev/null || ip link add d0 type veth peer name d1\n\
                 ip addr add 10.9.9.9/24 dev d0\nip link set d0 up\n\
                 ip route del local 10.9.9.9 dev d0 table local\nip route add unreachable 10.9.9.9 table local";
    let Some(possible) = run_in_namespace(&job, "-n", script, &["--version"]) else { return };
    if possible.status.code() != Some(0) {
        return skip(format!("an address without a route: {}", possible.stderr.trim()));
    }
    let expected = "this host does not reach its own address 10.9.9.9";
    let static_node = |nodes| [nodes, "--master-addr=10.9.9.9", "--master-port=29500", "true"];
    for (flags, code) in [
        (&static_node("--nnodes=2")[..], 1),
        (&static_node("--nnodes=1"), 0),
        (&["--local-addr=10.9.9.9", "true"], 0),
    ] {
        let start = Instant::now();
        let Some(ended) = run_in_namespace(&job, "-n", script, flags) else { return };
        let ended = ended.expect_exit_code(code);
        assert_eq!(ended.stderr.matches(expected).count(), 1, "{flags:?}: {}", ended.stderr);
        assert!(start.elapsed() < Duration::from_secs(20), "{flags:?} took {:?}", start.elapsed());
    }
}
