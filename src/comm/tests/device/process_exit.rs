//! The exit of a process that used devices.

use std::fs;
use std::process;

use super::*;
use convoke_testkit::gpu::output_with_simulated_gpus;

/// Returns whether this process has a thread of this name.
fn has_thread(name: &str) -> bool {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let mut names =
        tasks.map(|task| fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default());
    names.any(|found| found.trim_end() == name)
}

#[test]
#[allow(clippy::exit)] // what is tested
fn process_may_exit_while_nccl_frees_a_communicator() {
    let test = "process_exit::process_may_exit_while_nccl_frees_a_communicator";
    let Some(output) = output_with_simulated_gpus(test, &[("SIMULATED_NCCL_DESTROY_MS", "1500")]) else {
        on_devices(1, |group, stream| {
            let mut buf = buffer(&stream, &[1.0_f32]);
            drop(group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap());
            stream.synchronize().unwrap();
            // Returns after a second, before the communicator is freed.
            drop(group);
            while !has_thread("convoke-free") {
                std::thread::yield_now();
            }
            process::exit(0);
        });
        unreachable!("the rank ends the process");
    };
    assert!(output.status.success(), "{output:?}");
}
