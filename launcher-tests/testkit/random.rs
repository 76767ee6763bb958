//! Random numbers with a seed that a failing test prints.

/// A small generator (SplitMix64). CONVOKE_SEED sets the seed; otherwise the system chooses it. A failing
/// test prints how to replay it.
#[derive(Debug)]
pub struct Random {
    state: u64,
    seed: u64,
    test: &'static str,
}

impl Random {
    /// Returns a generator for the test of this name.
    #[must_use]
    pub fn new(test: &'static str) -> Self {
        let given = std::env::var("CONVOKE_SEED").ok();
        let seed = given.map_or_else(system_seed, |text| {
            text.parse().unwrap_or_else(|_| panic!("CONVOKE_SEED={text}: not a number below 2^64"))
        });
        Self { state: seed, seed, test }
    }

    /// Returns a generator with the given seed. The caller prints the seed, or the seed of the generator
    /// that produced it.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        Self { state: seed, seed, test: "" }
    }

    /// Returns a random number of the whole range.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number below `bound`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

fn system_seed() -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

impl Drop for Random {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.test.is_empty() {
            eprintln!("{}: replay with CONVOKE_SEED={}", self.test, self.seed);
        }
    }
}
