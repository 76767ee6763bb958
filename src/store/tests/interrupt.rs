//! A program that is interrupted while it waits for a store. The check belongs to the process, so these tests
//! have a program of their own.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::cell::Cell;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use convoke_store::{FileStore, MemoryStore, Store, StoreError, StoreServer, TcpStore, interrupt};

/// Longer than any test may take.
const LONG: Duration = Duration::from_secs(600);

thread_local! {
    /// The number of checks of this thread that still say no. The next check says yes.
    static UNTIL_INTERRUPTED: Cell<u32> = const { Cell::new(u32::MAX) };
}

fn check() -> bool {
    UNTIL_INTERRUPTED.with(|left| left.replace(left.get().saturating_sub(1)) == 0)
}

/// Calls `wait`, which is interrupted after three checks; returns its error.
fn interruption<T>(wait: impl FnOnce(Instant) -> Result<T, StoreError>) -> StoreError {
    interrupt::set_interrupt_check(check);
    UNTIL_INTERRUPTED.set(3);
    let error = wait(Instant::now() + LONG).err().unwrap();
    UNTIL_INTERRUPTED.set(u32::MAX);
    assert!(matches!(error, StoreError::Interrupted { .. }), "{error}");
    assert!(error.to_string().contains("interrupted by a signal, as by Ctrl-C"), "{error}");
    error
}

fn assert_waits_end_and_store_remains(store: &dyn Store, name: &str) {
    let soon = || Instant::now() + Duration::from_secs(20);
    store.set(b"there", b"1", soon()).unwrap();
    let error = interruption(|deadline| store.get(b"absent", deadline));
    assert!(error.to_string().contains(name), "{error}");
    assert!(error.to_string().ends_with("waiting for absent"), "{error}");
    interruption(|deadline| store.wait(&[b"there", b"absent"], deadline));
    interruption(|deadline| store.multi_get(&[b"there", b"absent"], deadline));
    assert_eq!(store.get(b"there", soon()).unwrap(), b"1");
}

#[test]
fn waits_for_a_key_at_a_server_end() {
    let server = StoreServer::bind(&[([127, 0, 0, 1], 0).into()]).unwrap();
    let address = server.addresses()[0].to_string();
    let store = TcpStore::connect(&address, Instant::now() + LONG).unwrap();
    assert_waits_end_and_store_remains(&store, &address);
    interruption(|deadline| store.queue_pop(b"queue", deadline));
    interruption(|deadline| store.wait_for_workers(2, deadline));
    // In the process of the server.
    assert_waits_end_and_store_remains(&*server.store(), "store at");
}

#[test]
fn waits_for_a_key_in_memory_end() {
    let store = MemoryStore::new();
    assert_waits_end_and_store_remains(&store, "memory");
    interruption(|deadline| store.queue_pop(b"queue", deadline));
}

#[test]
fn waits_for_a_key_or_the_lock_of_a_file_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = FileStore::open(&path, None, Instant::now() + LONG).unwrap();
    assert_waits_end_and_store_remains(&store, "store");
    let other = std::fs::File::open(&path).unwrap();
    other.lock().unwrap();
    let error = interruption(|deadline| store.set(b"key", b"1", deadline));
    assert!(error.to_string().ends_with("waiting for the file's lock"), "{error}");
}

#[test]
fn wait_for_a_server_that_does_not_start_or_answer_ends() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let error = interruption(|deadline| TcpStore::connect(&address, deadline));
    assert!(error.to_string().starts_with(&format!("store at {address}: connect was")), "{error}");
    interruption(|deadline| TcpStore::connect_once(&address, deadline));
    drop(silent);
    interruption(|deadline| TcpStore::connect(&address, deadline));
}
