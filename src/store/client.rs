//! A client of a TCPStore server, torch's or ours.

mod connect;
mod connection;
mod last_will;
mod pool;

use std::borrow::Cow;
use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::StoreError;
use crate::keys::{KeyStyle, check_value, not_a_number, printable};
use crate::state::leading_number;
use crate::store::Store;
use crate::wire::encode::{blobs, byte, counted, key_and_number};
use crate::wire::{Kind, MAX_REPLY_BYTES, encode};
use connect::{Address, random};
use connection::{Connection, Failure, Waited};
pub use last_will::{KeyWatch, LastWill};
use pool::Pool;

/// The key under which torch counts workers; alone among keys it has no slash.
const WORKERS_KEY: &[u8] = b"init/";
/// How often [`TcpStore::wait_for_workers`] looks; torch's interval.
const WORKERS_POLL: Duration = Duration::from_millis(10);
/// Of so many keys a timeout finds out which are missing.
const ASKED_KEYS: usize = 64;

/// A connected store; cheap to share between threads.
///
/// Calls of several threads run side by side, each on a connection of its own, up to 32; a thread
/// in a long wait holds up nobody. Writes return when the server has carried them out. A call ends
/// by its deadline, a wait that times out at most 0.1 s after it. When a connection fails, its call
/// returns [`StoreError::Lost`] and the next call opens a new one.
pub struct TcpStore {
    pool: Pool,
    keys: KeyStyle,
}

/// How to talk to a server.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct TcpOptions {
    /// How keys are spelt on the wire; by default as torch's clients do.
    pub keys: KeyStyle,
}

impl TcpOptions {
    /// Keys spelt this way.
    pub fn keys(mut self, keys: KeyStyle) -> TcpOptions {
        self.keys = keys;
        self
    }
}

impl TcpStore {
    /// Connects to `host:port` (`[address]:port` for IPv6), trying all addresses of the host and
    /// again, with growing pauses, until `deadline`.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] with the number of attempts and what the last one met;
    /// [`StoreError::Invalid`] if `address` is no address.
    pub fn connect(address: &str, deadline: Instant) -> Result<TcpStore, StoreError> {
        TcpStore::connect_with(address, TcpOptions::default(), deadline)
    }

    /// As [`connect`](TcpStore::connect), with options.
    ///
    /// # Errors
    /// As [`connect`](TcpStore::connect).
    pub fn connect_with(
        address: &str,
        options: TcpOptions,
        deadline: Instant,
    ) -> Result<TcpStore, StoreError> {
        let address = Address::parse(address)?;
        let first = address.reach(deadline)?;
        Ok(TcpStore { pool: Pool::new(address, first), keys: options.keys })
    }

    /// Counts this process as a worker, as torch's clients do that were given a world size; returns
    /// how many have come so far.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn announce_worker(&self, deadline: Instant) -> Result<i64, StoreError> {
        self.exchange("add", &[WORKERS_KEY], deadline, |connection| {
            key_and_number(connection.request(), Kind::Add, WORKERS_KEY, 1);
            connection.send(deadline)?;
            connection.read_number(deadline)
        })
    }

    /// Waits until `count` workers have announced themselves, as the process that serves torch's
    /// store does.
    ///
    /// # Errors
    /// [`StoreError::Timeout`].
    pub fn wait_for_workers(&self, count: usize, deadline: Instant) -> Result<(), StoreError> {
        let started = Instant::now();
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        loop {
            let came = self.exchange("wait_for_workers", &[WORKERS_KEY], deadline, |connection| {
                present(connection, WORKERS_KEY, deadline)
            })?;
            let came = came.as_deref().and_then(leading_number).unwrap_or(0);
            if came >= count {
                return Ok(());
            }
            if Instant::now() + WORKERS_POLL >= deadline {
                let key = format!("init/ ({came} of {count} workers came)");
                return Err(self.timeout("wait_for_workers", vec![key], started));
            }
            thread::sleep(WORKERS_POLL);
        }
    }

    /// Runs one exchange on a connection of its own, which is dropped if the exchange fails.
    fn exchange<R>(
        &self,
        operation: &'static str,
        keys: &[&[u8]],
        deadline: Instant,
        work: impl FnOnce(&mut Connection) -> Result<R, Failure>,
    ) -> Result<R, StoreError> {
        let started = Instant::now();
        let late = || self.timeout(operation, printable(keys.iter().copied()), started);
        let mut connection = self.pool.take(deadline)?.ok_or_else(late)?;
        let store = || self.pool.address.to_string();
        match work(&mut connection) {
            Ok(result) => {
                if connection.is_in_step() {
                    self.pool.put_back(connection);
                } else {
                    self.pool.forget();
                }
                Ok(result)
            }
            Err(failure) => {
                drop(connection);
                self.pool.forget();
                Err(match failure {
                    Failure::Late => late(),
                    Failure::Lost(source) => StoreError::Lost { store: store(), operation, source },
                    Failure::Protocol(what) => {
                        StoreError::Protocol { store: store(), what: format!("{operation}: it {what}") }
                    }
                })
            }
        }
    }

    /// Waits for `keys` and then, on the same connection, does `work`; `None` from it means that
    /// somebody was faster, and waits again.
    fn wait_then<R>(
        &self,
        operation: &'static str,
        keys: &[&[u8]],
        deadline: Instant,
        mut work: impl FnMut(&mut Connection, &[Cow<'_, [u8]>]) -> Result<Option<R>, Failure>,
    ) -> Result<R, StoreError> {
        let started = Instant::now();
        let names = self.keys.outer_all(keys)?;
        let result = self.exchange(operation, keys, deadline, |connection| {
            loop {
                counted(connection.request(), Kind::Wait, names.len(), names.iter().map(|name| &**name));
                connection.send(deadline)?;
                let asked: Vec<&[u8]> = names.iter().take(ASKED_KEYS).map(|name| &**name).collect();
                if let Waited::TimedOut { there } = connection.finish_wait(&asked, deadline)? {
                    return Ok(Err(there));
                }
                if let Some(result) = work(connection, &names)? {
                    return Ok(Ok(result));
                }
            }
        })?;
        result.map_err(|there| {
            let missing = keys.iter().zip(there).filter(|(_, there)| !there).map(|(key, _)| *key);
            let missing = printable(missing);
            let all = || printable(keys.iter().copied());
            self.timeout(operation, if missing.is_empty() { all() } else { missing }, started)
        })
    }

    /// Sends one request that has no reply, and makes sure that it was carried out.
    fn write(
        &self,
        operation: &'static str,
        keys: &[&[u8]],
        deadline: Instant,
        request: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), StoreError> {
        self.exchange(operation, keys, deadline, |connection| {
            request(connection.request());
            connection.send_and_confirm(random(), deadline)
        })
    }

    /// Sends a request whose reply is one number.
    fn number(
        &self,
        operation: &'static str,
        keys: &[&[u8]],
        deadline: Instant,
        request: impl FnOnce(&mut Vec<u8>),
    ) -> Result<i64, StoreError> {
        self.exchange(operation, keys, deadline, |connection| {
            request(connection.request());
            connection.send(deadline)?;
            connection.read_number(deadline)
        })
    }

    /// A server hangs up on whoever adds to a value that is no number. So after a loss its value is looked at.
    fn or_not_a_number<R>(
        &self,
        outcome: Result<R, StoreError>,
        operation: &'static str,
        key: &[u8],
        deadline: Instant,
    ) -> Result<R, StoreError> {
        let Err(StoreError::Lost { .. }) = &outcome else { return outcome };
        let name = self.keys.outer(key)?;
        let value =
            self.exchange(operation, &[key], deadline, |connection| present(connection, &name, deadline));
        match value {
            Ok(Some(text)) if leading_number(&text).is_none() => Err(not_a_number(key)),
            // The store is gone, or the value was not the reason.
            Ok(_) | Err(_) => outcome,
        }
    }

    fn timeout(&self, operation: &'static str, keys: Vec<String>, started: Instant) -> StoreError {
        StoreError::Timeout {
            store: self.pool.address.to_string(),
            operation,
            after: started.elapsed(),
            keys,
        }
    }
}

fn read_check(connection: &mut Connection, deadline: Instant) -> Result<bool, Failure> {
    match connection.read_byte(deadline)? {
        byte::READY => Ok(true),
        byte::MISSING => Ok(false),
        other => Err(Failure::Protocol(format!("answered a check with {other}"))),
    }
}

fn check(connection: &mut Connection, key: &[u8], deadline: Instant) -> Result<bool, Failure> {
    counted(connection.request(), Kind::Check, 1, [key].into_iter());
    connection.send(deadline)?;
    read_check(connection, deadline)
}

/// The value of `key` if it is there now. A GET of an absent key is answered like an empty value by
/// some servers and by hanging up by others, so CHECK goes first, and decides about empty values.
fn present(connection: &mut Connection, key: &[u8], deadline: Instant) -> Result<Option<Vec<u8>>, Failure> {
    if !check(connection, key, deadline)? {
        return Ok(None);
    }
    blobs(connection.request(), Kind::Get, &[key]);
    connection.send(deadline)?;
    let value = connection.read_blob(deadline)?;
    let there = !value.is_empty() || check(connection, key, deadline)?;
    Ok(there.then_some(value))
}

/// Takes the first item of a queue if there is one.
fn pop(connection: &mut Connection, key: &[u8], deadline: Instant) -> Result<Option<Vec<u8>>, Failure> {
    blobs(connection.request(), Kind::QueuePop, &[key]);
    connection.send(deadline)?;
    match connection.read_number(deadline)? {
        ..=0 => Ok(None),
        _ => connection.read_blob(deadline).map(Some),
    }
}

impl Store for TcpStore {
    fn set(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        check_value(value)?;
        let name = self.keys.outer(key)?;
        self.write("set", &[key], deadline, |out| blobs(out, Kind::Set, &[&name, value]))
    }

    fn get(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError> {
        self.wait_then("get", &[key], deadline, |connection, names| {
            blobs(connection.request(), Kind::Get, &[&names[0]]);
            connection.send(deadline)?;
            connection.read_blob(deadline).map(Some)
        })
    }

    fn try_get(&self, key: &[u8], deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        let name = self.keys.outer(key)?;
        self.exchange("get", &[key], deadline, |connection| present(connection, &name, deadline))
    }

    fn compare_set(
        &self,
        key: &[u8],
        expected: &[u8],
        desired: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, StoreError> {
        check_value(expected)?;
        check_value(desired)?;
        let name = self.keys.outer(key)?;
        self.exchange("compare_set", &[key], deadline, |connection| {
            blobs(connection.request(), Kind::CompareSet, &[&name, expected, desired]);
            connection.send(deadline)?;
            connection.read_blob(deadline)
        })
    }

    fn add(&self, key: &[u8], delta: i64, deadline: Instant) -> Result<i64, StoreError> {
        let name = self.keys.outer(key)?;
        let sum = self.number("add", &[key], deadline, |out| key_and_number(out, Kind::Add, &name, delta));
        self.or_not_a_number(sum, "add", key, deadline)
    }

    fn append(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        check_value(value)?;
        let name = self.keys.outer(key)?;
        self.write("append", &[key], deadline, |out| blobs(out, Kind::Append, &[&name, value]))
    }

    fn check(&self, keys: &[&[u8]], deadline: Instant) -> Result<bool, StoreError> {
        let names = self.keys.outer_all(keys)?;
        self.exchange("check", keys, deadline, |connection| {
            counted(connection.request(), Kind::Check, names.len(), names.iter().map(|name| &**name));
            connection.send(deadline)?;
            read_check(connection, deadline)
        })
    }

    fn wait(&self, keys: &[&[u8]], deadline: Instant) -> Result<(), StoreError> {
        self.wait_then("wait", keys, deadline, |_, _| Ok(Some(())))
    }

    fn multi_get(&self, keys: &[&[u8]], deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        self.wait_then("multi_get", keys, deadline, |connection, names| {
            counted(connection.request(), Kind::MultiGet, names.len(), names.iter().map(|name| &**name));
            connection.send(deadline)?;
            connection.read_blobs(names.len(), deadline).map(Some)
        })
    }

    fn multi_set(&self, pairs: &[(&[u8], &[u8])], deadline: Instant) -> Result<(), StoreError> {
        pairs.iter().try_for_each(|(_, value)| check_value(value))?;
        let keys: Vec<&[u8]> = pairs.iter().map(|(key, _)| *key).collect();
        let names = self.keys.outer_all(&keys)?;
        self.write("multi_set", &keys, deadline, |out| {
            let fields = names.iter().zip(pairs).flat_map(|(name, (_, value))| [&**name, value]);
            counted(out, Kind::MultiSet, names.len(), fields);
        })
    }

    fn delete(&self, key: &[u8], deadline: Instant) -> Result<bool, StoreError> {
        let name = self.keys.outer(key)?;
        let deleted = self.number("delete", &[key], deadline, |out| blobs(out, Kind::Delete, &[&name]))?;
        Ok(deleted > 0)
    }

    fn num_keys(&self, deadline: Instant) -> Result<u64, StoreError> {
        let count = self.number("num_keys", &[], deadline, |out| encode::bare(out, Kind::NumKeys))?;
        Ok(u64::try_from(count).unwrap_or(0))
    }

    fn list_keys(&self, deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        let names = self.exchange("list_keys", &[], deadline, |connection| {
            encode::bare(connection.request(), Kind::ListKeys);
            connection.send(deadline)?;
            let count = connection.read_count(MAX_REPLY_BYTES / 8, deadline)?;
            connection.read_blobs(count, deadline)
        })?;
        Ok(names.iter().filter_map(|name| self.keys.inner(name)).map(<[u8]>::to_vec).collect())
    }

    fn queue_push(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        check_value(value)?;
        let name = self.keys.outer(key)?;
        self.write("queue_push", &[key], deadline, |out| blobs(out, Kind::QueuePush, &[&name, value]))
    }

    fn queue_pop(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError> {
        self.wait_then("queue_pop", &[key], deadline, |connection, names| {
            let item = pop(connection, &names[0], deadline)?;
            if item.is_none() {
                // Waiting again ends at once if the name is also a key: do not spin.
                thread::sleep(Duration::from_millis(1));
            }
            Ok(item)
        })
    }

    fn try_queue_pop(&self, key: &[u8], deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        let name = self.keys.outer(key)?;
        self.exchange("queue_pop", &[key], deadline, |connection| pop(connection, &name, deadline))
    }

    fn queue_len(&self, key: &[u8], deadline: Instant) -> Result<u64, StoreError> {
        let name = self.keys.outer(key)?;
        let length =
            self.number("queue_len", &[key], deadline, |out| blobs(out, Kind::QueueLen, &[&name]))?;
        Ok(u64::try_from(length).unwrap_or(0))
    }

    fn barrier(&self, key: &[u8], world_size: usize, deadline: Instant) -> Result<(), StoreError> {
        let name = self.keys.outer(key)?;
        let started = Instant::now();
        let world_size = i64::try_from(world_size).unwrap_or(i64::MAX);
        let waited = self.exchange("barrier", &[key], deadline, |connection| {
            key_and_number(connection.request(), Kind::Barrier, &name, world_size);
            connection.send(deadline)?;
            connection.finish_wait(&[], deadline)
        });
        match self.or_not_a_number(waited, "barrier", key, deadline)? {
            Waited::Ready => Ok(()),
            Waited::TimedOut { .. } => Err(self.timeout("barrier", printable([key]), started)),
        }
    }
}

impl fmt::Debug for TcpStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpStore").field("address", &self.pool.address.to_string()).finish_non_exhaustive()
    }
}
