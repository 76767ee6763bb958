//! Fuzzing of decoders with damaged messages.

use std::fmt::Debug;

use crate::{Random, memory};

/// Number of messages that [`fuzz`] makes.
const ROUNDS: usize = 20_000;
/// Replacement bytes that keep a text valid as text.
const TEXT_BYTES: &[u8] = b"0123456789-.e\"{}[],:=/&";

/// Passes damaged copies of the `good` messages, and random bytes, to `decode`.
///
/// `decode` may reject a message, but must not panic nor use more than `max_bytes`. A decoded value must
/// survive `encode` and a second `decode`. Panics unless the test binary has [`memory::CountingAllocator`] as
/// its allocator.
pub fn fuzz<T: PartialEq + Debug>(
    test: &'static str,
    good: &[impl AsRef<[u8]>],
    max_bytes: usize,
    decode: impl Fn(&[u8]) -> Option<T>,
    encode: impl Fn(&T) -> Vec<u8>,
) {
    assert!(memory::counts_memory(), "{test}: this test binary does not count memory");
    for good in good {
        let read = decode(good.as_ref());
        assert!(read.is_some(), "{test}: not even {:?} is read", String::from_utf8_lossy(good.as_ref()));
        assert_eq!(read.as_ref().and_then(|read| decode(&encode(read))), read, "{test}");
    }
    let mut random = Random::new(test);
    for round in 0..ROUNDS {
        let bytes = mutate(&mut random, good[round % good.len()].as_ref());
        let (read, used) = memory::peak_bytes(|| decode(&bytes));
        assert!(used <= max_bytes, "{test}: {used} bytes for {bytes:?}");
        if let Some(read) = read {
            assert_eq!(decode(&encode(&read)), Some(read), "{test}: {bytes:?}");
        }
    }
}

/// Returns `good` with some bytes changed, added or cut off; sometimes random bytes instead.
fn mutate(random: &mut Random, good: &[u8]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    if random.below(16) == 0 {
        bytes = (0..random.below(2 * good.len() + 8)).map(|_| random.next() as u8).collect();
    }
    for _ in 0..random.below(6) {
        let at = random.below(bytes.len() + 1);
        let byte = if random.below(2) == 0 {
            TEXT_BYTES[random.below(TEXT_BYTES.len())]
        } else {
            random.next() as u8
        };
        match random.below(4) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, byte),
            _ => bytes.iter_mut().skip(at).take(1).for_each(|place| *place = byte),
        }
    }
    bytes
}
