//! A client allocates no memory for an announced reply before its bytes arrive.
//!
//! This test has a binary of its own, because it measures the memory of the whole process.

#![allow(clippy::unwrap_used, clippy::panic)] // in a test a broken expectation ends it

mod support;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use convoke_store::{Store, StoreError, TcpStore};
use support::{soon, status_field, word};

/// A limit in KiB above what the process needs for anything else, such as the stack of a thread.
const MOST_KIB: u64 = 150 << 10;

#[test]
fn incomplete_large_reply_times_out_without_allocating_memory() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // The server performs the handshake, announces 200 MiB and sends 3 bytes.
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
    // The deadline is long enough for the bytes to arrive on a busy machine. Later bytes would be taken
    // for the answer to the cancellation.
    let result = store.get(b"k", Instant::now() + Duration::from_secs(1));
    assert!(matches!(result, Err(StoreError::Timeout { .. })), "{result:?}");
    let grown = status_field(std::process::id(), "VmSize").saturating_sub(before);
    assert!(grown < MOST_KIB, "{grown} KiB");
}
