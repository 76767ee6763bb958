//! Models of what ranks write and check before they sleep, run under loom in every order that a processor
//! allows. `engine/models.rs` has those of the engine. Loom knows no processes, so threads stand for them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use loom::sync::atomic::{AtomicU64, AtomicUsize};
use loom::thread;

use super::bells::{asleep, fall_asleep, is_asleep, take_away};

const BIT: u64 = 2;

/// The words that two ranks share: whether the first sleeps, the stamp of the other's call, and the data
/// beside it.
struct Shared {
    sleepers: AtomicU64,
    stamp: AtomicU64,
    given: AtomicUsize,
    sleeper: thread::Thread,
}

impl Shared {
    /// The other rank publishes data and wakes the sleeper.
    fn give(&self) {
        self.given.store(7, Ordering::Relaxed);
        self.stamp.store(1, Ordering::Release);
        if asleep(&self.sleepers) & BIT != 0 && take_away(&self.sleepers, BIT) {
            self.sleeper.unpark();
        }
    }
}

/// A rank that sleeps though its data was published would sleep for ever, which loom reports as a failure.
#[test]
fn sleeping_rank_is_woken_or_sees_the_new_data() {
    loom::model(|| {
        let shared = Arc::new(Shared {
            sleepers: AtomicU64::new(0),
            stamp: AtomicU64::new(0),
            given: AtomicUsize::new(0),
            sleeper: thread::current(),
        });
        let other = Arc::clone(&shared);
        let other = thread::spawn(move || other.give());
        fall_asleep(&shared.sleepers, BIT);
        if shared.stamp.load(Ordering::Acquire) == 0 && is_asleep(&shared.sleepers, BIT) {
            thread::park();
        }
        take_away(&shared.sleepers, BIT);
        // A rank that was woken finds the data; one that was not woken had seen it.
        while shared.stamp.load(Ordering::Acquire) == 0 {
            thread::yield_now();
        }
        assert_eq!(shared.given.load(Ordering::Relaxed), 7, "the stamp is there before what was given");
        other.join().unwrap();
    });
}
