//! Adding up the shares of all ranks at one place, in the order of the ranks.

use super::{Kernel, WIDE_BYTES, Wide};

/// Bytes that are added up at a time: at home in the L1 cache. A multiple of all elements' sizes.
const BLOCK_BYTES: usize = 4 << 10;

/// Shares of as many bytes from each rank, and where their sums go.
pub(crate) trait Shares {
    /// The share of `rank`, from byte `at` on.
    fn load(&mut self, rank: usize, at: usize, into: &mut [u8]);

    /// The sums, from byte `at` on. Of these bytes no share is loaded any more.
    fn store(&mut self, at: usize, sums: &[u8]);
}

impl Kernel {
    /// Adds up `bytes` bytes of the shares of `ranks` ranks. `scratch` has 32 KiB.
    ///
    /// Sums of halves are rounded once. The error says how a function of the program failed.
    pub(crate) fn add_up(
        &self,
        ranks: usize,
        bytes: usize,
        scratch: &mut [u8],
        shares: &mut dyn Shares,
    ) -> Result<(), String> {
        let (sums, rest) = scratch.split_at_mut(BLOCK_BYTES / Wide::NARROW_BYTES * WIDE_BYTES);
        let (next, raw) = rest.split_at_mut(BLOCK_BYTES / Wide::NARROW_BYTES * WIDE_BYTES);
        for at in (0..bytes).step_by(BLOCK_BYTES) {
            let len = BLOCK_BYTES.min(bytes - at);
            let raw = &mut raw[..len];
            let wider = self.wide.map_or(len, |_| len / Wide::NARROW_BYTES * WIDE_BYTES);
            let (sums, next) = (&mut sums[..wider], &mut next[..wider]);
            for rank in 0..ranks {
                let into = if rank == 0 { &mut *sums } else { &mut *next };
                match self.wide {
                    None => shares.load(rank, at, into),
                    Some(wide) => {
                        shares.load(rank, at, raw);
                        (wide.widen)(raw, into);
                    }
                }
                if rank > 0 {
                    self.reduce(sums, next, false, rank + 1 == ranks)?;
                }
            }
            match self.wide {
                None => shares.store(at, sums),
                Some(wide) => {
                    (wide.narrow)(sums, raw);
                    shares.store(at, raw);
                }
            }
        }
        Ok(())
    }
}
