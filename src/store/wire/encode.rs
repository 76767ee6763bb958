//! Encoding of requests and replies. Each function appends to a buffer.

use super::{Kind, MAGIC};

/// Appends the handshake: VALIDATE and PING. The client must send them with one write, because
/// torch's server expects VALIDATE in one read.
pub(crate) fn handshake(out: &mut Vec<u8>, nonce: u32) {
    out.push(Kind::Validate as u8);
    out.extend_from_slice(&MAGIC.to_le_bytes());
    ping(out, nonce);
}

pub(crate) fn ping(out: &mut Vec<u8>, nonce: u32) {
    out.push(Kind::Ping as u8);
    out.extend_from_slice(&nonce.to_le_bytes());
}

/// Appends a request without fields: NUM_KEYS, CANCEL_WAIT, LIST_KEYS.
pub(crate) fn bare(out: &mut Vec<u8>, kind: Kind) {
    out.push(kind as u8);
}

/// Appends a request that consists of blobs: GET, SET, COMPARE_SET, APPEND, DELETE, QUEUE_*.
pub(crate) fn blobs(out: &mut Vec<u8>, kind: Kind, blobs: &[&[u8]]) {
    out.push(kind as u8);
    for bytes in blobs {
        blob(out, bytes);
    }
}

/// Appends a request of a key and a number: ADD, BARRIER.
pub(crate) fn key_and_number(out: &mut Vec<u8>, kind: Kind, key: &[u8], value: i64) {
    blobs(out, kind, &[key]);
    number(out, value);
}

/// Appends a request of a count and as many keys or pairs: CHECK, WAIT, MULTI_GET, MULTI_SET.
pub(crate) fn counted<'a>(
    out: &mut Vec<u8>,
    kind: Kind,
    count: usize,
    blobs: impl Iterator<Item = &'a [u8]>,
) {
    out.push(kind as u8);
    out.extend_from_slice(&(count as u64).to_le_bytes());
    for bytes in blobs {
        blob(out, bytes);
    }
}

pub(crate) fn blob(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

pub(crate) fn number(out: &mut Vec<u8>, value: i64) {
    out.extend_from_slice(&value.to_le_bytes());
}

/// Replies that consist of one byte.
pub(crate) mod byte {
    /// Reply to CHECK if all keys exist, and to WAIT and BARRIER when the wait ends.
    pub(crate) const READY: u8 = 0;
    /// Reply to CHECK if a key is missing.
    pub(crate) const MISSING: u8 = 1;
    /// Reply to CANCEL_WAIT.
    pub(crate) const CANCELLED: u8 = 1;
}
