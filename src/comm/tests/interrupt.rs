//! A program that is interrupted while it waits. The check belongs to the process, so this test has a program of
//! its own.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod common;

use std::sync::atomic::{AtomicU32, Ordering};

use common::{CommError, ReduceOp, run_ranks};
use convoke_comm::raw;

/// The number of checks that still say no. The next check says yes.
static UNTIL_INTERRUPTED: AtomicU32 = AtomicU32::new(3);

fn check() -> bool {
    UNTIL_INTERRUPTED.fetch_sub(1, Ordering::SeqCst) == 0
}

#[test]
fn interrupted_wait_ends_and_names_the_awaited_rank() {
    raw::set_interrupt_check(check);
    run_ranks(2, |group| {
        // Each rank waits for the other: a collective and a message never meet.
        let result = match group.rank() {
            0 => group.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum),
            _ => group.recv(&mut [0_u8; 4], 0, 1).map(drop),
        };
        let error = result.unwrap_err();
        assert!(matches!(error, CommError::Aborted { .. }), "{error}");
        let waits = "interrupted by a signal, as by Ctrl-C, while it waited for rank";
        assert!(error.to_string().contains(waits), "{error}");
    });
}
