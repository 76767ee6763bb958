//! Models of what ranks write and check before they sleep, run under loom in every order that a processor
//! allows. `engine/models.rs` has those of the engine. Loom knows no processes, so threads stand for them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use loom::sync::atomic::{AtomicU64, AtomicUsize};
use loom::thread;

use super::doorbells::{clear_sleep_bit, is_sleep_bit_set, set_sleep_bit, sleeping_ranks};

const BIT: u64 = 2;

/// The words that two ranks share: whether the first sleeps, the stamp of the other's call, and the data
/// beside it.
struct Shared {
    sleepers: AtomicU64,
    stamp: AtomicU64,
    data: AtomicUsize,
    sleeper: thread::Thread,
}

impl Shared {
    /// The other rank publishes data and wakes the sleeper.
    fn publish(&self) {
        self.data.store(7, Ordering::Relaxed);
        self.stamp.store(1, Ordering::Release);
        if sleeping_ranks(&self.sleepers) & BIT != 0 && clear_sleep_bit(&self.sleepers, BIT) {
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
            data: AtomicUsize::new(0),
            sleeper: thread::current(),
        });
        let other = Arc::clone(&shared);
        let other = thread::spawn(move || other.publish());
        set_sleep_bit(&shared.sleepers, BIT);
        if shared.stamp.load(Ordering::Acquire) == 0 && is_sleep_bit_set(&shared.sleepers, BIT) {
            thread::park();
        }
        clear_sleep_bit(&shared.sleepers, BIT);
        // A rank that was woken finds the data; one that was not woken had seen it.
        while shared.stamp.load(Ordering::Acquire) == 0 {
            thread::yield_now();
        }
        assert_eq!(shared.data.load(Ordering::Relaxed), 7, "the stamp is there before the data");
        other.join().unwrap();
    });
}
