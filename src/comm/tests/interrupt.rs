//! A program that is interrupted while it waits. The check belongs to the process, so these tests have a program of
//! their own.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod common;

use std::cell::Cell;
use std::sync::Arc;
use std::thread;

use common::{CommError, Group, ReduceOp, options, run_ranks};
use convoke_comm::raw;
use convoke_store::{MemoryStore, Store};

const REASON: &str = "interrupted by a signal, as by Ctrl-C, while it waited for rank";

thread_local! {
    /// The number of checks of this thread that still say no. The next check says yes.
    static UNTIL_INTERRUPTED: Cell<u32> = const { Cell::new(u32::MAX) };
}

fn check() -> bool {
    UNTIL_INTERRUPTED.with(|left| left.replace(left.get().saturating_sub(1)) == 0)
}

/// The third check of this thread from now on says that the program was interrupted.
fn interrupt_soon() {
    raw::set_interrupt_check(check);
    UNTIL_INTERRUPTED.set(3);
}

#[test]
fn interrupted_wait_ends_and_names_the_awaited_rank() {
    run_ranks(2, |group| {
        // Each rank waits for the other: a collective and a message never meet.
        let rank = group.rank();
        if rank == 0 {
            interrupt_soon();
        }
        let result = match rank {
            0 => group.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum),
            _ => group.recv(&mut [0_u8; 4], 0, 1).map(drop),
        };
        let error = result.unwrap_err();
        assert!(matches!(error, CommError::Aborted { by: 0, .. }), "{error}");
        assert!(error.to_string().contains(REASON), "{error}");
    });
}

/// Forms a group of two ranks at `store`, as the rank `rank`.
fn form(store: &Arc<dyn Store>, rank: usize) -> Result<Group, CommError> {
    Group::new(Arc::clone(store), rank, 2, options())
}

/// Forms a group as `form` does, and is interrupted while it waits.
fn interrupted_form(store: &Arc<dyn Store>, rank: usize) -> String {
    interrupt_soon();
    let error = form(store, rank).unwrap_err();
    UNTIL_INTERRUPTED.set(u32::MAX);
    assert!(matches!(error, CommError::Bootstrap { .. }), "{error}");
    error.to_string()
}

#[test]
fn interrupted_rank_0_names_the_absent_ranks_and_they_learn_of_it() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let error = interrupted_form(&store, 0);
    assert!(error.contains(&format!("rank 0 was {REASON}(s) 1 of 2 to join")), "{error}");
    let error = form(&store, 1).unwrap_err().to_string();
    assert!(error.contains(&format!("rank 0 was {REASON}")), "{error}");
}

#[test]
fn interrupted_rank_may_join_later() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let error = interrupted_form(&store, 1);
    assert!(error.contains(&format!("rank 1 was {REASON}(s) 0 of 2 to join")), "{error}");
    thread::scope(|scope| {
        let other = scope.spawn(|| form(&store, 0).unwrap().barrier());
        form(&store, 1).unwrap().barrier().unwrap();
        other.join().unwrap().unwrap();
    });
}
