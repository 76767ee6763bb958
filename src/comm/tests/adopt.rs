//! Memory that programs have made themselves: results equal those in other memory, and a failed call makes it
//! private.

#![allow(clippy::unwrap_used, clippy::panic, unsafe_code)]

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use common::{CommError, Group, GroupOptions, ReduceOp};
use convoke_comm::raw::Adopted;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

const PAGE: usize = 4096;
/// Number of `f32` of a rank; the last page is not full.
const LEN: usize = 40_961;
const BYTES: usize = LEN * 4;

/// Memory that a program has made, behind a page of other data in the file.
struct Mapped {
    file: OwnedFd,
    start: NonNull<f32>,
}

impl Mapped {
    fn new() -> Self {
        let file = memfd_create(c"program", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, (PAGE + BYTES) as u64).unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping where nothing is mapped.
        let start = unsafe {
            mmap(std::ptr::null_mut(), BYTES, protection, MapFlags::SHARED, &file, PAGE as u64).unwrap()
        };
        Self { file, start: NonNull::new(start.cast()).unwrap() }
    }

    fn adopted_by(&self, group: &Group) -> Result<Adopted, CommError> {
        // SAFETY: the mapping stays until the tests drop the handle, and nobody changes the file's size.
        unsafe { group.adopt(self.file.as_fd(), PAGE as u64, self.start.cast(), BYTES) }
    }

    #[allow(clippy::mut_from_ref)]
    fn values(&self) -> &mut [f32] {
        // SAFETY: the mapping has so many values; each test uses one slice of it at a time.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), LEN) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made.
        unsafe { munmap(self.start.as_ptr().cast(), BYTES).unwrap() };
    }
}

#[test]
fn all_reduce_of_adopted_memory_gives_the_sum_of_all_ranks() {
    for world in [2, 3, 5] {
        common::run_ranks(world, |group| {
            let (memory, rank) = (Mapped::new(), group.rank());
            let adopted = memory.adopted_by(&group).unwrap();
            assert!(adopted.is_shared());
            let address = memory.start.as_ptr().cast();
            assert!(group.is_shared_memory(address, BYTES) && group.is_shared_memory(address, 2 * PAGE));
            assert!(!group.is_shared_memory(address, 100) && !group.is_shared_memory(address, BYTES + PAGE));
            // All of the memory; whole pages; then ranges that are not reduced in place.
            for range in [0..LEN, 1024..LEN, 1024..3072, 0..LEN - 1, 1..LEN] {
                memory.values().iter_mut().enumerate().for_each(|(at, x)| *x = (at % 100 + rank) as f32);
                group.all_reduce(&mut memory.values()[range.clone()], ReduceOp::Sum).unwrap();
                let ranks = world * (world - 1) / 2;
                let sum =
                    |at: usize| if range.contains(&at) { at % 100 * world + ranks } else { at % 100 + rank };
                assert!(memory.values().iter().enumerate().all(|(at, &x)| x == sum(at) as f32), "{range:?}");
            }
            drop(adopted);
            assert!(!group.is_shared_memory(address, BYTES));
            memory.values().fill(1.0);
            group.all_reduce(memory.values(), ReduceOp::Sum).unwrap();
            assert!(memory.values().iter().all(|&x| x == world as f32));
        });
    }
}

#[test]
fn adopted_and_allocated_memory_may_be_mixed() {
    common::run_ranks(3, |group| {
        let (memory, mut allocated) = (Mapped::new(), group.alloc::<f32>(LEN).unwrap());
        let _adopted = memory.adopted_by(&group).unwrap();
        let values = if group.rank() == 1 { &mut allocated[..] } else { memory.values() };
        values.fill(2.0);
        group.all_reduce(&mut *values, ReduceOp::Sum).unwrap();
        assert!(values.iter().all(|&x| x == 6.0));
    });
}

#[test]
fn memory_that_one_rank_cannot_share_stays_private_on_all_ranks() {
    common::run_ranks(3, |group| {
        let memory = Mapped::new();
        if group.rank() == 1 {
            // The memory would end behind the end of the file.
            ftruncate(&memory.file, BYTES as u64).unwrap();
        }
        let adopted = memory.adopted_by(&group).unwrap();
        assert!(!adopted.is_shared() && !group.is_shared_memory(memory.start.as_ptr().cast(), BYTES));
        let mut values = [1.0_f32; 10];
        group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
        assert_eq!(values, [3.0; 10]);
    });
    let options = GroupOptions::default().shared_memory(false);
    common::run_with_options(2, options, |group| {
        assert!(!Mapped::new().adopted_by(&group).unwrap().is_shared());
    });
}

#[test]
fn memory_that_begins_within_a_page_is_refused() {
    common::run_ranks(2, |group| {
        let memory = Mapped::new();
        for (offset, at) in [(PAGE as u64 + 1, 0), (PAGE as u64, 1)] {
            let start = memory.start.cast::<u8>();
            // SAFETY: the call refuses the memory.
            let error = unsafe { group.adopt(memory.file.as_fd(), offset, start.add(at), PAGE).unwrap_err() };
            assert!(error.to_string().contains("multiples of 4096"), "{error}");
        }
        group.barrier().unwrap();
    });
}

#[test]
fn adopted_memory_is_private_and_zero_after_a_failure() {
    common::run_ranks_together(2, |group| {
        let memory = Mapped::new();
        let _adopted = memory.adopted_by(&group).unwrap();
        memory.values().fill(7.0);
        if group.rank() == 1 {
            group.abort("enough");
        }
        let error = group.all_reduce(memory.values(), ReduceOp::Sum).unwrap_err();
        assert!(matches!(error, CommError::Aborted { .. }), "{error}");
        memory.values().fill(9.0);
        assert!(memory.values().iter().all(|&x| x == 9.0));
    });
}
