//! Untyped calls: buffers by address, length and type.

#![allow(clippy::unwrap_used, clippy::panic, unsafe_code, missing_docs)]

mod common;

use std::sync::Arc;
use std::sync::mpsc::channel;

use common::{CommError, Group, ReduceOp, run_ranks};
use convoke_comm::raw::{Buffer, Call, Operation, Reduction};
use convoke_comm::{Dtype, bf16};

/// The values as a buffer. The tests keep the values until the operation is done.
fn raw<T>(values: &mut [T], dtype: Dtype) -> Buffer {
    assert_eq!(size_of::<T>(), dtype.size_bytes());
    // SAFETY: the memory has so many values, and the tests do not use it before the operation is done.
    unsafe { Buffer::new(values.as_mut_ptr().cast(), values.len(), dtype) }
}

/// Runs an untyped call on copies of the values, and returns the receive buffer.
fn call(group: &Group, call: Call, mut send: Vec<i32>, mut recv: Vec<i32>) -> Vec<i32> {
    let operation = Operation::new(call).send(raw(&mut send, Dtype::I32)).recv(raw(&mut recv, Dtype::I32));
    group.run(operation).unwrap();
    recv
}

#[test]
fn untyped_calls_compute_what_typed_calls_compute() {
    run_ranks(3, |group| {
        let (rank, zeros) = (group.rank() as i32, |count: usize| vec![0; count]);
        let one = || vec![10 * rank + 1, 10 * rank + 2];
        let all = || (0..6).map(|index| 100 * rank + index).collect::<Vec<i32>>();
        let sum = || Reduction::from(ReduceOp::Sum);
        let mut expected = one();
        group.all_reduce(&mut expected, ReduceOp::Sum).unwrap();
        assert_eq!(call(&group, Call::AllReduce { op: sum() }, vec![], one()), expected);
        assert_eq!(call(&group, Call::AllReduceInto { op: sum() }, one(), zeros(2)), expected);
        let reduced = call(&group, Call::Reduce { op: sum(), root: 1 }, vec![], one());
        let into = call(&group, Call::ReduceInto { op: sum(), root: 1 }, one(), zeros(2));
        if rank == 1 {
            assert_eq!((&reduced, &into), (&expected, &expected));
        }
        assert_eq!(call(&group, Call::Broadcast { root: 2 }, vec![], one()), [21, 22]);
        let mut expected = one();
        group.scan(&mut expected, ReduceOp::Sum).unwrap();
        assert_eq!(call(&group, Call::Scan { op: sum() }, vec![], one()), expected);
        let mut expected = one();
        group.exclusive_scan(&mut expected, ReduceOp::Sum).unwrap();
        assert_eq!(call(&group, Call::ExclusiveScan { op: sum() }, vec![], one()), expected);
        let mut expected = zeros(6);
        group.all_gather(&one(), &mut expected).unwrap();
        assert_eq!(call(&group, Call::AllGather, one(), zeros(6)), expected);
        let mut placed = zeros(6);
        placed[2 * rank as usize..][..2].copy_from_slice(&one());
        assert_eq!(call(&group, Call::AllGatherInPlace, vec![], placed), expected);
        let lens = vec![2; 3];
        assert_eq!(call(&group, Call::AllGatherV { lens: lens.clone() }, one(), zeros(6)), expected);
        for root in 0..3 {
            let gathered = call(&group, Call::Gather { root }, one(), zeros(6));
            let gathered_v = call(&group, Call::GatherV { lens: lens.clone(), root }, one(), zeros(6));
            if rank == root as i32 {
                assert_eq!((&gathered, &gathered_v), (&expected, &expected));
            }
            let own: Vec<i32> = (0..2).map(|index| 100 * root as i32 + 2 * rank + index).collect();
            assert_eq!(call(&group, Call::Scatter { root }, all(), zeros(2)), own);
            assert_eq!(call(&group, Call::ScatterV { lens: lens.clone(), root }, all(), zeros(2)), own);
        }
        let mut expected = zeros(2);
        group.reduce_scatter(&all(), &mut expected, ReduceOp::Sum).unwrap();
        assert_eq!(call(&group, Call::ReduceScatter { op: sum() }, all(), zeros(2)), expected);
        let v = Call::ReduceScatterV { lens: lens.clone(), op: sum() };
        assert_eq!(call(&group, v, all(), zeros(2)), expected);
        let in_place = call(&group, Call::ReduceScatterInPlace { op: sum() }, vec![], all());
        assert_eq!(in_place[2 * rank as usize..][..2], expected);
        let mut expected = zeros(6);
        group.all_to_all(&all(), &mut expected).unwrap();
        assert_eq!(call(&group, Call::AllToAll, all(), zeros(6)), expected);
        assert_eq!(call(&group, Call::AllToAllInPlace, vec![], all()), expected);
        let v = Call::AllToAllV { send_lens: lens.clone(), recv_lens: lens };
        assert_eq!(call(&group, v, all(), zeros(6)), expected);
        group.run(Operation::new(Call::Barrier)).unwrap();
    });
}

#[test]
fn messages_have_a_status() {
    run_ranks(2, |group| {
        let mut values = [7.5_f64, 8.5, 0.0];
        if group.rank() == 0 {
            let send = Operation::new(Call::Send { to: 1, tag: 3 }).send(raw(&mut values[..2], Dtype::F64));
            group.start(send).unwrap().wait().unwrap();
        } else {
            values.fill(0.0);
            let recv = Operation::new(Call::Recv { from: None, tag: 3 }).recv(raw(&mut values, Dtype::F64));
            let status = group.start(recv).unwrap().wait().unwrap().status.unwrap();
            assert_eq!((status.source(), status.tag(), status.count()), (0, 3, 2));
            assert_eq!(values, [7.5, 8.5, 0.0]);
        }
    });
}

#[test]
fn owner_is_kept_until_the_operation_is_done() {
    run_ranks(2, |group| {
        let owner = Arc::new(vec![1_u8; 1 << 20]);
        let (address, count) = (owner.as_ptr().cast_mut(), owner.len());
        // SAFETY: the buffer owns the memory, and nobody writes to it.
        let buffer = unsafe { Buffer::new(address, count, Dtype::U8) }.owned_by(Arc::clone(&owner));
        let mut recv = vec![0_u8; 2 << 20];
        let operation = Operation::new(Call::AllGather).send(buffer).recv(raw(&mut recv, Dtype::U8));
        let work = group.start(operation).unwrap();
        assert_eq!(Arc::strong_count(&owner), 2);
        let (done, is_done) = channel();
        work.on_complete(move || done.send(()).unwrap());
        is_done.recv().unwrap();
        let buffers = work.wait().unwrap();
        assert_eq!((Arc::strong_count(&owner), recv.iter().all(|&byte| byte == 1)), (2, true));
        drop(buffers);
        assert_eq!(Arc::strong_count(&owner), 1);
    });
}

#[test]
fn reductions_have_factors_and_functions() {
    run_ranks(2, |group| {
        let mut halves = [bf16::from_f32(1.5); 4];
        let mut factor = [0; 16];
        factor[..4].copy_from_slice(&2.0_f32.to_ne_bytes());
        let op = Reduction::premul_sum(Dtype::Bf16, factor).unwrap();
        let operation = Operation::new(Call::AllReduce { op }).recv(raw(&mut halves, Dtype::Bf16));
        group.run(operation).unwrap();
        assert_eq!(halves, [bf16::from_f32(6.0); 4]);
        let mut bytes = [1_u8 << group.rank(); 3];
        let op = Reduction::new(|into, from| into.iter_mut().zip(from).for_each(|(a, b)| *a |= b));
        group.run(Operation::new(Call::AllReduce { op }).recv(raw(&mut bytes, Dtype::U8))).unwrap();
        assert_eq!(bytes, [3; 3]);
        assert!(Reduction::premul_sum(Dtype::Bool, factor).is_err());
    });
}

#[test]
fn wrong_buffers_are_refused_before_anything_is_sent() {
    run_ranks(2, |group| {
        let (mut ints, mut floats) = ([1_i32; 2], [0.0_f32; 4]);
        let refused = |operation: Operation, part: &str| {
            let error = group.run(operation).unwrap_err();
            assert!(matches!(error, CommError::InvalidArgument(_)), "{error}");
            assert!(error.to_string().contains(part), "{error}");
        };
        let other_type = Operation::new(Call::AllGather).send(raw(&mut ints, Dtype::I32));
        let what = "the send buffer has elements of i32, and the receive buffer of f32";
        refused(other_type.recv(raw(&mut floats, Dtype::F32)), what);
        refused(Operation::new(Call::AllGather).send(raw(&mut ints, Dtype::I32)), "needs a receive buffer");
        refused(Operation::new(Call::Send { to: 0, tag: 0 }), "needs a send buffer");
        refused(Operation::new(Call::Gather { root: 0 }), "needs a send or a receive buffer");
        let op = ReduceOp::Avg.into();
        refused(Operation::new(Call::AllReduce { op }).recv(raw(&mut ints, Dtype::I32)), "avg of i32");
        group.barrier().unwrap();
    });
}
