//! A hash to compare bytes.
//!
//! Pure: no clock, no I/O.

/// FNV-1a, 64 bits. It detects damaged or different bytes, but not deliberate manipulation.
pub(crate) fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes
        .into_iter()
        .fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fnv_produces_the_published_values() {
        assert_eq!(fnv1a(*b""), 0xCBF2_9CE4_8422_2325);
        assert_eq!(fnv1a(*b"foobar"), 0x8594_4171_F739_67E8);
    }
}
