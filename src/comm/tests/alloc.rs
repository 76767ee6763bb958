//! Memory that ranks of a host share: results equal those in private memory, and a failed call makes it
//! private.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{CommError, GroupOptions, ReduceOp, Sample, for_every_type, op};
use convoke_comm::{Reduction, SharedBuffer, f16};

/// A length that fills pages of any type, with a remainder.
const LEN: usize = 40_961;

fn fill<T: Sample>(buf: &mut [T], rank: usize, round: usize) {
    for (index, element) in buf.iter_mut().enumerate() {
        let any = (index * 7 + rank * 13 + round * 31) % 23;
        *element = T::of(T::number(any as i64 - 11));
    }
}

/// Compares all-reduces of one length in shared and in private memory bit by bit.
fn same_as_in_own_memory<T: Sample>(world: usize) {
    let differ = common::run_ranks(world, |group| {
        let mut shared = group.alloc::<T>(LEN).unwrap();
        assert!(shared.is_shared() && shared.len() == LEN && shared.iter().all(|x| *x == T::of(0)));
        let mut own: Vec<T> = shared.to_vec();
        let page = 4096 / size_of::<T>();
        // All of the memory; whole pages; then ranges that begin or end within a page, which are not reduced
        // in place.
        for (round, range) in
            [0..LEN, page..LEN, page..3 * page + 1, 0..LEN - 1, 1..LEN].into_iter().enumerate()
        {
            fill(&mut shared, group.rank(), round);
            own.copy_from_slice(&shared);
            let (a, b) = (&mut shared[range.clone()], &mut own[range.clone()]);
            for op in [ReduceOp::Max, ReduceOp::Sum].into_iter().filter(|op| op.accepts(T::DTYPE)) {
                group.all_reduce(a, op).unwrap();
                group.all_reduce(b, op).unwrap();
            }
            if shared[..] != own[..] {
                return Some(range);
            }
        }
        None
    });
    assert_eq!(differ, vec![None; world], "{world} ranks, {}", T::DTYPE);
}

#[test]
fn all_reduce_in_shared_and_private_memory_is_equal() {
    for world in [2, 3, 5] {
        for_every_type!(same_as_in_own_memory, (world));
    }
}

#[test]
fn half_average_rounds_once_and_factor_applies_once() {
    common::run_ranks(4, |group| {
        let mut shared = group.alloc::<f16>(LEN).unwrap();
        let mut own = vec![f16::ZERO; LEN];
        for (index, element) in shared.iter_mut().enumerate() {
            *element = f16::from_f32((index % 1000) as f32 * 0.37 + group.rank() as f32);
        }
        own.copy_from_slice(&shared);
        group.all_reduce(&mut shared[..], ReduceOp::Avg).unwrap();
        group.all_reduce(&mut own, ReduceOp::Avg).unwrap();
        assert_eq!(shared[..], own[..]);
        let mut shared = group.alloc::<f32>(LEN).unwrap();
        shared.fill(2.0);
        group.all_reduce(&mut shared[..], Reduction::premul_sum(0.25)).unwrap();
        assert!(shared.iter().all(|&x| x == 2.0));
        let last = Reduction::new(|into: &mut [f32], from: &[f32]| into.copy_from_slice(from));
        shared.fill(group.rank() as f32);
        group.all_reduce(&mut shared[..], last).unwrap();
        assert!(shared.iter().all(|&x| x == 3.0));
    });
}

#[test]
fn ranks_may_use_different_shared_or_private_buffers() {
    common::run_ranks(3, |group| {
        let (mut one, mut other) = (group.alloc::<i64>(LEN).unwrap(), group.alloc::<i64>(2 * LEN).unwrap());
        let mut own = vec![0_i64; LEN];
        for round in 0..4 {
            let buf: &mut [i64] = match (round, group.rank()) {
                (0, 0) | (1, 1) => &mut own,
                (2, 2) => &mut other[..LEN],
                // Another page of that allocation.
                (3, rank) => &mut other[rank * 512..][..LEN],
                _ => &mut one,
            };
            fill(buf, group.rank(), round);
            group.all_reduce(buf, ReduceOp::Sum).unwrap();
            let mut want = vec![0_i64; LEN];
            for rank in 0..3 {
                let mut share = vec![0_i64; LEN];
                fill(&mut share, rank, round);
                want.iter_mut().zip(&share).for_each(|(sum, share)| *sum += share);
            }
            assert!(buf == want, "round {round} at {}", group.rank());
        }
        // Memory that one rank drops still exists on the others.
        if group.rank() == 1 {
            drop(one);
            drop(other);
        } else {
            other.fill(1);
        }
        group.all_reduce(&mut own, ReduceOp::Sum).unwrap();
    });
}

#[test]
fn shared_buffers_support_concurrent_operations_and_every_collective() {
    common::run_ranks(2, |group| {
        let world = group.size();
        let buffers: Vec<SharedBuffer<f32>> = (0..4).map(|_| group.alloc(LEN).unwrap()).collect();
        let works: Vec<_> = buffers
            .into_iter()
            .enumerate()
            .map(|(index, mut buffer)| {
                buffer.fill(index as f32);
                group.start(op::all_reduce(buffer, ReduceOp::Sum)).unwrap()
            })
            .collect();
        for (index, work) in works.into_iter().enumerate() {
            let buffer = work.wait().unwrap();
            assert!(buffer.iter().all(|&x| x == (world * index) as f32));
        }
        let (mut a, mut b) = (group.alloc::<u32>(LEN).unwrap(), group.alloc::<u32>(world * LEN).unwrap());
        a.fill(group.rank() as u32 + 1);
        group.all_gather(&a, &mut b).unwrap();
        assert!(b[..LEN].iter().all(|&x| x == 1) && b[LEN..].iter().all(|&x| x == 2));
        group.reduce_scatter(&b, &mut a, ReduceOp::Sum).unwrap();
        assert!(a.iter().all(|&x| x == 2 * (group.rank() as u32 + 1)));
        group.broadcast(&mut a[..], 1).unwrap();
        assert!(a.iter().all(|&x| x == 4));
    });
}

#[test]
fn unshared_allocation_behaves_like_any_other_buffer() {
    let options = GroupOptions::default().shared_memory(false);
    common::run_with_options(3, options, |group| {
        let mut buffer = group.alloc::<u16>(LEN).unwrap();
        assert!(!buffer.is_shared());
        buffer.fill(5);
        group.all_reduce(&mut buffer[..], ReduceOp::Sum).unwrap();
        assert!(buffer.iter().all(|&x| x == 15));
    });
    common::run_on_hosts(&[0, 0, 1], "", |group| assert!(!group.alloc::<u16>(LEN).unwrap().is_shared()));
    common::run_ranks(1, |group| assert!(!group.alloc::<u16>(LEN).unwrap().is_shared()));
    // One rank asks for no memory, so none is shared.
    common::run_ranks(2, |group| assert!(!group.alloc::<u8>(group.rank() * LEN).unwrap().is_shared()));
}

#[test]
fn too_large_allocation_is_an_error_and_the_group_continues() {
    common::run_ranks(2, |group| {
        let error = group.alloc::<f64>(usize::MAX / 4).unwrap_err();
        assert!(matches!(error, CommError::InvalidArgument(_)), "{error}");
        // Each part is possible, but their sum is not.
        let error = group.alloc::<u8>(isize::MAX as usize / 2 + 1).unwrap_err();
        assert!(matches!(error, CommError::InvalidArgument(_)), "{error}");
        group.barrier().unwrap();
    });
}

#[test]
fn memory_is_private_after_a_failure() {
    common::run_ranks_together(2, |group| {
        let mut lent = group.alloc::<u64>(LEN).unwrap();
        let mut kept = group.alloc::<u64>(LEN).unwrap();
        lent.fill(7);
        kept.fill(8);
        if group.rank() == 1 {
            // It may or may not have seen that the other rank is in the call: both must work.
            group.abort("enough");
        }
        let error = group.all_reduce(&mut lent[..], ReduceOp::Sum).unwrap_err();
        assert!(matches!(error, CommError::Aborted { .. }), "{error}");
        // The memory is private again: nobody changes it.
        lent.fill(9);
        assert!(lent.iter().all(|&x| x == 9) && kept.iter().all(|&x| x == 8));
    });
}
