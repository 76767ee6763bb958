//! A store in this process's memory. A process with a store server also uses it to access the server's
//! keys without TCP.

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, io, mem};

use crate::call::Call;
use crate::error::StoreError;
use crate::interrupt::{self, Interrupted};
use crate::keys::{check_value, not_a_number, printable_or, stored_key, stored_keys, user_key};
use crate::shared_store::{LockedStore, SharedStore, WaitEnd, Waiter};
use crate::state::{ClientId, Refusal, State};
use crate::store::Store;

/// A store in memory for the threads of one process; clones share their keys.
///
/// It corresponds to torch's HashStore. An operation costs a lock and no system call. A waiting thread
/// sleeps on a condition variable.
#[derive(Clone)]
pub struct MemoryStore {
    shared: Arc<SharedStore>,
    name: Arc<str>,
}

impl MemoryStore {
    /// Creates an empty store.
    pub fn new() -> MemoryStore {
        Self::of(Arc::new(SharedStore::in_process()), "memory")
    }

    /// Returns a store of these shared keys, such as those of a server.
    pub(crate) fn of(shared: Arc<SharedStore>, name: &str) -> MemoryStore {
        MemoryStore { shared, name: name.into() }
    }

    fn with<R>(
        &self,
        operation: &'static str,
        work: impl FnOnce(&mut LockedStore) -> R,
    ) -> Result<R, StoreError> {
        self.shared.with(work).ok_or_else(|| self.shut_down_error(operation))
    }

    fn shut_down_error(&self, operation: &'static str) -> StoreError {
        let source = io::Error::new(io::ErrorKind::ConnectionAborted, "the server was shut down");
        StoreError::Lost { store: self.name.to_string(), operation, source }
    }

    /// Runs `attempt`, and repeats it each time `keys` exist, until it returns a result or the
    /// deadline passes.
    fn wait_until<R>(
        &self,
        call: Call<'_>,
        mut attempt: impl FnMut(&mut State, ClientId, &[Vec<u8>]) -> Option<R>,
    ) -> Result<R, StoreError> {
        let stored_keys = stored_keys(call.keys)?;
        let client = self.with(call.operation, LockedStore::new_thread)?;
        loop {
            let step = self.with(call.operation, |locked| {
                if let Some(result) = attempt(&mut locked.state, client, &stored_keys) {
                    locked.state.clear_offer(client);
                    return Ok(NextStep::Done(result));
                }
                let keys_exist = locked.state.wait(client, stored_keys.iter().map(Vec::as_slice))?;
                Ok(if keys_exist { NextStep::Poll } else { NextStep::Sleep(locked.waiter(client)) })
            })?;
            match step.map_err(|refusal: Refusal| StoreError::Invalid { what: refusal.to_string() })? {
                NextStep::Done(result) => return Ok(result),
                NextStep::Sleep(waiter) => self.sleep(call, client, &waiter)?,
                NextStep::Poll if Instant::now() >= call.deadline => {
                    return Err(self.timeout(call, call.keys));
                }
                NextStep::Poll => interrupt::sleep(POLL).map_err(|Interrupted| {
                    call.interrupted(self.name.to_string(), awaited(call, call.keys))
                })?,
            }
        }
    }

    /// Sleeps until the wait of `client` ends. At the deadline it cancels the wait and returns
    /// [`StoreError::Timeout`] with the missing keys.
    fn sleep(&self, call: Call<'_>, client: ClientId, waiter: &Waiter) -> Result<(), StoreError> {
        let mut is_interrupted = false;
        let mut end = waiter.sleep(interrupt::next_check(call.deadline));
        while end.is_none() && Instant::now() < call.deadline {
            is_interrupted = interrupt::is_interrupted();
            if is_interrupted {
                break;
            }
            end = waiter.sleep(interrupt::next_check(call.deadline));
        }
        let mut missing = Vec::new();
        if end.is_none() {
            self.with(call.operation, |locked| {
                locked.cancel_wait(client);
                // Another thread may have ended this client's wait between the deadline and the lock.
                end = waiter.outcome();
                let is_missing = |key: &&[u8]| stored_key(key).is_ok_and(|stored| !locked.state.has(&stored));
                missing = call.keys.iter().copied().filter(is_missing).collect();
            })?;
        }
        match end {
            Some(WaitEnd::Ready) => Ok(()),
            Some(WaitEnd::ShutDown) => Err(self.shut_down_error(call.operation)),
            None if is_interrupted => Err(call.interrupted(self.name.to_string(), awaited(call, &missing))),
            None => Err(self.timeout(call, &missing)),
        }
    }

    fn timeout(&self, call: Call<'_>, missing: &[&[u8]]) -> StoreError {
        call.timeout(self.name.to_string(), awaited(call, missing))
    }
}

fn awaited(call: Call<'_>, missing: &[&[u8]]) -> Vec<String> {
    printable_or(missing.iter().copied(), call.keys)
}

/// Interval of polling a queue while a key with the queue's name exists: a wait for an item would end
/// at once because of the key.
const POLL: Duration = Duration::from_millis(10);

/// The next step of a blocking operation.
enum NextStep<R> {
    Done(R),
    Sleep(Arc<Waiter>),
    Poll,
}

fn refused(key: &[u8], refusal: Refusal) -> StoreError {
    match refusal {
        Refusal::NotANumber => not_a_number(key),
        Refusal::TooLong | Refusal::TooManyWaits => StoreError::Invalid { what: refusal.to_string() },
    }
}

impl Store for MemoryStore {
    fn get(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError> {
        let get = |state: &mut State, _, stored: &[Vec<u8>]| state.get(&stored[0]).map(<[u8]>::to_vec);
        self.wait_until(Call::new("get", &[key], deadline), get)
    }

    fn try_get(&self, key: &[u8], _deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        let key = stored_key(key)?;
        self.with("get", |locked| locked.state.get(&key).map(<[u8]>::to_vec))
    }

    fn compare_set(
        &self,
        key: &[u8],
        expected: &[u8],
        desired: &[u8],
        _deadline: Instant,
    ) -> Result<Vec<u8>, StoreError> {
        check_value(expected)?;
        check_value(desired)?;
        let key = stored_key(key)?;
        self.with("compare_set", |locked| {
            locked.state.compare_set(&key, expected, desired, &mut locked.woken).to_vec()
        })
    }

    fn add(&self, key: &[u8], delta: i64, _deadline: Instant) -> Result<i64, StoreError> {
        let stored = stored_key(key)?;
        let sum = self.with("add", |locked| locked.state.add(&stored, delta, &mut locked.woken))?;
        sum.map_err(|refusal| refused(key, refusal))
    }

    fn append(&self, key: &[u8], value: &[u8], _deadline: Instant) -> Result<(), StoreError> {
        check_value(value)?;
        let stored = stored_key(key)?;
        let whole = self.with("append", |locked| locked.state.append(&stored, value, &mut locked.woken))?;
        whole.map_err(|refusal| refused(key, refusal))
    }

    fn check(&self, keys: &[&[u8]], _deadline: Instant) -> Result<bool, StoreError> {
        let keys = stored_keys(keys)?;
        self.with("check", |locked| keys.iter().all(|key| locked.state.has(key)))
    }

    fn wait(&self, keys: &[&[u8]], deadline: Instant) -> Result<(), StoreError> {
        let mut woken = false;
        self.wait_until(Call::new("wait", keys, deadline), |state, _, stored_keys| {
            // A client is woken only when all keys exist, so the wait has ended even if a key has been
            // deleted since.
            let has_ended =
                mem::replace(&mut woken, true) || stored_keys.iter().all(|stored| state.has(stored));
            has_ended.then_some(())
        })
    }

    fn multi_get(&self, keys: &[&[u8]], deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        self.wait_until(Call::new("multi_get", keys, deadline), |state, _, stored_keys| {
            stored_keys.iter().map(|stored| state.get(stored).map(<[u8]>::to_vec)).collect()
        })
    }

    fn multi_set(&self, pairs: &[(&[u8], &[u8])], _deadline: Instant) -> Result<(), StoreError> {
        pairs.iter().try_for_each(|(_, value)| check_value(value))?;
        let keys: Vec<&[u8]> = pairs.iter().map(|(key, _)| *key).collect();
        let keys = stored_keys(&keys)?;
        self.with("set", |locked| {
            for (key, (_, value)) in keys.iter().zip(pairs) {
                locked.state.set(key, value, &mut locked.woken);
            }
        })
    }

    fn delete(&self, key: &[u8], _deadline: Instant) -> Result<bool, StoreError> {
        let key = stored_key(key)?;
        self.with("delete", |locked| locked.state.delete(&key))
    }

    fn num_keys(&self, _deadline: Instant) -> Result<u64, StoreError> {
        self.with("num_keys", |locked| locked.state.num_keys() as u64)
    }

    fn list_keys(&self, _deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        self.with("list_keys", |locked| locked.state.keys().filter_map(user_key).collect())
    }

    fn queue_push(&self, key: &[u8], value: &[u8], _deadline: Instant) -> Result<(), StoreError> {
        check_value(value)?;
        let key = stored_key(key)?;
        self.with("queue_push", |locked| locked.state.queue_push(&key, value, &mut locked.woken))
    }

    fn queue_pop(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError> {
        self.wait_until(Call::new("queue_pop", &[key], deadline), |state, client, stored| {
            state.queue_pop(client, &stored[0]).1.map(Vec::from)
        })
    }

    fn try_queue_pop(&self, key: &[u8], _deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        let key = stored_key(key)?;
        self.with("queue_pop", |locked| {
            let client = locked.new_thread();
            locked.state.queue_pop(client, &key).1.map(Vec::from)
        })
    }

    fn queue_len(&self, key: &[u8], _deadline: Instant) -> Result<u64, StoreError> {
        let key = stored_key(key)?;
        self.with("queue_len", |locked| locked.state.queue_len(&key) as u64)
    }

    fn barrier(&self, key: &[u8], world_size: usize, deadline: Instant) -> Result<(), StoreError> {
        let (stored, keys) = (stored_key(key)?, [key]);
        let world_size = i64::try_from(world_size).unwrap_or(i64::MAX);
        let call = Call::new("barrier", &keys, deadline);
        let step = self.with("barrier", |locked| {
            let client = locked.new_thread();
            let LockedStore { state, woken, .. } = locked;
            let complete = state.barrier(client, &stored, world_size, woken)?;
            Ok((!complete).then(|| (client, locked.waiter(client))))
        })?;
        match step.map_err(|refusal| refused(key, refusal))? {
            None => Ok(()),
            Some((client, waiter)) => self.sleep(call, client, &waiter),
        }
    }
}

impl Default for MemoryStore {
    fn default() -> MemoryStore {
        MemoryStore::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").field("name", &self.name).finish_non_exhaustive()
    }
}
