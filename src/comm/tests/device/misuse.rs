//! Misuse that NCCL and CUDA would answer with wrong numbers, a hang or worse.

use super::*;
use convoke_comm::device::cudarc::driver::CudaContext;

fn refused<T: std::fmt::Debug>(result: Result<T, CommError>, why: &str) {
    let error = result.unwrap_err();
    assert!(matches!(error, CommError::InvalidArgument(_)), "{error}");
    assert!(error.to_string().contains(why), "{error}");
}

#[test]
fn streams_and_buffers_of_other_contexts_are_refused() {
    if !run_with_simulated_gpus("misuse::streams_and_buffers_of_other_contexts_are_refused", &[]) {
        return;
    }
    on_devices(1, |group, stream| {
        // This context's streams are not ordered with those of the other context.
        let again = CudaContext::new(0).unwrap().new_stream().unwrap();
        refused(group.on(&again), "another CudaContext of device 0");
        let mut foreign = buffer(&again, &[1.0_f32]);
        let on = group.on(&stream).unwrap();
        refused(on.enqueue(op::all_reduce(&mut foreign, ReduceOp::Sum)), "another CudaContext of device 0");
        let elsewhere = device::open(1).unwrap().new_stream().unwrap();
        refused(group.on(&elsewhere), "on device 1; the group is on device 0");
        // In NCCL's threads this handle means another stream.
        refused(group.on(&stream.context().per_thread_stream()).map(|_| ()), "the per-thread default stream");
    });
}

#[test]
fn overflowing_total_lengths_are_refused() {
    if !run_with_simulated_gpus("misuse::overflowing_total_lengths_are_refused", &[]) {
        return;
    }
    on_devices(2, |group, stream| {
        let (send, mut recv) = (buffer(&stream, &[1.0_f32]), buffer(&stream, &[1.0_f32]));
        let on = group.on(&stream).unwrap();
        let lens = [usize::MAX, 2];
        refused(
            on.enqueue(op::all_to_all_v((&send, &lens), (&mut recv, &lens))),
            "the sum of the lengths is too large",
        );
        if group.rank() == 0 {
            refused(
                on.enqueue(op::scatter_v(&send, &mut recv, &[1, usize::MAX], 0)),
                "the sum of the lengths is too large",
            );
        }
        let error = device::DeviceBuffer::<f64>::zeros(&stream, usize::MAX / 4).unwrap_err();
        assert!(error.to_string().contains("cannot allocate memory on the device"), "{error}");
    });
}

#[test]
fn ranks_may_destroy_a_group_at_different_times() {
    if !run_with_simulated_gpus("misuse::ranks_may_destroy_a_group_at_different_times", &[]) {
        return;
    }
    on_devices(2, |group, _| {
        let part = group.split(Some(0), 0).unwrap().unwrap();
        let begun = Instant::now();
        // NCCL frees a communicator when all ranks of a host do, so one rank waits for the other here.
        if group.rank() == 0 {
            drop(part);
            group.barrier().unwrap();
        } else {
            group.barrier().unwrap();
            drop(part);
        }
        assert!(begun.elapsed() < 2 * PROMPT_LIMIT, "{:?}", begun.elapsed());
    });
}

#[test]
fn split_waits_for_pending_device_operations() {
    if !run_with_simulated_gpus("misuse::split_waits_for_pending_device_operations", &[]) {
        return;
    }
    on_devices(2, |group, stream| {
        let mut buf = buffer(&stream, &[1.0_f32]);
        let spin = Spin::on(&stream);
        let work = group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap();
        let kernel = spin.end_after(Duration::from_millis(200));
        let part = group.split(Some(0), 0).unwrap().unwrap();
        work.wait().unwrap();
        assert!(part.has_device());
        kernel.join().unwrap();
    });
}

#[test]
fn operations_completed_before_an_abort_stay_successful() {
    if !run_with_simulated_gpus("misuse::operations_completed_before_an_abort_stay_successful", &[]) {
        return;
    }
    on_devices(1, |group, stream| {
        let mut buf = buffer(&stream, &[1.0_f32]);
        for _ in 0..20 {
            let part = group.split(Some(0), 0).unwrap().unwrap();
            let work = part.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap();
            stream.synchronize().unwrap();
            part.abort("enough");
            work.wait().unwrap();
        }
    });
}

#[test]
fn destroying_the_host_group_destroys_its_device_groups() {
    if !run_with_simulated_gpus("misuse::destroying_the_host_group_destroys_its_device_groups", &[]) {
        return;
    }
    run_ranks(2, |host| {
        let context = device::open(host.rank()).unwrap();
        let group = host.with_device(&context, DeviceOptions::default()).unwrap();
        let stream = context.new_stream().unwrap();
        let mut buf = buffer(&stream, &[1.0_f32]);
        let spin = Spin::on(&stream);
        let work = group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap();
        let kernel = spin.end_after(Duration::from_millis(300));
        host.destroy();
        work.wait().unwrap();
        kernel.join().unwrap();
    });
}

#[test]
fn any_thread_may_query_work_completion() {
    if !run_with_simulated_gpus("misuse::any_thread_may_query_work_completion", &[]) {
        return;
    }
    on_devices(2, |group, stream| {
        let mut buf = buffer(&stream, &[1.0_f32]);
        let work = group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap();
        // A thread that has not used a device before.
        std::thread::scope(|scope| scope.spawn(|| work.wait()).join().unwrap()).unwrap();
        group.barrier().unwrap();
    });
}

#[test]
fn checked_batches_may_start_with_different_messages() {
    if !run_with_simulated_gpus("misuse::checked_batches_may_start_with_different_messages", &[]) {
        return;
    }
    run_with_options(2, &DeviceOptions::default().checked(true), |group, stream| {
        let (mut sum, mut buf) =
            (buffer(&stream, &[1.0_f32]), buffer(&stream, &[4.0_f32 + group.rank() as f32]));
        let on = group.on(&stream).unwrap();
        let sum_up = op::all_reduce(&mut sum, ReduceOp::Sum);
        let work = match group.rank() {
            0 => on.enqueue((op::send(&buf, 1), sum_up)),
            _ => on.enqueue((sum_up, op::recv(&mut buf, 0))),
        };
        work.unwrap().wait().unwrap();
        assert_eq!(
            (stream.clone_dtoh(&sum).unwrap(), stream.clone_dtoh(&buf).unwrap()),
            (vec![2.0], vec![4.0])
        );
    });
}

#[test]
fn abort_releases_a_staged_call_that_waits_for_a_kernel() {
    if !run_with_simulated_gpus("misuse::abort_releases_a_staged_call_that_waits_for_a_kernel", &[]) {
        return;
    }
    run_with_options(1, &DeviceOptions::default().staged(true), |group, stream| {
        let mut buf = buffer(&stream, &[1.0_f32]);
        let spin = Spin::on(&stream);
        let abort = abort_when_asleep(&group);
        let begun = Instant::now();
        let error = group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap_err();
        assert!(matches!(error, CommError::Aborted { .. }), "{error}");
        assert!(begun.elapsed() < PROMPT_LIMIT, "{:?}", begun.elapsed());
        abort.join().unwrap();
        drop(spin);
    });
}
