//! The buffers of measured collective calls, in host or device memory, and how calls run with them.

use std::hint::black_box;
use std::ops::{Deref, DerefMut};

use convoke_comm::{CommError, Group, SharedBuffer};

use super::call::{BufferPair, Call};
use super::error::PerfError;
use super::measure::Settings;
use super::memory;
use super::values::{TestPattern, Value};
use super::verify::{self, WrongElement};

/// Buffers of the other benchmarks begin at a page.
const PAGE_BYTES: usize = 4096;

/// A buffer in host memory that begins at a page.
pub(crate) struct PageBuffer<T: Value> {
    memory: SharedBuffer<T>,
    /// The index of the first element in `memory`, and the number of elements.
    start: usize,
    len: usize,
}

impl<T: Value> PageBuffer<T> {
    /// Allocates `len` zeros with this function, which gets the number of elements that are needed.
    fn new(
        len: usize,
        zeros: impl FnOnce(usize) -> Result<SharedBuffer<T>, PerfError>,
    ) -> Result<Self, PerfError> {
        let memory = zeros(len + PAGE_BYTES / size_of::<T>())?;
        let start = memory.as_ptr().align_offset(PAGE_BYTES);
        Ok(Self { memory, start, len })
    }
}

impl<T: Value> Deref for PageBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.memory[self.start..self.start + self.len]
    }
}

impl<T: Value> DerefMut for PageBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

/// Buffers for the calls of one case, on the host or on a device.
pub(crate) trait BenchBuffers {
    type Element: Value;

    /// Fills the buffers before the checked call.
    fn fill(&mut self, pattern: &TestPattern, call: &Call<Self::Element>) -> Result<(), PerfError>;

    /// Checks the contents of the buffers after the checked call.
    fn check(
        &self,
        pattern: &TestPattern,
        call: &Call<Self::Element>,
        root: usize,
    ) -> Result<Result<(), WrongElement>, PerfError>;

    /// Sets the buffers to zero. Repeated sums of zeros stay zero, so timed calls cannot overflow.
    fn clear(&mut self, call: &Call<Self::Element>) -> Result<(), PerfError>;

    /// Writes the send buffers again, as a program does before each call, if they are memory of the host.
    fn rewrite(&mut self, _: &Call<Self::Element>) {}

    /// Runs one operation with each pair of buffers.
    fn run(&mut self, group: &Group, call: &Call<Self::Element>, root: usize) -> Result<(), CommError>;

    /// Waits until all operations have completed, if calls return before that.
    fn synchronize(&mut self) -> Result<(), CommError> {
        Ok(())
    }

    /// Number of calls to time together, if one call takes about `micros` microseconds.
    fn calls_per_sample(&self, _micros: f64) -> usize {
        1
    }
}

/// Buffers in host memory. A call there is complete when it returns.
pub(crate) struct HostBuffers<T: Value> {
    buffers: Vec<BufferPair<T>>,
    nonblocking: bool,
}

impl<T: Value> HostBuffers<T> {
    /// Allocates buffers `a` and `b` with at most `lens` elements.
    pub(crate) fn new(
        settings: &Settings,
        name: &str,
        group: &Group,
        lens: (usize, usize),
    ) -> Result<Self, PerfError> {
        let zeros = |len| -> Result<PageBuffer<T>, PerfError> {
            if settings.alloc {
                // Such memory begins at a page, and calls with all of it copy nothing.
                return Ok(PageBuffer { memory: group.alloc(len)?, start: 0, len });
            }
            PageBuffer::new(len, |len| Ok(memory::try_filled_vec(len, T::from_parts(0, 0), name)?.into()))
        };
        let buffers =
            (0..settings.in_flight).map(|_| Ok(BufferPair { a: zeros(lens.0)?, b: zeros(lens.1)? }));
        let buffers = buffers.collect::<Result<_, PerfError>>()?;
        Ok(Self { buffers, nonblocking: settings.nonblocking })
    }
}

impl<T: Value> BenchBuffers for HostBuffers<T> {
    type Element = T;

    fn fill(&mut self, pattern: &TestPattern, call: &Call<T>) -> Result<(), PerfError> {
        let shape = &call.shape;
        call.buffer_parts(&mut self.buffers).for_each(|(a, b)| verify::fill(pattern, shape, a, b));
        Ok(())
    }

    fn check(
        &self,
        pattern: &TestPattern,
        call: &Call<T>,
        root: usize,
    ) -> Result<Result<(), WrongElement>, PerfError> {
        let shape = &call.shape;
        let (a, b) = shape.buffer_lens();
        let check =
            |buffers: &BufferPair<T>| verify::check(pattern, shape, root, (&buffers.a[..a], &buffers.b[..b]));
        Ok(self.buffers.iter().try_for_each(check))
    }

    fn clear(&mut self, call: &Call<T>) -> Result<(), PerfError> {
        call.buffer_parts(&mut self.buffers).for_each(|(a, b)| {
            a.fill(T::from_parts(0, 0));
            b.fill(T::from_parts(0, 0));
        });
        Ok(())
    }

    fn rewrite(&mut self, call: &Call<T>) {
        // Compiles to `memset`, by which the benchmark of the MPIs writes. On a Xeon (Emerald Rapids) a loop of stores took longer.
        call.buffer_parts(&mut self.buffers).for_each(|(a, _)| {
            a.fill(T::from_parts(0, 0));
            black_box(a);
        });
    }

    fn run(&mut self, group: &Group, call: &Call<T>, root: usize) -> Result<(), CommError> {
        call.run(group, &mut self.buffers, root, self.nonblocking)
    }
}
