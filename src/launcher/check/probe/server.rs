//! Answers the other nodes' probes, in threads that end with this process.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use super::{ANSWER, CHUNK, ID, MAX_BYTES, REQUEST, now_ms};

/// Number of TCP ports at which a node answers.
const PORTS: usize = 3;
/// Most connections at a time, and the longest time without progress of one.
const MAX_CONNECTIONS: usize = 512;
const IDLE: Duration = Duration::from_secs(5);

/// The ports at which this node answers.
#[derive(Debug)]
pub(in super::super) struct ProbePorts {
    pub(in super::super) tcp: Vec<u16>,
    pub(in super::super) udp: u16,
}

/// Starts to answer probes at ports that the kernel chooses.
///
/// # Errors
/// There is no free port, or no thread.
pub(in super::super) fn answer_probes(id: [u8; ID]) -> io::Result<ProbePorts> {
    let any = [SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)), SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))];
    let connections = Arc::new(AtomicUsize::new(0));
    let mut tcp = Vec::new();
    for _ in 0..PORTS {
        let listener = TcpListener::bind(&any[..])?;
        tcp.push(listener.local_addr()?.port());
        let connections = Arc::clone(&connections);
        let accept = move || {
            for stream in listener.incoming().flatten() {
                if connections.fetch_add(1, Ordering::Relaxed) < MAX_CONNECTIONS {
                    let connections = Arc::clone(&connections);
                    let answer = move || {
                        // A peer that breaks off sees so at its end.
                        let _ = answer(stream, id);
                        connections.fetch_sub(1, Ordering::Relaxed);
                    };
                    let _ = thread::Builder::new().name("convoke-answer".into()).spawn(answer);
                } else {
                    connections.fetch_sub(1, Ordering::Relaxed);
                }
            }
        };
        thread::Builder::new().name("convoke-probe".into()).spawn(accept)?;
    }
    let socket = UdpSocket::bind(&any[..])?;
    let udp = socket.local_addr()?.port();
    thread::Builder::new().name("convoke-datagram".into()).spawn(move || answer_datagrams(&socket, id))?;
    Ok(ProbePorts { tcp, udp })
}

fn answer(mut stream: TcpStream, id: [u8; ID]) -> io::Result<()> {
    stream.set_read_timeout(Some(IDLE))?;
    stream.set_write_timeout(Some(IDLE))?;
    stream.set_nodelay(true)?;
    let mut request = [0; REQUEST];
    stream.read_exact(&mut request)?;
    let mut answer = [0; ANSWER];
    answer[..ID].copy_from_slice(&id);
    answer[ID..].copy_from_slice(&now_ms().to_be_bytes());
    stream.write_all(&answer)?;
    let (wanted, length) = request.split_at(ID);
    let length = u32::from_be_bytes(length.try_into().expect("a request ends with four bytes"));
    if wanted != id || length > MAX_BYTES {
        return Ok(());
    }
    let length = u64::from(length);
    io::copy(&mut Read::by_ref(&mut stream).take(length), &mut io::sink())?;
    let chunk = [0; CHUNK];
    let mut left = usize::try_from(length).unwrap_or(usize::MAX);
    while left > 0 {
        let part = left.min(CHUNK);
        stream.write_all(&chunk[..part])?;
        left -= part;
    }
    Ok(())
}

/// Answers each datagram that begins with the id of this node, with the id alone.
fn answer_datagrams(socket: &UdpSocket, id: [u8; ID]) {
    let mut packet = vec![0; CHUNK];
    loop {
        match socket.recv_from(&mut packet) {
            Ok((length, from)) if length >= ID + 4 && packet[..ID] == id => {
                // The answer has the number of the attempt. A lost one is asked for again.
                let _ = socket.send_to(&packet[..ID + 4], from);
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Errors of an answer that was not delivered come here, too.
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
}
