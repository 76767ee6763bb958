//! A client of a TCPStore server. The server may be convoke's or torch's.

mod connect;
mod connection;
mod last_will;
mod pool;

use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use crate::call::Call;
use crate::error::StoreError;
use crate::interrupt::{self, Interrupted};
use crate::keys::{check_value, not_a_number, printable, printable_or, stored_key, stored_keys, user_key};
use crate::state::leading_number;
use crate::store::Store;
use crate::wire::encode::{blobs, counted, key_and_number};
use crate::wire::{Kind, MAX_REPLY_BYTES, encode};
use connect::{Address, AttemptError, random_u32};
use connection::{Connection, ExchangeError};
pub use last_will::{KeyWatch, LastWill};
use pool::Pool;

/// The key under which torch counts workers. It is the only key without a leading slash.
const WORKERS_KEY: &[u8] = b"init/";
/// Interval at which [`TcpStore::wait_for_workers`] reads the count of workers; torch uses the same
/// interval.
const WORKERS_POLL: Duration = Duration::from_millis(10);
/// Most keys of a timed-out wait for which the client asks the server whether they exist.
const MAX_CHECKED_KEYS: usize = 64;

/// A client of a TCPStore server; threads share it behind a reference.
///
/// Concurrent calls use separate connections, at most 32, so a thread in a long wait blocks no other
/// thread. An operation that writes returns when the server has carried it out. An operation ends by
/// its deadline; a wait that times out ends at most 0.1 s later. If a connection fails, its operation
/// returns [`StoreError::Lost`] and the next operation opens a new connection.
pub struct TcpStore {
    pool: Pool,
}

impl TcpStore {
    /// Connects to `host:port` (`[address]:port` for IPv6).
    ///
    /// Tries all addresses of the host, and repeats that with growing delays until `deadline`.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] with the number of attempts and the error of the last one;
    /// [`StoreError::Invalid`] if `address` does not have this form.
    pub fn connect(address: &str, deadline: Instant) -> Result<TcpStore, StoreError> {
        let address = Address::parse(address)?;
        let first = address.connect(deadline)?;
        Ok(TcpStore { pool: Pool::new(address, first) })
    }

    /// Connects as [`connect`](TcpStore::connect) does, but tries each address of the host once.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] with the error of the last address; [`StoreError::Invalid`] if
    /// `address` does not have the form of [`connect`](TcpStore::connect).
    pub fn connect_once(address: &str, deadline: Instant) -> Result<TcpStore, StoreError> {
        let address = Address::parse(address)?;
        let started = Instant::now();
        let first = address.connect_once(deadline).map_err(|error| match error {
            AttemptError::Interrupted => address.interrupted(started),
            AttemptError::Failed(last) => StoreError::Unreachable {
                store: address.to_string(),
                after: started.elapsed(),
                attempts: 1,
                last,
            },
        })?;
        Ok(TcpStore { pool: Pool::new(address, first) })
    }

    /// Adds this process to the store's count of workers and returns the new count.
    ///
    /// A torch client that was given a world size adds itself to the count when it connects.
    ///
    /// # Errors
    /// Only the errors that every operation may return, see [`Store`].
    pub fn announce_worker(&self, deadline: Instant) -> Result<i64, StoreError> {
        let request = |out: &mut _| key_and_number(out, Kind::Add, WORKERS_KEY, 1);
        self.ask(Call::new("add", &[WORKERS_KEY], deadline), request, Connection::read_number)
    }

    /// Waits until `count` workers have called [`announce_worker`](TcpStore::announce_worker).
    ///
    /// In torch, the process that serves the store waits in this way. Costs two round trips every 10
    /// ms.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] with the number of workers that have called it; [`StoreError::Invalid`]
    /// if the store's count is not a number.
    pub fn wait_for_workers(&self, count: usize, deadline: Instant) -> Result<(), StoreError> {
        let call = Call::new("wait_for_workers", &[WORKERS_KEY], deadline);
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        let awaited = |arrived| format!("init/ ({arrived} of {count} workers came)");
        let late = |arrived| call.timeout(self.name(), vec![awaited(arrived)]);
        let mut last = None;
        loop {
            let answer = self.exchange(call, |connection| get_if_present(connection, WORKERS_KEY));
            let arrived = match (answer, last) {
                // The deadline has passed while the store was asked again.
                (Err(StoreError::Timeout { .. }), Some(last)) => return Err(late(last)),
                (Err(error), _) => return Err(error),
                (Ok(None), _) => 0,
                (Ok(Some(text)), _) => leading_number(&text).ok_or_else(|| not_a_number(WORKERS_KEY))?,
            };
            if arrived >= count {
                return Ok(());
            }
            if Instant::now() + WORKERS_POLL >= deadline {
                return Err(late(arrived));
            }
            last = Some(arrived);
            interrupt::sleep(WORKERS_POLL)
                .map_err(|Interrupted| call.interrupted(self.name(), vec![awaited(arrived)]))?;
        }
    }

    /// Runs `work`, which sends a request and reads its reply, on a connection that no other thread
    /// uses at that time. If `work` fails, the connection is dropped.
    fn exchange<R>(
        &self,
        call: Call<'_>,
        work: impl FnOnce(&mut Connection) -> Result<R, ExchangeError>,
    ) -> Result<R, StoreError> {
        let keys = || printable(call.keys.iter().copied());
        let mut connection = self.pool.acquire(call)?;
        connection.deadline = call.deadline;
        match work(&mut connection) {
            Ok(result) => {
                self.pool.release(connection);
                Ok(result)
            }
            Err(error) => {
                drop(connection);
                self.pool.discard();
                Err(error.of_call(call, self.name(), keys()))
            }
        }
    }

    /// Waits for `keys`, then runs `work` on the same connection. If `work` returns `None`, another
    /// client has already removed the awaited item, and the wait starts again.
    fn wait_then<R>(
        &self,
        call: Call<'_>,
        mut work: impl FnMut(&mut Connection, &[Vec<u8>]) -> Result<Option<R>, ExchangeError>,
    ) -> Result<R, StoreError> {
        let stored_keys = stored_keys(call.keys)?;
        let result = self.exchange(call, |connection| {
            loop {
                connection.ask(|out| key_list(out, Kind::Wait, &stored_keys))?;
                let checked: Vec<&[u8]> =
                    stored_keys.iter().take(MAX_CHECKED_KEYS).map(Vec::as_slice).collect();
                if let Some(present) = connection.finish_wait(&checked)? {
                    return Ok(Err(present));
                }
                if let Some(result) = work(connection, &stored_keys)? {
                    return Ok(Ok(result));
                }
            }
        })?;
        result.map_err(|present| {
            let keys = call.keys.iter().zip(present);
            let missing = keys.filter(|(_, present)| !present).map(|(key, _)| *key);
            call.timeout(self.name(), printable_or(missing, call.keys))
        })
    }

    /// Sends one request, and reads its reply by `reply`.
    fn ask<R>(
        &self,
        call: Call<'_>,
        request: impl FnOnce(&mut Vec<u8>),
        reply: impl FnOnce(&mut Connection) -> Result<R, ExchangeError>,
    ) -> Result<R, StoreError> {
        self.exchange(call, |connection| {
            connection.ask(request)?;
            reply(connection)
        })
    }

    /// Sends one request that has no reply, and waits until the server has carried it out.
    fn write(&self, call: Call<'_>, request: impl FnOnce(&mut Vec<u8>)) -> Result<(), StoreError> {
        self.exchange(call, |connection| {
            request(connection.request());
            connection.send_and_confirm(random_u32())
        })
    }

    /// Sends a request whose reply is one number that cannot be negative.
    fn count(&self, call: Call<'_>, request: impl FnOnce(&mut Vec<u8>)) -> Result<u64, StoreError> {
        self.ask(call, request, |connection| connection.read_count(usize::MAX)).map(|count| count as u64)
    }

    /// Replaces [`StoreError::Lost`] in `outcome` by the error for which the server closed the
    /// connection, if that is known.
    ///
    /// A server closes the connection of a client that adds to a value that is not a number. So after
    /// a loss, this reads the value of the call's only key on another connection.
    fn diagnose_loss<R>(&self, outcome: Result<R, StoreError>, call: Call<'_>) -> Result<R, StoreError> {
        let Err(StoreError::Lost { .. }) = &outcome else { return outcome };
        let stored = stored_key(call.keys[0])?;
        match self.exchange(call, |connection| get_if_present(connection, &stored)) {
            Ok(Some(text)) if leading_number(&text).is_none() => Err(not_a_number(call.keys[0])),
            // The store has ended, or the value did not cause the loss of the connection.
            Ok(_) | Err(_) => outcome,
        }
    }

    fn name(&self) -> String {
        self.pool.address.to_string()
    }
}

/// Appends a request of a count and as many keys.
fn key_list(out: &mut Vec<u8>, kind: Kind, stored_keys: &[Vec<u8>]) {
    counted(out, kind, stored_keys.len(), stored_keys.iter().map(Vec::as_slice));
}

fn check(connection: &mut Connection, key: &[u8]) -> Result<bool, ExchangeError> {
    connection.ask(|out| counted(out, Kind::Check, 1, [key].into_iter()))?;
    connection.read_check()
}

/// Returns the value of `key`, or `None` if the key does not exist.
///
/// Some servers answer the GET of an absent key with an empty value, others close the connection.
/// So a CHECK goes first, and a second CHECK follows an empty value.
fn get_if_present(connection: &mut Connection, key: &[u8]) -> Result<Option<Vec<u8>>, ExchangeError> {
    if !check(connection, key)? {
        return Ok(None);
    }
    connection.ask(|out| blobs(out, Kind::Get, &[key]))?;
    let value = connection.read_blob()?;
    let exists = !value.is_empty() || check(connection, key)?;
    Ok(exists.then_some(value))
}

/// Removes and returns the first item of a queue; `None` if the queue is empty.
fn pop_if_present(connection: &mut Connection, key: &[u8]) -> Result<Option<Vec<u8>>, ExchangeError> {
    connection.ask(|out| blobs(out, Kind::QueuePop, &[key]))?;
    match connection.read_count(usize::MAX)? {
        0 => Ok(None),
        _ => connection.read_blob().map(Some),
    }
}

impl Store for TcpStore {
    fn set(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        check_value(value)?;
        let stored = stored_key(key)?;
        self.write(Call::new("set", &[key], deadline), |out| blobs(out, Kind::Set, &[&stored, value]))
    }

    fn get(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError> {
        self.wait_then(Call::new("get", &[key], deadline), |connection, stored_keys| {
            connection.ask(|out| blobs(out, Kind::Get, &[&stored_keys[0]]))?;
            connection.read_blob().map(Some)
        })
    }

    fn try_get(&self, key: &[u8], deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        let stored = stored_key(key)?;
        self.exchange(Call::new("get", &[key], deadline), |connection| get_if_present(connection, &stored))
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
        let stored = stored_key(key)?;
        let request = |out: &mut _| blobs(out, Kind::CompareSet, &[&stored, expected, desired]);
        self.ask(Call::new("compare_set", &[key], deadline), request, Connection::read_blob)
    }

    fn add(&self, key: &[u8], delta: i64, deadline: Instant) -> Result<i64, StoreError> {
        let (stored, keys) = (stored_key(key)?, [key]);
        let call = Call::new("add", &keys, deadline);
        let request = |out: &mut _| key_and_number(out, Kind::Add, &stored, delta);
        self.diagnose_loss(self.ask(call, request, Connection::read_number), call)
    }

    fn append(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        check_value(value)?;
        let stored = stored_key(key)?;
        self.write(Call::new("append", &[key], deadline), |out| blobs(out, Kind::Append, &[&stored, value]))
    }

    fn check(&self, keys: &[&[u8]], deadline: Instant) -> Result<bool, StoreError> {
        let stored_keys = stored_keys(keys)?;
        let request = |out: &mut _| key_list(out, Kind::Check, &stored_keys);
        self.ask(Call::new("check", keys, deadline), request, Connection::read_check)
    }

    fn wait(&self, keys: &[&[u8]], deadline: Instant) -> Result<(), StoreError> {
        self.wait_then(Call::new("wait", keys, deadline), |_, _| Ok(Some(())))
    }

    fn multi_get(&self, keys: &[&[u8]], deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        self.wait_then(Call::new("multi_get", keys, deadline), |connection, stored_keys| {
            connection.ask(|out| key_list(out, Kind::MultiGet, stored_keys))?;
            connection.read_blobs(stored_keys.len()).map(Some)
        })
    }

    fn multi_set(&self, pairs: &[(&[u8], &[u8])], deadline: Instant) -> Result<(), StoreError> {
        pairs.iter().try_for_each(|(_, value)| check_value(value))?;
        let keys: Vec<&[u8]> = pairs.iter().map(|(key, _)| *key).collect();
        let stored_keys = stored_keys(&keys)?;
        self.write(Call::new("multi_set", &keys, deadline), |out| {
            let fields =
                stored_keys.iter().zip(pairs).flat_map(|(stored, (_, value))| [stored.as_slice(), value]);
            counted(out, Kind::MultiSet, stored_keys.len(), fields);
        })
    }

    fn delete(&self, key: &[u8], deadline: Instant) -> Result<bool, StoreError> {
        let stored = stored_key(key)?;
        let request = |out: &mut _| blobs(out, Kind::Delete, &[&stored]);
        Ok(self.count(Call::new("delete", &[key], deadline), request)? > 0)
    }

    fn num_keys(&self, deadline: Instant) -> Result<u64, StoreError> {
        self.count(Call::new("num_keys", &[], deadline), |out| encode::bare(out, Kind::NumKeys))
    }

    fn list_keys(&self, deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        let request = |out: &mut _| encode::bare(out, Kind::ListKeys);
        let stored_keys = self.ask(Call::new("list_keys", &[], deadline), request, |connection| {
            let count = connection.read_count(MAX_REPLY_BYTES / 8)?;
            connection.read_blobs(count)
        })?;
        Ok(stored_keys.iter().filter_map(|stored| user_key(stored)).collect())
    }

    fn queue_push(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        check_value(value)?;
        let stored = stored_key(key)?;
        let request = |out: &mut _| blobs(out, Kind::QueuePush, &[&stored, value]);
        self.write(Call::new("queue_push", &[key], deadline), request)
    }

    fn queue_pop(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError> {
        self.wait_then(Call::new("queue_pop", &[key], deadline), |connection, stored_keys| {
            let item = pop_if_present(connection, &stored_keys[0])?;
            if item.is_none() {
                // If a key has the name of the queue, the next wait ends at once; the pause avoids
                // a busy loop.
                thread::sleep(Duration::from_millis(1));
            }
            Ok(item)
        })
    }

    fn try_queue_pop(&self, key: &[u8], deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        let stored = stored_key(key)?;
        let pop = |connection: &mut Connection| pop_if_present(connection, &stored);
        self.exchange(Call::new("queue_pop", &[key], deadline), pop)
    }

    fn queue_len(&self, key: &[u8], deadline: Instant) -> Result<u64, StoreError> {
        let stored = stored_key(key)?;
        self.count(Call::new("queue_len", &[key], deadline), |out| blobs(out, Kind::QueueLen, &[&stored]))
    }

    fn barrier(&self, key: &[u8], world_size: usize, deadline: Instant) -> Result<(), StoreError> {
        let (stored, keys) = (stored_key(key)?, [key]);
        let call = Call::new("barrier", &keys, deadline);
        let world_size = i64::try_from(world_size).unwrap_or(i64::MAX);
        let request = |out: &mut _| key_and_number(out, Kind::Barrier, &stored, world_size);
        let waited = self.ask(call, request, |connection| connection.finish_wait(&[]));
        match self.diagnose_loss(waited, call)? {
            None => Ok(()),
            Some(_) => Err(call.timeout(self.name(), printable(keys))),
        }
    }
}

impl fmt::Debug for TcpStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpStore").field("address", &self.pool.address.to_string()).finish_non_exhaustive()
    }
}
