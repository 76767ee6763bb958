//! Reduction of the contributions of all ranks at one rank, in the order of the ranks.

use std::cell::Cell;

use super::{ACCUMULATOR_BYTES, F32Conversion, Kernel, ReduceFn, ReduceImpl, SourceBytes};

/// Bytes of each contribution that are reduced at a time, so that they fit in the L1 cache. It is a multiple
/// of all element sizes.
const BLOCK_BYTES: usize = 4 << 10;
/// The size of a block of half-precision elements ([`BLOCK_BYTES`]) after their conversion to `f32`.
const ACCUMULATOR_BLOCK_BYTES: usize = BLOCK_BYTES / F32Conversion::HALF_BYTES * ACCUMULATOR_BYTES;

/// The size of the memory of [`Scratch`].
const SCRATCH_BYTES: usize = 2 * ACCUMULATOR_BLOCK_BYTES + BLOCK_BYTES;

thread_local! {
    /// Memory for the reductions of this thread, in all groups; empty until the first that needs it.
    static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Scratch memory of this thread, taken at the first use. Most reductions of two ranks use none.
#[derive(Debug, Default)]
pub(crate) struct Scratch(Vec<u8>);

impl Scratch {
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        if self.0.is_empty() {
            self.0 = SCRATCH.take();
            self.0.resize(SCRATCH_BYTES, 0);
        }
        &mut self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            SCRATCH.set(std::mem::take(&mut self.0));
        }
    }
}

/// The number of ranks whose contributions are reduced, and this rank's number among them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Contributors {
    pub(crate) count: usize,
    pub(crate) me: usize,
}

impl Kernel {
    /// Returns the function that combines two contributions in place, if the reduction needs nothing else. `None` for a
    /// function of the program, and for a reduction that divides or converts elements.
    #[inline(always)]
    pub(crate) fn in_place(&self) -> Option<ReduceFn> {
        match (&self.reduce, self.divide, self.f32_conversion) {
            (ReduceImpl::Builtin(reduce), None, None) => Some(*reduce),
            _ => None,
        }
    }

    /// Reduces the contributions of all other ranks into `own`, the contribution of `ranks.me`.
    /// `contribution(rank, at, len)` returns the `len` bytes at byte `at` of a rank's contribution.
    /// `added(at, bytes)` is called for each finished piece of `own`. After that, no contribution is read at
    /// these bytes.
    ///
    /// Half-precision sums are rounded once. The error says how the program's reduction function failed.
    #[inline]
    pub(crate) fn reduce_all<'a>(
        &self,
        ranks: Contributors,
        own: &mut [u8],
        scratch: &mut Scratch,
        contribution: impl Fn(usize, usize, usize) -> SourceBytes<'a>,
        mut added: impl FnMut(usize, &[u8]),
    ) -> Result<(), String> {
        let (mut at, mut rest) = (0, own);
        while !rest.is_empty() {
            let len = rest.len().min(BLOCK_BYTES);
            let (own, behind) = rest.split_at_mut(len);
            let contribution = |rank: usize| contribution(rank, at, len);
            match (&self.reduce, self.f32_conversion) {
                (ReduceImpl::Builtin(reduce), None) => {
                    add_in_place(*reduce, ranks, own, scratch, contribution)
                }
                _ => self.add_copies(ranks, own, scratch, contribution)?,
            }
            if let Some(divide) = self.divide.filter(|_| self.f32_conversion.is_none()) {
                divide(own, self.world);
            }
            added(at, own);
            (at, rest) = (at + len, behind);
        }
        Ok(())
    }

    /// Reduces copies of the contributions: a function of the program must not see shared memory, and
    /// half-precision values become `f32`.
    fn add_copies<'a>(
        &self,
        ranks: Contributors,
        own: &mut [u8],
        scratch: &mut Scratch,
        contribution: impl Fn(usize) -> SourceBytes<'a>,
    ) -> Result<(), String> {
        let F32Conversion { widen, narrow } = *self.f32_conversion.unwrap_or(&F32Conversion::IDENTITY);
        let wider = self
            .f32_conversion
            .map_or(own.len(), |_| own.len() / F32Conversion::HALF_BYTES * ACCUMULATOR_BYTES);
        let (sums, rest) = scratch.bytes().split_at_mut(ACCUMULATOR_BLOCK_BYTES);
        let (next, copy) = rest.split_at_mut(ACCUMULATOR_BLOCK_BYTES);
        let (sums, next, copy) = (&mut sums[..wider], &mut next[..wider], &mut copy[..own.len()]);
        for rank in 0..ranks.count {
            if rank == ranks.me {
                SourceBytes::from(&*own).copy_to(copy);
            } else {
                contribution(rank).copy_to(copy);
            }
            widen(copy, if rank == 0 { &mut *sums } else { &mut *next });
            if rank > 0 {
                self.reduce(sums, next, false, self.f32_conversion.is_some() && rank + 1 == ranks.count)?;
            }
        }
        narrow(sums, own);
        Ok(())
    }
}

/// Reduces the contributions in place. Each operation gives equal bits with swapped operands, so the sum of
/// the lower ranks can be added to this rank's contribution.
#[inline]
fn add_in_place<'a>(
    reduce: ReduceFn,
    Contributors { count, me }: Contributors,
    own: &mut [u8],
    scratch: &mut Scratch,
    contribution: impl Fn(usize) -> SourceBytes<'a>,
) {
    match me {
        0 => {}
        1 => reduce(own, contribution(0)),
        _ => {
            let sums = &mut scratch.bytes()[..own.len()];
            contribution(0).copy_to(sums);
            (1..me).for_each(|rank| reduce(sums, contribution(rank)));
            reduce(own, SourceBytes::from(&*sums));
        }
    }
    (me + 1..count).for_each(|rank| reduce(own, contribution(rank)));
}
