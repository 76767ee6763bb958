//! Whether what is written to shared memory goes past the caches. Pure: the caller tells how long a write took.
//!
//! Cores that share no cache, as those of different chiplets or sockets, take lines from each other slowly, and who writes a
//! line that such another has read waits for it. What goes past the caches goes by main memory and waits for nobody, but the
//! reader finds it there only. Measured with messages between two cores of an EPYC (Zen 4), which share a cache or do not
//! as the hypervisor moves them, µs:
//!
//! | | shared cache: as usual | past the caches | none shared: as usual | past the caches |
//! |---|---|---|---|---|
//! | 64 KiB | 3.1 | 5.2 | 14.5 | 5.7 |
//! | 1 MiB | 33 | 52 | 450 | 70 |
//!
//! No table of the system tells which it is where a hypervisor moves cores, so writes are timed: those of 16 KiB take 0.25 to
//! 0.75 µs where a cache is shared, 2 to 6 µs where none is, and 0.75 to 1.75 µs where all lies in main memory anyway.

use std::cell::Cell;
use std::time::Duration;

/// Shorter writes are neither timed nor sent past the caches.
pub(super) const LEAST_BYTES: usize = 4096;
/// One write in so many is timed.
const TIMED: u32 = 8;
/// Slower than so many bytes in a nanosecond is slow.
const SLOW: u128 = 5;
/// So many slow writes in a row are no accident, such as another process that had the core meanwhile.
const CERTAIN: u32 = 2;
/// Bytes that go past the caches before the usual way is tried again.
const PAST_BYTES: usize = 4 << 20;

/// How a write is to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Usual,
    /// As usual, and [`Pace::took`] is told how long it took.
    Timed,
    PastCaches,
}

/// What is known of the writes to one reader, or to all.
#[derive(Debug, Default)]
pub(super) struct Pace {
    writes: Cell<u32>,
    /// In a row.
    slow: Cell<u32>,
    /// Bytes still to go past the caches.
    past: Cell<usize>,
}

impl Pace {
    /// How the next write, of `bytes` bytes, is made.
    pub(super) fn way(&self, bytes: usize) -> Way {
        let past = self.past.get();
        if past > 0 {
            self.past.set(past.saturating_sub(bytes));
            return Way::PastCaches;
        }
        self.writes.set(self.writes.get().wrapping_add(1));
        let is_timed = self.slow.get() > 0 || self.writes.get().is_multiple_of(TIMED);
        if is_timed { Way::Timed } else { Way::Usual }
    }

    /// A write that was made as usual took so long.
    pub(super) fn took(&self, bytes: usize, time: Duration) {
        if bytes as u128 >= time.as_nanos() * SLOW {
            self.slow.set(0);
            return;
        }
        self.slow.set(self.slow.get() + 1);
        if self.slow.get() >= CERTAIN {
            // When it is tried again, one slow write is enough.
            self.slow.set(CERTAIN - 1);
            self.past.set(PAST_BYTES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 16 << 10;
    const QUICK: Duration = Duration::from_nanos(500);
    const SLOW: Duration = Duration::from_nanos(6000);

    /// How many of so many writes are made which way, if the usual way takes `time`.
    fn write(pace: &Pace, count: usize, time: Duration) -> [usize; 3] {
        let mut ways = [0; 3];
        for _ in 0..count {
            let way = pace.way(BYTES);
            ways[way as usize] += 1;
            if way == Way::Timed {
                pace.took(BYTES, time);
            }
        }
        ways
    }

    #[test]
    fn where_a_cache_is_shared_all_goes_as_usual_and_one_in_eight_is_timed() {
        assert_eq!(write(&Pace::default(), 800, QUICK), [700, 100, 0]);
        // All of it in main memory.
        assert_eq!(write(&Pace::default(), 800, Duration::from_nanos(1750)), [700, 100, 0]);
    }

    #[test]
    fn where_none_is_shared_almost_all_goes_past_the_caches() {
        let pace = Pace::default();
        assert_eq!(write(&pace, 9, SLOW), [7, 2, 0]);
        // 4 MiB, and a try.
        assert_eq!(write(&pace, 257 * 10, SLOW), [0, 10, 2560]);
        assert_eq!(write(&pace, 800, QUICK)[2], 256, "it is found out when that changes");
    }

    #[test]
    fn one_slow_write_is_an_accident() {
        let pace = Pace::default();
        for _ in 0..100 {
            assert_eq!(write(&pace, 8, SLOW)[1], 1);
            assert_eq!(write(&pace, 8, QUICK)[2], 0);
        }
    }
}
