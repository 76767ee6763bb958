//! Copies past the caches, and the length of data for which they gain.

#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::array;
use std::fs;
#[cfg(target_arch = "x86_64")]
use std::ops::Range;
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
        let groups = before + lines / GROUP_LINES * GROUP_LINES * LINE_BYTES;
        // SAFETY: both pieces consist of lines within both ranges.
        unsafe {
            copy_lines::<GROUP_LINES>(from, into, before..groups);
            copy_lines::<1>(from, into, groups..behind);
        }
    }
}

/// The number of lines that are loaded before they are stored. On two cores of an EPYC (Zen 3), an `all_gather` of 16 MiB takes
/// 970 instead of 1070 µs if not each 16 bytes are stored at once.
#[cfg(target_arch = "x86_64")]
const GROUP_LINES: usize = 4;

/// Copies the bytes in `range` with non-temporal stores, `LINES` cache lines at a time.
///
/// # Safety
/// The caller guarantees the conditions of [`copy_non_temporal`] for `range`, whose length is a multiple of `LINES` lines. Its
/// target begins at the start of a line.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn copy_lines<const LINES: usize>(from: *const u8, into: *mut u8, range: Range<usize>) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    type Line = [__m128i; LINE_BYTES / size_of::<__m128i>()];
    for at in range.step_by(LINES * LINE_BYTES) {
        // SAFETY: the lines lie within the range. The addresses in `into` are multiples of 16, because a line begins at a
        // multiple of 64; the loads take any alignment.
        unsafe {
            let (from, into) = (from.add(at).cast::<Line>(), into.add(at).cast::<Line>());
            let load =
                |line| array::from_fn(|piece| _mm_loadu_si128(from.add(line).cast::<__m128i>().add(piece)));
            let group: [Line; LINES] = array::from_fn(load);
            for (line, pieces) in group.into_iter().enumerate() {
                for (piece, value) in pieces.into_iter().enumerate() {
                    _mm_stream_si128(into.add(line).cast::<__m128i>().add(piece), value);
                }
            }
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

/// The least number of bytes of a copy whose data is written past the caches. It is the least of three: a quarter of the last
/// cache, eight times the L2 cache of a core, and 8 MiB. More bytes, of two ranks that send and receive, are not in the last
/// cache when the program uses them. Past the caches, on an EPYC of Zen 5 (L2 of 1 MiB, L3 of 32 MiB), a message of 16 MiB
/// takes 680 instead of 860 µs. One of 4 MiB would take 98 instead of 85. On one of Zen 3 (L2 of 512 KiB), a message of 4 MiB
/// takes 156 instead of 177 µs.
static UNCACHED_BYTES: LazyLock<usize> = LazyLock::new(|| {
    let folder = |index: u32| format!("/sys/devices/system/cpu/cpu0/cache/index{index}");
    uncached_bytes(&(0..=4).filter_map(|index| Cache::read(&folder(index))).collect::<Vec<_>>())
});

/// A cache of a core, as the system describes it.
#[derive(Debug, Clone, Copy)]
struct Cache {
    level: u32,
    bytes: usize,
}

impl Cache {
    /// Reads the description of a cache; `None` if there is none.
    fn read(folder: &str) -> Option<Self> {
        let text = |name| fs::read_to_string(format!("{folder}/{name}")).ok();
        let level = text("level")?.trim_end().parse().ok()?;
        let kib: usize = text("size")?.trim_end().strip_suffix('K')?.parse().ok()?;
        Some(Self { level, bytes: kib << 10 })
    }
}

/// Returns the value of [`UNCACHED_BYTES`] for a core with these caches.
fn uncached_bytes(caches: &[Cache]) -> usize {
    let last = caches.iter().max_by_key(|cache| cache.level).map_or(DEFAULT_CACHE_BYTES, |cache| cache.bytes);
    let second = caches.iter().find(|cache| cache.level == 2).map_or(last, |cache| cache.bytes);
    (last / 4).min(8 * second).clamp(MIN_UNCACHED_BYTES, MOST_UNCACHED_BYTES)
}

/// The assumed size of the last cache if the system does not tell it.
const DEFAULT_CACHE_BYTES: usize = 32 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_of_uncached_data_depends_on_the_last_and_the_second_cache() {
        let core = |kib: &[usize]| {
            kib.iter().zip(1..).map(|(kib, level)| Cache { level, bytes: kib << 10 }).collect::<Vec<_>>()
        };
        for (kib, expected) in [
            (&[32, 512, 32 << 10][..], 4 << 20),
            (&[32, 1 << 10, 32 << 10], 8 << 20),
            (&[48, 2 << 10, 300 << 10], 8 << 20),
            (&[32, 1 << 10, 24 << 10], 6 << 20),
            (&[32, 1 << 10], MIN_UNCACHED_BYTES),
            (&[], 8 << 20),
        ] {
            assert_eq!(uncached_bytes(&core(kib)), expected, "caches of {kib:?} KiB");
        }
    }

    #[test]
    fn data_is_uncached_from_the_limit_on() {
        assert!((MIN_UNCACHED_BYTES..=MOST_UNCACHED_BYTES).contains(&*UNCACHED_BYTES), "{}", *UNCACHED_BYTES);
        assert!(!is_uncached(0) && !is_uncached(*UNCACHED_BYTES - 1));
        assert!(is_uncached(*UNCACHED_BYTES) && is_uncached(usize::MAX));
    }
}
