//! What several test modules need.

mod gate;
pub(crate) mod memory;

pub(crate) use gate::Gate;

/// A small random generator, seeded by CONVOKE_SEED or by chance; a failing test shows its seed.
#[derive(Debug)]
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

    /// `good` with some bytes changed, added or cut off; sometimes nothing of it is left.
    fn damaged(&mut self, good: &[u8]) -> Vec<u8> {
        // They keep a text what it is.
        const OF_TEXTS: &[u8] = b"0123456789-.e\"{}[],:=/&";
        let mut bytes = good.to_vec();
        if self.below(16) == 0 {
            bytes = (0..self.below(2 * good.len() + 8)).map(|_| self.next() as u8).collect();
        }
        for _ in 0..self.below(6) {
            let at = self.below(bytes.len() + 1);
            let byte =
                if self.below(2) == 0 { OF_TEXTS[self.below(OF_TEXTS.len())] } else { self.next() as u8 };
            match self.below(4) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, byte),
                _ => bytes.iter_mut().skip(at).take(1).for_each(|place| *place = byte),
            }
        }
        bytes
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

/// Messages that [`fuzz`] makes.
const ROUNDS: usize = 20_000;

/// Gives `decode` what is left of `good` messages after some damage, and random bytes: it may refuse them, but must
/// not panic, nor have more than `most_bytes` in use; and what it reads it must read again when it is written.
pub(crate) fn fuzz<T: PartialEq + std::fmt::Debug>(
    test: &'static str,
    good: &[impl AsRef<[u8]>],
    most_bytes: usize,
    decode: impl Fn(&[u8]) -> Option<T>,
    encode: impl Fn(&T) -> Vec<u8>,
) {
    for good in good {
        let read = decode(good.as_ref());
        assert!(read.is_some(), "{test}: not even {:?} is read", String::from_utf8_lossy(good.as_ref()));
        assert_eq!(read.as_ref().and_then(|read| decode(&encode(read))), read, "{test}");
    }
    let mut random = Random::new(test);
    for round in 0..ROUNDS {
        let bytes = random.damaged(good[round % good.len()].as_ref());
        let (read, used) = memory::most_of(|| decode(&bytes));
        assert!(used <= most_bytes, "{test}: {used} bytes for {bytes:?}");
        if let Some(read) = read {
            assert_eq!(decode(&encode(&read)), Some(read), "{test}: {bytes:?}");
        }
    }
}
