//! A store in this process's memory, and a server's own view of its keys.

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, io, mem, thread};

use crate::error::StoreError;
use crate::hub::{Closed, Hub, Shared, Ticket, WaitEnd};
use crate::keys::{KeyStyle, check_value, not_a_number, printable};
use crate::state::{Caller, Refusal, State};
use crate::store::Store;

/// A store in memory for the threads of one process; clones share their keys.
///
/// Torch calls this a HashStore. An operation costs a lock and no system call; a wait sleeps.
#[derive(Clone)]
pub struct MemoryStore {
    hub: Arc<Hub>,
    keys: KeyStyle,
    name: Arc<str>,
}

impl MemoryStore {
    /// An empty store, keys as given.
    pub fn new() -> MemoryStore {
        MemoryStore { hub: Arc::new(Hub::local()), keys: KeyStyle::Plain, name: "memory".into() }
    }

    /// A view of a server's keys, spelt as its TCP clients spell them.
    pub(crate) fn of_server(hub: Arc<Hub>, name: &str) -> MemoryStore {
        MemoryStore { hub, keys: KeyStyle::Slash, name: name.into() }
    }

    fn with<R>(&self, operation: &'static str, work: impl FnOnce(&mut Shared) -> R) -> Result<R, StoreError> {
        self.hub.with(work).map_err(|Closed| self.closed(operation))
    }

    fn closed(&self, operation: &'static str) -> StoreError {
        let source = io::Error::new(io::ErrorKind::ConnectionAborted, "the server was shut down");
        StoreError::Lost { store: self.name.to_string(), operation, source }
    }

    /// Tries `attempt`, and again each time that `keys` have appeared, until the deadline.
    fn until<R>(
        &self,
        operation: &'static str,
        keys: &[&[u8]],
        deadline: Instant,
        mut attempt: impl FnMut(&mut State, Caller) -> Option<R>,
    ) -> Result<R, StoreError> {
        let names = self.keys.outer_all(keys)?;
        let started = Instant::now();
        let caller = self.with(operation, Shared::new_thread)?;
        loop {
            let step = self.with(operation, |shared| {
                if let Some(result) = attempt(&mut shared.state, caller) {
                    shared.state.forget_item(caller);
                    return Ok(Step::Done(result));
                }
                let there = shared.state.wait(caller, names.iter().map(|name| &**name))?;
                Ok(if there { Step::Poll } else { Step::Sleep(shared.ticket(caller)) })
            })?;
            match step.map_err(|refusal| refused(keys.first().copied().unwrap_or_default(), refusal))? {
                Step::Done(result) => return Ok(result),
                Step::Sleep(ticket) => self.sleep(operation, keys, caller, &ticket, started, deadline)?,
                Step::Poll if Instant::now() >= deadline => {
                    return Err(self.timeout(operation, keys, started));
                }
                Step::Poll => thread::sleep(POLL),
            }
        }
    }

    /// Sleeps until the ticket's wait is over; at the deadline gives it up.
    fn sleep(
        &self,
        operation: &'static str,
        keys: &[&[u8]],
        caller: Caller,
        ticket: &Ticket,
        started: Instant,
        deadline: Instant,
    ) -> Result<(), StoreError> {
        let mut end = ticket.sleep(deadline);
        let mut missing = Vec::new();
        if end.is_none() {
            self.with(operation, |shared| {
                shared.give_up(caller);
                // It may have been woken between the deadline and the lock.
                end = ticket.ended();
                let is_missing =
                    |key: &&[u8]| self.keys.outer(key).is_ok_and(|name| !shared.state.has(&name));
                missing = keys.iter().copied().filter(is_missing).collect();
            })?;
        }
        match end {
            Some(WaitEnd::Ready) => Ok(()),
            Some(WaitEnd::Closed) => Err(self.closed(operation)),
            None => Err(self.timeout(operation, if missing.is_empty() { keys } else { &missing }, started)),
        }
    }

    fn timeout(&self, operation: &'static str, keys: &[&[u8]], started: Instant) -> StoreError {
        StoreError::Timeout {
            store: self.name.to_string(),
            operation,
            after: started.elapsed(),
            keys: printable(keys.iter().copied()),
        }
    }
}

/// Between two looks at a queue whose name is also a key, so that waiting for it ends at once.
const POLL: Duration = Duration::from_millis(10);

/// What a blocking operation does next.
enum Step<R> {
    Done(R),
    Sleep(Arc<Ticket>),
    Poll,
}

fn refused(key: &[u8], refusal: Refusal) -> StoreError {
    match refusal {
        Refusal::NotANumber => not_a_number(key),
        Refusal::TooLong | Refusal::TooManyWaits => StoreError::Invalid { what: refusal.to_string() },
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &[u8], value: &[u8], _deadline: Instant) -> Result<(), StoreError> {
        check_value(value)?;
        let key = self.keys.outer(key)?;
        self.with("set", |shared| shared.state.set(&key, value, &mut shared.woken))
    }

    fn get(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError> {
        let name = self.keys.outer(key)?;
        self.until("get", &[key], deadline, |state, _| state.get(&name).map(<[u8]>::to_vec))
    }

    fn try_get(&self, key: &[u8], _deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        let key = self.keys.outer(key)?;
        self.with("get", |shared| shared.state.get(&key).map(<[u8]>::to_vec))
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
        let key = self.keys.outer(key)?;
        self.with("compare_set", |shared| {
            shared.state.compare_set(&key, expected, desired, &mut shared.woken).to_vec()
        })
    }

    fn add(&self, key: &[u8], delta: i64, _deadline: Instant) -> Result<i64, StoreError> {
        let name = self.keys.outer(key)?;
        let sum = self.with("add", |shared| shared.state.add(&name, delta, &mut shared.woken))?;
        sum.map_err(|refusal| refused(key, refusal))
    }

    fn append(&self, key: &[u8], value: &[u8], _deadline: Instant) -> Result<(), StoreError> {
        check_value(value)?;
        let name = self.keys.outer(key)?;
        let whole = self.with("append", |shared| shared.state.append(&name, value, &mut shared.woken))?;
        whole.map_err(|refusal| refused(key, refusal))
    }

    fn check(&self, keys: &[&[u8]], _deadline: Instant) -> Result<bool, StoreError> {
        let keys = self.keys.outer_all(keys)?;
        self.with("check", |shared| keys.iter().all(|key| shared.state.has(key)))
    }

    fn wait(&self, keys: &[&[u8]], deadline: Instant) -> Result<(), StoreError> {
        let names = self.keys.outer_all(keys)?;
        let mut woken = false;
        self.until("wait", keys, deadline, |state, _| {
            // Once woken all keys have been there, even if one is gone again.
            let over = mem::replace(&mut woken, true) || names.iter().all(|name| state.has(name));
            over.then_some(())
        })
    }

    fn multi_get(&self, keys: &[&[u8]], deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        let names = self.keys.outer_all(keys)?;
        self.until("multi_get", keys, deadline, |state, _| {
            names.iter().map(|name| state.get(name).map(<[u8]>::to_vec)).collect()
        })
    }

    fn multi_set(&self, pairs: &[(&[u8], &[u8])], _deadline: Instant) -> Result<(), StoreError> {
        pairs.iter().try_for_each(|(_, value)| check_value(value))?;
        let keys: Vec<&[u8]> = pairs.iter().map(|(key, _)| *key).collect();
        let keys = self.keys.outer_all(&keys)?;
        self.with("multi_set", |shared| {
            for (key, (_, value)) in keys.iter().zip(pairs) {
                shared.state.set(key, value, &mut shared.woken);
            }
        })
    }

    fn delete(&self, key: &[u8], _deadline: Instant) -> Result<bool, StoreError> {
        let key = self.keys.outer(key)?;
        self.with("delete", |shared| shared.state.delete(&key))
    }

    fn num_keys(&self, _deadline: Instant) -> Result<u64, StoreError> {
        self.with("num_keys", |shared| shared.state.num_keys() as u64)
    }

    fn list_keys(&self, _deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        self.with("list_keys", |shared| {
            shared.state.keys().filter_map(|key| self.keys.inner(key)).map(<[u8]>::to_vec).collect()
        })
    }

    fn queue_push(&self, key: &[u8], value: &[u8], _deadline: Instant) -> Result<(), StoreError> {
        check_value(value)?;
        let key = self.keys.outer(key)?;
        self.with("queue_push", |shared| shared.state.queue_push(&key, value, &mut shared.woken))
    }

    fn queue_pop(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError> {
        let name = self.keys.outer(key)?;
        self.until("queue_pop", &[key], deadline, |state, caller| {
            state.queue_pop(caller, &name).1.map(Vec::from)
        })
    }

    fn try_queue_pop(&self, key: &[u8], _deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        let key = self.keys.outer(key)?;
        self.with("queue_pop", |shared| {
            let caller = shared.new_thread();
            shared.state.queue_pop(caller, &key).1.map(Vec::from)
        })
    }

    fn queue_len(&self, key: &[u8], _deadline: Instant) -> Result<u64, StoreError> {
        let key = self.keys.outer(key)?;
        self.with("queue_len", |shared| shared.state.queue_len(&key) as u64)
    }

    fn barrier(&self, key: &[u8], world_size: usize, deadline: Instant) -> Result<(), StoreError> {
        let name = self.keys.outer(key)?;
        let world_size = i64::try_from(world_size).unwrap_or(i64::MAX);
        let started = Instant::now();
        let step = self.with("barrier", |shared| {
            let caller = shared.new_thread();
            let Shared { state, woken, .. } = shared;
            let complete = state.barrier(caller, &name, world_size, woken)?;
            Ok((!complete).then(|| (caller, shared.ticket(caller))))
        })?;
        match step.map_err(|refusal| refused(key, refusal))? {
            None => Ok(()),
            Some((caller, ticket)) => self.sleep("barrier", &[key], caller, &ticket, started, deadline),
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
