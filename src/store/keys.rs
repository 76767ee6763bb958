//! How a store spells its callers' keys, and what it accepts.

use std::borrow::Cow;

use crate::error::StoreError;
use crate::wire::{MAX_KEY_BYTES, MAX_KEY_COUNT, MAX_VALUE_BYTES};

/// How a caller's key is spelt in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeyStyle {
    /// As torch's TCP and file stores do: `/` before every key. Keys without it are not seen.
    #[default]
    Slash,
    /// As given.
    Plain,
}

impl KeyStyle {
    /// The caller's `key` as the store holds it.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] if it is too long.
    pub(crate) fn outer(self, key: &[u8]) -> Result<Cow<'_, [u8]>, StoreError> {
        let outer = match self {
            KeyStyle::Slash => Cow::Owned([b"/", key].concat()),
            KeyStyle::Plain => Cow::Borrowed(key),
        };
        if outer.len() > MAX_KEY_BYTES {
            let what = format!("a key of {} bytes, the limit is {MAX_KEY_BYTES}", outer.len());
            return Err(StoreError::Invalid { what });
        }
        Ok(outer)
    }

    /// Several keys, as by [`outer`](KeyStyle::outer).
    pub(crate) fn outer_all<'a>(self, keys: &[&'a [u8]]) -> Result<Vec<Cow<'a, [u8]>>, StoreError> {
        if keys.len() > MAX_KEY_COUNT {
            let what = format!("{} keys at once, the limit is {MAX_KEY_COUNT}", keys.len());
            return Err(StoreError::Invalid { what });
        }
        keys.iter().map(|key| self.outer(key)).collect()
    }

    /// The caller's name of a key in the store; `None` if callers cannot see it.
    pub(crate) fn inner(self, key: &[u8]) -> Option<&[u8]> {
        match self {
            KeyStyle::Slash => key.strip_prefix(b"/"),
            KeyStyle::Plain => Some(key),
        }
    }
}

/// # Errors
/// [`StoreError::Invalid`] if the value is longer than the protocol carries.
pub(crate) fn check_value(value: &[u8]) -> Result<(), StoreError> {
    if value.len() > MAX_VALUE_BYTES {
        let what = format!("a value of {} bytes, the limit is {MAX_VALUE_BYTES}", value.len());
        return Err(StoreError::Invalid { what });
    }
    Ok(())
}

/// The same from every store: its value, text or beyond the range, cannot be added to.
pub(crate) fn not_a_number(key: &[u8]) -> StoreError {
    StoreError::Invalid { what: format!("the value of {} is not a number", printable([key]).concat()) }
}

/// Keys for a message: at most 8, each printable and not longer than a line.
pub(crate) fn printable<'a>(keys: impl IntoIterator<Item = &'a [u8]>) -> Vec<String> {
    const SHOWN_KEYS: usize = 8;
    const SHOWN_BYTES: usize = 128;
    let show = |key: &[u8]| match key.get(..SHOWN_BYTES) {
        Some(start) if key.len() > SHOWN_BYTES => format!("{}...", start.escape_ascii()),
        Some(_) | None => key.escape_ascii().to_string(),
    };
    keys.into_iter().take(SHOWN_KEYS).map(show).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slash_is_put_before_keys_and_taken_away_again() {
        assert_eq!(KeyStyle::Slash.outer(b"a/b").unwrap(), &b"/a/b"[..]);
        assert_eq!(KeyStyle::Slash.inner(b"/a/b"), Some(&b"a/b"[..]));
        assert_eq!(KeyStyle::Slash.inner(b"init/"), None);
        assert_eq!(KeyStyle::Plain.outer(b"a/b").unwrap(), &b"a/b"[..]);
    }

    #[test]
    fn the_limit_counts_the_slash() {
        assert!(KeyStyle::Slash.outer(&[b'k'; MAX_KEY_BYTES - 1]).is_ok());
        let error = KeyStyle::Slash.outer(&[b'k'; MAX_KEY_BYTES]).unwrap_err();
        assert_eq!(error.to_string(), "store: a key of 8193 bytes, the limit is 8192");
    }

    #[test]
    fn keys_in_messages_are_few_short_and_printable() {
        let keys = vec![&b"\x00\xff\n"[..]; 20];
        assert_eq!(printable(keys), vec!["\\x00\\xff\\n"; 8]);
        assert_eq!(printable([&[b'a'; 500][..]])[0].len(), 131);
    }
}
