//! The launcher in pods: names that come late, the root cause where Kubernetes shows it, exit codes for a
//! podFailurePolicy, and containers without the usual comforts.

use std::fs;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::kubernetes_cluster::{MAX_MESSAGE_BYTES, start_name_server};
use convoke_launcher_tests::harness::{Job, Launcher, ProcessOutput};
use convoke_launcher_tests::hosts::{Hosts, missing_requirement};
use convoke_launcher_tests::{path_argument, worker_command};
use convoke_testkit::programs::user_program;
use convoke_testkit::{free_port, is_full_test_run, skip, wait_until};

/// Starts pod `index` of a job with 2 pods on host `host`, with a name server on h0. `words` are the first of its
/// command.
fn start_pod(hosts: &Hosts, job: &Job, host: usize, index: usize, words: &[&str]) -> Launcher {
    let files = hosts.state_dir().display();
    let pod = format!(
        "hostname train-{index}; \
         printf '127.0.0.1 localhost\\n10.77.0.{host} train-{index}.train train-{index}\\n' > {files}/hosts.{index}; \
         printf 'nameserver 10.77.0.254\\noptions timeout:1 attempts:1\\n' > {files}/resolv.{index}; \
         mount --bind {files}/hosts.{index} /etc/hosts; mount --bind {files}/resolv.{index} /etc/resolv.conf; exec \"$@\""
    );
    let script = Hosts::script().display().to_string();
    let host = host.to_string();
    let wrapper = [script.as_str(), "exec", &host, "unshare", "--uts", "--mount", "sh", "-c", &pod, "sh"];
    let mut command = job.wrapped_command(&wrapper, [words, &["--nnodes=2"]].concat());
    command.args(worker_command("group")).env("TESTBED_DIR", hosts.state_dir());
    command.env("KUBERNETES_SERVICE_HOST", "10.96.0.1").env("JOB_COMPLETION_INDEX", index.to_string());
    job.start(command)
}

#[test]
fn pods_meet_although_their_names_come_late_flap_and_move() {
    let up = Hosts::up(3).inspect_err(|why| skip(format!("pods of an indexed job: {why}")));
    let Ok(hosts) = up else { return };
    let job = Job::new();
    let table = hosts.state_dir().join("table");
    let table_is = |answer: &str| {
        let new = hosts.state_dir().join("table.new");
        fs::write(&new, format!("train-0.train {answer}\n")).unwrap();
        fs::rename(new, &table).unwrap();
    };
    table_is("NXDOMAIN");
    let dns = start_name_server(&hosts, &job, &table);

    let (first, second) = (start_pod(&hosts, &job, 1, 0, &[]), start_pod(&hosts, &job, 2, 1, &[]));
    wait_until("node 1 to say why it waits", || {
        second.stderr().contains("waiting for node 0 at train-0.train:29500: cannot look up").then_some(())
    });
    // The pause of a cluster's name server after a pod has started is 30 s.
    let unknown = Duration::from_secs(if is_full_test_run() { 35 } else { 2 });
    let began = Instant::now();
    wait_until("the name server to learn the name", || (began.elapsed() > unknown).then_some(()));
    // No pod is at the first address any more, and one query fails between.
    for answer in ["10.77.0.3", "SERVFAIL", "10.77.0.1"] {
        table_is(answer);
        let since = Instant::now();
        wait_until("some look-ups", || (since.elapsed() > Duration::from_secs(1)).then_some(()));
    }
    for ended in [first.wait(), second.wait()] {
        let ended = ended.expect_exit_code(0);
        assert!(ended.stdout.contains(" of 2, 0 of 1 here, sum 3"), "{}{}", ended.stdout, ended.stderr);
        let waits = ended.stderr.lines().filter(|line| line.contains("waiting for node 0")).count();
        assert!(waits < 12, "a line for each change or 10 s:\n{}", ended.stderr);
    }
    drop(dns);
}

/// An init container checks the hosts before the job. Its pods come late, and their names later.
#[test]
fn check_in_an_init_container_waits_for_late_pods_and_shows_problems() {
    let up = Hosts::up(2).inspect_err(|why| skip(format!("checks in init containers: {why}")));
    let Ok(hosts) = up else { return };
    let job = Job::new();
    let table = hosts.state_dir().join("table");
    fs::write(&table, "train-0.train NXDOMAIN\n").unwrap();
    let dns = start_name_server(&hosts, &job, &table);
    let log = format!("--termination-log={}", job.path("term").display());
    let second = start_pod(&hosts, &job, 2, 1, &["check", &log]);
    wait_until("pod 1 to wait for the name of pod 0", || {
        second.stderr().contains("waiting for node 0 at train-0.train:29500").then_some(())
    });
    let _ = hosts
        .run_script(["exec", "1", "mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", "/dev/shm"])
        .unwrap();
    let first = start_pod(&hosts, &job, 1, 0, &["check"]);
    wait_until("pod 0 to wait for pod 1", || {
        first.stderr().contains("1 of 2 nodes have come to the check").then_some(())
    });
    fs::write(&table, "train-0.train 10.77.0.1\n").unwrap();
    for ended in [first.wait(), second.wait()] {
        let ended = ended.expect_exit_code(1);
        assert!(
            ended.stdout.contains("FAIL train-0: /dev/shm has 20 MiB free"),
            "{}{}",
            ended.stdout,
            ended.stderr
        );
    }
    let shown = fs::read_to_string(job.path("term")).unwrap();
    assert!(shown.starts_with("FAIL train-0: /dev/shm has 20 MiB free"), "{shown}");
    drop(dns);
}

/// Starts nodes 0 to 2 of a static job on this host, each with its termination log.
fn start_three(job: &Job, flags: &[&str], worker: &str) -> [Launcher; 3] {
    let (port, script) = (free_port().to_string(), job.script(worker));
    [0, 1, 2].map(|node| {
        let mut command = job.command(["--nnodes=3", "--master-addr=127.0.0.1", "--master-port", &port]);
        command.arg(format!("--node-rank={node}")).arg("--exit-codes=scheduler").args(flags);
        command.arg("--termination-log").arg(job.path(&format!("term.{node}"))).arg(&script);
        job.start(command)
    })
}

fn termination_logs(job: &Job) -> [String; 3] {
    [0, 1, 2].map(|node| fs::read_to_string(job.path(&format!("term.{node}"))).unwrap_or_default())
}

fn codes(ended: [ProcessOutput; 3]) -> [Option<i32>; 3] {
    ended.map(|ended| ended.status.code())
}

#[test]
fn every_pod_shows_one_root_cause_in_three_kib() {
    let job = Job::new();
    // A long traceback with letters of several bytes.
    let worker = r#"
if [ $RANK = 1 ]; then
  echo 'Traceback (most recent call last):' >&2
  i=0; while [ $i -lt 300 ]; do echo "  File \"/a/träin.py\", line $i, in schrïtt_with_a_rather_long_name_ü" >&2; i=$((i + 1)); done
  echo "RuntimeError: CUDA out of memory $(head -c 5000 /dev/zero | tr '\0' x)" >&2
  exit 1
fi
exec sleep 1000
"#;
    assert_eq!(codes(start_three(&job, &[], worker).map(Launcher::wait)), [Some(1); 3]);
    let texts = termination_logs(&job);
    assert!(texts[0].starts_with("rank 1 on node 1 ("), "{}", texts[0]);
    assert!(texts[0].contains("RuntimeError: CUDA out of memory"), "{}", texts[0]);
    assert!(texts[0].len() <= MAX_MESSAGE_BYTES, "{} bytes", texts[0].len());
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:#?}");
}

#[test]
fn exit_code_says_whether_another_start_may_help() {
    let job = Job::new();
    let imports = "[ $RANK = 2 ] && { echo \"ModuleNotFoundError: No module named 'torhc'\" >&2; exit 1; }\nexec sleep 1000\n";
    assert_eq!(codes(start_three(&job, &[], imports).map(Launcher::wait)), [Some(78); 3]);
    assert!(termination_logs(&job).iter().all(|text| text.contains("import-error")));

    let job = Job::new();
    let same = ["--max-restarts=9", "--restart-stop-after-same=2"];
    let mut command = job.command(["--exit-codes=scheduler", "--no-python"]);
    let ended = job
        .start({
            command.args(same).args(["sh", "-c", "exit 3"]);
            command
        })
        .wait();
    assert_eq!(ended.status.code(), Some(78), "no progress: {}", ended.stderr);
    let wrong = job.run(["--exit-codes=scheduler", "--nproc-per-node=0", "x"]);
    assert_eq!(wrong.status.code(), Some(78), "{}", wrong.stderr);

    // A signal to one node, then a node that is killed.
    for (signal, who) in [(Signal::SIGTERM, "was stopped by SIGTERM"), (Signal::SIGKILL, "is lost")] {
        let job = Job::new();
        let nodes = start_three(&job, &[], "echo up > \"$JOB/up.$RANK\"\nexec sleep 1000\n");
        (0..3).for_each(|rank| drop(job.wait_for_file(&format!("up.{rank}"))));
        nodes[1].signal(signal);
        let [first, second, third] = nodes.map(Launcher::wait);
        assert_eq!([first.status.code(), third.status.code()], [Some(75); 2], "{}", first.stderr);
        let [one, own, three] = termination_logs(&job);
        assert!(one.contains(who) && one == three, "{one}{three}");
        if signal == Signal::SIGTERM {
            assert_eq!((second.status.code(), own), (Some(75), one));
        }
    }
}

#[test]
fn container_without_writable_root_user_name_and_shell_is_enough() {
    if let Some(why) = missing_requirement(&["unshare", "setpriv"]) {
        skip(format!("a container with a read-only root: {why}"));
        return;
    }
    let job = Job::new();
    // Write permission is missing everywhere but in the two files that Kubernetes makes.
    let read_only =
        "mount -o remount,bind,ro / && exec setpriv --reuid=54321 --regid=54321 --clear-groups \"$@\"";
    let wrapper = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
        read_only,
        "sh",
    ];
    let program = path_argument(user_program("convoke"));
    let run = |worker: &str| {
        let mut command = job.command_for_program(wrapper[0], &wrapper[1..]);
        command.args([
            &program,
            "--standalone",
            "--nproc-per-node=2",
            "--no-python",
            "/bin/sh",
            "-c",
            worker,
        ]);
        command.env_remove("HOME").env_remove("USER");
        job.start(command).wait()
    };
    let ended = run("echo uid $(id -u) rank $RANK");
    if ended.stderr.contains("mount: ") {
        skip(format!("a container with a read-only root: {}", ended.stderr.trim()));
        return;
    }
    let ended = ended.expect_exit_code(0);
    let mut lines: Vec<_> = ended.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["uid 54321 rank 0", "uid 54321 rank 1"], "{}", ended.stderr);
    let failed = run("exit 3").expect_exit_code(1);
    assert!(failed.stderr.contains("exitcode  : 3"), "{}", failed.stderr);
}
