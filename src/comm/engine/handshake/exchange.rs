//! The frames of a handshake.

use std::io::{self, IoSlice};
use std::time::Duration;

use convoke_env::Generation;

use crate::transport::frame::{Frame, FrameError, HEADER_BYTES, Kind};
use crate::transport::links::conn::Conn;
use crate::transport::links::hello::{ConnectionKind, HELLO_BYTES, HandshakeError};

/// Longest time until an outgoing connection is established, and until an incoming one has sent its hello.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest frame of a handshake.
pub(super) const HANDSHAKE_BYTES: usize = HEADER_BYTES + 512;

/// A result of connecting or accepting.
#[derive(Debug)]
pub(crate) enum HandshakeEvent {
    /// A peer in `group` has authenticated. Its connection is still registered as [`Source::Handshake`].
    Opened { group: u64, peer: usize, conn_kind: ConnectionKind, conn: Conn },
    /// The peer at an address that the ranks of `group` published does not know the secret.
    Unauthorized { group: u64, from: String, error: HandshakeError },
    /// No descriptor is left for a connection that this process makes for `group`; `None` if a connection
    /// waits to be accepted.
    Exhausted { group: Option<u64>, source: io::Error },
}

/// Returns the first handshake frame among the bytes that were read ahead, with its payload; `None` if it is
/// not complete.
pub(super) fn handshake_frame(conn: &Conn) -> Result<Option<(Frame, Vec<u8>)>, FrameError> {
    let unread = conn.unread();
    let Some(header) = unread.first_chunk::<HEADER_BYTES>() else {
        // Bytes that are no frame are recognised by the first four, even if they are fewer than a header.
        return match unread.first_chunk::<4>() {
            Some(&magic) if magic != crate::transport::frame::MAGIC => Err(FrameError::Magic(magic)),
            _ => Ok(None),
        };
    };
    let frame = Frame::decode(header)?;
    if frame.len > (HANDSHAKE_BYTES - HEADER_BYTES) as u64 {
        return Err(FrameError::Length { kind: frame.kind, len: frame.len });
    }
    let end = HEADER_BYTES + frame.len as usize;
    Ok(unread.get(HEADER_BYTES..end).map(|payload| (frame, payload.to_vec())))
}

/// Sends a small frame whole. The socket buffer of a new connection has room for it.
pub(super) fn send(
    conn: &mut Conn,
    kind: Kind,
    generation: Generation,
    group: u64,
    payload: &[u8],
) -> io::Result<()> {
    debug_assert!(payload.len() <= HELLO_BYTES.max(200));
    let frame = Frame { kind, generation, group, seq: 0, call: [0; 16], len: payload.len() as u64 };
    let header = frame.encode();
    match conn.send(&[IoSlice::new(&header), IoSlice::new(payload)]) {
        Ok(sent) if sent == header.len() + payload.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(broken) => Err(io::Error::other(broken.to_string())),
    }
}

/// Tells a convoke process the reason `why` it is refused, closes the connection for writing, and returns
/// `why`.
pub(super) fn refuse(
    conn: &mut Conn,
    generation: Generation,
    group: u64,
    why: HandshakeError,
) -> HandshakeError {
    let text: String = why.to_string().chars().take(150).collect();
    let _ = send(conn, Kind::Refuse, generation, group, &text.as_bytes()[..text.len().min(200)]);
    conn.close_write();
    conn.discard();
    why
}

pub(super) fn nonce() -> io::Result<[u8; 32]> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}
