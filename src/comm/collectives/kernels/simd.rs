//! Detection of the processor's vector instructions, and loops that are compiled for each set of them.
//!
//! A loop is written once, over single elements, and compiled three times on x86-64: for SSE2 (which every
//! such processor has), AVX2 and AVX-512. On other processors it is compiled once, with the vector
//! instructions that all of them have (NEON on aarch64). The set is selected at run time.

use std::marker::PhantomData;
use std::sync::LazyLock;

use crate::collectives::dtype::NativeBytes;

/// A set of vector instructions that this processor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SimdLevel(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// A loop over elements. To use vector instructions, all of it must be inlined into the function that
/// [`SimdLevel::run`] calls.
pub(super) trait Loop {
    fn run(self);
}

#[cfg(test)]
thread_local! {
    /// The vector instructions that a test selects for this thread.
    static FORCED: std::cell::Cell<Option<SimdLevel>> = const { std::cell::Cell::new(None) };
}

impl SimdLevel {
    /// Returns the widest vector instructions of this processor.
    #[inline]
    pub(super) fn widest() -> Self {
        #[cfg(test)]
        if let Some(forced) = FORCED.get() {
            return forced;
        }
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                return Self(Kind::Avx512);
            }
            if is_x86_feature_detected!("avx2") {
                return Self(Kind::Avx2);
            }
        }
        Self(Kind::Portable)
    }

    /// Calls `body` with each set of vector instructions that this processor has. Returns how many there are.
    #[cfg(test)]
    pub(super) fn for_each_supported(mut body: impl FnMut()) -> usize {
        let mut kinds = vec![Self(Kind::Portable)];
        #[cfg(target_arch = "x86_64")]
        kinds.extend(is_x86_feature_detected!("avx2").then_some(Self(Kind::Avx2)));
        kinds.push(Self::widest());
        kinds.dedup();
        for &kind in &kinds {
            FORCED.set(Some(kind));
            body();
            FORCED.set(None);
        }
        kinds.len()
    }

    #[inline(always)]
    #[allow(unsafe_code)]
    fn run(self, work: impl Loop) {
        match self.0 {
            Kind::Portable => work.run(),
            // SAFETY: this value exists only if the processor has these instructions, see `widest` and
            // `for_each_supported`.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => unsafe { with_avx2(work) },
            // SAFETY: this value exists only if the processor has these instructions, see `widest` and
            // `for_each_supported`.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => unsafe { with_avx512(work) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2(work: impl Loop) {
    work.run();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn with_avx512(work: impl Loop) {
    work.run();
}

/// Bytes that a kernel reads. This type is not a slice, because the bytes may be in shared memory that other
/// processes write at other times.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SourceBytes<'a> {
    start: *const u8,
    len: usize,
    memory: PhantomData<&'a [u8]>,
}

impl<'a> From<&'a [u8]> for SourceBytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self { start: bytes.as_ptr(), len: bytes.len(), memory: PhantomData }
    }
}

impl SourceBytes<'_> {
    /// # Safety
    /// For `'a` the `len` bytes from `start` on can be read, and nobody writes to them.
    #[allow(unsafe_code)]
    #[inline(always)]
    pub(crate) unsafe fn new(start: *const u8, len: usize) -> Self {
        Self { start, len, memory: PhantomData }
    }

    /// Copies all bytes into `into`, which has their length.
    #[allow(unsafe_code)]
    #[inline(always)]
    pub(crate) fn copy_to(self, into: &mut [u8]) {
        assert_eq!(into.len(), self.len);
        // SAFETY: `len` bytes can be read (see `new`) and written, and nobody else uses the memory of `into`.
        unsafe { copy(self.start, into.as_mut_ptr(), self.len) };
    }

    /// Copies all bytes into `into`, which has their length, from two places in turn (see [`TWO_PLACES_BYTES`]).
    #[allow(unsafe_code)]
    pub(crate) fn copy_from_two_places(self, into: &mut [u8]) {
        assert_eq!(into.len(), self.len);
        // SAFETY: `len` bytes can be read (see `new`) and written, and nobody else uses the memory of `into`.
        unsafe { copy_from_two_places(self.start, into.as_mut_ptr(), self.len) };
    }
}

/// Least bytes for which [`copy`] avoids `memcpy`, which uses vector instructions for fewer bytes anyway.
const MIN_VECTOR_COPY_BYTES: usize = 2048;

/// Copies `len` bytes as `memcpy` does, but avoids a slow case. On AMD's Zen 3 and 4, glibc copies many bytes
/// by `rep movsb` (glibc bug 30994). That takes 5 to 20 times as long (1.8 GB/s) if the target's offset in
/// its page is 1 to 31 bytes more than the source's. Memory of `malloc` often begins 16 bytes behind the
/// start of a page, shared memory at the start.
///
/// # Safety
/// `len` bytes from `from` on are readable and nobody writes them. `len` bytes from `into` on are writable
/// and nobody else uses them. The two ranges do not overlap.
#[allow(unsafe_code)]
#[inline(always)]
pub(crate) unsafe fn copy(from: *const u8, into: *mut u8, len: usize) {
    let is_slow_case = (1..64).contains(&(into.addr().wrapping_sub(from.addr()) % 4096));
    if cfg!(target_arch = "x86_64") && len >= MIN_VECTOR_COPY_BYTES && is_slow_case {
        // SAFETY: the caller guarantees the conditions of this function.
        unsafe { copy_by_vectors(from, into, len) };
    } else if len > COPY_PIECE_BYTES && *COPIES_IN_PIECES {
        // SAFETY: the caller guarantees the conditions of this function.
        unsafe { copy_in_pieces(from, into, len) };
    } else {
        // SAFETY: the caller guarantees the conditions of this function.
        unsafe { std::ptr::copy_nonoverlapping(from, into, len) };
    }
}

/// The bytes that one `memcpy` copies on processors that copy in pieces.
const COPY_PIECE_BYTES: usize = 256 << 10;

/// True on AMD's Zen 5 and later. Above the size of the L2 cache, glibc copies by vectors there, and `rep movsb`, by which it
/// copies fewer bytes, is faster. On two cores of an EPYC (Zen 5), 1 MiB in pieces takes 14.5 instead of 17.7 µs, and 16
/// MiB takes 325 instead of 415.
static COPIES_IN_PIECES: LazyLock<bool> = LazyLock::new(|| {
    #[cfg(target_arch = "x86_64")]
    {
        let version = std::arch::x86_64::__cpuid(1).eax;
        // The family is the sum of two fields on all processors of AMD since 2003.
        let family = (version >> 8 & 0xF) + (version >> 20 & 0xFF);
        is_made_by(b"AuthenticAMD") && family >= 26
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
});

/// Returns whether the processor is of this vendor, as `cpuid` names it.
pub(crate) fn is_made_by(vendor: &[u8; 12]) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let found = std::arch::x86_64::__cpuid(0);
        [found.ebx, found.edx, found.ecx].map(u32::to_le_bytes).as_flattened() == vendor
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = vendor;
        false
    }
}

/// Copies `len` bytes by several calls of `memcpy`.
///
/// # Safety
/// The caller guarantees the conditions of [`copy`].
#[allow(unsafe_code)]
#[inline(never)]
unsafe fn copy_in_pieces(from: *const u8, into: *mut u8, len: usize) {
    for at in (0..len).step_by(COPY_PIECE_BYTES) {
        // SAFETY: the piece lies within both ranges.
        unsafe { std::ptr::copy_nonoverlapping(from.add(at), into.add(at), COPY_PIECE_BYTES.min(len - at)) };
    }
}

/// Copies `len` bytes by vector loads and stores.
///
/// # Safety
/// The caller guarantees the conditions of [`copy`].
#[allow(unsafe_code)]
#[cold]
unsafe fn copy_by_vectors(from: *const u8, into: *mut u8, len: usize) {
    type Chunk = [u8; 128];
    struct CopyChunks(*const Chunk, *mut Chunk, usize);
    impl Loop for CopyChunks {
        #[inline(always)]
        fn run(self) {
            let Self(from, into, steps) = self;
            for step in 0..steps {
                // SAFETY: this step lies within both ranges, because `steps` steps do; bytes need no
                // alignment.
                unsafe { into.add(step).write(from.add(step).read()) };
            }
        }
    }
    let steps = len / size_of::<Chunk>();
    SimdLevel::widest().run(CopyChunks(from.cast(), into.cast(), steps));
    let done = steps * size_of::<Chunk>();
    // SAFETY: this is the rest of both ranges.
    unsafe { std::ptr::copy_nonoverlapping(from.add(done), into.add(done), len - done) };
}

/// Bytes of a block that [`SourceBytes::copy_from_two_places`] copies: from its first and its second half in turn.
/// Processors fetch lines ahead for each memory page apart. So lines of two pages are on their way at a time.
pub(crate) const TWO_PLACES_BYTES: usize = 16 << 10;

/// Copies `len` bytes, block by block from two places in turn.
///
/// # Safety
/// The caller guarantees the conditions of [`copy`].
#[allow(unsafe_code)]
unsafe fn copy_from_two_places(from: *const u8, into: *mut u8, len: usize) {
    type Piece = [u8; 256];
    const HALF: usize = TWO_PLACES_BYTES / size_of::<Piece>() / 2;
    struct CopyBlocks(*const Piece, *mut Piece, usize);
    impl Loop for CopyBlocks {
        #[inline(always)]
        fn run(self) {
            let Self(from, into, blocks) = self;
            for block in 0..blocks {
                for piece in 0..HALF {
                    for place in [2 * block * HALF + piece, (2 * block + 1) * HALF + piece] {
                        // SAFETY: the piece lies within both ranges, because `blocks` blocks do; bytes need no
                        // alignment.
                        unsafe { into.add(place).write(from.add(place).read()) };
                    }
                }
            }
        }
    }
    let blocks = len / TWO_PLACES_BYTES;
    SimdLevel::widest().run(CopyBlocks(from.cast(), into.cast(), blocks));
    let done = blocks * TWO_PLACES_BYTES;
    // SAFETY: this is the rest of both ranges.
    unsafe { copy(from.add(done), into.add(done), len - done) };
}

/// Most bytes for which finding out and calling the widest vector instructions takes longer than they save.
const MAX_SHORT_BYTES: usize = 32;

/// `into[i] = op(into[i], from[i])`, for as many whole elements as both have.
#[inline]
pub(super) fn zip_in_place<T: NativeBytes<N>, const N: usize>(
    into: &mut [u8],
    from: SourceBytes<'_>,
    op: impl Fn(T, T) -> T,
) {
    struct Zip<'a, T, Op, const N: usize>(&'a mut [u8], SourceBytes<'a>, Op, PhantomData<T>);
    impl<T: NativeBytes<N>, Op: Fn(T, T) -> T, const N: usize> Loop for Zip<'_, T, Op, N> {
        #[inline(always)]
        #[allow(unsafe_code)]
        fn run(self) {
            let Self(into, from, op, _) = self;
            let elements = into.len().min(from.len) / N;
            let (into, _) = into[..elements * N].as_chunks_mut::<N>();
            for (index, a) in into.iter_mut().enumerate() {
                // SAFETY: element `index` lies within both, `from` can be read, and bytes need no alignment.
                let b = unsafe { from.start.add(index * N).cast::<[u8; N]>().read() };
                *a = op(T::read(*a), T::read(b)).write();
            }
        }
    }
    debug_assert_eq!(into.len(), from.len);
    debug_assert_eq!(into.len() % N, 0);
    let level = if into.len() <= MAX_SHORT_BYTES { SimdLevel(Kind::Portable) } else { SimdLevel::widest() };
    level.run(Zip(into, from, op, PhantomData));
}

/// `into[i] = op(into[i])`, for all whole elements.
#[inline]
pub(super) fn map_in_place<T: NativeBytes<N>, const N: usize>(into: &mut [u8], op: impl Fn(T) -> T) {
    struct Each<'a, T, Op, const N: usize>(&'a mut [u8], Op, PhantomData<T>);
    impl<T: NativeBytes<N>, Op: Fn(T) -> T, const N: usize> Loop for Each<'_, T, Op, N> {
        #[inline(always)]
        fn run(self) {
            let Self(into, op, _) = self;
            let (into, _) = into.as_chunks_mut::<N>();
            for a in into {
                *a = op(T::read(*a)).write();
            }
        }
    }
    SimdLevel::widest().run(Each(into, op, PhantomData));
}

/// `into[i] = op(from[i])`, for as many whole elements as both have.
#[inline]
pub(super) fn convert<F, T, const N: usize, const M: usize>(from: &[u8], into: &mut [u8], op: impl Fn(F) -> T)
where
    F: NativeBytes<N>,
    T: NativeBytes<M>,
{
    struct Convert<'a, F, T, Op, const N: usize, const M: usize>(
        &'a [u8],
        &'a mut [u8],
        Op,
        PhantomData<(F, T)>,
    );
    impl<F, T, Op, const N: usize, const M: usize> Loop for Convert<'_, F, T, Op, N, M>
    where
        F: NativeBytes<N>,
        T: NativeBytes<M>,
        Op: Fn(F) -> T,
    {
        #[inline(always)]
        fn run(self) {
            let Self(from, into, op, _) = self;
            for (from, into) in from.as_chunks::<N>().0.iter().zip(into.as_chunks_mut::<M>().0) {
                *into = op(F::read(*from)).write();
            }
        }
    }
    SimdLevel::widest().run(Convert(from, into, op, PhantomData));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(unsafe_code)]
    fn copies_in_pieces_are_exact_at_all_lengths_and_offsets() {
        let from: Vec<u8> = (0..3 * COPY_PIECE_BYTES + 700).map(|at| (at * 7 + at / 256) as u8).collect();
        let piece = COPY_PIECE_BYTES;
        for copy in [copy, copy_in_pieces] {
            for len in [0, 1, piece - 1, piece, piece + 1, 2 * piece + 300, 3 * piece] {
                for (begin, at) in [(0, 0), (300, 0), (0, 300), (63, 1)] {
                    let mut into = vec![0; at + len + 1];
                    let source = &from[begin..begin + len];
                    // SAFETY: both ranges have `len` bytes, and only this test uses them.
                    unsafe { copy(source.as_ptr(), into[at..].as_mut_ptr(), len) };
                    assert!(into[at..at + len] == *source, "{len} from {begin} to {at}");
                    assert!(into[..at].iter().chain(&into[at + len..]).all(|&byte| byte == 0), "{len}");
                }
            }
        }
    }

    #[test]
    fn copies_from_two_places_are_exact_at_all_lengths_and_offsets() {
        let from: Vec<u8> = (0..3 * TWO_PLACES_BYTES + 700).map(|at| (at * 7 + at / 256) as u8).collect();
        let block = TWO_PLACES_BYTES;
        SimdLevel::for_each_supported(|| {
            for len in [0, 1, 255, block - 1, block, block + 1, 2 * block + 300, 3 * block] {
                for (begin, at) in [(0, 0), (16, 0), (0, 16), (63, 1)] {
                    let mut into = vec![0; at + len + 1];
                    SourceBytes::from(&from[begin..begin + len])
                        .copy_from_two_places(&mut into[at..at + len]);
                    assert!(into[at..at + len] == from[begin..begin + len], "{len} from {begin} to {at}");
                    assert!(into[..at].iter().chain(&into[at + len..]).all(|&byte| byte == 0), "{len}");
                }
            }
        });
    }
}
