//! JSON that ranks put into the store or into frames. Pure.

use serde::Serialize;

/// Encodes plain data: structs of numbers, texts, lists and options.
pub(crate) fn encode(data: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(data).expect("plain data has a JSON form, and memory takes all bytes")
}
