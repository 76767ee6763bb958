//! Probes a port of another node.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::{ANSWER, CHUNK, ID, REQUEST, now_ms};

/// Shortest timeout of a socket.
const LEAST: Duration = Duration::from_millis(1);

/// The answer of a node.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Answer {
    /// Milliseconds by which the node's clock is ahead of this host's.
    pub(in super::super) ahead_ms: i64,
    /// Time that the bytes took in both directions.
    pub(in super::super) took: Duration,
}

/// Why a node was not reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum ProbeError {
    NotReached(String),
    OtherAnswered,
    /// The node answered, but only `arrived` bytes of both directions arrived.
    Stalled {
        arrived: usize,
    },
}

/// Connects to a node, and sends `bytes` there and back.
pub(in super::super) fn probe(
    address: SocketAddr,
    id: &[u8; ID],
    bytes: u32,
    deadline: Instant,
) -> Result<Answer, ProbeError> {
    let start = Instant::now();
    let mut stream =
        TcpStream::connect_timeout(&address, left(deadline)).map_err(|error| not_reached(&error, start))?;
    let mut request = [0; REQUEST];
    request[..ID].copy_from_slice(id);
    request[ID..].copy_from_slice(&bytes.to_be_bytes());
    let other = |_| ProbeError::OtherAnswered;
    stream.set_nodelay(true).map_err(other)?;
    stream.set_read_timeout(Some(left(deadline))).map_err(other)?;
    let sent_ms = now_ms();
    stream.write_all(&request).map_err(other)?;
    let mut answer = [0; ANSWER];
    stream.read_exact(&mut answer).map_err(other)?;
    let received_ms = now_ms();
    if answer[..ID] != *id {
        return Err(ProbeError::OtherAnswered);
    }
    let time = i64::from_be_bytes(answer[ID..].try_into().expect("an answer ends with eight bytes"));
    let ahead_ms = time.saturating_sub(sent_ms.midpoint(received_ms));
    let begun = Instant::now();
    let mut arrived = 0;
    exchange(&mut stream, bytes as usize, deadline, &mut arrived)
        .map_err(|_| ProbeError::Stalled { arrived })?;
    Ok(Answer { ahead_ms, took: begun.elapsed() })
}

/// Sends and receives the bytes. `arrived` counts them.
fn exchange(stream: &mut TcpStream, bytes: usize, deadline: Instant, arrived: &mut usize) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK];
    let mut sent = 0;
    while sent < bytes {
        stream.set_write_timeout(Some(left(deadline)))?;
        let part = (bytes - sent).min(CHUNK);
        sent += stream.write(&chunk[..part])?;
        check(deadline)?;
    }
    let mut received = 0;
    while received < bytes {
        stream.set_read_timeout(Some(left(deadline)))?;
        let part = (bytes - received).min(CHUNK);
        let count = stream.read(&mut chunk[..part])?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        received += count;
        // The other node sends when it has received all.
        *arrived = bytes + received;
        check(deadline)?;
    }
    Ok(())
}

fn check(deadline: Instant) -> io::Result<()> {
    if Instant::now() >= deadline { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(LEAST)
}

fn not_reached(error: &io::Error, start: Instant) -> ProbeError {
    let text = match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
            format!("no answer in {:.1} s", start.elapsed().as_secs_f64())
        }
        io::ErrorKind::ConnectionRefused => "connection refused".to_owned(),
        io::ErrorKind::HostUnreachable => "no route to the host, or nobody answers for it".to_owned(),
        io::ErrorKind::NetworkUnreachable => "no route to the network".to_owned(),
        _ => error.to_string(),
    };
    ProbeError::NotReached(text)
}
