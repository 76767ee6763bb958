//! The generation: the identity of one incarnation of a job.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A random 128-bit number that all workers of one rendezvous round share.
///
/// It is part of every store key, handshake and frame header. So a worker of an earlier round cannot
/// connect to a later round or set its keys. TORCHELASTIC_RESTART_COUNT is not suitable for this,
/// because each agent counts only its own restarts.
///
/// The text form has 32 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Generation(u128);

/// The error for a text that is not a generation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a generation is 32 hexadecimal digits, got {got:?}")]
pub struct ParseGenerationError {
    got: String,
}

impl Generation {
    /// Creates a new generation from the operating system's random numbers.
    ///
    /// # Errors
    /// Fails if the operating system provides no random numbers.
    pub fn random() -> std::io::Result<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
        Ok(Self::from_bytes(bytes))
    }

    /// Returns the generation whose wire form is `bytes` (little endian).
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_le_bytes(bytes))
    }

    /// Returns the wire form, little endian.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl From<Generation> for String {
    fn from(generation: Generation) -> Self {
        generation.to_string()
    }
}

impl TryFrom<String> for Generation {
    type Error = ParseGenerationError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Generation({self})")
    }
}

impl FromStr for Generation {
    type Err = ParseGenerationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_hexadecimal = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(text, 16).ok().filter(|_| is_hexadecimal);
        number.map(Self).ok_or_else(|| ParseGenerationError { got: text.chars().take(64).collect() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_text_is_a_generation_or_refused(text in "[0-9a-fA-F]{30,34}|.{0,40}") {
            if let Ok(generation) = text.parse::<Generation>() {
                prop_assert_eq!(generation.to_string(), text.to_ascii_lowercase());
            }
        }
    }

    #[test]
    fn text_and_bytes_round_trip() {
        let generation = Generation::random().unwrap();
        assert_eq!(generation.to_string().parse(), Ok(generation));
        assert_eq!(Generation::from_bytes(generation.to_bytes()), generation);
        assert_ne!(generation, Generation::random().unwrap());
    }

    #[test]
    fn malformed_generations_are_refused() {
        for text in ["", "1", "+0000000000000000000000000000001", &"g".repeat(32), &"0".repeat(33)] {
            assert!(text.parse::<Generation>().is_err(), "{text:?}");
        }
    }
}
