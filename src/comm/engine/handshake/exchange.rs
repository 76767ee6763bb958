//! The frames of a handshake.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Duration;

use crate::transport::frame::{Frame, FrameError, HEADER_BYTES, Kind, MAGIC};
use crate::transport::links::conn::Conn;
use crate::transport::links::hello::{ConnectionKind, Credentials, HELLO_BYTES, HandshakeError};

/// Longest time until an outgoing connection is established, and until an incoming one has sent its hello.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest frame of a handshake.
pub(super) const HANDSHAKE_BYTES: usize = HEADER_BYTES + 512;

/// A connection of a group: the rank to which it leads, and its purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ConnectionId {
    pub(crate) group: u64,
    pub(crate) peer: usize,
    pub(crate) conn_kind: ConnectionKind,
}

/// A result of connecting or accepting, for one group.
#[derive(Debug)]
pub(crate) enum HandshakeEvent {
    /// A peer has authenticated.
    Opened { peer: usize, conn_kind: ConnectionKind, conn: Conn },
    /// The peer at an address that the ranks of the group published does not know the secret.
    Unauthorized { from: String, error: HandshakeError },
    /// No descriptor is left for a connection that this process makes (`outgoing`) or accepts.
    Exhausted { outgoing: bool, source: Arc<io::Error> },
}

/// Returns the first handshake frame that was read ahead, with its payload; `None` if it is not complete.
pub(super) fn handshake_frame(conn: &Conn) -> Result<Option<(Frame, Vec<u8>)>, FrameError> {
    let unread = conn.unread();
    let Some(header) = unread.first_chunk::<HEADER_BYTES>() else {
        // Bytes that are no frame are recognised by the first four, even if they are fewer than a header.
        return match unread.first_chunk::<4>() {
            Some(&magic) if magic != MAGIC => Err(FrameError::Magic(magic)),
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
pub(super) fn send(conn: &mut Conn, kind: Kind, ours: &Credentials, payload: &[u8]) -> io::Result<()> {
    debug_assert!(payload.len() <= HELLO_BYTES.max(200));
    let frame = Frame { len: payload.len() as u64, ..Frame::empty(kind, ours.group_id(), 0) };
    let header = frame.encode();
    match conn.send(&[IoSlice::new(&header), IoSlice::new(payload)]) {
        Ok(sent) if sent == header.len() + payload.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(broken) => Err(io::Error::other(broken.to_string())),
    }
}

/// Tells a convoke process `why` it is refused, closes the connection for writing, and returns `why`.
pub(super) fn refuse(conn: &mut Conn, ours: &Credentials, why: HandshakeError) -> HandshakeError {
    let text: String = why.to_string().chars().take(150).collect();
    let _ = send(conn, Kind::Refuse, ours, &text.as_bytes()[..text.len().min(200)]);
    conn.close_write();
    conn.discard();
    why
}

pub(super) fn nonce() -> io::Result<[u8; 32]> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map(|()| nonce).map_err(io::Error::other)
}
