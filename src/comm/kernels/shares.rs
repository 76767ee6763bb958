//! Reduction of the shares of all ranks at one place, in the order of the ranks.

use super::{Kernel, Reduce, ReduceFn, Source, WIDE_BYTES, Wide};

/// Bytes that are added at a time; they fit in the L1 cache. It is a multiple of all elements' sizes.
const BLOCK_BYTES: usize = 4 << 10;
/// Block size of shares whose elements are halves, after they became `f32`.
const WIDE_BLOCK_BYTES: usize = BLOCK_BYTES / Wide::NARROW_BYTES * WIDE_BYTES;

/// The number of ranks whose shares are added up, and the own rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ranks {
    pub(crate) count: usize,
    pub(crate) me: usize,
}

impl Kernel {
    /// Bytes of scratch memory that [`Self::add_up`] needs.
    pub(crate) const SCRATCH_BYTES: usize = 2 * WIDE_BLOCK_BYTES + BLOCK_BYTES;

    /// Adds the shares of all other ranks to `own`, the share of `ranks.me`. `share` returns the bytes of one
    /// share from a given place on. `added` is called for each finished piece of `own`, with its place. After
    /// that, no share is read at these bytes.
    ///
    /// Sums of halves are rounded once. The error says how a function of the program failed.
    #[inline]
    pub(crate) fn add_up<'a>(
        &self,
        ranks: Ranks,
        own: &mut [u8],
        scratch: &mut [u8],
        share: impl Fn(usize, usize, usize) -> Source<'a>,
        mut added: impl FnMut(usize, &[u8]),
    ) -> Result<(), String> {
        for (index, own) in own.chunks_mut(BLOCK_BYTES).enumerate() {
            let (at, len) = (index * BLOCK_BYTES, own.len());
            let share = |rank: usize| share(rank, at, len);
            match (&self.reduce, self.wide) {
                (Reduce::Numbers(reduce), None) => add_in_place(*reduce, ranks, own, scratch, share),
                _ => self.add_copies(ranks, own, scratch, share)?,
            }
            if let Some(divide) = self.divide.filter(|_| self.wide.is_none()) {
                divide(own, self.world);
            }
            added(at, own);
        }
        Ok(())
    }

    /// Adds copies of the shares: a function of the program must not see shared memory, and halves become
    /// wider.
    fn add_copies<'a>(
        &self,
        ranks: Ranks,
        own: &mut [u8],
        scratch: &mut [u8],
        share: impl Fn(usize) -> Source<'a>,
    ) -> Result<(), String> {
        let wider = self.wide.map_or(own.len(), |_| own.len() / Wide::NARROW_BYTES * WIDE_BYTES);
        let (sums, rest) = scratch.split_at_mut(WIDE_BLOCK_BYTES);
        let (next, copy) = rest.split_at_mut(WIDE_BLOCK_BYTES);
        let (sums, next, copy) = (&mut sums[..wider], &mut next[..wider], &mut copy[..own.len()]);
        for rank in 0..ranks.count {
            if rank == ranks.me {
                Source::from(&*own).copy_to(copy);
            } else {
                share(rank).copy_to(copy);
            }
            let into = if rank == 0 { &mut *sums } else { &mut *next };
            match self.wide {
                Some(wide) => (wide.widen)(copy, into),
                None => Source::from(&*copy).copy_to(into),
            }
            if rank > 0 {
                self.reduce(sums, next, false, self.wide.is_some() && rank + 1 == ranks.count)?;
            }
        }
        match self.wide {
            Some(wide) => (wide.narrow)(sums, own),
            None => Source::from(&*sums).copy_to(own),
        }
        Ok(())
    }
}

/// Adds in place. Each operation commutes to the last bit, so the sum of the lower ranks can be added to this
/// share.
#[inline]
fn add_in_place<'a>(
    reduce: ReduceFn,
    Ranks { count, me }: Ranks,
    own: &mut [u8],
    scratch: &mut [u8],
    share: impl Fn(usize) -> Source<'a>,
) {
    match me {
        0 => {}
        1 => reduce(own, share(0)),
        _ => {
            let sums = &mut scratch[..own.len()];
            share(0).copy_to(sums);
            (1..me).for_each(|rank| reduce(sums, share(rank)));
            reduce(own, Source::from(&*sums));
        }
    }
    (me + 1..count).for_each(|rank| reduce(own, share(rank)));
}
