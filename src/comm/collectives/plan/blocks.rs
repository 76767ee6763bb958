//! A row of blocks in a buffer, one block for each rank.

use std::ops::Range;

/// The position of each rank's block in a row of blocks in rank order, in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// The start of each block, and the end of the last one.
    bounds: Vec<usize>,
}

impl Blocks {
    /// Returns `world` blocks of `len` elements.
    pub(crate) fn uniform(world: usize, len: usize) -> Self {
        Self { bounds: (0..=world).map(|index| index * len).collect() }
    }

    /// Returns blocks of these lengths; `None` if their sum overflows.
    pub(crate) fn new(lens: &[usize]) -> Option<Self> {
        let mut bounds = vec![0_usize];
        for &len in lens {
            bounds.push(bounds[bounds.len() - 1].checked_add(len)?);
        }
        Some(Self { bounds })
    }

    /// Returns these blocks with `times` elements in place of each.
    pub(crate) fn scaled(self, times: usize) -> Self {
        Self { bounds: self.bounds.into_iter().map(|bound| bound * times).collect() }
    }

    pub(crate) fn world(&self) -> usize {
        self.bounds.len() - 1
    }

    pub(crate) fn range(&self, rank: usize) -> Range<usize> {
        self.bounds[rank]..self.bounds[rank + 1]
    }

    /// Returns the number of elements of all blocks.
    pub(crate) fn end(&self) -> usize {
        self.bounds[self.world()]
    }

    /// Returns the length of each block, if all are equal.
    pub(crate) fn uniform_len(&self) -> Option<usize> {
        let first = self.range(0).len();
        (1..self.world()).all(|rank| self.range(rank).len() == first).then_some(first)
    }

    /// Returns a hash of the lengths, which ranks compare instead of the lengths.
    pub(crate) fn fingerprint(&self) -> u32 {
        let hash = fingerprint(&self.bounds);
        (hash ^ hash >> 32) as u32
    }
}

/// Returns the FNV-1a hash of the numbers, which ranks compare instead of long lists.
pub(crate) fn fingerprint(numbers: &[usize]) -> u64 {
    let bytes = numbers.iter().flat_map(|number| (*number as u64).to_le_bytes());
    bytes.fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_contiguous() {
        let blocks = Blocks::new(&[3, 0, 4]).unwrap();
        assert_eq!((blocks.world(), blocks.end(), blocks.uniform_len()), (3, 7, None));
        assert_eq!((blocks.range(0), blocks.range(1), blocks.range(2)), (0..3, 3..3, 3..7));
        assert_eq!(Blocks::new(&[2, 2]), Some(Blocks::uniform(2, 2)));
        assert_ne!(blocks.fingerprint(), Blocks::new(&[4, 0, 3]).unwrap().fingerprint());
        assert_eq!(Blocks::new(&[usize::MAX, 1]), None);
    }
}
