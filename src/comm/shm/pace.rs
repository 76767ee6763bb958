//! The choice between normal and non-temporal stores to shared memory. Pure: the caller tells how long a
//! write took.
//!
//! Cores of different chiplets or sockets share no cache and take lines from each other slowly. A store to a
//! line that such a core has read waits for the line. A non-temporal store goes to main memory and does not
//! wait, but the reader must read it from there. Measured with messages between two cores of an EPYC (Zen 4),
//! which the hypervisor places with or without a shared cache, µs:
//!
//! | | shared cache: as usual | past the caches | none shared: as usual | past the caches |
//! |---|---|---|---|---|
//! | 64 KiB | 3.1 | 5.2 | 14.5 | 5.7 |
//! | 1 MiB | 33 | 52 | 450 | 70 |
//!
//! No system table shows the topology where a hypervisor moves cores, so writes are timed. A write of 16 KiB
//! takes 0.25 to 0.75 µs with a shared cache and 2 to 6 µs without. It takes 0.75 to 1.75 µs if all data is
//! in main memory anyway. Non-temporal stores are timed as well: if every store waits for main memory, they
//! gain nothing.

use std::cell::Cell;
use std::time::Duration;

/// Shorter writes are neither timed nor made with non-temporal stores.
pub(super) const LEAST_BYTES: usize = 4096;
/// The bytes that are timed together, in one write or several. Fewer take hardly longer than reading the
/// clock.
const TIMED_BYTES: usize = 16 << 10;
/// The least number of untimed bytes after a quick measurement; up to twice as many.
const UNTIMED_BYTES: usize = 5 * TIMED_BYTES;
/// A write below this many bytes a nanosecond is slow.
const SLOW: u64 = 5;
/// The number of slow measurements in a row that rules out an accident, such as another process on the core.
const CERTAIN: u32 = 2;
/// The bytes that one policy is kept for before the other is tried again.
const KEPT_BYTES: usize = 4 << 20;

/// The way in which to make a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) past_caches: bool,
    /// If set, the caller passes the duration to [`Pace::took`].
    pub(super) is_timed: bool,
}

/// The state of the policy for writes to one reader, or to all.
#[derive(Debug)]
pub(super) struct Pace {
    stage: Cell<Stage>,
    /// The number of slow measurements of normal stores in a row, and the nanoseconds that 16 KiB took in the
    /// last one.
    slow: Cell<u32>,
    slow_ns: Cell<u64>,
    /// The state of the random generator.
    lot: Cell<u32>,
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    /// The bytes left that use this policy without being timed.
    Untimed { past_caches: bool, left: usize },
    /// The bytes of this policy that were timed so far, and their duration.
    Timed { past_caches: bool, bytes: usize, ns: u64 },
}

impl Stage {
    fn timed(past_caches: bool) -> Self {
        Self::Timed { past_caches, bytes: 0, ns: 0 }
    }
}

impl Default for Pace {
    fn default() -> Self {
        let stage = Stage::Untimed { past_caches: false, left: UNTIMED_BYTES };
        Self { stage: Cell::new(stage), slow: Cell::new(0), slow_ns: Cell::new(0), lot: Cell::new(0) }
    }
}

impl Pace {
    /// Returns how to make the next write, of `bytes` bytes.
    #[inline]
    pub(super) fn way(&self, bytes: usize) -> Way {
        match self.stage.get() {
            Stage::Untimed { past_caches, left } => {
                self.stage.set(match left.saturating_sub(bytes) {
                    0 => Stage::timed(false),
                    left => Stage::Untimed { past_caches, left },
                });
                Way { past_caches, is_timed: false }
            }
            Stage::Timed { past_caches, .. } => Way { past_caches, is_timed: true },
        }
    }

    /// Records the duration of a write that was to be timed.
    pub(super) fn took(&self, more: usize, time: Duration) {
        let Stage::Timed { past_caches, bytes, ns } = self.stage.get() else { return };
        let (bytes, ns) = (bytes + more, ns + time.as_nanos() as u64);
        self.stage.set(if bytes < TIMED_BYTES {
            Stage::Timed { past_caches, bytes, ns }
        } else if past_caches {
            self.tried_past_caches(ns * TIMED_BYTES as u64 / bytes as u64)
        } else if bytes as u64 >= ns * SLOW {
            self.was_quick()
        } else {
            self.was_slow(ns * TIMED_BYTES as u64 / bytes as u64)
        });
    }

    fn was_quick(&self) -> Stage {
        self.slow.set(0);
        // The distance varies: where readers take turns, a fixed one might always time writes for one of
        // them. A linear congruential generator with the factors of Numerical Recipes; its high bits are good
        // enough.
        self.lot.set(self.lot.get().wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
        let further = ((self.lot.get() >> 16) as usize * UNTIMED_BYTES) >> 16;
        Stage::Untimed { past_caches: false, left: UNTIMED_BYTES + further }
    }

    fn was_slow(&self, ns: u64) -> Stage {
        self.slow.set(self.slow.get() + 1);
        self.slow_ns.set(ns);
        Stage::timed(self.slow.get() >= CERTAIN)
    }

    fn tried_past_caches(&self, ns: u64) -> Stage {
        let gains = ns < self.slow_ns.get();
        // When normal stores are tried again later, one slow measurement is enough.
        self.slow.set(if gains { CERTAIN - 1 } else { 0 });
        Stage::Untimed { past_caches: gains, left: KEPT_BYTES }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 16 << 10;
    const QUICK: u64 = 500;
    const SLOW: u64 = 6000;
    const PAST: u64 = 2000;

    /// Makes `count` writes of `sizes` in turn. Returns the bytes that are written normally, timed normally,
    /// and written with non-temporal stores. 16 KiB take `usual` ns with normal and `past` ns with
    /// non-temporal stores.
    fn write(pace: &Pace, count: usize, sizes: &[usize], usual: u64, past: u64) -> [usize; 3] {
        let mut ways = [0; 3];
        for &bytes in sizes.iter().cycle().take(count) {
            let way = pace.way(bytes);
            ways[if way.past_caches { 2 } else { usize::from(way.is_timed) }] += bytes;
            if way.is_timed {
                let ns = if way.past_caches { past } else { usual } * bytes as u64 / BYTES as u64;
                pace.took(bytes, Duration::from_nanos(ns));
            }
        }
        ways
    }

    #[test]
    fn ranks_with_a_shared_cache_store_normally() {
        // 1750 ns: all data is in main memory.
        for ns in [QUICK, 1750] {
            for sizes in [&[BYTES][..], &[4096], &[32 << 10, 4096, 4096, 8192]] {
                let [usual, timed, past] = write(&Pace::default(), 9000, sizes, ns, PAST);
                assert_eq!(past, 0);
                assert!((3 * timed..12 * timed).contains(&usual), "{usual} and {timed}");
            }
        }
    }

    #[test]
    fn ranks_without_a_shared_cache_use_non_temporal_stores() {
        for sizes in [&[BYTES][..], &[4096], &[32 << 10, 4096, 4096, 4096], &[128 << 10]] {
            let pace = Pace::default();
            let [usual, timed, past] = write(&pace, 40_000, sizes, SLOW, PAST);
            assert!(past > 25 * (usual + timed), "{sizes:?}: {usual}, {timed} and {past}");
            let [_, _, past] = write(&pace, 40_000, sizes, QUICK, PAST);
            assert!(past <= KEPT_BYTES + (128 << 10), "it is found out when that changes");
        }
    }

    #[test]
    fn slow_memory_disables_non_temporal_stores() {
        let [usual, timed, past] = write(&Pace::default(), 40_000, &[BYTES], SLOW, SLOW);
        assert!(usual + timed > 200 * past, "{usual}, {timed} and {past}");
    }

    #[test]
    fn one_slow_write_changes_no_store_policy() {
        let pace = Pace::default();
        for _ in 0..100 {
            assert!((0..100).any(|_| pace.way(BYTES).is_timed));
            pace.took(BYTES, Duration::from_nanos(SLOW));
            assert_eq!(write(&pace, 5, &[BYTES], QUICK, PAST), [4 * BYTES, BYTES, 0]);
        }
    }

    #[test]
    fn alternating_readers_are_all_sampled() {
        for readers in 2..=16 {
            for bytes in [4096, BYTES, 64 << 10, 128 << 10] {
                let (pace, mut timed) = (Pace::default(), vec![0; readers]);
                for write in 0..readers * 4000 {
                    if pace.way(bytes).is_timed {
                        timed[write % readers] += 1;
                        pace.took(bytes, Duration::from_nanos(1));
                    }
                }
                let (least, most) = (timed.iter().min().unwrap(), timed.iter().max().unwrap());
                assert!(2 * least > *most, "{readers} readers, {bytes} bytes: {timed:?}");
            }
        }
    }
}
