//! Reads and writes the frames of the rendezvous protocol over a TCP connection. Each write has a deadline.

use std::io;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::wire::{self, LENGTH_BYTES, MAC_BYTES, Seal, WireError};

/// Longest time that the peer may take to receive a frame.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Reason for which a connection to a rendezvous peer ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum FramingError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Wire(#[from] WireError),
    #[error("{0}")]
    Refused(String),
    #[error("it is not a rendezvous of convoke, or one of another version")]
    NotRendezvous,
    #[error("it closed the connection, and is not a rendezvous or no longer one")]
    ClosedByPeer,
    #[error("connected, but it does not answer as a rendezvous")]
    NoHandshake,
    #[error("no answer within {0:?}")]
    Timeout(Duration),
}

/// Configures the socket for short, repeated messages. The kernel sends them without delay (`TCP_NODELAY`),
/// and retransmits lost packets at a constant interval, without exponential backoff.
pub(super) fn set_socket_options(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    SockRef::from(stream).set_tcp_thin_linear_timeouts(true)
}

/// Reads the body of the next frame, of at most `limit` bytes. The caller must not cancel this halfway,
/// because the bytes read so far would be lost.
pub(super) async fn read_body(
    stream: &mut (impl AsyncRead + Unpin),
    limit: usize,
) -> Result<Vec<u8>, FramingError> {
    let mut length = [0; LENGTH_BYTES];
    stream.read_exact(&mut length).await?;
    let mut body = vec![0; wire::body_len(length, limit)?];
    stream.read_exact(&mut body).await?;
    Ok(body)
}

/// Reads the next frame, verifies its MAC with `seal` and decodes its body, of at most `limit` bytes. Not to
/// be cancelled halfway either.
pub(super) async fn read<T: DeserializeOwned>(
    stream: &mut (impl AsyncRead + Unpin),
    seal: &mut Seal,
    limit: usize,
) -> Result<T, FramingError> {
    let body = read_body(stream, limit).await?;
    let mut mac = [0; MAC_BYTES];
    stream.read_exact(&mut mac).await?;
    Ok(seal.open(&body, &mac)?)
}

/// Encodes `body` as the next frame, adds its MAC with `seal`, and sends it.
pub(super) async fn write(
    stream: &mut (impl AsyncWrite + Unpin),
    seal: &mut Seal,
    body: &impl Serialize,
) -> Result<(), FramingError> {
    write_raw(stream, &seal.seal(body)).await
}

pub(super) async fn write_raw(
    stream: &mut (impl AsyncWrite + Unpin),
    bytes: &[u8],
) -> Result<(), FramingError> {
    match timeout(WRITE_TIMEOUT, stream.write_all(bytes)).await {
        Ok(written) => Ok(written?),
        Err(_) => Err(FramingError::Timeout(WRITE_TIMEOUT)),
    }
}
