//! Random numbers that are the same on all ranks, machines and versions.
//!
//! Pure: no clock, no I/O.

/// SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2714064.2660195): one word of state, no weak seeds.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    /// A sequence of its own for each pair: the split, the initial weights and each epoch's order have
    /// streams that do not overlap in practice.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut mixed = Self(seed);
        Self(mixed.next() ^ stream.wrapping_mul(0xD1B5_4A32_D192_ED03))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `-bound .. bound`.
    pub(crate) fn symmetric(&mut self, bound: f32) -> f32 {
        // 24 bits are what an f32 holds exactly.
        let unit = (self.next() >> 40) as f32 / (1u32 << 24) as f32;
        (2.0 * unit - 1.0) * bound
    }

    /// Fisher-Yates. The bias of the multiply-shift is below 2^-50 for the few thousand rows here.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = (u128::from(self.next()) * (i as u128 + 1)) >> 64;
            items.swap(i, j as usize);
        }
    }
}

/// FNV-1a, 64 bits: tells equal bytes from damaged or different ones; no protection against intent.
pub(crate) fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes
        .into_iter()
        .fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix_gives_the_published_sequence() {
        let mut random = Random(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn fnv_gives_the_published_values() {
        assert_eq!(fnv1a(*b""), 0xCBF2_9CE4_8422_2325);
        assert_eq!(fnv1a(*b"foobar"), 0x8594_4171_F739_67E8);
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
    fn symmetric_fills_its_range_evenly() {
        let mut random = Random::new(3, 3);
        let draws: Vec<f32> = (0..10_000).map(|_| random.symmetric(0.5)).collect();
        assert!(draws.iter().all(|x| (-0.5..0.5).contains(x)));
        assert!(draws.iter().sum::<f32>().abs() / 10_000.0 < 0.02);
    }
}
