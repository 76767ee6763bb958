//! Random numbers that are identical on all ranks, machines and versions.
//!
//! Pure: no clock, no I/O.

/// SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2714064.2660195): one word of state, no weak seeds.
///
/// Use it for decisions that must agree on all ranks, such as the order of an epoch or initial weights. Later
/// versions generate the same numbers, because resumed runs depend on the numbers. The numbers are not
/// suitable for cryptography.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Begins the sequence of the pair `seed` and `stream`. Streams of one seed do not overlap in practice.
    #[must_use]
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut mixed = Self(seed);
        Self(mixed.next_u64() ^ stream.wrapping_mul(0xD1B5_4A32_D192_ED03))
    }

    /// Returns the next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a uniform number in `0 .. bound`, or 0 if `bound` is 0. The bias is below `bound` / 2^64.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// Returns a uniform number in `-bound .. bound`.
    pub fn symmetric(&mut self, bound: f32) -> f32 {
        // An f32 holds 24 bits exactly.
        let unit = (self.next_u64() >> 40) as f32 / (1_u32 << 24) as f32;
        (2.0 * unit - 1.0) * bound
    }

    /// Shuffles `items` (Fisher-Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix_produces_the_published_sequence() {
        let mut random = Random(1_234_567);
        assert_eq!(random.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(random.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn shuffle_keeps_every_item_and_follows_the_seed() {
        let shuffled = |seed, stream| {
            let mut items: Vec<u32> = (0..500).collect();
            Random::new(seed, stream).shuffle(&mut items);
            items
        };
        let mut sorted = shuffled(7, 0);
        assert_ne!(sorted, shuffled(8, 0));
        assert_ne!(sorted, shuffled(7, 1));
        assert_eq!(sorted, shuffled(7, 0));
        sorted.sort_unstable();
        assert!(sorted.iter().copied().eq(0..500));
    }

    #[test]
    fn symmetric_values_fill_their_range_evenly() {
        let mut random = Random::new(3, 3);
        let draws: Vec<f32> = (0..10_000).map(|_| random.symmetric(0.5)).collect();
        assert!(draws.iter().all(|x| (-0.5..0.5).contains(x)));
        assert!(draws.iter().sum::<f32>().abs() / 10_000.0 < 0.02);
    }
}
