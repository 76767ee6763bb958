//! Copies past the caches, and the length of data for which they gain.

#![allow(unsafe_code)]

use std::fs;
use std::sync::LazyLock;

const LINE_BYTES: usize = 64;

/// Copies `len` bytes with non-temporal stores, which are in main memory after [`store_fence`].
///
/// # Safety
/// `len` bytes from `from` on are readable and nobody writes them. `len` bytes from `into` on are writable and nobody
/// else uses them. The two ranges do not overlap.
pub(crate) unsafe fn copy_non_temporal(from: *const u8, into: *mut u8, len: usize) {
    // Only whole cache lines of the target use non-temporal stores. Normal stores write the bytes before and behind.
    #[cfg(target_arch = "x86_64")]
    let (before, lines) = {
        let before = into.align_offset(LINE_BYTES).min(len);
        (before, (len - before) / LINE_BYTES)
    };
    #[cfg(not(target_arch = "x86_64"))]
    let (before, lines) = (0, 0);
    let behind = before + lines * LINE_BYTES;
    // SAFETY: both pieces lie within the ranges that the caller gives.
    unsafe {
        std::ptr::copy_nonoverlapping(from, into, before);
        std::ptr::copy_nonoverlapping(from.add(behind), into.add(behind), len - behind);
    }
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        for at in (before..behind).step_by(size_of::<__m128i>()) {
            // SAFETY: within the lines of both ranges. The address in `into` is a multiple of 16, because the lines
            // begin at a multiple of 64; the load takes any alignment.
            unsafe { _mm_stream_si128(into.add(at).cast(), _mm_loadu_si128(from.add(at).cast())) };
        }
    }
}

/// Orders earlier non-temporal stores of this thread before later stores (`sfence`).
pub(crate) fn store_fence() {
    // SAFETY: every x86-64 processor has this instruction.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Returns whether data of `bytes` bytes is to be copied past the caches.
#[inline(always)]
pub(crate) fn is_uncached(bytes: usize) -> bool {
    bytes >= MIN_UNCACHED_BYTES && bytes >= *UNCACHED_BYTES
}

/// Returns the least number of bytes of a message that its receiver copies past the caches, on a host of `ranks` ranks.
/// Between two ranks it is [`UNCACHED_BYTES`]. More ranks may share the last cache, and fill it with shorter messages. With
/// two pairs of ranks on two cores (EPYC, Zen 4), a message of 4 MiB takes 460 instead of 710 µs past the caches.
pub(crate) fn uncached_message_bytes(ranks: usize) -> usize {
    (2 * *UNCACHED_BYTES / ranks.max(2)).max(MIN_UNCACHED_BYTES)
}

/// The least value of [`UNCACHED_BYTES`]. Short data is compared with it alone, without reading the system's files.
const MIN_UNCACHED_BYTES: usize = 4 << 20;

/// The largest value of [`UNCACHED_BYTES`]. Many cores share a larger cache, and a rank has a small part of it. A Xeon
/// (Emerald Rapids) has 300 MiB for all its cores. A `gather` of 16 MiB takes 1.5 instead of 2.4 ms by stores past the
/// caches. A message of 16 MiB takes 2.7 instead of 3.8 ms.
const MOST_UNCACHED_BYTES: usize = 8 << 20;

/// The least number of bytes of a copy whose data is written past the caches: a quarter of the last cache, at most 8 MiB. More
/// bytes, of two ranks that send and receive, are not in the cache when the program uses them. On an EPYC (Zen 5,
/// 32 MiB) a message of 16 MiB then takes 680 instead of 860 µs, but one of 4 MiB 98 instead of 85.
static UNCACHED_BYTES: LazyLock<usize> = LazyLock::new(|| {
    let size = |index: u32| {
        let size =
            fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size")).ok()?;
        size.trim_end().strip_suffix('K')?.parse::<usize>().ok()
    };
    let last = (0..=4).rev().find_map(size).map_or(DEFAULT_CACHE_BYTES, |kib| kib << 10);
    (last / 4).clamp(MIN_UNCACHED_BYTES, MOST_UNCACHED_BYTES)
});

/// The assumed size of the last cache if the system does not tell it.
const DEFAULT_CACHE_BYTES: usize = 32 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_uncached_from_the_limit_on() {
        assert!((MIN_UNCACHED_BYTES..=MOST_UNCACHED_BYTES).contains(&*UNCACHED_BYTES), "{}", *UNCACHED_BYTES);
        assert!(!is_uncached(0) && !is_uncached(*UNCACHED_BYTES - 1));
        assert!(is_uncached(*UNCACHED_BYTES) && is_uncached(usize::MAX));
    }
}
