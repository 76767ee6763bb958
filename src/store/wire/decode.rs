//! Incremental decoding of requests, which may arrive split or pipelined in any way.

use super::{
    Blobs, Kind, MAGIC, MAX_KEY_BYTES, MAX_KEY_COUNT, MAX_REQUEST_BYTES, MAX_VALUE_BYTES, Request, WORD,
    split_array, split_blob, split_u64,
};

/// The way in which a client broke the protocol, with the wrong type byte, magic number, length or count. Its
/// connection must be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Malformed {
    NotValidated(u8),
    Magic(u32),
    ValidatedTwice,
    Type(u8),
    Key(u64),
    Value(u64),
    Count(u64),
    Request,
}

/// Finds the requests in a stream of bytes.
///
/// The decoder keeps no bytes, only its position in the unfinished request. So a request that arrives
/// byte by byte is scanned only once.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    validated: bool,
    /// Number of bytes of the unfinished request that have been checked; 0 before its first byte.
    seen_bytes: usize,
    /// Number of complete fields within `seen_bytes`.
    fields: u64,
    /// Number of fields that follow the count of the unfinished request.
    counted: u64,
}

/// The type of the next field of a request.
enum Field {
    Key,
    Value,
    Count { fields_each: u64 },
    Bytes(usize),
    End,
}

impl Decoder {
    /// Returns the request at the front of `bytes` and its length in bytes, or `None` if it is
    /// unfinished.
    ///
    /// `bytes` must begin with the first byte of the request. After `None`, the caller passes the same
    /// bytes again, with newly received bytes appended.
    ///
    /// # Errors
    /// [`Malformed`], as soon as the available bytes break the protocol. Decoding cannot continue
    /// afterwards.
    pub(crate) fn next<'a>(&mut self, bytes: &'a [u8]) -> Result<Option<(Request<'a>, usize)>, Malformed> {
        let Some(&first) = bytes.first() else { return Ok(None) };
        if !self.validated && first != Kind::Validate as u8 {
            return Err(Malformed::NotValidated(first));
        }
        let kind = Kind::from_byte(first).ok_or(Malformed::Type(first))?;
        if self.validated && kind == Kind::Validate {
            return Err(Malformed::ValidatedTwice);
        }
        self.seen_bytes = self.seen_bytes.max(1);
        if !self.scan(kind, bytes)? {
            return Ok(None);
        }
        let length = self.seen_bytes;
        let request = build(kind, &bytes[1..length])?;
        *self = Decoder { validated: true, ..Decoder::default() };
        Ok(Some((request, length)))
    }

    /// Checks the fields of the unfinished request that have not been checked before. Returns true if
    /// the request is complete.
    fn scan(&mut self, kind: Kind, bytes: &[u8]) -> Result<bool, Malformed> {
        loop {
            let rest = &bytes[self.seen_bytes..];
            let field_bytes = match field(kind, self.fields, self.counted) {
                Field::End => return Ok(true),
                Field::Bytes(length) => Some(length),
                Field::Key => blob_bytes(rest, MAX_KEY_BYTES).map_err(Malformed::Key)?,
                Field::Value => blob_bytes(rest, MAX_VALUE_BYTES).map_err(Malformed::Value)?,
                Field::Count { fields_each } => {
                    let Some(count) = rest.first_chunk::<WORD>() else { return Ok(false) };
                    let count = u64::from_le_bytes(*count);
                    if count > MAX_KEY_COUNT as u64 {
                        return Err(Malformed::Count(count));
                    }
                    self.counted = count * fields_each;
                    Some(WORD)
                }
            };
            let Some(field_bytes) = field_bytes else { return Ok(false) };
            if self.seen_bytes + field_bytes > MAX_REQUEST_BYTES {
                return Err(Malformed::Request);
            }
            if rest.len() < field_bytes {
                return Ok(false);
            }
            self.seen_bytes += field_bytes;
            self.fields += 1;
        }
    }
}

/// Returns the type of field number `index` in a request of this kind. `counted` is the number of
/// fields after the count.
fn field(kind: Kind, index: u64, counted: u64) -> Field {
    match (kind, index) {
        (Kind::Validate | Kind::Ping, 0) => Field::Bytes(4),
        (Kind::Set | Kind::Append | Kind::QueuePush | Kind::CompareSet | Kind::SetLastWill, 0)
        | (Kind::Get | Kind::Delete | Kind::QueuePop | Kind::QueueLen, 0)
        | (Kind::Add | Kind::Barrier, 0) => Field::Key,
        (Kind::Set | Kind::Append | Kind::QueuePush | Kind::CompareSet | Kind::SetLastWill, 1)
        | (Kind::CompareSet, 2) => Field::Value,
        (Kind::Add | Kind::Barrier, 1) => Field::Bytes(WORD),
        (Kind::Check | Kind::Wait | Kind::MultiGet, 0) => Field::Count { fields_each: 1 },
        (Kind::MultiSet, 0) => Field::Count { fields_each: 2 },
        (Kind::Check | Kind::Wait | Kind::MultiGet, index) if index <= counted => Field::Key,
        (Kind::MultiSet, index) if index <= counted && index % 2 == 1 => Field::Key,
        (Kind::MultiSet, index) if index <= counted => Field::Value,
        (Kind::Validate | Kind::Ping, _)
        | (Kind::Set | Kind::Append | Kind::QueuePush | Kind::CompareSet | Kind::SetLastWill, _)
        | (Kind::Get | Kind::Delete | Kind::QueuePop | Kind::QueueLen, _)
        | (Kind::Add | Kind::Barrier, _)
        | (Kind::Check | Kind::Wait | Kind::MultiGet | Kind::MultiSet, _)
        | (Kind::NumKeys | Kind::CancelWait | Kind::ListKeys, _) => Field::End,
    }
}

/// Returns the size of the blob at the front of `rest`, its length word included; `None` if the length
/// word is incomplete.
///
/// # Errors
/// The length of the blob, if it exceeds `limit`. The check does not need the bytes of the blob.
fn blob_bytes(rest: &[u8], limit: usize) -> Result<Option<usize>, u64> {
    let Some(length) = rest.first_chunk::<WORD>() else { return Ok(None) };
    let length = u64::from_le_bytes(*length);
    match usize::try_from(length) {
        Ok(length) if length <= limit => Ok(Some(WORD + length)),
        _ => Err(length),
    }
}

/// Builds the request whose fields are `rest`. `scan` has checked that they are complete.
fn build(kind: Kind, mut rest: &[u8]) -> Result<Request<'_>, Malformed> {
    let rest = &mut rest;
    Ok(match kind {
        Kind::Validate => match u32::from_le_bytes(split_array(rest)) {
            MAGIC => Request::Validate,
            magic => return Err(Malformed::Magic(magic)),
        },
        Kind::Set => Request::Set { key: split_blob(rest), value: split_blob(rest) },
        Kind::CompareSet => Request::CompareSet {
            key: split_blob(rest),
            expected: split_blob(rest),
            desired: split_blob(rest),
        },
        Kind::Get => Request::Get { key: split_blob(rest) },
        Kind::Add => Request::Add { key: split_blob(rest), delta: split_u64(rest).cast_signed() },
        Kind::Check => Request::Check { keys: split_blobs(rest) },
        Kind::Wait => Request::Wait { keys: split_blobs(rest) },
        Kind::NumKeys => Request::NumKeys,
        Kind::Delete => Request::Delete { key: split_blob(rest) },
        Kind::Append => Request::Append { key: split_blob(rest), value: split_blob(rest) },
        Kind::MultiGet => Request::MultiGet { keys: split_blobs(rest) },
        Kind::MultiSet => Request::MultiSet { pairs: split_blobs(rest) },
        Kind::CancelWait => Request::CancelWait,
        Kind::Ping => Request::Ping { nonce: u32::from_le_bytes(split_array(rest)) },
        Kind::QueuePush => Request::QueuePush { key: split_blob(rest), value: split_blob(rest) },
        Kind::QueuePop => Request::QueuePop { key: split_blob(rest) },
        Kind::QueueLen => Request::QueueLen { key: split_blob(rest) },
        Kind::ListKeys => Request::ListKeys,
        Kind::SetLastWill => Request::SetLastWill { key: split_blob(rest), value: split_blob(rest) },
        Kind::Barrier => {
            Request::Barrier { key: split_blob(rest), world_size: split_u64(rest).cast_signed() }
        }
    })
}

/// Skips the count at the front of `rest` and returns the blobs after it.
fn split_blobs<'a>(rest: &mut &'a [u8]) -> Blobs<'a> {
    let _count = split_u64(rest);
    Blobs { bytes: rest }
}
