//! Standalone jobs are independent of each other.

use std::collections::BTreeSet;
use std::process::Command;

use convoke_launcher_tests::harness::Job;
use convoke_launcher_tests::worker_command;
use convoke_testkit::programs::user_program;
use convoke_testkit::wait_until;

#[test]
fn fifty_concurrent_jobs_succeed_on_separate_ports() {
    const JOBS: usize = 50;
    const WORKERS: usize = 2;
    let job = Job::new();
    std::fs::create_dir(job.path("up")).unwrap();
    let mut launchers: Vec<_> = (0..JOBS)
        .map(|_| {
            let mut command = job.command(["--standalone", &format!("--nproc-per-node={WORKERS}")]);
            command.args(worker_command("plain")).arg("connect").arg(job.path("up"));
            job.start(command)
        })
        .collect();
    // A worker that is connected to its master writes a file PORT.RANK. It stays connected until all workers
    // are.
    let names = wait_until("all workers to be connected", || {
        for launcher in &mut launchers {
            assert_eq!(launcher.child.try_wait().unwrap(), None, "{}", launcher.stderr());
        }
        let files = std::fs::read_dir(job.path("up")).unwrap();
        let names: Vec<_> =
            files.map(|file| file.unwrap().file_name().to_string_lossy().into_owned()).collect();
        (names.len() >= JOBS * WORKERS).then_some(names)
    });
    let ports: BTreeSet<_> = names.iter().filter_map(|name| name.split('.').next()).collect();
    assert_eq!(ports.len(), JOBS, "{names:?}");
    std::fs::write(job.path("up").join("go"), "").unwrap();
    for launcher in launchers {
        assert_eq!(launcher.wait().expect_exit_code(0).stderr, "");
    }
}

#[test]
fn successful_job_prints_nothing_and_leaves_no_folder() {
    let job = Job::new();
    let (worker, folder) = (job.script("echo done\n"), job.path("temporary"));
    std::fs::create_dir(&folder).unwrap();
    let mut command = job.command(["--standalone", "--nproc-per-node=2"]);
    command.arg(&worker).env("TMPDIR", &folder);
    let ended = job.start(command).wait().expect_exit_code(0);
    assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("done\ndone\n", ""));
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    // The launcher must not delete the output of the workers.
    let mut command = job.command(["--standalone", "--redirects=3"]);
    command.arg(&worker).env("TMPDIR", &folder);
    job.start(command).wait().expect_exit_code(0);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
}

#[test]
fn launcher_needs_no_library_but_the_c_library() {
    let launcher = user_program("convoke");
    let listed = Command::new("ldd").arg(&launcher).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let names: Vec<&str> = listed.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(names.contains(&"libc.so.6"), "{listed}");
    let is_known =
        |name: &&str| name.starts_with("linux-vdso") || name.contains("/ld-linux") || *name == "libc.so.6";
    assert!(names.iter().all(is_known), "{listed}");
}
