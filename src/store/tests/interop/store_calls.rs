//! Carries out store operations that it reads from stdin. Tests use it to compare this store with
//! other implementations.
//!
//! Usage: `store_calls tcp HOST:PORT` or `store_calls file PATH WORKERS`. Each line of the input has an
//! operation, a timeout in milliseconds and arguments. Arguments are numbers, or bytes in hexadecimal
//! after an `x`. Each answer is a line: `ok RESULT...`, `timeout` or `error TEXT`.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // a broken expectation ends it

use std::io::BufRead;
use std::sync::Arc;
use std::time::{Duration, Instant};

use convoke_store::{FileStore, PrefixStore, Store, StoreError, TcpStore};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let soon = Instant::now() + Duration::from_secs(20);
    let mut tcp = None;
    let mut store: Arc<dyn Store> = match arguments[0].as_str() {
        "tcp" => {
            let store = Arc::new(TcpStore::connect(&arguments[1], soon).unwrap());
            tcp = Some(Arc::clone(&store));
            store
        }
        "file" => {
            Arc::new(FileStore::open(&arguments[1], Some(arguments[2].parse().unwrap()), soon).unwrap())
        }
        other => panic!("no such store: {other}"),
    };
    println!("ok");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let deadline = Instant::now() + Duration::from_millis(words[1].parse().unwrap());
        if words[0] == "prefix" {
            store = Arc::new(PrefixStore::new(bytes(words[2]), store));
            println!("ok");
            continue;
        }
        match call(&*store, tcp.as_deref(), words[0], &words[2..], deadline) {
            Ok(result) => println!("ok {}", result.join(" ")),
            Err(StoreError::Timeout { .. }) => println!("timeout"),
            Err(error) => println!("error {error}"),
        }
    }
}

fn call(
    store: &dyn Store,
    tcp: Option<&TcpStore>,
    operation: &str,
    words: &[&str],
    deadline: Instant,
) -> Result<Vec<String>, StoreError> {
    let blobs: Vec<Vec<u8>> =
        words.iter().filter(|word| word.starts_with('x')).map(|word| bytes(word)).collect();
    let blobs: Vec<&[u8]> = blobs.iter().map(Vec::as_slice).collect();
    let number = || words.last().unwrap().parse::<i64>().unwrap();
    let pairs = || blobs.chunks(2).map(|pair| (pair[0], pair[1])).collect::<Vec<_>>();
    let nothing = |()| Vec::new();
    Ok(match operation {
        "set" => store.set(blobs[0], blobs[1], deadline).map(nothing)?,
        "get" => vec![hex(&store.get(blobs[0], deadline)?)],
        "try_get" => store.try_get(blobs[0], deadline)?.iter().map(|value| hex(value)).collect(),
        "compare_set" => vec![hex(&store.compare_set(blobs[0], blobs[1], blobs[2], deadline)?)],
        "add" => vec![store.add(blobs[0], number(), deadline)?.to_string()],
        "append" => store.append(blobs[0], blobs[1], deadline).map(nothing)?,
        "check" => vec![store.check(&blobs, deadline)?.to_string()],
        "wait" => store.wait(&blobs, deadline).map(nothing)?,
        "multi_get" => store.multi_get(&blobs, deadline)?.iter().map(|value| hex(value)).collect(),
        "multi_set" => store.multi_set(&pairs(), deadline).map(nothing)?,
        "delete" => vec![store.delete(blobs[0], deadline)?.to_string()],
        "num_keys" => vec![store.num_keys(deadline)?.to_string()],
        "list_keys" => store.list_keys(deadline)?.iter().map(|key| hex(key)).collect(),
        "queue_push" => store.queue_push(blobs[0], blobs[1], deadline).map(nothing)?,
        "queue_pop" => vec![hex(&store.queue_pop(blobs[0], deadline)?)],
        "try_queue_pop" => store.try_queue_pop(blobs[0], deadline)?.iter().map(|value| hex(value)).collect(),
        "queue_len" => vec![store.queue_len(blobs[0], deadline)?.to_string()],
        "barrier" => store.barrier(blobs[0], usize::try_from(number()).unwrap(), deadline).map(nothing)?,
        "announce_worker" => vec![tcp.unwrap().announce_worker(deadline)?.to_string()],
        "wait_for_workers" => {
            tcp.unwrap().wait_for_workers(usize::try_from(number()).unwrap(), deadline).map(nothing)?
        }
        other => panic!("no such operation: {other}"),
    })
}

fn hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from_digit(u32::from(value), 16).unwrap();
    std::iter::once('x').chain(bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)])).collect()
}

fn bytes(word: &str) -> Vec<u8> {
    let digits = word.strip_prefix('x').unwrap();
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
}
