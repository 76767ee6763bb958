//! Nonblocking operations: they give the results of the blocking ones, progress in the background, and end or
//! fail with the group.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use common::*;
use convoke_comm::{LossReason, Work, wait_all, wait_any};
use convoke_testkit::Thread;
use nix::poll::{PollFd, PollFlags, PollTimeout};

/// The value of rank `rank` at element `index`.
fn value(rank: usize, index: usize) -> i64 {
    (rank * 1000 + index) as i64
}

fn row(rank: usize, len: usize) -> Vec<i64> {
    (0..len).map(|index| value(rank, index)).collect()
}

/// Sizes that select each algorithm.
const LENS: [usize; 3] = [3, 5_000, 70_000];

#[test]
fn nonblocking_and_blocking_calls_return_equal_results() {
    for world in [1, 2, 4] {
        run_ranks(world, |group| {
            let (rank, size) = (group.rank(), group.size());
            for len in LENS {
                let (mine, blocks) = (row(rank, len), row(rank, len * size));
                let lens: Vec<usize> = (0..size).map(|rank| len + rank).collect();
                let (mine_v, blocks_v) = (row(rank, lens[rank]), row(rank, lens.iter().sum()));

                let mut want = mine.clone();
                group.all_reduce(&mut want, ReduceOp::Sum).unwrap();
                let got = group.start(op::all_reduce(mine.clone(), ReduceOp::Sum)).unwrap().wait().unwrap();
                assert_eq!(got, want);
                let into =
                    group.start(op::all_reduce_into(mine.clone(), vec![0; len], ReduceOp::Sum)).unwrap();
                assert_eq!(into.wait().unwrap(), (mine.clone(), want));

                let mut want = mine.clone();
                group.broadcast(&mut want, size - 1).unwrap();
                assert_eq!(group.start(op::broadcast(mine.clone(), size - 1)).unwrap().wait().unwrap(), want);

                let (mut want, mut want_into) = (mine.clone(), vec![0; len]);
                group.reduce(&mut want, ReduceOp::Max, 0).unwrap();
                group.reduce_into(&mine, &mut want_into, ReduceOp::Max, 0).unwrap();
                let got = group.start(op::reduce(mine.clone(), ReduceOp::Max, 0)).unwrap().wait().unwrap();
                let into =
                    group.start(op::reduce_into(mine.clone(), vec![0; len], ReduceOp::Max, 0)).unwrap();
                let into = into.wait().unwrap();
                if rank == 0 {
                    assert_eq!((&got, &into.1), (&want, &want));
                    assert_eq!(want_into, want);
                }
                assert_eq!(into.0, mine);

                let (mut want, mut want_before) = (mine.clone(), mine.clone());
                group.scan(&mut want, ReduceOp::Sum).unwrap();
                group.exclusive_scan(&mut want_before, ReduceOp::Sum).unwrap();
                assert_eq!(group.start(op::scan(mine.clone(), ReduceOp::Sum)).unwrap().wait().unwrap(), want);
                let got =
                    group.start(op::exclusive_scan(mine.clone(), ReduceOp::Sum)).unwrap().wait().unwrap();
                assert_eq!(got, want_before);

                let mut want = vec![0; len * size];
                group.all_gather(&mine, &mut want).unwrap();
                let got =
                    group.start(op::all_gather(mine.clone(), vec![0; len * size])).unwrap().wait().unwrap();
                assert_eq!(got.1, want);
                let mut place = vec![0; len * size];
                place[rank * len..][..len].copy_from_slice(&mine);
                assert_eq!(group.start(op::all_gather_in_place(place)).unwrap().wait().unwrap(), want);

                let mut want = vec![0; len];
                group.reduce_scatter(&blocks, &mut want, ReduceOp::Sum).unwrap();
                let got =
                    group.start(op::reduce_scatter(blocks.clone(), vec![0; len], ReduceOp::Sum)).unwrap();
                assert_eq!(got.wait().unwrap().1, want);
                let got = group
                    .start(op::reduce_scatter_in_place(blocks.clone(), ReduceOp::Sum))
                    .unwrap()
                    .wait()
                    .unwrap();
                assert_eq!(got[rank * len..][..len], want);

                let mut want = vec![0; len * size];
                group.gather(&mine, &mut want, 0).unwrap();
                assert_eq!(
                    group.start(op::gather(mine.clone(), vec![0; len * size], 0)).unwrap().wait().unwrap().1,
                    want
                );
                let mut want = vec![0; len];
                group.scatter(&blocks, &mut want, 0).unwrap();
                assert_eq!(
                    group.start(op::scatter(blocks.clone(), vec![0; len], 0)).unwrap().wait().unwrap().1,
                    want
                );

                let mut want = vec![0; len * size];
                group.all_to_all(&blocks, &mut want).unwrap();
                let got = group.start(op::all_to_all(blocks.clone(), vec![0; len * size])).unwrap();
                assert_eq!(got.wait().unwrap().1, want);
                assert_eq!(
                    group.start(op::all_to_all_in_place(blocks.clone())).unwrap().wait().unwrap(),
                    want
                );

                let mut want = vec![0; blocks_v.len()];
                group.all_gather_v(&mine_v, &mut want, &lens).unwrap();
                let got =
                    group.start(op::all_gather_v(mine_v.clone(), vec![0; blocks_v.len()], &lens)).unwrap();
                assert_eq!(got.wait().unwrap().1, want);
                let mut want = vec![0; mine_v.len()];
                group.reduce_scatter_v(&blocks_v, &mut want, &lens, ReduceOp::Sum).unwrap();
                let got = group.start(op::reduce_scatter_v(
                    blocks_v.clone(),
                    vec![0; mine_v.len()],
                    &lens,
                    ReduceOp::Sum,
                ));
                assert_eq!(got.unwrap().wait().unwrap().1, want);
                let got =
                    group.start(op::gather_v(mine_v.clone(), vec![0; blocks_v.len()], &lens, 0)).unwrap();
                let gathered = got.wait().unwrap().1;
                let mut want = vec![0; blocks_v.len()];
                group.gather_v(&mine_v, &mut want, &lens, 0).unwrap();
                assert_eq!(gathered, want);
                let got =
                    group.start(op::scatter_v(blocks_v.clone(), vec![0; mine_v.len()], &lens, 0)).unwrap();
                let mut want = vec![0; mine_v.len()];
                group.scatter_v(&blocks_v, &mut want, &lens, 0).unwrap();
                assert_eq!(got.wait().unwrap().1, want);
                let all = vec![len; size];
                let got = group
                    .start(op::all_to_all_v((blocks.clone(), &all), (vec![0; len * size], &all)))
                    .unwrap();
                let mut want = vec![0; len * size];
                group.all_to_all(&blocks, &mut want).unwrap();
                assert_eq!(got.wait().unwrap().1, want);
            }
            group.start(op::barrier()).unwrap().wait().unwrap();
        });
    }
}

#[test]
fn lists_of_operations_give_the_results_of_separate_calls() {
    for world in [1, 2, 3] {
        run_ranks(world, |group| {
            let (rank, size) = (group.rank(), group.size());
            for lens in [vec![], vec![0], vec![1, 0, 7], vec![30_000, 1, 50_000]] {
                let list = || -> Vec<Vec<i64>> { lens.iter().map(|&len| row(rank, len)).collect() };
                let each = |call: &dyn Fn(&mut [i64])| -> Vec<Vec<i64>> {
                    let mut list = list();
                    list.iter_mut().for_each(|buf| call(buf));
                    list
                };
                let want = each(&|buf| group.all_reduce(buf, ReduceOp::Sum).unwrap());
                let operations = list().into_iter().map(|buf| op::all_reduce(buf, ReduceOp::Sum));
                assert_eq!(group.run(operations.collect::<Vec<_>>()).unwrap(), want);
                let want = each(&|buf| group.broadcast(buf, size - 1).unwrap());
                let operations = list().into_iter().map(|buf| op::broadcast(buf, size - 1));
                assert_eq!(group.run(operations.collect::<Vec<_>>()).unwrap(), want);
                let want = each(&|buf| group.reduce(buf, ReduceOp::Min, 0).unwrap());
                let operations = list().into_iter().map(|buf| op::reduce(buf, ReduceOp::Min, 0));
                let got = group.run(operations.collect::<Vec<_>>()).unwrap();
                if rank == 0 {
                    assert_eq!(got, want);
                }

                let wide = || -> Vec<Vec<i64>> { lens.iter().map(|&len| vec![0; len * size]).collect() };
                let (mut got, mut want) = (wide(), wide());
                let sends = list();
                let pairs = sends.iter().zip(&mut got).map(|(send, recv)| op::all_gather(send, recv));
                group.run(pairs.collect::<Vec<_>>()).unwrap();
                for (send, recv) in sends.iter().zip(&mut want) {
                    group.all_gather(send, recv).unwrap();
                }
                assert_eq!(got, want);
                let sends: Vec<Vec<i64>> = lens.iter().map(|&len| row(rank, len * size)).collect();
                let (mut got, mut want) = (list(), list());
                let pairs = sends.iter().zip(&mut got);
                let pairs = pairs.map(|(send, recv)| op::reduce_scatter(send, recv, ReduceOp::Sum));
                group.run(pairs.collect::<Vec<_>>()).unwrap();
                for (send, recv) in sends.iter().zip(&mut want) {
                    group.reduce_scatter(send, recv, ReduceOp::Sum).unwrap();
                }
                assert_eq!(got, want);
            }
        });
    }
}

#[test]
fn tuples_and_arrays_run_operations_of_all_kinds() {
    for world in [1, 3] {
        run_ranks(world, |group| {
            let (me, size) = (group.rank(), group.size());
            let (next, before) = ((me + 1) % size, (me + size - 1) % size);
            let (mut left, mut sum, mut least, mut most) = ([0_u32], [1_u64, 2], [7_u64], [me as f64]);
            let ((_, (_, status)), maxima, ()) = group
                .run((
                    (op::send(&[me as u32], next).tag(4), op::recv(&mut left, before).tag(4)),
                    // They differ, so each is a call of its own.
                    [
                        op::all_reduce(&mut sum[..1], ReduceOp::Sum),
                        op::all_reduce(&mut least[..], ReduceOp::Min),
                    ],
                    op::barrier(),
                ))
                .unwrap();
            assert_eq!((status.source(), status.tag(), status.count()), (before, 4, 1));
            assert_eq!(maxima.map(|buf| buf[0]), [size as u64, 7]);
            group.run([op::all_reduce(&mut most, ReduceOp::Max)]).unwrap();
            assert_eq!((left[0] as usize, sum, most), (before, [size as u64, 2], [(size - 1) as f64]));
        });
    }
}

#[test]
fn blocking_calls_keep_their_order_among_pending_ones() {
    run_ranks(3, |group| {
        let works: Vec<Work<Vec<i64>>> = (0..200)
            .map(|round| {
                let work = group.start(op::all_reduce(vec![round; 500], ReduceOp::Sum)).unwrap();
                if round % 50 == 49 {
                    let mut now = [round];
                    group.all_reduce(&mut now, ReduceOp::Max).unwrap();
                    assert_eq!(now, [round]);
                    assert!(work.is_completed(), "what was called before is done before");
                }
                work
            })
            .collect();
        for (round, sums) in wait_all(works).unwrap().into_iter().enumerate() {
            assert_eq!(sums, vec![3 * round as i64; 500]);
        }
    });
}

#[test]
fn operation_progresses_without_a_waiter() {
    run_ranks(2, |group| {
        let work = group.start(op::all_reduce(vec![1.0_f32; 300_000], ReduceOp::Sum)).unwrap();
        let (told, news) = mpsc::channel();
        work.on_complete(move || told.send(()).unwrap());
        news.recv_timeout(LONG).unwrap();
        assert!(work.is_completed());
        assert_eq!(work.wait().unwrap(), vec![2.0; 300_000]);
    });
}

#[test]
fn dropped_operation_completes_even_without_the_group() {
    let (tell, told) = thread_channel();
    let sums = run_ranks(2, |group| {
        if group.rank() == 0 {
            // No thread waits or holds the group, but the other rank must get its sum nevertheless.
            drop(group.start(op::all_reduce(vec![1_i64; 100_000], ReduceOp::Sum)).unwrap());
            drop(group.start(op::send(vec![5_i64; 100_000], 1).tag(7)).unwrap());
            tell.send(Thread::current()).unwrap();
            return 0;
        }
        wait_until_left(&told);
        let mut mine = vec![2_i64; 100_000];
        group.all_reduce(&mut mine, ReduceOp::Sum).unwrap();
        let mut got = vec![0_i64; 100_000];
        group.recv(&mut got, 0, 7).unwrap();
        mine[99_999] + got[99_999]
    });
    assert_eq!(sums, [0, 8]);
}

#[test]
fn dropped_barrier_completes_even_without_the_group() {
    let (gate, (tell, told)) = (TimedBarrier::new(3), thread_channel());
    run_ranks(4, |group| {
        if group.rank() == 0 {
            drop(group.start(op::barrier()).unwrap());
            return tell.send(Thread::current()).unwrap();
        }
        if group.rank() == 1 {
            wait_until_left(&told);
        }
        gate.wait();
        group.barrier().unwrap();
    });
}

/// A call that waits for rank 0.
type Call = fn(&Group) -> Result<(), CommError>;

#[test]
fn waiting_rank_learns_of_an_omitted_call_despite_pending_messages() {
    let begin = Instant::now();
    let waits: [Call; 4] = [
        |group| group.recv(&mut [0_u8], 0, 6).map(drop),
        |group| group.send(&vec![0_u64; 100_000], 0, 5),
        |group| group.recv_any(&mut [0_u8], 6).map(drop),
        Group::barrier,
    ];
    for wait in waits {
        let errors = run_ranks_together(3, |group| {
            if group.rank() > 0 {
                return Some(if group.rank() == 1 { wait(&group) } else { group.barrier() }.unwrap_err());
            }
            // No rank receives this message.
            drop(group.start(op::send(vec![1_u64; 100_000], 1).tag(5)).unwrap());
            None
        });
        let left =
            |error: &CommError| matches!(error, CommError::PeerLost { rank: 0, how: LossReason::Left, .. });
        assert!(errors[0].is_none() && errors[1..].iter().flatten().all(left), "{errors:?}");
    }
    assert!(begin.elapsed() < LONG / 2);
}

#[test]
fn abandoned_receives_do_not_delay_group_destruction() {
    let begin = Instant::now();
    for world in [1, 2] {
        run_ranks_together(world, |group| {
            drop(group.start(op::recv(vec![0_u8; 10], group.rank()).tag(8)).unwrap());
            drop(group.start(op::recv(vec![0_u8; 10], world - 1 - group.rank()).tag(9)).unwrap());
            drop(group.start(op::recv_any(vec![0_u8; 10]).tag(9)).unwrap());
        });
    }
    assert!(begin.elapsed() < LONG / 2);
}

type ThreadReceiver = Mutex<mpsc::Receiver<Thread>>;

fn thread_channel() -> (mpsc::Sender<Thread>, ThreadReceiver) {
    let (tell, told) = mpsc::channel();
    (tell, Mutex::new(told))
}

/// Waits until the rank that sent its thread on this channel has dropped its group, or sleeps in the drop.
fn wait_until_left(told: &ThreadReceiver) {
    told.lock().unwrap().recv_timeout(LONG).unwrap().wait_until_asleep_or_ended();
}

#[test]
fn handle_used_outside_its_scope_keeps_its_outcome() {
    let gate = TimedBarrier::new(2);
    run_ranks(2, |group| {
        group.barrier().unwrap();
        let (mut kept, mut failed) = (None, None);
        if group.rank() == 0 {
            group.send(&[7_u8], 1, 0).unwrap();
        } else {
            group
                .scope(|scope| {
                    kept = Some(scope.start(op::recv_any(vec![0_u8]))?);
                    Ok(())
                })
                .unwrap();
            let (got, status) = kept.unwrap().wait().unwrap();
            assert_eq!((got, status.source()), (vec![7], 0));
        }
        // No abort before the message has arrived, since the abort could be heard first.
        gate.wait();
        group
            .scope(|scope| {
                failed = Some(scope.start(op::recv(vec![0_u8], 1 - group.rank()).tag(1))?);
                group.abort("enough");
                Ok(())
            })
            .unwrap();
        let error = failed.unwrap().wait().unwrap_err();
        assert!(matches!(error, CommError::Aborted { .. }), "{error}");
        let dropped = group.scope(|scope| scope.start(op::barrier()).map(drop)).unwrap_err();
        assert!(matches!(dropped, CommError::Aborted { .. }), "{dropped}");
    });
}

#[test]
fn work_can_be_awaited_as_a_future() {
    run_ranks(2, |group| {
        let total = pollster::block_on(async {
            let one = group.start(op::all_reduce(vec![1_i32; 10], ReduceOp::Sum))?;
            let two = group.start(op::all_reduce(vec![2_i32; 100_000], ReduceOp::Sum))?;
            let two = two.await?;
            Ok::<_, CommError>(one.await?[0] + two[99_999])
        });
        assert_eq!(total.unwrap(), 6);
    });
}

#[test]
fn work_descriptor_becomes_readable_at_completion() {
    run_ranks(2, |group| {
        let work = group.start(op::all_reduce(vec![1_i32; 1000], ReduceOp::Sum)).unwrap();
        let descriptor = work.descriptor().unwrap().unwrap();
        let mut fds = [PollFd::new(descriptor, PollFlags::POLLIN)];
        assert_eq!(nix::poll::poll(&mut fds, PollTimeout::from(60_000_u16)), Ok(1));
        assert!(work.is_completed());
        // The operation is already done when it is waited for.
        let done = group.start(op::barrier()).unwrap();
        group.barrier().unwrap();
        assert!(done.is_completed());
        let descriptor = done.descriptor().unwrap().unwrap();
        let mut fds = [PollFd::new(descriptor, PollFlags::POLLIN)];
        assert_eq!(nix::poll::poll(&mut fds, PollTimeout::ZERO), Ok(1));
    });
}

#[test]
fn callbacks_may_submit_the_next_operation() {
    run_ranks(2, |group| {
        let (told, news) = mpsc::channel();
        let next = group.clone();
        let first = group.start(op::barrier()).unwrap();
        first.on_complete(move || {
            told.send(next.start(op::all_reduce(vec![21_u64], ReduceOp::Sum)).unwrap()).unwrap();
        });
        let second = news.recv_timeout(LONG).unwrap();
        assert_eq!(second.wait().unwrap(), [42]);
        let called = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&called);
        first.on_complete(move || counter.store(1, Ordering::SeqCst));
        assert_eq!(called.load(Ordering::SeqCst), 1, "at once if it is done");
    });
}

#[test]
fn callback_panic_ends_only_the_group() {
    let errors = run_ranks(2, |group| {
        if group.rank() == 0 {
            let work = group.start(op::barrier()).unwrap();
            work.on_complete(|| panic!("in a callback, as the test wants"));
            group.send(&[0_u8], 1, 1).unwrap();
        } else {
            group.recv(&mut [0_u8], 0, 1).unwrap();
            group.barrier().unwrap();
        }
        group.recv(&mut [0_u8], 1 - group.rank(), 0).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("a callback panicked")), "{errors:?}");
}

#[test]
fn wait_for_returns_none_until_the_operation_is_done() {
    run_ranks(2, |group| {
        if group.rank() == 0 {
            let mut work = group.start(op::recv(vec![0_u8; 3], 1)).unwrap();
            let begin = Instant::now();
            assert!(work.wait_for(Duration::from_millis(30)).unwrap().is_none());
            assert!(begin.elapsed() >= Duration::from_millis(30));
            assert!(work.try_wait().unwrap().is_none());
            group.send(&[0_u8], 1, 1).unwrap();
            assert_eq!(work.wait_for(LONG).unwrap().unwrap().0, [1, 2, 3]);
            for again in [work.try_wait().map(drop), work.wait().map(drop)] {
                assert!(again.unwrap_err().to_string().contains("was returned before"));
            }
        } else {
            group.recv(&mut [0_u8], 0, 1).unwrap();
            group.send(&[1_u8, 2, 3], 0, 0).unwrap();
        }
    });
}

#[test]
fn scope_borrows_buffers_and_waits() {
    run_ranks(3, |group| {
        let (mut sums, mut gathered, mine) = (vec![1_u32; 9], vec![0_u32; 3], [group.rank() as u32]);
        let first = group
            .scope(|scope| {
                let work = scope.start(op::all_reduce(&mut sums[..], ReduceOp::Sum))?;
                scope.start(op::all_gather(&mine[..], &mut gathered[..]))?;
                Ok(work.wait()?[0])
            })
            .unwrap();
        assert_eq!((first, sums, gathered), (3, vec![3; 9], vec![0, 1, 2]));
    });
}

#[test]
fn scope_returns_errors_of_unawaited_operations() {
    let errors = run_ranks(2, |group| {
        let mut buf = vec![0_u32; 4 + group.rank()];
        group.scope(|scope| scope.start(op::all_reduce(&mut buf[..], ReduceOp::Sum)).map(drop)).unwrap_err()
    });
    assert!(errors.iter().all(|error| matches!(error, CommError::Mismatch { .. })), "{errors:?}");
}

#[test]
fn panic_in_a_scope_ends_its_operations() {
    let errors = run_ranks(2, |group| {
        group.barrier().unwrap();
        if group.rank() == 0 {
            let mut buf = [0_u8; 100];
            let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                group.scope(|scope| -> Result<(), CommError> {
                    let _never = scope.start(op::recv(&mut buf[..], 1))?;
                    panic!("in a scope, as the test wants");
                })
            }));
            assert!(panic.is_err());
        }
        group.barrier().unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("panicked in a scope")), "{errors:?}");
}

#[test]
fn wait_any_returns_the_completed_operation() {
    run_ranks(4, |group| {
        if group.rank() > 0 {
            // The ranks take turns in the order 3, 1, 2.
            let turn = [2, 3, 1][group.rank() - 1];
            for now in 1..=3 {
                if now == turn {
                    group.send(&[group.rank() as u8], 0, 0).unwrap();
                }
                group.barrier().unwrap();
            }
            return;
        }
        let mut works: Vec<_> = (1..4).map(|from| group.start(op::recv(vec![0_u8], from)).unwrap()).collect();
        let mut order = Vec::new();
        for left in (0..3).rev() {
            let (_, got) = wait_any(&mut works).unwrap().unwrap();
            order.push(got.0[0]);
            assert_eq!(works.len(), left);
            group.barrier().unwrap();
        }
        assert_eq!(order, [3, 1, 2]);
        assert!(wait_any(&mut works).unwrap().is_none());
    });
}

#[test]
fn wait_any_accepts_operations_of_several_groups() {
    run_ranks(2, |group| {
        let other = group.subgroup(&[0, 1]).unwrap().unwrap();
        if group.rank() == 0 {
            let mut works = vec![
                group.start(op::recv(vec![0_u8], 1)).unwrap(),
                other.start(op::recv(vec![0_u8], 1)).unwrap(),
            ];
            let (index, (got, _)) = wait_any(&mut works).unwrap().unwrap();
            assert_eq!((index, got), (1, vec![2]));
            group.send(&[0_u8], 1, 1).unwrap();
            let (index, (got, _)) = wait_any(&mut works).unwrap().unwrap();
            assert_eq!((index, got), (0, vec![1]));
        } else {
            other.send(&[2_u8], 0, 0).unwrap();
            group.recv(&mut [0_u8], 0, 1).unwrap();
            group.send(&[1_u8], 0, 0).unwrap();
        }
    });
}

#[test]
fn invalid_arguments_submit_no_operation() {
    run_ranks(2, |group| {
        let wrong = |error: CommError| assert!(matches!(error, CommError::InvalidArgument(_)), "{error}");
        wrong(group.start(op::all_reduce(vec![1_i32], ReduceOp::Avg)).unwrap_err());
        wrong(group.start(op::broadcast(vec![1_i32], 2)).unwrap_err());
        wrong(group.start(op::all_gather(vec![1_i32], vec![0; 3])).unwrap_err());
        wrong(group.start(op::all_reduce_into(vec![1_i32], vec![0; 2], ReduceOp::Sum)).unwrap_err());
        wrong(group.start(op::send(vec![1_i32], 2)).unwrap_err());
        group.barrier().unwrap();
    });
}

#[test]
fn threads_may_wait_while_others_call() {
    // The progress lock passes between the background thread and callers, and no operation is forgotten.
    run_ranks(2, |group| {
        let standing = group.start(op::recv(vec![0_u8], 1 - group.rank()).tag(99)).unwrap();
        std::thread::scope(|scope| {
            for tag in 0..3 {
                let group = group.clone();
                scope.spawn(move || {
                    let peer = 1 - group.rank();
                    for round in 0..200_u32 {
                        let mut got = [0];
                        let work = group.start(op::recv(vec![0_u32], peer).tag(tag + 10)).unwrap();
                        group
                            .run((op::send(&[round], peer).tag(tag), op::recv(&mut got, peer).tag(tag)))
                            .unwrap();
                        group.send(&[round], peer, tag + 10).unwrap();
                        assert_eq!((got[0], work.wait().unwrap().0[0]), (round, round));
                    }
                });
            }
        });
        group.send(&[1_u8], 1 - group.rank(), 99).unwrap();
        assert_eq!(standing.wait().unwrap().0, [1]);
    });
}

#[test]
fn buffer_of_a_dropped_handle_is_freed_once_its_operation_is_done() {
    // Longer than a message that is sent before it is received.
    const LEN: usize = 1 << 20;
    run_ranks(2, |group| {
        if group.rank() == 1 {
            group.recv(&mut [0_u8], 0, 9).unwrap();
            let mut received = vec![0_u8; LEN];
            (0..4).for_each(|tag| {
                group.recv(&mut received, 0, tag).unwrap();
            });
            return;
        }
        let start = |tag| {
            let buffer: Arc<[u8]> = vec![1; LEN].into();
            (Arc::downgrade(&buffer), group.start(op::send(buffer, 1).tag(tag)).unwrap())
        };
        let [(dropped, drops), (forgotten, forgets), (done, is_done), (waited, waits)] =
            [0, 1, 2, 3].map(start);
        drop(drops);
        std::mem::forget(forgets);
        assert_eq!(
            [&dropped, &forgotten].map(|buffer| buffer.strong_count()),
            [1, 1],
            "rank 1 has not received"
        );
        group.send(&[0_u8], 1, 9).unwrap();
        let buffer = waits.wait().unwrap();
        assert_eq!((waited.strong_count(), buffer.len()), (1, LEN));
        drop(buffer);
        assert_eq!(waited.strong_count(), 0);
        assert!(is_done.is_completed(), "an earlier message");
        assert_eq!(done.strong_count(), 1);
        drop(is_done);
        assert_eq!((done.strong_count(), forgotten.strong_count()), (0, 1));
        // The thread that completes an operation frees its buffer a little later.
        let begin = Instant::now();
        while dropped.strong_count() > 0 {
            assert!(begin.elapsed() < LONG);
            std::thread::yield_now();
        }
    });
}
