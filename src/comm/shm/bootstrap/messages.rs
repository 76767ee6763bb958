//! The replies of the bootstrap: a byte that accepts or refuses, and a payload or the reason.

use crate::shm::unavailable::Unavailable;
use crate::shm::unix_socket::MESSAGE_BYTES;

pub(super) const ACCEPT: u8 = 1;
const REFUSE: u8 = 0;

/// Returns a message that refuses shared memory for a reason, truncated to the size of the longest message.
pub(crate) fn refusal(reason: &str) -> Vec<u8> {
    let mut bytes = [&[REFUSE], reason.as_bytes()].concat();
    bytes.truncate(MESSAGE_BYTES);
    bytes
}

/// Returns the payload of a reply of `rank`. It is an error if the rank refused or the reply is empty.
pub(super) fn parse_reply(bytes: &[u8], rank: usize) -> Result<&[u8], Unavailable> {
    match bytes.split_first() {
        Some((&ACCEPT, rest)) => Ok(rest),
        Some((_, reason)) => {
            Err(Unavailable::PeerReported { rank, what: String::from_utf8_lossy(reason).into_owned() })
        }
        None => Err(Unavailable::InvalidMessage { rank }),
    }
}
