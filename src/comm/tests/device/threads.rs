//! Several threads, more calls than fit, ranks that are not needed, and forks.

use super::*;

#[test]
fn group_can_be_split_while_another_thread_calls() {
    if !run_with_simulated_gpus("threads::group_can_be_split_while_another_thread_calls", &[]) {
        return;
    }
    on_devices(1, |group, stream| {
        let other = group.clone();
        let cuts = std::thread::spawn(move || {
            for _ in 0..50 {
                let cut = other.split(Some(0), 0).unwrap().unwrap();
                assert!(cut.has_device());
            }
        });
        let mut buf = buffer(&stream, &[3.0_f32]);
        while !cuts.is_finished() {
            drop(group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap());
        }
        cuts.join().unwrap();
        assert_eq!(stream.clone_dtoh(&buf).unwrap(), [3.0]);
    });
}

#[test]
fn messages_continue_after_a_rank_departs() {
    if !run_with_simulated_gpus("threads::messages_continue_after_a_rank_departs", &[]) {
        return;
    }
    let has_left = common::TimedBarrier::new(3);
    on_devices(3, |group, stream| {
        let rank = group.rank();
        if rank == 2 {
            drop(group);
            has_left.wait();
            return;
        }
        has_left.wait();
        let mut buf = buffer(&stream, &[rank as f32]);
        if rank == 0 {
            // The delay exceeds the grace period for operations with a rank that has left.
            let message = group.on(&stream).unwrap().enqueue(op::recv(&mut buf, 1)).unwrap();
            message.wait().unwrap();
            assert_eq!(stream.clone_dtoh(&buf).unwrap(), [1.0]);
        } else {
            let spin = Spin::on(&stream);
            let mut message = group.on(&stream).unwrap().enqueue(op::send(&buf, 0)).unwrap();
            let early = message.wait_for(Duration::from_millis(1500)).unwrap();
            assert!(early.is_none(), "a kernel is before it");
            drop(spin);
            message.wait().unwrap();
        }
    });
}

#[test]
fn caller_waits_while_the_device_queue_is_full() {
    if !run_with_simulated_gpus("threads::caller_waits_while_the_device_queue_is_full", &[]) {
        return;
    }
    on_devices(1, |group, stream| {
        let mut buf = buffer(&stream, &[1.0_f32]);
        let spin = Spin::on(&stream);
        let (called, calls) = channel();
        let caller = std::thread::spawn(move || {
            for _ in 0..1000 {
                drop(group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap());
                called.send(()).unwrap();
            }
            assert_eq!(stream.clone_dtoh(&buf).unwrap(), [1.0]);
        });
        let mut before = 0;
        while calls.recv_timeout(Duration::from_millis(500)).is_ok() {
            before += 1;
        }
        assert_eq!(before, 64);
        drop(spin);
        caller.join().unwrap();
        assert_eq!(calls.iter().count(), 1000 - before);
    });
}

#[test]
fn abort_releases_threads_that_wait_to_call() {
    if !run_with_simulated_gpus("threads::abort_releases_threads_that_wait_to_call", &[]) {
        return;
    }
    on_devices(1, |group, stream| {
        let mut buf = buffer(&stream, &[1.0_f32]);
        let _spin = Spin::on(&stream);
        let begun = Instant::now();
        let abort = abort_when_asleep(&group);
        let mut call =
            || group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).map(drop);
        let error = (0..1000).find_map(|_| call().err()).unwrap();
        assert!(matches!(error, CommError::Aborted { .. }), "{error}");
        assert!(begun.elapsed() < PROMPT_LIMIT, "{:?}", begun.elapsed());
        abort.join().unwrap();
        std::mem::forget(buf);
    });
}

#[test]
#[allow(unsafe_code)]
fn forked_child_does_not_affect_pending_operations() {
    if !run_with_simulated_gpus("threads::forked_child_does_not_affect_pending_operations", &[]) {
        return;
    }
    on_devices(1, |group, stream| {
        let mut buf = buffer(&stream, &[1.0_f32]);
        let known = group.register(buffer(&stream, &[1.0_f32])).unwrap();
        let spin = Spin::on(&stream);
        let work = group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap();
        // SAFETY: the child uses only data of this thread, and ends with _exit.
        match unsafe { nix::unistd::fork() }.unwrap() {
            nix::unistd::ForkResult::Child => {
                drop(known);
                let error = work.wait().unwrap_err().to_string();
                let failed = error.contains("this is a fork of it") && group.on(&stream).is_err();
                drop(group);
                // SAFETY: ends the process at once.
                unsafe { nix::libc::_exit(i32::from(!failed)) };
            }
            nix::unistd::ForkResult::Parent { child } => {
                let status = nix::sys::wait::waitpid(child, None).unwrap();
                assert!(matches!(status, nix::sys::wait::WaitStatus::Exited(_, 0)), "{status:?}");
                drop((spin, known));
                work.wait().unwrap();
                group.barrier().unwrap();
            }
        }
    });
}
