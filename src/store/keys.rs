//! The form in which a store holds the user's keys, and the limits of keys and values.

use crate::error::StoreError;
use crate::wire::{MAX_KEY_BYTES, MAX_KEY_COUNT, MAX_VALUE_BYTES};

/// Returns the user's `key` in the form in which stores hold it, as torch's do: with a leading `/`.
pub(crate) fn stored_key(key: &[u8]) -> Result<Vec<u8>, StoreError> {
    if key.len() >= MAX_KEY_BYTES {
        let what = format!("a key of {} bytes, the limit is {MAX_KEY_BYTES}", key.len() + 1);
        return Err(StoreError::Invalid { what });
    }
    Ok([b"/", key].concat())
}

pub(crate) fn stored_keys(keys: &[&[u8]]) -> Result<Vec<Vec<u8>>, StoreError> {
    if keys.len() > MAX_KEY_COUNT {
        let what = format!("{} keys at once, the limit is {MAX_KEY_COUNT}", keys.len());
        return Err(StoreError::Invalid { what });
    }
    keys.iter().map(|key| stored_key(key)).collect()
}

/// Returns the user's form of a stored key; `None` if users do not see the key.
pub(crate) fn user_key(key: &[u8]) -> Option<Vec<u8>> {
    key.strip_prefix(b"/").map(<[u8]>::to_vec)
}

pub(crate) fn check_value(value: &[u8]) -> Result<(), StoreError> {
    if value.len() > MAX_VALUE_BYTES {
        let what = format!("a value of {} bytes, the limit is {MAX_VALUE_BYTES}", value.len());
        return Err(StoreError::Invalid { what });
    }
    Ok(())
}

/// Returns the error of every store for adding to a value that is not a number or out of range.
pub(crate) fn not_a_number(key: &[u8]) -> StoreError {
    StoreError::Invalid { what: format!("the value of {} is not a number", printable([key]).concat()) }
}

/// Returns keys for an error message: at most 8, escaped, at most 128 bytes of each.
pub(crate) fn printable<'a>(keys: impl IntoIterator<Item = &'a [u8]>) -> Vec<String> {
    const SHOWN_KEYS: usize = 8;
    const SHOWN_BYTES: usize = 128;
    let show = |key: &[u8]| match key.get(..SHOWN_BYTES) {
        Some(start) if key.len() > SHOWN_BYTES => format!("{}...", start.escape_ascii()),
        Some(_) | None => key.escape_ascii().to_string(),
    };
    keys.into_iter().take(SHOWN_KEYS).map(show).collect()
}

/// Returns the missing keys for an error message, or all of `keys` if none is missing now.
pub(crate) fn printable_or<'a>(missing: impl Iterator<Item = &'a [u8]>, keys: &[&[u8]]) -> Vec<String> {
    let missing = printable(missing);
    if missing.is_empty() { printable(keys.iter().copied()) } else { missing }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slash_prefix_of_keys_is_added_and_removed() {
        assert_eq!(stored_key(b"a/b").unwrap(), b"/a/b");
        assert_eq!(user_key(b"/a/b"), Some(b"a/b".to_vec()));
        assert_eq!(user_key(b"init/"), None);
    }

    #[test]
    fn key_length_limit_includes_the_slash() {
        assert!(stored_key(&[b'k'; MAX_KEY_BYTES - 1]).is_ok());
        let error = stored_key(&[b'k'; MAX_KEY_BYTES]).unwrap_err();
        assert_eq!(error.to_string(), "store: a key of 8193 bytes, the limit is 8192");
    }

    #[test]
    fn messages_show_few_short_printable_keys() {
        let keys = vec![&b"\x00\xff\n"[..]; 20];
        assert_eq!(printable(keys), vec!["\\x00\\xff\\n"; 8]);
        assert_eq!(printable([&[b'a'; 500][..]])[0].len(), 131);
    }
}
