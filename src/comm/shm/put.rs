//! Copies into shared memory: with normal stores, with prefetched lines, or with non-temporal stores.

use std::sync::LazyLock;
use std::time::Instant;

use super::pace::{self, Pace};
use super::segment::View;
use crate::kernels::copy;

/// Copies of at least this many bytes prefetch lines, this many bytes at a time.
const FETCHED_BYTES: usize = 512;
const LINE_BYTES: usize = 64;

impl View<'_> {
    /// Copies `bytes`, which has the length of this view, into it.
    #[inline(always)]
    pub(crate) fn put(self, bytes: &[u8]) {
        if bytes.len() >= FETCHED_BYTES && *FETCHES { self.put_many(bytes) } else { self.put_far(bytes) }
    }

    /// Copies `bytes` into the view, with non-temporal stores if `pace` expects them to be quicker.
    #[inline(always)]
    pub(super) fn put_at(self, pace: &Pace, bytes: &[u8]) {
        if self.put_part_at(pace, bytes) {
            arrive();
        }
    }

    /// Copies one of several parts. Returns whether it used non-temporal stores. Then [`arrive`] must follow
    /// the last part before others are told. One fence for all parts is enough; one after each 4 KiB would
    /// add a third to the time.
    #[inline(always)]
    pub(super) fn put_part_at(self, pace: &Pace, bytes: &[u8]) -> bool {
        if bytes.len() < pace::LEAST_BYTES {
            self.put(bytes);
            return false;
        }
        self.put_long(pace, bytes)
    }

    fn put_long(self, pace: &Pace, bytes: &[u8]) -> bool {
        let way = pace.way(bytes.len());
        let begin = way.is_timed.then(Instant::now);
        match way.past_caches {
            true => self.put_past_caches(bytes),
            false => self.put(bytes),
        }
        if let Some(begin) = begin {
            pace.took(bytes.len(), begin.elapsed());
        }
        way.past_caches
    }

    /// Copies `bytes` with non-temporal stores, which are in main memory after [`arrive`].
    #[allow(unsafe_code)]
    fn put_past_caches(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes);
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
            // Whole lines; the bytes before and behind them use normal stores.
            let before = self.start.align_offset(LINE_BYTES).min(bytes.len());
            let (first, rest) = bytes.split_at(before);
            let (lines, last) = rest.as_chunks::<LINE_BYTES>();
            let behind = self.start.wrapping_add(before + lines.as_flattened().len());
            // SAFETY: as in `put_far`, in three pieces.
            unsafe {
                std::ptr::copy_nonoverlapping(first.as_ptr(), self.start, first.len());
                std::ptr::copy_nonoverlapping(last.as_ptr(), behind, last.len());
            }
            let mut into = self.start.wrapping_add(before).cast::<__m128i>();
            for line in lines {
                for piece in line.as_chunks::<16>().0 {
                    // SAFETY: within the lines, which begin at a multiple of 64; reads 16 bytes of any
                    // alignment.
                    unsafe { _mm_stream_si128(into, _mm_loadu_si128(piece.as_ptr().cast())) };
                    into = into.wrapping_add(1);
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        self.put(bytes);
    }

    /// Copies `bytes` without prefetching, for destinations that no other core has in its cache.
    #[allow(unsafe_code)]
    #[inline(always)]
    pub(crate) fn put_far(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes);
        // SAFETY: both have so many bytes, and are apart. A view that is written belongs to another rank than
        // the lent memory, or to memory that no program has.
        unsafe { copy(bytes.as_ptr(), self.start, self.bytes) };
    }

    /// Copies `bytes`, prefetching each group of lines for writing before it is written.
    #[allow(unsafe_code)]
    fn put_many(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes);
        fetch_for_writing(self.start, FETCHED_BYTES);
        for (index, piece) in bytes.chunks(FETCHED_BYTES).enumerate() {
            let into = self.start.wrapping_add(index * FETCHED_BYTES);
            fetch_for_writing(into.wrapping_add(FETCHED_BYTES), FETCHED_BYTES);
            // SAFETY: as in `put_far`, piece by piece.
            unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), into, piece.len()) };
        }
    }
}

/// Orders earlier non-temporal stores of this thread before later stores (`sfence`).
#[allow(unsafe_code)]
pub(super) fn arrive() {
    // SAFETY: every x86-64 has it.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// True if prefetching lines for writing makes copies quicker. Other cores have read these lines, so a store
/// needs a round trip to them. Measured on two cores of a Xeon (Cascade Lake): 18 instead of 12 GB/s from 16
/// KiB on. On an EPYC (Zen 5) it is a tenth to a third slower. Processors that are not known to gain do not
/// prefetch.
static FETCHES: LazyLock<bool> = LazyLock::new(|| {
    #[cfg(target_arch = "x86_64")]
    {
        let vendor = std::arch::x86_64::__cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
});

/// Asks the processor to fetch the lines of `bytes` bytes for writing. Unmapped memory is ignored.
#[inline(always)]
fn fetch_for_writing(start: *const u8, bytes: usize) {
    for at in (0..bytes).step_by(LINE_BYTES) {
        let line = start.wrapping_add(at);
        // SAFETY: a hint that changes nothing and never faults, wherever it points; processors without it
        // skip it.
        #[cfg(target_arch = "x86_64")]
        #[allow(unsafe_code)]
        unsafe {
            std::arch::asm!("prefetchw [{}]", in(reg) line, options(readonly, nostack, preserves_flags));
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
    }
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
                segment.view(0, 4096).put(&[0; 4096]);
                segment.view(at, len).put_past_caches(&bytes[..len]);
                arrive();
                let mut all = [0xFF; 4096];
                segment.view(0, 4096).take(&mut all);
                assert_eq!(all[at..at + len], bytes[..len], "{len} at {at}");
                let others = all[..at].iter().chain(&all[at + len..]);
                assert!(others.into_iter().all(|&byte| byte == 0), "{len} at {at}");
            }
        }
    }

    #[test]
    fn slow_writes_switch_to_non_temporal_stores_and_are_visible() {
        let segment = segment(65536);
        let (pace, bytes) = (Pace::default(), vec![7; pace::LEAST_BYTES]);
        let past_caches = |_| {
            pace.took(bytes.len(), Duration::from_millis(1));
            pace.way(bytes.len()).past_caches
        };
        assert!((0..100).any(past_caches));
        segment.view(100, bytes.len()).put_at(&pace, &bytes);
        let mut got = vec![0; bytes.len()];
        segment.view(100, bytes.len()).take(&mut got);
        assert_eq!(got, bytes);
    }
}
