//! Copies into shared memory, with normal stores, prefetched lines or non-temporal stores, and out of it. Looks at the
//! stamps that announce data, and fetches the lines of this data.

#![allow(unsafe_code)]

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::segment::View;
use super::store_policy::{self, StorePolicy};
use crate::collectives::kernels::{TWO_PLACES_BYTES, copy, copy_non_temporal, is_made_by, store_fence};

/// Copies of at least this many bytes prefetch cache lines of the target, this many bytes at a time.
const PREFETCH_BYTES: usize = 512;
const LINE_BYTES: usize = 64;

/// Most bytes of awaited data whose lines are fetched while its stamp is polled. On two cores of an EPYC (Zen 4)
/// without a common cache, a message of 512 bytes takes 0.38 instead of 0.45 µs. With 1 KiB, the reader takes
/// lines from the writer that the writer has not finished: `broadcast` takes 0.37 instead of 0.32 µs with a common cache.
const MOST_AWAITED_BYTES: usize = 512;

impl View<'_> {
    /// Copies the bytes into `into`, which has the length of this view.
    #[inline(always)]
    pub(crate) fn read(self, into: &mut [u8]) {
        self.source().copy_to(into);
    }

    /// Copies the bytes, a part of longer data, into `into`, which has the length of this view. If `uncached` is set, it uses
    /// non-temporal stores, and the caller must call [`store_fence`] before another thread can use the data.
    #[inline(always)]
    pub(super) fn read_part(self, into: &mut [u8], uncached: bool) {
        if uncached {
            self.read_non_temporal(into);
        } else if into.len() >= TWO_PLACES_BYTES && *IS_INTEL {
            self.source().copy_from_two_places(into);
        } else {
            self.read(into);
        }
    }

    /// Copies `bytes`, which has the length of this view, into it.
    #[inline(always)]
    pub(crate) fn write(self, bytes: &[u8]) {
        if bytes.len() >= PREFETCH_BYTES && *IS_INTEL {
            self.write_with_prefetch(bytes)
        } else {
            self.write_without_prefetch(bytes)
        }
    }

    /// Copies `bytes` into the view, with non-temporal stores if `policy` expects them to be quicker.
    #[inline(always)]
    pub(super) fn write_with(self, policy: &StorePolicy, bytes: &[u8]) {
        if self.write_part(policy, bytes) {
            store_fence();
        }
    }

    /// Asks the processor to fetch the lines of this view for a later write, if it gains by that.
    #[inline(always)]
    pub(super) fn prefetch_for_write(self) {
        if *IS_INTEL {
            prefetch_for_write(self.start, self.bytes);
        }
    }

    /// Fetches the lines of this view, which another rank has written.
    #[inline(always)]
    pub(super) fn prefetch_for_read(self) {
        for at in (0..self.bytes).step_by(LINE_BYTES) {
            prefetch_for_read(self.start.wrapping_add(at));
        }
    }

    /// Fetches the lines of this view, if they are few. Another rank is about to write them and then a stamp, which
    /// this rank polls. A rank that fetches these lines with each look at the stamp receives them together with the
    /// stamp, instead of one transfer later.
    #[inline(always)]
    fn prefetch_awaited(self) {
        if self.is_polled() {
            self.prefetch_for_read();
        }
    }

    /// Returns whether a rank that polls the stamp of this data also fetches its lines.
    #[inline(always)]
    pub(super) fn is_polled(self) -> bool {
        self.bytes <= MOST_AWAITED_BYTES
    }

    /// Copies `bytes`, one of several parts of the data, into the view. Returns whether it used non-temporal
    /// stores. If so, the caller must call [`store_fence`] after the last part, before it announces the data.
    /// One fence for all parts is enough; one after each 4 KiB would add a third to the time.
    #[inline(always)]
    pub(super) fn write_part(self, policy: &StorePolicy, bytes: &[u8]) -> bool {
        if bytes.len() < store_policy::MIN_BYTES {
            self.write(bytes);
            return false;
        }
        self.write_long(policy, bytes)
    }

    fn write_long(self, policy: &StorePolicy, bytes: &[u8]) -> bool {
        let mode = policy.mode(bytes.len());
        let begin = mode.is_timed.then(Instant::now);
        match mode.non_temporal {
            true => self.write_non_temporal(bytes),
            false => self.write(bytes),
        }
        if let Some(begin) = begin {
            policy.record(bytes.len(), begin.elapsed());
        }
        mode.non_temporal
    }

    /// Copies `bytes` with non-temporal stores, which are in main memory after [`store_fence`].
    fn write_non_temporal(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes);
        // SAFETY: as in `write_without_prefetch`.
        unsafe { copy_non_temporal(bytes.as_ptr(), self.start, self.bytes) };
    }

    /// Copies the bytes into `into`, which has the length of this view, with non-temporal stores. The target then
    /// does not displace other data from the caches, and its lines are not read before they are written.
    fn read_non_temporal(self, into: &mut [u8]) {
        assert_eq!(into.len(), self.bytes);
        // SAFETY: the owner of this memory has published it, so nobody writes it, and nobody else uses `into`.
        unsafe { copy_non_temporal(self.start, into.as_mut_ptr(), self.bytes) };
    }

    /// Copies `bytes` without prefetching, for destinations that no other core has in its cache.
    #[inline(always)]
    pub(crate) fn write_without_prefetch(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes);
        // SAFETY: source and target both have `self.bytes` bytes and do not overlap. The view belongs to
        // another rank than the borrowed memory, or to memory that no program can borrow.
        unsafe { copy(bytes.as_ptr(), self.start, self.bytes) };
    }

    /// Copies `bytes` and asks the processor for each group of cache lines before it writes to them.
    fn write_with_prefetch(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes);
        prefetch_for_write(self.start, PREFETCH_BYTES);
        for (index, piece) in bytes.chunks(PREFETCH_BYTES).enumerate() {
            let into = self.start.wrapping_add(index * PREFETCH_BYTES);
            prefetch_for_write(into.wrapping_add(PREFETCH_BYTES), PREFETCH_BYTES);
            // SAFETY: as in `write_without_prefetch`, piece by piece.
            unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), into, piece.len()) };
        }
    }
}

/// The number of looks at a stamp in one attempt.
const LOOKS: u32 = 16;
/// The number of accesses to another cache line between two looks at a stamp. A processor that only loads one line
/// again and again receives a change of it later. On two cores of an EPYC (Zen 5) with a common cache, a line's way there
/// and back takes 120 ns without such accesses and 70 to 90 with them. A message of 4 bytes takes 0.128 µs with 1, 0.110
/// with 3, 0.095 with 6. Without a common cache there is no difference.
const OTHER_ACCESSES: u32 = 8;

/// Looks at a stamp, several times if `is_awaited` is not true of it, and fetches the lines of the `data` that the
/// stamp announces. Returns whether `is_awaited` was true in the end. An attempt of the caller takes much longer than
/// a look, so several looks in each attempt notice the stamp sooner.
///
/// Between two looks, this rank accesses a line of its own ([`OTHER_ACCESSES`]).
#[inline(always)]
pub(super) fn poll_stamp(
    stamp: &AtomicU64,
    data: Option<View<'_>>,
    is_awaited: impl Fn(u64) -> bool,
) -> bool {
    let other = 0_u8;
    for _ in 0..LOOKS {
        if is_awaited(stamp.load(Ordering::Acquire)) {
            return true;
        }
        for _ in 0..OTHER_ACCESSES {
            prefetch_for_read(&raw const other);
        }
        if let Some(data) = data {
            data.prefetch_awaited();
        }
    }
    false
}

/// True on Intel's processors, which copy faster in two ways than by `memcpy`:
/// - A writer asks for the lines of the target before it writes them. Other cores have read these lines, so a
///   store needs a round trip to them. On two cores of a Xeon (Cascade Lake) this makes 18 instead of 12 GB/s.
/// - A reader reads from two places in turn. On two cores of a Xeon (Sapphire Rapids) a message of 256 KiB then
///   takes 16 instead of 18 µs.
///
/// On an EPYC (Zen 5) copies with prefetching are a tenth to a third slower. Only processors that are known to
/// gain use these ways.
pub(super) static IS_INTEL: LazyLock<bool> = LazyLock::new(|| is_made_by(b"GenuineIntel"));

/// Asks the processor to fetch the cache lines of `bytes` bytes for writing. It ignores unmapped addresses.
#[inline(always)]
fn prefetch_for_write(start: *const u8, bytes: usize) {
    for at in (0..bytes).step_by(LINE_BYTES) {
        let line = start.wrapping_add(at);
        // SAFETY: a hint that changes nothing and never faults, wherever it points; processors without it
        // skip it.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            std::arch::asm!("prefetchw [{}]", in(reg) line, options(readonly, nostack, preserves_flags));
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
    }
}

/// Asks the processor to fetch a cache line for reading. It ignores unmapped addresses.
#[inline(always)]
fn prefetch_for_read(line: *const u8) {
    // SAFETY: a hint that changes nothing and never faults, wherever it points.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(line.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::segment::{Segment, create};
    use super::*;

    fn segment(bytes: usize) -> Segment {
        Segment::map(create(bytes).unwrap(), bytes).unwrap()
    }

    #[test]
    fn non_temporal_stores_write_exactly_the_given_range() {
        let segment = segment(4096);
        let bytes: Vec<u8> = (0..1024_u32).map(|i| (i % 251) as u8 + 1).collect();
        for at in (0..130).chain([1000]) {
            for len in [0, 1, 15, 16, 63, 64, 65, 127, 128, 200, 1000] {
                segment.view(0, 4096).write(&[0; 4096]);
                segment.view(at, len).write_non_temporal(&bytes[..len]);
                store_fence();
                let mut all = [0xFF; 4096];
                segment.view(0, 4096).read(&mut all);
                assert_eq!(all[at..at + len], bytes[..len], "{len} at {at}");
                let others = all[..at].iter().chain(&all[at + len..]);
                assert!(others.into_iter().all(|&byte| byte == 0), "{len} at {at}");
            }
        }
    }

    #[test]
    fn non_temporal_reads_write_exactly_the_given_range() {
        let segment = segment(4096);
        let bytes: Vec<u8> = (0..4096_u32).map(|i| (i % 251) as u8 + 1).collect();
        segment.view(0, 4096).write(&bytes);
        for at in 0..130 {
            for len in [0, 1, 15, 16, 63, 64, 65, 127, 128, 200, 1000] {
                let mut into = [0; 1200];
                segment.view(at * 7, len).read_non_temporal(&mut into[at..at + len]);
                store_fence();
                assert_eq!(into[at..at + len], bytes[at * 7..][..len], "{len} at {at}");
                let others = into[..at].iter().chain(&into[at + len..]);
                assert!(others.into_iter().all(|&byte| byte == 0), "{len} at {at}");
            }
        }
    }

    #[test]
    fn reads_with_and_past_the_caches_return_the_published_bytes() {
        let segment = segment(4096);
        segment.view(0, 4096).write(&[9; 4096]);
        for uncached in [false, true] {
            let mut into = [0; 1000];
            segment.view(3, 1000).read_part(&mut into, uncached);
            store_fence();
            assert_eq!(into, [9; 1000]);
        }
    }

    #[test]
    fn slow_writes_switch_to_non_temporal_stores_and_are_visible() {
        let segment = segment(65536);
        let (policy, bytes) = (StorePolicy::default(), vec![7; store_policy::MIN_BYTES]);
        let non_temporal = |_| {
            policy.record(bytes.len(), Duration::from_millis(1));
            policy.mode(bytes.len()).non_temporal
        };
        assert!((0..100).any(non_temporal));
        segment.view(100, bytes.len()).write_with(&policy, &bytes);
        let mut got = vec![0; bytes.len()];
        segment.view(100, bytes.len()).read(&mut got);
        assert_eq!(got, bytes);
    }
}
