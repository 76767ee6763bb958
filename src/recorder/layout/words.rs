//! Numbers and texts in words. Pure.

use convoke_env::Generation;

/// Returns the 64-bit word with these lower and higher 32 bits.
#[inline]
#[must_use]
pub fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

pub(super) fn low(word: u64) -> u32 {
    word as u32
}

pub(super) fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

pub(super) fn byte(word: u64, at: usize) -> u8 {
    word.to_le_bytes()[at]
}

/// Stands for `None` in an optional number.
pub(super) const NONE: u32 = u32::MAX;

pub(super) fn optional(number: u32) -> Option<u32> {
    (number != NONE).then_some(number)
}

/// Writes a text into `words`: the length in bytes into the first word, the bytes into the next words.
/// A text that is too long is cut at a character boundary.
pub(super) fn put_text(words: &mut [u64], text: &str) {
    let end = text.floor_char_boundary(8 * (words.len() - 1));
    words[0] = end as u64;
    for (word, bytes) in words[1..].iter_mut().zip(text.as_bytes()[..end].chunks(8)) {
        let mut eight = [0; 8];
        eight[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(eight);
    }
}

/// Reads a text that [`put_text`] has written. A length beyond the available words is cut.
pub(super) fn get_text(words: &[u64]) -> String {
    let bytes: Vec<u8> = words[1..].iter().flat_map(|word| word.to_le_bytes()).collect();
    let length = usize::try_from(words[0]).unwrap_or(usize::MAX).min(bytes.len());
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}

/// Reads a text that will be shown, and replaces its control characters, which could change the state
/// of a terminal.
pub(super) fn get_line(words: &[u64]) -> String {
    get_text(words).replace(char::is_control, "\u{fffd}")
}

pub(super) fn generation(low: u64, high: u64) -> Option<Generation> {
    let number = whole(low, high);
    (number != 0).then(|| Generation::from_bytes(number.to_le_bytes()))
}

/// Returns the number of 128 bits with these two words.
pub(super) fn whole(low: u64, high: u64) -> u128 {
    u128::from(low) | u128::from(high) << 64
}

/// Returns the two words of a number of 128 bits, the lower one first.
#[inline]
pub(super) fn halves(number: u128) -> [u64; 2] {
    [number as u64, (number >> 64) as u64]
}

pub(super) fn encode_generation(generation: Option<Generation>) -> [u64; 2] {
    halves(generation.map_or(0, |generation| u128::from_le_bytes(generation.to_bytes())))
}
