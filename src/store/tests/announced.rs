//! What a server announces takes no memory before it comes. In a process of its own, whose memory is looked at.

#![allow(clippy::unwrap_used, clippy::panic)] // in a test a broken expectation ends it

mod support;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use convoke_store::{Store, StoreError, TcpStore};
use support::{soon, status_field, word};

/// More than the process takes for anything else, such as the memory of a thread.
const MOST_KIB: u64 = 150 << 10;

#[test]
fn a_reply_that_stops_in_the_middle_is_a_timeout_and_takes_no_memory() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // Shakes hands, then announces 200 MiB and sends 3 bytes.
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let (mut hello, mut request) = ([0; 10], [0; 4096]);
        stream.read_exact(&mut hello).unwrap();
        stream.write_all(&hello[6..]).unwrap();
        let _ = stream.read(&mut request);
        stream.write_all(&[&[0][..], &word(200 << 20), b"abc"].concat()).unwrap();
        while stream.read(&mut request).is_ok_and(|count| count > 0) {}
    });
    let store = TcpStore::connect(&address.to_string(), soon()).unwrap();
    let before = status_field(std::process::id(), "VmSize");
    // Long enough for the bytes to come on a busy machine: later ones would be taken for the answer to a cancellation.
    let result = store.get(b"k", Instant::now() + Duration::from_secs(1));
    assert!(matches!(result, Err(StoreError::Timeout { .. })), "{result:?}");
    let grown = status_field(std::process::id(), "VmSize").saturating_sub(before);
    assert!(grown < MOST_KIB, "{grown} KiB");
}
