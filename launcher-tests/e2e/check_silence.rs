//! `convoke check` stays within its time on hosts where a driver, a disk or Python gives no answer, and names limits.

use std::fs;

use convoke_testkit::{gpu, skip};

use crate::checked_hosts::{CheckResult, Checked, Mistake, mistake};

#[test]
fn driver_disk_and_python_that_give_no_answer_are_named_in_time() {
    let Some(checked) = Checked::up_or_skip(3, "checks of silent devices") else { return };
    let library = format!("export LD_LIBRARY_PATH={} CONVOKE_KMSG=/dev/null", gpu::libraries().display());
    let check = |odd: &str, flags: &str| -> CheckResult {
        checked.check_each(|host| {
            let own = if host == 2 { odd } else { "" };
            (format!("{library} SIMULATED_GPUS=2; {own}"), flags.to_owned())
        })
    };
    let driver = check("export SIMULATED_LOST_GPU=1", "");
    driver.assert_names("FAIL", "h2", &["NVIDIA's driver did not list the GPUs within 2s"]);
    let per_gpu = check("export SIMULATED_LOST_GPU=1", "--nproc-per-node=gpu");
    per_gpu.assert_names("FAIL", "h2", &["NVIDIA's driver did not list the GPUs within 2s"]);

    // A file system that takes the bytes, and does not say that they are on the disk.
    fs::write(checked.job.path("disk.c"), "#include <unistd.h>\nint fsync(int file) { for (;;) pause(); }\n")
        .unwrap();
    checked.on(0, "cd $JOB && cc -shared -fPIC -o disk.so disk.c");
    let disk = check("export LD_PRELOAD=$JOB/disk.so", "");
    disk.assert_names("FAIL", "h2", &["a file system did not take 4 KiB in 2.5 s"]);

    checked.on(0, "printf '#!/bin/sh\\nexec sleep 1000\\n' > $JOB/python; chmod +x $JOB/python");
    let python = check("export PYTHON_EXEC=$JOB/python", "train.py");
    // On a busy machine the limit of all checks may end 0.2 s before that of Python is noticed.
    let is_late = python.nodes[0].stdout.contains("the check of versions took longer than 2.5 s");
    let text =
        if is_late { "the check of versions took longer" } else { "/python did not answer within 2 s" };
    python.assert_names("FAIL", "h2", &[text]);
    if !is_late {
        checked.on(2, "if pgrep -f '[s]leep 1000'; then exit 1; fi");
    }
    for result in [driver, per_gpu, disk, python] {
        assert!(result.nodes[0].stdout.contains("convoke check: 3 nodes checked in "), "{}", result.text());
    }
}

#[test]
fn limits_of_files_processes_and_cpus_and_another_python_are_named() {
    let Some(checked) = Checked::up_or_skip(3, "checks of limits of files and processes") else { return };
    let files = Mistake { host: 2, before: "ulimit -f 2000", flags: "--tee=3" };
    let parts = ["a file may have 1000 KiB, so log files end there"];
    checked.assert_named(&files, "WARN", "h2", &parts);
    let group = format!("/sys/fs/cgroup/pids/convoke-check-{}", std::process::id());
    match fs::create_dir(&group) {
        Ok(()) => {
            let enter = format!("echo 200 > {group}/pids.max; echo $$ > {group}/cgroup.procs");
            let processes = Mistake { host: 2, before: &enter, flags: "--nproc-per-node=200" };
            let allowed = format!("{group} allows 200 (pids.max)");
            let result = checked.check("", Some(&processes));
            result.assert_names("FAIL", "h2", &["200 workers need 204 more processes and threads", &allowed]);
            fs::remove_dir(&group).unwrap();
        }
        Err(error) => skip(format!("checks of limits of processes: no control group: {error}")),
    }
    if std::thread::available_parallelism().unwrap().get() > 1 {
        let one = "taskset -pc $(taskset -pc $$ | sed 's/.*: //; s/[,-].*//') $$ > /dev/null";
        checked.assert_named(&mistake(2, one), "WARN", "h2", &["CPUs is 1, ", " on h1, h3"]);
    }
    let python = "printf '#!/bin/sh\\nprintf \"Python\\\\t3.8.1\\\\n\"\\n' > $JOB/python; chmod +x $JOB/python; export PYTHON_EXEC=$JOB/python";
    let result = checked.check("train.py", Some(&mistake(3, python)));
    result.assert_names("WARN", "h3", &["Python is 3.8.1, ", " on h1, h2"]);
}
