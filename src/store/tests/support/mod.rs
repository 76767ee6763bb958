//! Helpers of the store's tests: raw connections that send arbitrary bytes, and requests for them.
#![allow(dead_code, reason = "each test file uses its part")]

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use convoke_store::{Store, StoreServer, TcpStore};
use convoke_testkit::{Thread, subprocess_test};
use socket2::{Domain, Socket, Type};

/// The handshake: VALIDATE and PING.
pub(crate) const HELLO: [u8; 10] = [0x00, 0xce, 0xf7, 0x85, 0x3c, 0x0d, 0x44, 0x44, 0x00, 0x00];
/// Reply of a server to the handshake.
pub(crate) const HELLO_REPLY: [u8; 4] = [0x44, 0x44, 0x00, 0x00];

pub(crate) const SET: u8 = 1;
pub(crate) const COMPARE_SET: u8 = 2;
pub(crate) const GET: u8 = 3;
pub(crate) const ADD: u8 = 4;
pub(crate) const CHECK: u8 = 5;
pub(crate) const WAIT: u8 = 6;
pub(crate) const DELETE: u8 = 8;
pub(crate) const APPEND: u8 = 9;
pub(crate) const MULTI_GET: u8 = 10;
pub(crate) const MULTI_SET: u8 = 11;
pub(crate) const CANCEL_WAIT: u8 = 12;
pub(crate) const PING: u8 = 13;
pub(crate) const QUEUE_PUSH: u8 = 14;
pub(crate) const BARRIER: u8 = 18;

/// Returns a deadline in 20 s, for operations that should succeed at once.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

pub(crate) fn serve() -> StoreServer {
    StoreServer::bind(&["127.0.0.1:0".parse().unwrap()]).unwrap()
}

pub(crate) fn client(server: &StoreServer) -> TcpStore {
    TcpStore::connect(&server.addresses()[0].to_string(), soon()).unwrap()
}

/// Returns the bytes of a length or count.
pub(crate) fn word(value: u64) -> Vec<u8> {
    value.to_le_bytes().to_vec()
}

pub(crate) fn blob(bytes: &[u8]) -> Vec<u8> {
    [&word(bytes.len() as u64), bytes].concat()
}

/// Returns a request that consists of blobs.
pub(crate) fn request(kind: u8, blobs: &[&[u8]]) -> Vec<u8> {
    let mut out = vec![kind];
    blobs.iter().for_each(|bytes| out.extend(blob(bytes)));
    out
}

/// Returns a request of a count and blobs.
pub(crate) fn counted(kind: u8, count: u64, blobs: &[&[u8]]) -> Vec<u8> {
    let mut out = vec![kind];
    out.extend(word(count));
    blobs.iter().for_each(|bytes| out.extend(blob(bytes)));
    out
}

/// Opens a connection without a handshake.
pub(crate) fn raw(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// Opens a connection and performs the handshake.
pub(crate) fn connected(address: SocketAddr) -> TcpStream {
    let mut stream = raw(address);
    stream.write_all(&HELLO).unwrap();
    assert_eq!(read(&mut stream, 4), HELLO_REPLY);
    stream
}

pub(crate) fn read(stream: &mut TcpStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// Reads until the peer closes the connection and returns the bytes. Panics if it does not close.
pub(crate) fn read_to_close(stream: &mut TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    let mut bytes = [0; 65536];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return all,
            Ok(count) => all.extend_from_slice(&bytes[..count]),
            // The peer closed before it had read all bytes.
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return all,
            Err(error) => panic!("not closed: {error}"),
        }
    }
}

/// Waits until the server has read everything that its clients have sent so far.
///
/// The server serves connections in the order in which they became ready. So it has read the earlier
/// bytes when it answers a later request of the client `other`.
pub(crate) fn wait_until_read(other: &TcpStore) {
    (0..2).for_each(|_| is_served(other));
}

/// Checks that the server has read what was sent, has answered nothing and keeps the connection.
pub(crate) fn stays_silent(stream: &mut TcpStream, other: &TcpStore) {
    wait_until_read(other);
    stream.set_nonblocking(true).unwrap();
    let got = stream.read(&mut [0; 1]);
    let silent = matches!(&got, Err(error) if error.kind() == ErrorKind::WouldBlock);
    assert!(silent, "expected silence: {got:?}");
    stream.set_nonblocking(false).unwrap();
}

/// Runs `call` in a thread, and `then` as soon as that thread waits in the store. `other` is a client
/// of the same store.
pub(crate) fn while_waiting<R: Send>(
    other: &TcpStore,
    call: impl FnOnce() -> R + Send,
    then: impl FnOnce(),
) -> R {
    let (sender, receiver) = channel();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            sender.send(Thread::current()).unwrap();
            call()
        });
        let thread = receiver.recv().unwrap();
        // It sleeps at most twice: for the handshake of a new connection and for its request.
        for _ in 0..3 {
            thread.wait_until_asleep();
            is_served(other);
        }
        assert!(!waiting.is_finished(), "it did not wait");
        then();
        waiting.join().unwrap()
    })
}

/// Starts this test binary again, to run one ignored test in a separate process.
pub(crate) fn another_process(test: &str, input: Stdio) -> Child {
    subprocess_test(test).stdin(input).stdout(Stdio::piped()).spawn().unwrap()
}

/// Returns the thread of the only server of this process.
pub(crate) fn server_thread() -> Thread {
    let mut threads = Thread::named("convoke-store");
    assert_eq!(threads.len(), 1, "{threads:?}");
    threads.remove(0)
}

/// Returns an address at which nobody listens. The bound socket keeps other programs from it.
pub(crate) fn unserved_address() -> (Socket, SocketAddr) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    (socket, address)
}

/// Checks that a well-behaved client is served.
pub(crate) fn is_served(other: &TcpStore) {
    let started = Instant::now();
    other.set(b"witness", b"served", soon()).unwrap();
    assert_eq!(other.get(b"witness", soon()).unwrap(), b"served");
    assert!(started.elapsed() < Duration::from_secs(5), "served, but after {:?}", started.elapsed());
}

/// Returns a field of `/proc/PID/status`, in KiB if it is a size.
pub(crate) fn status_field(pid: u32, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
