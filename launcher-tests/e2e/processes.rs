//! Processes that workers leave behind, signals, and programs that cannot be started.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use convoke_launcher_tests::harness::Job;
use convoke_testkit::wait_until;

#[test]
fn processes_outliving_a_successful_worker_are_stopped_and_named() {
    let job = Job::new();
    let worker = job.script("setsid --fork sleep 1000\n");
    let ended = job.run(["--no-python".as_ref(), worker.as_os_str()]).expect_exit_code(0);
    assert!(
        ended.stderr.contains("stopped processes that outlived their workers: sleep (pid "),
        "{}",
        ended.stderr
    );
    assert_eq!(job.processes(), [0; 0]);
}

#[test]
fn keep_orphans_flag_keeps_orphans_running() {
    let job = Job::new();
    let worker = job.script("setsid --fork sleep 1000\n");
    let ended = job.run(["--orphans=keep".as_ref(), worker.as_os_str()]).expect_exit_code(0);
    assert_eq!(ended.stderr, "");
    // `setsid --fork` itself may not have exited yet.
    wait_until("the orphan alone to live on", || (job.processes().len() == 1).then_some(()));
}

#[test]
fn each_worker_leads_a_process_group_without_a_terminal() {
    let cpus = std::thread::available_parallelism().unwrap().get();
    for workers in [1, cpus + 1] {
        let job = Job::new();
        // The worker prints its pid, process group, session and terminal.
        let worker = job.script("cut -d ' ' -f 1,5-7 /proc/$$/stat > \"$JOB/stat.$RANK\"\n");
        let arguments =
            [format!("--nproc-per-node={workers}"), "--no-python".into(), worker.display().to_string()];
        job.run(arguments).expect_exit_code(0);
        for rank in 0..workers {
            let stat = std::fs::read_to_string(job.path(&format!("stat.{rank}"))).unwrap();
            let words: Vec<&str> = stat.split_whitespace().collect();
            let [pid, group, session, terminal] = words[..] else { panic!("{stat}") };
            assert_eq!((group, terminal), (pid, "0"), "{stat}");
            assert!(workers > cpus || session == pid, "{stat}");
        }
    }
}

#[test]
fn leftover_of_a_failed_attempt_ends_before_the_next_attempt() {
    let job = Job::new();
    let worker = job.script(
        r#"
if [ "$TORCHELASTIC_RESTART_COUNT" = 0 ]; then
    setsid --fork sh -c 'echo $$ > "$JOB/daemon.partial"; mv "$JOB/daemon.partial" "$JOB/daemon"; sleep 1000'
    while [ ! -e "$JOB/daemon" ]; do sleep 0.01; done
    exit 1
fi
kill -0 $(cat "$JOB/daemon") 2>/dev/null && exit 1
exit 0
"#,
    );
    job.run(["--max-restarts=1".as_ref(), worker.as_os_str()]).expect_exit_code(0);
}

#[test]
fn guard_ignores_scheduler_signals_sent_to_every_process() {
    let job = Job::new();
    let worker = job.script("trap 'echo got > \"$JOB/got.$RANK\"; exit 0' TERM\necho $PPID > \"$JOB/up.$RANK\"\nwhile :; do sleep 0.01; done\n");
    let launcher = job.start({
        let mut command = job.command(["--nproc-per-node=2"]);
        command.arg(&worker);
        command
    });
    let guard: i32 = job.wait_for_file("up.0").trim().parse().unwrap();
    job.wait_for_file("up.1");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(guard), Signal::SIGTERM).unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(guard), Signal::SIGINT).unwrap();
    launcher.signal(Signal::SIGTERM);
    launcher.wait().expect_exit_code(1);
    job.wait_for_file("got.0");
    job.wait_for_file("got.1");
}

#[test]
fn workers_receive_signals_that_the_launcher_inherited_as_ignored() {
    for signal in [Signal::SIGINT, Signal::SIGQUIT] {
        let job = Job::new();
        // A shell without job control starts background commands with SIGINT and SIGQUIT ignored.
        let through = ["sh", "-c", "trap '' INT QUIT; exec \"$@\"", "sh"];
        let worker = "echo > \"$JOB/up.$RANK\"; exec sleep 1000";
        let handled = "--signals-to-handle=SIGINT,SIGQUIT";
        let arguments = ["--nproc-per-node=2", handled, "sh", "-c", worker];
        let launcher = job.start(job.wrapped_command(&through, arguments));
        job.wait_for_file("up.0");
        job.wait_for_file("up.1");
        let start = Instant::now();
        launcher.signal(signal);
        launcher.wait().expect_exit_code(1);
        assert!(start.elapsed() < Duration::from_secs(10), "{signal} took {:?}", start.elapsed());
    }
}

#[test]
fn unexecutable_program_is_named() {
    let job = Job::new();
    std::fs::write(job.path("no-program"), "x").unwrap();
    for (program, what) in [("/no/such/program", "No such file"), ("./no-program", "Permission denied")] {
        let ended =
            job.run(["--no-python", "--nproc-per-node=2", "--max-restarts=3", program]).expect_exit_code(1);
        let expected = format!("could not be started: {program}: {what}");
        assert!(ended.stderr.contains(&expected), "{}", ended.stderr);
        assert_eq!(
            ended.stderr.matches("could not be started").count(),
            1,
            "once, and no restart: {}",
            ended.stderr
        );
    }
}

#[test]
fn stopped_worker_is_also_ended() {
    let job = Job::new();
    let worker = job.script(
        "echo > \"$JOB/up.$RANK\"\nif [ $RANK = 0 ]; then kill -STOP $$; fi\nwhile :; do sleep 0.01; done\n",
    );
    let launcher = job.start({
        let mut command = job.command(["--nproc-per-node=2"]);
        command.arg(&worker);
        command
    });
    job.wait_for_file("up.0");
    job.wait_for_file("up.1");
    launcher.signal(Signal::SIGTERM);
    launcher.wait().expect_exit_code(1);
    assert_eq!(job.processes(), [0; 0]);
}

#[test]
fn launcher_runs_on_kernels_without_pidfd() {
    let job = Job::new();
    let worker = job.script("[ $TORCHELASTIC_RESTART_COUNT = 1 ]\n");
    let mut command = job.command(["--nproc-per-node=3", "--max-restarts=1"]);
    command.arg(&worker).env("CONVOKE_NO_PIDFD", "1");
    job.start(command).wait().expect_exit_code(0);
}
