//! The records of a file store, and their replay. Pure.
//!
//! A record is `u32 key_length, key, u32 value_length, value`, little-endian. The last record of a
//! key wins. Keys that users set begin with `/`. A record with the key `-/key` (a `-` before the
//! whole key) and an empty value deletes `/key`.

use std::collections::HashMap;

/// Longest accepted key or value, in bytes. A longer one means that the file is damaged. The format
/// itself allows 4 GiB.
pub(super) const MAX_FIELD_BYTES: usize = 256 << 20;

/// First byte of the key in a record that deletes a key; the key to delete follows this byte.
const DELETE: u8 = b'-';
/// First byte of every key that a user of the store sets; the store's own counters begin otherwise.
const USER: u8 = b'/';

/// The keys and values after replaying the records so far.
#[derive(Debug, Default)]
pub(super) struct Log {
    pub(super) values: HashMap<Vec<u8>, Vec<u8>>,
    /// Number of bytes of the file that have been replayed. The last replayed record ends at this
    /// position.
    pub(super) replayed_bytes: u64,
}

/// Error: a length that no record can have.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Damaged {
    pub(super) at_byte: u64,
    pub(super) length: u32,
}

impl Log {
    /// Replays the complete records at the front of `bytes`, which must be the bytes of the file that
    /// follow the already replayed ones.
    ///
    /// A truncated record at the end is ignored. Its writer died, and the next writer removes it.
    pub(super) fn replay(&mut self, mut bytes: &[u8]) -> Result<(), Damaged> {
        loop {
            let mut rest = bytes;
            let Some(key) = self.field(bytes, &mut rest)? else { return Ok(()) };
            let Some(value) = self.field(bytes, &mut rest)? else { return Ok(()) };
            match key.strip_prefix(&[DELETE]) {
                Some(deleted) if deleted.starts_with(&[USER]) => drop(self.values.remove(deleted)),
                Some(_) | None => drop(self.values.insert(key.to_vec(), value.to_vec())),
            }
            self.replayed_bytes += (bytes.len() - rest.len()) as u64;
            bytes = rest;
        }
    }

    fn field<'a>(&self, record: &[u8], rest: &mut &'a [u8]) -> Result<Option<&'a [u8]>, Damaged> {
        let Some((length, after)) = rest.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length);
        if length as usize > MAX_FIELD_BYTES {
            let at_byte = self.replayed_bytes + (record.len() - rest.len()) as u64;
            return Err(Damaged { at_byte, length });
        }
        let Some((field, after)) = after.split_at_checked(length as usize) else { return Ok(None) };
        *rest = after;
        Ok(Some(field))
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice)
    }

    pub(super) fn has(&self, key: &[u8]) -> bool {
        self.values.contains_key(key)
    }
}

pub(super) fn push_record(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    for field in [key, value] {
        out.extend_from_slice(&(field.len() as u32).to_le_bytes());
        out.extend_from_slice(field);
    }
}

/// Appends the record that deletes `key` to `out`.
pub(super) fn push_deletion(out: &mut Vec<u8>, key: &[u8]) {
    push_record(out, &[&[DELETE], key].concat(), b"");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn records_may_be_read_in_any_chunks() {
        let mut bytes = Vec::new();
        push_record(&mut bytes, b"/k", b"v1");
        push_record(&mut bytes, b"/n", b"5");
        push_deletion(&mut bytes, b"/k");
        push_record(&mut bytes, b"/-x", b"-");
        for step in 1..bytes.len() {
            let mut log = Log::default();
            let mut end = 0;
            while end < bytes.len() {
                end = (end + step).min(bytes.len());
                log.replay(&bytes[log.replayed_bytes as usize..end]).unwrap();
            }
            assert_eq!(log.replayed_bytes, bytes.len() as u64);
            assert_eq!(
                (log.get(b"/k"), log.get(b"/n"), log.get(b"/-x")),
                (None, Some(&b"5"[..]), Some(&b"-"[..]))
            );
        }
    }

    proptest! {
        /// Replaying any bytes in pieces gives the result of replaying them at once.
        #[test]
        fn random_files_never_cause_a_panic(
            pairs in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..6), prop::collection::vec(any::<u8>(), 0..9)), 0..8),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            step in 1..40_usize,
        ) {
            let mut bytes = Vec::new();
            for (key, value) in &pairs {
                push_record(&mut bytes, &[&[USER], &key[..]].concat(), value);
            }
            let whole = bytes.clone();
            for (place, byte) in changes {
                let place = place.index(bytes.len() + 1);
                bytes.iter_mut().skip(place).take(1).for_each(|old| *old = byte);
            }
            let (mut log, mut result) = (Log::default(), Ok(()));
            for end in (0..bytes.len()).step_by(step).chain([bytes.len()]) {
                let from = log.replayed_bytes as usize;
                result = result.and_then(|()| log.replay(&bytes[from..end.max(from)]));
            }
            let mut at_once = Log::default();
            prop_assert_eq!(at_once.replay(&bytes), result);
            prop_assert_eq!((&at_once.values, at_once.replayed_bytes), (&log.values, log.replayed_bytes));
            if bytes == whole {
                let last: HashMap<_, _> =
                    pairs.into_iter().map(|(key, value)| ([&[USER], &key[..]].concat(), value)).collect();
                prop_assert_eq!(&log.values, &last);
            }
        }
    }

    #[test]
    fn impossible_record_length_is_reported_as_damage() {
        let mut bytes = Vec::new();
        push_record(&mut bytes, b"/k", b"v");
        bytes.extend_from_slice(&[0xff; 8]);
        let mut log = Log::default();
        assert_eq!(log.replay(&bytes), Err(Damaged { at_byte: 11, length: u32::MAX }));
        assert_eq!(log.get(b"/k"), Some(&b"v"[..]), "what came before stays");
    }
}
