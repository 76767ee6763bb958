//! GPUs, with simulated NVIDIA libraries.

use std::process::Command;
use std::time::{Duration, Instant};

use convoke_launcher_tests::harness::{Job, children};
use convoke_launcher_tests::path_argument;
use convoke_testkit::gpu::libraries;
use convoke_testkit::programs::user_program;
use convoke_testkit::{skip, wait_until};
use nix::sys::signal::Signal;

/// Time within which the survivors of a death must end.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Builds a launcher command on a node with `count` GPUs.
fn command_on_gpus(job: &Job, count: usize, arguments: &[&str]) -> Command {
    let mut command = job.command(arguments);
    set_simulated_gpus(job, &mut command, count);
    command
}

fn set_simulated_gpus(job: &Job, command: &mut Command, count: usize) {
    command.env("LD_LIBRARY_PATH", libraries()).env("SIMULATED_GPUS", count.to_string());
    command
        .env("SIMULATED_NCCL_DIR", job.path("tmp"))
        .env("OMP_NUM_THREADS", "1")
        .env_remove("CUDA_VISIBLE_DEVICES");
}

/// Returns the GPUs that the workers see, one sorted line for each worker.
fn visible_gpus(count: usize, flags: &[&str], variables: &[(&str, &str)]) -> Vec<String> {
    let job = Job::new();
    let script = job.script("echo \"$LOCAL_RANK sees ${CUDA_VISIBLE_DEVICES-all}\"\n");
    let mut command = command_on_gpus(&job, count, flags);
    command.arg(script).envs(variables.iter().copied());
    let ended = job.start(command).wait().expect_exit_code(0);
    let mut lines: Vec<String> = ended.stdout.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// Returns the launcher's error for invalid flags.
fn flag_error(count: usize, flags: &[&str], variables: &[(&str, &str)]) -> String {
    let job = Job::new();
    let mut command = command_on_gpus(&job, count, flags);
    command.arg("true").envs(variables.iter().copied());
    job.start(command).wait().expect_exit_code(1).stderr
}

#[test]
fn each_worker_sees_its_own_gpu() {
    let gpus = ["--nproc-per-node=gpu", "--gpu-bind"];
    assert_eq!(visible_gpus(3, &gpus, &[]), ["0 sees 0", "1 sees 1", "2 sees 2"]);
    assert_eq!(visible_gpus(2, &["--nproc-per-node=gpu"], &[]), ["0 sees all", "1 sees all"]);
    assert_eq!(visible_gpus(4, &gpus, &[("CUDA_VISIBLE_DEVICES", "3,1")]), ["0 sees 3", "1 sees 1"]);
    assert_eq!(
        visible_gpus(4, &["--nproc-per-node=gpu", "--gpus-per-worker=2"], &[]),
        ["0 sees 0,1", "1 sees 2,3"]
    );
    assert_eq!(
        visible_gpus(5, &["--nproc-per-node=auto", "--gpus-per-worker=2"], &[]),
        ["0 sees 0,1", "1 sees 2,3"]
    );
    assert_eq!(visible_gpus(4, &["--nproc-per-node=1", "--gpus-per-worker=3"], &[]), ["0 sees 0,1,2"]);
}

#[test]
fn mig_instances_are_assigned_by_name() {
    let instance = |number: usize| format!("MIG-00000000-0000-0000-0000-{number:012x}");
    let lines = visible_gpus(2, &["--nproc-per-node=gpu", "--gpu-bind"], &[("SIMULATED_MIG", "2")]);
    let last = "2 sees GPU-00000000-0000-0000-0000-000000000001".to_owned();
    assert_eq!(lines, [format!("0 sees {}", instance(0)), format!("1 sees {}", instance(1)), last]);
}

#[test]
fn driver_that_does_not_answer_is_reported() {
    let job = Job::new();
    let flags = ["--nproc-per-node=auto", "--dry-run"];
    let mut command = command_on_gpus(&job, 1, &flags);
    command.arg("true").env("SIMULATED_LOST_GPU", "1").env("CONVOKE_NVML_TIMEOUT_MS", "200");
    let ended = job.start(command).wait().expect_exit_code(0);
    let warning = "convoke: warning: NVIDIA's driver did not list the GPUs within 200ms; the GPUs are counted by /dev/nvidia* instead; \
                   nvidia-smi shows whether a GPU is lost\n";
    assert!(ended.stderr.contains(warning), "{}", ended.stderr);
}

#[test]
fn wait_for_the_driver_ends_by_ctrl_c() {
    let job = Job::new();
    let mut command = command_on_gpus(&job, 1, &["--nproc-per-node=auto"]);
    command.args(["sleep", "60"]).env("SIMULATED_LOST_GPU", "1");
    let launcher = job.start(command);
    wait_until("the child that waits for the driver", || children(launcher.pid()).first().copied());
    launcher.signal(Signal::SIGINT);
    let ended = launcher.wait();
    assert_eq!(ended.stderr, "convoke: stopped by SIGINT\n");
    assert!(!ended.status.success());
}

#[test]
fn too_few_gpus_and_unknown_gpu_names_are_reported() {
    let said = flag_error(2, &["--nproc-per-node=3", "--gpu-bind"], &[]);
    let expected = "--gpu-bind: 3 workers with 1 GPUs each need 3; 2 can be seen; lower --nproc-per-node or leave --gpu-bind out";
    assert!(said.contains(expected), "{said}");
    let said = flag_error(2, &["--nproc-per-node=gpu", "--gpus-per-worker=3"], &[]);
    assert!(said.contains("there are 2 GPUs, fewer than --gpus-per-worker=3"), "{said}");
    let said = flag_error(2, &["--gpu-bind"], &[("CUDA_VISIBLE_DEVICES", "GPU-beef")]);
    assert!(
        said.contains("CUDA_VISIBLE_DEVICES names GPU-beef, which is no GPU of this node (there are GPU-0"),
        "{said}"
    );
    let said = flag_error(2, &["--gpu-bind", "--virtual-local-rank"], &[]);
    assert!(said.contains("--gpu-bind and --virtual-local-rank exclude each other"), "{said}");
    let said = flag_error(2, &["--gpus-per-worker=0"], &[]);
    assert!(said.contains("--gpus-per-worker=0: there must be at least one"), "{said}");
    let said = flag_error(0, &["--nproc-per-node=gpu"], &[]);
    assert!(said.contains("no GPU was found"), "{said}");
}

#[test]
fn perf_tool_runs_on_gpus() {
    for device in ["cuda", "staged"] {
        let job = Job::new();
        let flags = ["--nproc-per-node=3", "--gpu-bind", &path_argument(user_program("convoke-perf"))];
        let mut command = command_on_gpus(&job, 3, &flags);
        command.args([
            "--device",
            device,
            "-e",
            "300K",
            "-f",
            "64",
            "--iters=2",
            "--warmup=1",
            "--dtype=f32,bf16,bool",
            "--no-pairs",
        ]);
        let ended = job.start(command).wait().expect_exit_code(0);
        for name in ["all_reduce", "all_to_all_v", "send_recv", "barrier"] {
            assert!(ended.stdout.lines().any(|line| line == name), "{name}: {}", ended.stdout);
        }
        assert!(!ended.stdout.contains("scan"), "{}", ended.stdout);
    }
}

#[test]
fn killed_rank_ends_gpu_operations_of_the_other_ranks() {
    let job = Job::new();
    let flags = ["--nproc-per-node=3", "--gpu-bind", &path_argument(user_program("convoke-perf"))];
    let mut command = command_on_gpus(&job, 3, &flags);
    command.args([
        "all_reduce",
        "--device=cuda",
        "-b",
        "4M",
        "-e",
        "4M",
        "--check=0",
        "--time-ms=60000",
        "--max-iters=1000000",
    ]);
    let launcher = job.start(command);
    // The ranks delete the file of their bootstrap once all have arrived.
    let worker = wait_until("a group on GPUs", || {
        job.processes().into_iter().find(|&pid| {
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
            maps.lines().any(|line| line.contains("simulated-nccl") && line.ends_with("(deleted)"))
                && rank(pid) == "1"
        })
    });
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(worker), Signal::SIGKILL).unwrap();
    let killed = Instant::now();
    let ended = launcher.wait();
    assert!(killed.elapsed() < END_LIMIT, "{:?}", killed.elapsed());
    assert!(!ended.status.success());
    assert!(ended.stderr.contains("SIGKILL"), "{}", ended.stderr);
    assert_eq!(job.processes(), Vec::<i32>::new());
}

fn rank(pid: i32) -> String {
    let environ = std::fs::read_to_string(format!("/proc/{pid}/environ")).unwrap_or_default();
    environ.split('\0').find_map(|variable| variable.strip_prefix("RANK=")).unwrap_or_default().to_owned()
}

/// Runs `digits` and returns loss and accuracy of each epoch.
fn epochs(flags: &[&str], of_digits: &[&str]) -> Vec<(f64, f64)> {
    let job = Job::new();
    let mut command = command_on_gpus(&job, 2, flags);
    command.arg(user_program("digits")).args(["--epochs=4", "--batch=50", "--hidden=20,30"]).args(of_digits);
    let ended = job.start(command).wait().expect_exit_code(0);
    let numbers = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let after = |word| words.iter().skip_while(|&&other| other != word).nth(1)?.parse().ok();
        Some((after("loss")?, after("accuracy")?))
    };
    let epochs: Vec<_> = ended.stdout.lines().filter_map(numbers).collect();
    assert_eq!(epochs.len(), 4, "{}", ended.stdout);
    epochs
}

#[test]
fn digits_example_trains_on_gpus_as_on_the_host() {
    let on_host = epochs(&["--nproc-per-node=1"], &[]);
    let two = ["--nproc-per-node=2", "--gpu-bind"];
    let on_gpus = [
        epochs(&["--nproc-per-node=1"], &["--device=cuda"]),
        epochs(&two, &["--device=cuda"]),
        epochs(&two, &["--device=cuda", "--gradients=late", "--bucket-bytes=1"]),
        epochs(&["--nproc-per-node=2"], &["--device=staged"]),
    ];
    for on_gpu in on_gpus {
        for ((loss, accuracy), (expected_loss, expected_accuracy)) in on_gpu.iter().zip(&on_host) {
            // The GPU sums in another order, so rounding differs.
            assert!((loss - expected_loss).abs() < 2e-3, "{on_gpu:?} {on_host:?}");
            assert!((accuracy - expected_accuracy).abs() < 1.0, "{on_gpu:?} {on_host:?}");
        }
    }
}

/// The limit of a whole check, which takes 30 s on a quiet machine with two cores.
const GPU_CHECK_TIMEOUT: Duration = Duration::from_secs(200);

/// Builds a command for `scripts/gpu-check` as packed for users, on a machine with one GPU.
fn gpu_check(job: &Job) -> Command {
    let folder = job.path("packed");
    std::fs::create_dir(&folder).unwrap();
    for name in ["convoke", "convoke-perf", "convoke-gpu-check", "digits"] {
        std::os::unix::fs::symlink(user_program(name), folder.join(name)).unwrap();
    }
    let script = convoke_testkit::programs::repository_root().join("scripts/gpu-check");
    std::fs::copy(script, folder.join("gpu-check")).unwrap();
    let mut command = Command::new(folder.join("gpu-check"));
    command.args(["--quick", "--report", "report.md"]).current_dir(&job.dir).env("TMPDIR", job.path("tmp"));
    set_simulated_gpus(job, &mut command, 1);
    command
}

#[test]
fn gpu_check_passes_and_writes_its_report() {
    let job = Job::new();
    let ended = job.start(gpu_check(&job)).wait_within(GPU_CHECK_TIMEOUT).expect_exit_code(0);
    let report = std::fs::read_to_string(job.path("report.md")).unwrap();
    for check in [
        "| a result on another stream | passed | right 100 of 100 times |",
        "| training steps | passed | training steps of 4 B: cudarc ",
        "| an abort while a rank is absent | passed | ",
        "| the deadline while a rank is absent | passed | ",
        "| an abort behind a kernel that does not end | passed | ",
        "## Through the host, 2 ranks on one GPU",
        "digits: done: accuracy",
    ] {
        assert!(report.contains(check), "{check}: {report}");
    }
    assert_eq!(report.matches("| passed |").count(), 10, "{report}");
    assert!(ended.stdout.ends_with("gpu-check: all passed; report in report.md\n"), "{}", ended.stdout);
}

#[test]
fn gpu_check_names_each_failed_check() {
    let job = Job::new();
    let mut command = gpu_check(&job);
    command.env("SIMULATED_NCCL_FAIL", "ncclAllReduce");
    let ended = job.start(command).wait().expect_exit_code(1);
    let report = std::fs::read_to_string(job.path("report.md")).unwrap();
    let failed = "| a result on another stream | FAILED | ncclAllReduce: unhandled system error";
    assert!(report.contains(failed) && report.contains("FAILED with exit code 1."), "{report}");
    assert!(ended.stderr.contains("gpu-check: FAILED; report in report.md"), "{}", ended.stderr);
}

#[test]
fn perf_without_a_gpu_reports_the_missing_part() {
    let job = Job::new();
    let flags =
        ["--nproc-per-node=2", &path_argument(user_program("convoke-perf")), "all_reduce", "--device=cuda"];
    let mut command = job.command(flags);
    command.env("LD_LIBRARY_PATH", "/nowhere");
    let ended = job.start(command).wait();
    if ended.status.success() {
        return skip("what is said without a GPU: there is one");
    }
    assert_eq!(ended.status.code(), Some(1));
    assert!(ended.stderr.contains("CUDA's driver, libcuda.so.1, was not found"), "{}", ended.stderr);
}

#[test]
fn failure_report_includes_driver_messages_for_the_workers_gpu() {
    let job = Job::new();
    let log = "3,1,99999999999999,-;NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.\n\
               3,2,99999999999999,-;NVRM: Xid (PCI:0000:03:00): 31, another one's\n3,3,5,-;NVRM: Xid (PCI:0000:02:00): 48, long ago\n";
    std::fs::write(job.path("kmsg"), log).unwrap();
    let script = job.script("[ $LOCAL_RANK = 1 ] && exit 3; sleep 60\n");
    let mut command =
        command_on_gpus(&job, 3, &["--nproc-per-node=gpu", "--gpu-bind", "--report-file=report.json"]);
    command.arg(script).env("CONVOKE_KMSG", job.path("kmsg")).env("SIMULATED_ECC", "2");
    let ended = job.start(command).wait().expect_exit_code(1);
    let told = "  gpu       : Xid 79 on 0000:02:00.0: the GPU fell off the bus: power, heat or the slot; the node needs a restart \
                (GPU has fallen off the bus.)\n";
    assert!(ended.stderr.contains(told), "{}", ended.stderr);
    assert_eq!(ended.stderr.matches("  gpu  ").count(), 1, "{}", ended.stderr);
    let report = std::fs::read_to_string(job.path("report.json")).unwrap();
    assert!(report.contains("\"gpu\": [\n        \"Xid 79 on 0000:02:00.0"), "{report}");
}
