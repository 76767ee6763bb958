//! The wire format of the c10d TCPStore protocol, and its limits.
//!
//! Pure: no socket and no clock. All integers are little-endian. A blob is a `u64` length and as many
//! bytes. The server decodes requests with [`Decoder`]. The functions of [`encode`] write the requests
//! of a client and the replies of a server. `docs/reference/store.md` lists the differences
//! from torch.

mod decode;
pub(crate) mod encode;
#[cfg(test)]
mod tests;

pub(crate) use decode::Decoder;

/// Magic number of the VALIDATE request, which starts every connection.
pub(crate) const MAGIC: u32 = 0x3C85_F7CE;
/// Longest key in bytes, as on the wire (a client's leading slash included).
pub const MAX_KEY_BYTES: usize = 8192;
/// Longest value of one request, in bytes. APPEND may build longer values.
pub const MAX_VALUE_BYTES: usize = 8 << 20;
/// Most keys (or pairs) of one request.
pub const MAX_KEY_COUNT: usize = 131_072;
/// Longest request, in bytes. Torch has no such limit. Without it, a client could make the server
/// allocate `MAX_KEY_COUNT * MAX_VALUE_BYTES`, a terabyte.
pub(crate) const MAX_REQUEST_BYTES: usize = 256 << 20;
/// Longest reply, and longest value that APPEND may build, in bytes.
pub(crate) const MAX_REPLY_BYTES: usize = 256 << 20;

/// Size of a length or of a number, in bytes.
const WORD: usize = 8;

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $byte:literal,)*) => {
        /// The type byte of a request.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub(crate) enum Kind {
            $($(#[$doc])* $kind = $byte,)*
        }

        impl Kind {
            /// Returns the kind with this type byte.
            pub(crate) fn from_byte(byte: u8) -> Option<Kind> {
                match byte {
                    $($byte => Some(Kind::$kind),)*
                    _ => None,
                }
            }
        }
    };
}

kinds! {
    Validate = 0,
    Set = 1,
    CompareSet = 2,
    Get = 3,
    Add = 4,
    Check = 5,
    Wait = 6,
    NumKeys = 7,
    Delete = 8,
    Append = 9,
    MultiGet = 10,
    MultiSet = 11,
    CancelWait = 12,
    Ping = 13,
    QueuePush = 14,
    QueuePop = 15,
    QueueLen = 16,
    ListKeys = 17,
    Barrier = 18,
    /// Asks the server to store a value under a key when this connection closes, if the key is absent then. A
    /// later will of the connection replaces this one; an empty value removes the will. The server sends no
    /// reply. Types from 0x40 are convoke's own requests, which torch's servers do not know.
    SetLastWill = 0x40,
}

/// One complete request, borrowed from the received bytes. The decoder has checked the magic number of
/// VALIDATE, and that it is the first request. `pairs` are blobs in the order key, value, key, value, ...
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request<'a> {
    Validate,
    Set { key: &'a [u8], value: &'a [u8] },
    CompareSet { key: &'a [u8], expected: &'a [u8], desired: &'a [u8] },
    Get { key: &'a [u8] },
    Add { key: &'a [u8], delta: i64 },
    Check { keys: Blobs<'a> },
    Wait { keys: Blobs<'a> },
    NumKeys,
    Delete { key: &'a [u8] },
    Append { key: &'a [u8], value: &'a [u8] },
    MultiGet { keys: Blobs<'a> },
    MultiSet { pairs: Blobs<'a> },
    CancelWait,
    Ping { nonce: u32 },
    QueuePush { key: &'a [u8], value: &'a [u8] },
    QueuePop { key: &'a [u8] },
    QueueLen { key: &'a [u8] },
    ListKeys,
    Barrier { key: &'a [u8], world_size: i64 },
    SetLastWill { key: &'a [u8], value: &'a [u8] },
}

/// A sequence of blobs, checked to be complete. Iterating copies nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Blobs<'a> {
    bytes: &'a [u8],
}

impl<'a> Iterator for Blobs<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        (!self.bytes.is_empty()).then(|| split_blob(&mut self.bytes))
    }
}

/// Removes `N` bytes from the front of fields that [`Decoder`] has checked to be complete.
fn split_array<const N: usize>(bytes: &mut &[u8]) -> [u8; N] {
    let (array, rest) = bytes.split_first_chunk().expect("the decoder has checked the fields");
    *bytes = rest;
    *array
}

/// Removes a `u64` from the front of fields that [`Decoder`] has checked to be complete.
fn split_u64(bytes: &mut &[u8]) -> u64 {
    u64::from_le_bytes(split_array(bytes))
}

/// Removes a blob from the front of fields that [`Decoder`] has checked to be complete.
fn split_blob<'a>(bytes: &mut &'a [u8]) -> &'a [u8] {
    // The decoder has checked that the length is below the limits and that as many bytes follow.
    let length = split_u64(bytes) as usize;
    let (blob, rest) = bytes.split_at(length);
    *bytes = rest;
    blob
}
