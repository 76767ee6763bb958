//! A rank whose thread panics while it drives the engine.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use convoke_testkit::TimedBarrier;

use super::{FAKE, LONG, with_scripted_peer};
use crate::buffer::BorrowedBuffer;
use crate::collectives::call::{Call, CallKind};
use crate::collectives::dtype::Dtype;
use crate::engine::Engine;
use crate::engine::progress_lock::Drive;
use crate::engine::{Completion, Operation, Shared};
use crate::error::CommError;

fn panic_while_driving(shared: &Shared) {
    let driving = || shared.try_with_engine(|_| -> () { panic!("on purpose") });
    assert!(catch_unwind(AssertUnwindSafe(driving)).is_err());
}

fn assert_names_the_panic(error: &CommError) {
    assert!(matches!(error, CommError::Aborted { .. }), "{error}");
    let cause = format!("a thread of rank {FAKE} panicked inside a call");
    assert!(error.to_string().contains(&cause), "{error}");
}

#[test]
fn peers_hear_of_a_panic_while_driving_at_once() {
    let (formed, heard) = (TimedBarrier::new(3), TimedBarrier::new(3));
    with_scripted_peer(
        |group| {
            let group = group.unwrap();
            formed.wait();
            assert_names_the_panic(&group.barrier().unwrap_err());
            heard.wait();
        },
        |peer| {
            let shared = Shared::new(peer.engine());
            formed.wait();
            panic_while_driving(&shared);
            // The group still exists, and no thread uses it.
            heard.wait();
            shared.close(Engine::leave);
        },
    );
}

/// A lock that is taken during an unwinding is not poisoned by a second panic.
#[test]
fn group_that_is_dropped_after_a_panic_while_driving_says_so() {
    for last in [Engine::leave as fn(&mut Engine), Engine::leave_on_panic] {
        let formed = TimedBarrier::new(3);
        with_scripted_peer(
            |group| {
                let group = group.unwrap();
                formed.wait();
                assert_names_the_panic(&group.barrier().unwrap_err());
            },
            |peer| {
                let shared = Shared::new(peer.engine());
                formed.wait();
                struct PanicsInDrop<'a>(&'a Shared);
                impl Drop for PanicsInDrop<'_> {
                    fn drop(&mut self) {
                        panic_while_driving(self.0);
                    }
                }
                let unwinding = || {
                    let _panics = PanicsInDrop(&shared);
                    panic!("on purpose, outside of a call");
                };
                assert!(catch_unwind(AssertUnwindSafe(unwinding)).is_err());
                shared.close(last);
            },
        );
    }
}

#[test]
fn buffer_of_a_forgotten_operation_is_never_written() {
    let sent = TimedBarrier::new(3);
    with_scripted_peer(
        |group| {
            let group = group.unwrap();
            if group.rank() == 0 {
                group.send(&[7_u8; 4], FAKE, 5).unwrap();
            }
            sent.wait();
            assert_names_the_panic(&group.barrier().unwrap_err());
        },
        |peer| {
            let shared = Shared::new(peer.engine());
            let mut memory = [0_u8; 4];
            let call = Call::new(CallKind::PointToPoint, Dtype::U8, None, 5, 4);
            let buffer = BorrowedBuffer::default().with_mut(0, &mut memory[..]);
            let completion = Arc::new(Completion::new(LONG));
            // SAFETY: `memory` outlives the engine.
            #[allow(unsafe_code)]
            unsafe {
                shared.begin(Operation::Recv { from: Some(0), call, buffer }, &completion);
            }
            shared.try_with_engine(Drive::collect).unwrap();
            sent.wait();
            panic_while_driving(&shared);
            assert!(completion.is_done());
            shared.close(Engine::leave_on_panic);
            assert_eq!(memory, [0; 4]);
        },
    );
}
