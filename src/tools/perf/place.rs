//! The location of a call's buffers (host or device), and how calls run there.

use std::hint::black_box;

use convoke_comm::{CommError, Group, SharedBuffer};

use super::call::{Buffers, Call};
use super::check::{self, Wrong};
use super::error::PerfError;
use super::measure::Rules;
use super::memory;
use super::values::{Numbers, Value};

/// Buffers for the calls of one subject, on the host or on a device.
pub(crate) trait Place<T: Value> {
    /// Fills the buffers before the checked call.
    fn fill(&mut self, numbers: &Numbers, call: &Call<T>) -> Result<(), PerfError>;

    /// Checks the contents of the buffers after the call.
    fn check(&self, numbers: &Numbers, call: &Call<T>, root: usize) -> Result<Result<(), Wrong>, PerfError>;

    /// Sets the buffers to zero. Repeated sums of zeros stay zero, so timed calls cannot overflow.
    fn clear(&mut self, call: &Call<T>) -> Result<(), PerfError>;

    /// Writes the send buffers again, as a program does before each call.
    fn rewrite(&mut self, call: &Call<T>);

    /// Runs one operation with each of the buffers.
    fn run(&mut self, group: &Group, call: &Call<T>, root: usize) -> Result<(), CommError>;

    /// Waits until all operations have completed.
    fn settle(&mut self) -> Result<(), CommError>;

    /// Number of calls to time together, if one call takes about `micros` microseconds.
    fn calls_at_once(&self, micros: f64) -> usize;
}

/// Buffers in host memory. A call there is complete when it returns.
pub(crate) struct Host<T: Value> {
    buffers: Vec<Buffers<T>>,
    nonblocking: bool,
}

impl<T: Value> Host<T> {
    /// Allocates buffers `a` and `b` with at most `lens` elements.
    ///
    /// # Errors
    /// [`PerfError::Allocation`], [`PerfError::Comm`].
    pub(crate) fn new(
        rules: &Rules,
        name: &str,
        group: &Group,
        lens: (usize, usize),
    ) -> Result<Self, PerfError> {
        let zeros = |len| -> Result<SharedBuffer<T>, PerfError> {
            if rules.alloc {
                return Ok(group.alloc(len)?);
            }
            Ok(memory::filled(len, T::of(0, 0), name)?.into())
        };
        let buffers = (0..rules.in_flight).map(|_| Ok(Buffers { a: zeros(lens.0)?, b: zeros(lens.1)? }));
        let buffers = buffers.collect::<Result<_, PerfError>>()?;
        Ok(Self { buffers, nonblocking: rules.nonblocking })
    }
}

impl<T: Value> Place<T> for Host<T> {
    fn fill(&mut self, numbers: &Numbers, call: &Call<T>) -> Result<(), PerfError> {
        let shape = call.shape();
        call.each_part(&mut self.buffers).for_each(|(a, b)| check::fill(numbers, shape, a, b));
        Ok(())
    }

    fn check(&self, numbers: &Numbers, call: &Call<T>, root: usize) -> Result<Result<(), Wrong>, PerfError> {
        let shape = call.shape();
        let (a, b) = shape.buffer_lens();
        let check =
            |buffers: &Buffers<T>| check::check(numbers, shape, root, (&buffers.a[..a], &buffers.b[..b]));
        Ok(self.buffers.iter().try_for_each(check))
    }

    fn clear(&mut self, call: &Call<T>) -> Result<(), PerfError> {
        call.each_part(&mut self.buffers).for_each(|(a, b)| {
            a.fill(T::of(0, 0));
            b.fill(T::of(0, 0));
        });
        Ok(())
    }

    fn rewrite(&mut self, call: &Call<T>) {
        call.each_part(&mut self.buffers).for_each(|(a, _)| a.fill(black_box(T::of(0, 0))));
    }

    fn run(&mut self, group: &Group, call: &Call<T>, root: usize) -> Result<(), CommError> {
        call.run(group, &mut self.buffers, root, self.nonblocking)
    }

    fn settle(&mut self) -> Result<(), CommError> {
        Ok(())
    }

    fn calls_at_once(&self, _: f64) -> usize {
        1
    }
}
