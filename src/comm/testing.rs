//! What several test modules need.

/// A small random generator, seeded by CONVOKE_SEED or by chance; a failing test shows its seed.
pub(crate) struct Random {
    state: u64,
    seed: u64,
    test: &'static str,
}

impl Random {
    pub(crate) fn new(test: &'static str) -> Self {
        let seed =
            std::env::var("CONVOKE_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(|| {
                let mut bytes = [0; 8];
                getrandom::fill(&mut bytes).unwrap();
                u64::from_ne_bytes(bytes)
            });
        Self { state: seed, seed, test }
    }

    /// A generator whose seed comes from another one.
    pub(crate) fn from_seed(seed: u64) -> Self {
        Self { state: seed, seed, test: "" }
    }

    /// SplitMix64.
    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

impl Drop for Random {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.test.is_empty() {
            eprintln!("{}: replay with CONVOKE_SEED={}", self.test, self.seed);
        }
    }
}
