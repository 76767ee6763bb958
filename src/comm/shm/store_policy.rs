//! The choice between normal and non-temporal store instructions for writes to shared memory. Pure: the
//! caller measures how long a write takes.
//!
//! Cores of different chiplets or sockets share no cache, and a cache line moves slowly between them. A store
//! to a line that such a core has read waits for the line. A non-temporal store goes to main memory and does
//! not wait, but the reader must then read the data from main memory. Time of a message between two cores of
//! an EPYC (Zen 4), which the hypervisor places with or without a shared cache, in µs:
//!
//! | | shared cache: normal | non-temporal | no shared cache: normal | non-temporal |
//! |---|---|---|---|---|
//! | 64 KiB | 3.1 | 5.2 | 14.5 | 5.7 |
//! | 1 MiB | 33 | 52 | 450 | 70 |
//!
//! Where a hypervisor moves virtual cores, no system table shows which cores share a cache, so writes are
//! timed. A write of 16 KiB takes 0.25 to 0.75 µs with a shared cache and 2 to 6 µs without. It takes 0.75 to
//! 1.75 µs if all data is in main memory anyway. Non-temporal stores are timed as well: where every store
//! waits for main memory, they are not faster.

use std::cell::Cell;
use std::time::Duration;

/// The least size of a write that is timed or made with non-temporal stores.
pub(super) const MIN_BYTES: usize = 4096;
/// The bytes of one measurement, in one write or several. Fewer bytes take hardly longer than reading the
/// clock.
const TIMED_BYTES: usize = 16 << 10;
/// The least number of bytes that are written untimed after a measurement found normal stores to be fast. The
/// actual number is random, at most twice this.
const UNTIMED_BYTES: usize = 5 * TIMED_BYTES;
/// A write below this many bytes a nanosecond is slow.
const SLOW_BYTES_PER_NS: u64 = 5;
/// The number of slow measurements in a row after which non-temporal stores are tried. A single slow one may
/// be caused by another process on the core.
const SLOW_IN_A_ROW: u32 = 2;
/// The number of slow measurements in a row for memory where each line may be slow to write once, but not again.
const PATIENT_SLOW_IN_A_ROW: u32 = 128;
/// After non-temporal stores were measured, the number of bytes written before normal stores are measured
/// again.
const RETRY_BYTES: usize = 4 << 20;

/// How to make one write to shared memory: with normal or non-temporal store instructions, timed or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StoreMode {
    pub(super) non_temporal: bool,
    /// If set, the caller measures the duration of the write and passes it to [`StorePolicy::record`].
    pub(super) is_timed: bool,
}

/// Chooses the store instructions for writes that one rank reads, or for writes that all ranks of the host
/// read.
#[derive(Debug)]
pub(super) struct StorePolicy {
    slow_in_a_row: u32,
    stage: Cell<Stage>,
    /// The number of slow measurements of normal stores in a row, and the nanoseconds that 16 KiB took in the
    /// last one.
    slow: Cell<u32>,
    slow_ns: Cell<u64>,
    /// The state of the random generator that varies the number of untimed bytes.
    random: Cell<u32>,
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    /// Writes are not timed for `left` more bytes.
    Untimed { non_temporal: bool, left: usize },
    /// Writes are timed: so far `bytes` bytes, which took `ns` nanoseconds.
    Timed { non_temporal: bool, bytes: usize, ns: u64 },
}

impl Stage {
    fn timed(non_temporal: bool) -> Self {
        Self::Timed { non_temporal, bytes: 0, ns: 0 }
    }
}

impl Default for StorePolicy {
    fn default() -> Self {
        Self::after(SLOW_IN_A_ROW)
    }
}

impl StorePolicy {
    /// Returns a policy that tries non-temporal stores only if normal stores were slow for 2 MiB.
    pub(super) fn patient() -> Self {
        Self::after(PATIENT_SLOW_IN_A_ROW)
    }

    fn after(slow_in_a_row: u32) -> Self {
        let stage = Cell::new(Stage::Untimed { non_temporal: false, left: UNTIMED_BYTES });
        Self { slow_in_a_row, stage, slow: Cell::new(0), slow_ns: Cell::new(0), random: Cell::new(0) }
    }

    /// Returns which store instructions the next write uses, which has `bytes` bytes, and whether to time it.
    #[inline]
    pub(super) fn mode(&self, bytes: usize) -> StoreMode {
        match self.stage.get() {
            Stage::Untimed { non_temporal, left } => {
                self.stage.set(match left.saturating_sub(bytes) {
                    0 => Stage::timed(false),
                    left => Stage::Untimed { non_temporal, left },
                });
                StoreMode { non_temporal, is_timed: false }
            }
            Stage::Timed { non_temporal, .. } => StoreMode { non_temporal, is_timed: true },
        }
    }

    /// Records that a write of `more` bytes took `time`. It is called if [`StoreMode::is_timed`] was set for
    /// the write.
    pub(super) fn record(&self, more: usize, time: Duration) {
        let Stage::Timed { non_temporal, bytes, ns } = self.stage.get() else { return };
        let (bytes, ns) = (bytes + more, ns + time.as_nanos() as u64);
        self.stage.set(if bytes < TIMED_BYTES {
            Stage::Timed { non_temporal, bytes, ns }
        } else if non_temporal {
            self.measured_non_temporal(ns * TIMED_BYTES as u64 / bytes as u64)
        } else if bytes as u64 >= ns * SLOW_BYTES_PER_NS {
            self.measured_fast()
        } else {
            self.measured_slow(ns * TIMED_BYTES as u64 / bytes as u64)
        });
    }

    fn measured_fast(&self) -> Stage {
        self.slow.set(0);
        // The number of untimed bytes is random: if it were fixed and the caller wrote to several readers in
        // turn, it might always time the writes to one of them. The generator is linear congruential with the
        // factors of Numerical Recipes; its high bits are good enough.
        self.random.set(self.random.get().wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
        let further = ((self.random.get() >> 16) as usize * UNTIMED_BYTES) >> 16;
        Stage::Untimed { non_temporal: false, left: UNTIMED_BYTES + further }
    }

    fn measured_slow(&self, ns: u64) -> Stage {
        self.slow.set(self.slow.get() + 1);
        self.slow_ns.set(ns);
        Stage::timed(self.slow.get() >= self.slow_in_a_row)
    }

    fn measured_non_temporal(&self, ns: u64) -> Stage {
        let gains = ns < self.slow_ns.get();
        // If non-temporal stores are faster, one slow measurement is enough when normal stores are tried
        // again.
        self.slow.set(if gains { self.slow_in_a_row - 1 } else { 0 });
        Stage::Untimed { non_temporal: gains, left: RETRY_BYTES }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 16 << 10;
    const FAST_NS: u64 = 500;
    const SLOW_NS: u64 = 6000;
    const NON_TEMPORAL_NS: u64 = 2000;

    /// Makes `count` writes of `sizes` in turn. Returns the bytes that are written normally, timed normally,
    /// and written with non-temporal stores. 16 KiB take `normal` ns with normal and `non_temporal` ns with
    /// non-temporal stores.
    fn write(
        policy: &StorePolicy,
        count: usize,
        sizes: &[usize],
        normal: u64,
        non_temporal: u64,
    ) -> [usize; 3] {
        let mut modes = [0; 3];
        for &bytes in sizes.iter().cycle().take(count) {
            let mode = policy.mode(bytes);
            modes[if mode.non_temporal { 2 } else { usize::from(mode.is_timed) }] += bytes;
            if mode.is_timed {
                let ns = if mode.non_temporal { non_temporal } else { normal } * bytes as u64 / BYTES as u64;
                policy.record(bytes, Duration::from_nanos(ns));
            }
        }
        modes
    }

    #[test]
    fn ranks_with_a_shared_cache_store_normally() {
        // 1750 ns: all data is in main memory.
        for ns in [FAST_NS, 1750] {
            for sizes in [&[BYTES][..], &[4096], &[32 << 10, 4096, 4096, 8192]] {
                let [normal, timed, non_temporal] =
                    write(&StorePolicy::default(), 9000, sizes, ns, NON_TEMPORAL_NS);
                assert_eq!(non_temporal, 0);
                assert!((3 * timed..12 * timed).contains(&normal), "{normal} and {timed}");
            }
        }
    }

    #[test]
    fn ranks_without_a_shared_cache_use_non_temporal_stores() {
        for sizes in [&[BYTES][..], &[4096], &[32 << 10, 4096, 4096, 4096], &[128 << 10]] {
            let policy = StorePolicy::default();
            let [normal, timed, non_temporal] = write(&policy, 40_000, sizes, SLOW_NS, NON_TEMPORAL_NS);
            assert!(non_temporal > 25 * (normal + timed), "{sizes:?}: {normal}, {timed} and {non_temporal}");
            let [_, _, non_temporal] = write(&policy, 40_000, sizes, FAST_NS, NON_TEMPORAL_NS);
            assert!(non_temporal <= RETRY_BYTES + (128 << 10), "it is found out when that changes");
        }
    }

    #[test]
    fn slow_memory_disables_non_temporal_stores() {
        let [normal, timed, non_temporal] =
            write(&StorePolicy::default(), 40_000, &[BYTES], SLOW_NS, SLOW_NS);
        assert!(normal + timed > 200 * non_temporal, "{normal}, {timed} and {non_temporal}");
    }

    #[test]
    fn one_slow_write_changes_no_store_policy() {
        let policy = StorePolicy::default();
        for _ in 0..100 {
            assert!((0..100).any(|_| policy.mode(BYTES).is_timed));
            policy.record(BYTES, Duration::from_nanos(SLOW_NS));
            assert_eq!(write(&policy, 5, &[BYTES], FAST_NS, NON_TEMPORAL_NS), [4 * BYTES, BYTES, 0]);
        }
    }

    #[test]
    fn patient_policy_changes_only_if_all_writes_are_slow_for_long() {
        let policy = StorePolicy::patient();
        let measured = |ns: u64| {
            assert!((0..100).any(|_| policy.mode(BYTES).is_timed));
            policy.record(BYTES, Duration::from_nanos(ns));
            policy.mode(BYTES).non_temporal
        };
        for slow in [1, 2, 127] {
            assert!((0..slow).all(|_| !measured(SLOW_NS)), "{slow} slow ones");
            assert!(!measured(FAST_NS));
        }
        assert!((0..127).all(|_| !measured(SLOW_NS)) && measured(SLOW_NS));
    }

    #[test]
    fn alternating_readers_are_all_sampled() {
        for readers in 2..=16 {
            for bytes in [4096, BYTES, 64 << 10, 128 << 10] {
                let (policy, mut timed) = (StorePolicy::default(), vec![0; readers]);
                for write in 0..readers * 4000 {
                    if policy.mode(bytes).is_timed {
                        timed[write % readers] += 1;
                        policy.record(bytes, Duration::from_nanos(1));
                    }
                }
                let (least, most) = (timed.iter().min().unwrap(), timed.iter().max().unwrap());
                assert!(2 * least > *most, "{readers} readers, {bytes} bytes: {timed:?}");
            }
        }
    }
}
