//! Keys, queues, waits and barriers of one store. Pure: clients are numbers, and each operation
//! returns the clients to wake.
//!
//! All operations behave as in torch's TCPStore server, with one exception. Here a wait ends only when
//! its keys exist. Torch's server also ends a wait when a COMPARE_SET of an awaited key fails.

#[cfg(test)]
mod tests;
mod waits;

use std::collections::{HashMap, VecDeque};

use crate::wire::MAX_REPLY_BYTES;
use waits::Waits;

/// A map with randomly seeded hashes, so that a client cannot choose keys that collide.
pub(crate) type Map<K, V> = HashMap<K, V, foldhash::fast::RandomState>;

/// Id of a client: a connection, or a thread of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ClientId(pub(crate) u64);

/// Clients whose wait has just ended. Each must get one [`READY`](crate::wire::encode::byte::READY).
pub(crate) type Woken = Vec<ClientId>;

/// The reason why an operation was refused. A refused operation changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("the value under this key is not a number")]
    NotANumber,
    #[error("a value or reply of more than {MAX_REPLY_BYTES} bytes")]
    TooLong,
    #[error("too many unfinished waits of one client")]
    TooManyWaits,
}

/// The last will of a client: the key, and the value to store under it when the client has ended, if the key
/// is absent then.
type LastWill = (Box<[u8]>, Box<[u8]>);

/// The contents of one store, and the waits of clients for keys, queue items and barriers.
#[derive(Debug, Default)]
pub(crate) struct State {
    values: Map<Box<[u8]>, Vec<u8>>,
    /// Queues by key. A queue without items is removed.
    queues: Map<Box<[u8]>, VecDeque<Box<[u8]>>>,
    waits: Waits,
    last_wills: Map<ClientId, LastWill>,
}

impl State {
    pub(crate) fn set(&mut self, key: &[u8], value: &[u8], woken: &mut Woken) {
        match self.values.get_mut(key) {
            Some(old) => replace(old, value),
            None => drop(self.values.insert(key.into(), value.to_vec())),
        }
        self.waits.key_appeared(key, woken);
    }

    pub(crate) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice)
    }

    /// Stores `desired` if the value of `key` is `expected`, or if the key is absent and `expected` is
    /// empty. Returns the value after the operation, or `expected` if the key stays absent.
    pub(crate) fn compare_set<'a>(
        &'a mut self,
        key: &[u8],
        expected: &'a [u8],
        desired: &'a [u8],
        woken: &mut Woken,
    ) -> &'a [u8] {
        if self.get(key).unwrap_or(b"") == expected {
            self.set(key, desired, woken);
            return desired;
        }
        self.values.get(key).map_or(expected, Vec::as_slice)
    }

    /// Adds `delta` to the number under `key` and returns the sum. The sum wraps around on overflow,
    /// as in torch.
    pub(crate) fn add(&mut self, key: &[u8], delta: i64, woken: &mut Woken) -> Result<i64, Refusal> {
        let old = self.get(key).map_or(Ok(0), |text| leading_number(text).ok_or(Refusal::NotANumber))?;
        let sum = old.wrapping_add(delta);
        self.set(key, sum.to_string().as_bytes(), woken);
        Ok(sum)
    }

    pub(crate) fn append(&mut self, key: &[u8], value: &[u8], woken: &mut Woken) -> Result<(), Refusal> {
        match self.values.get_mut(key) {
            Some(old) if old.len() + value.len() > MAX_REPLY_BYTES => return Err(Refusal::TooLong),
            Some(old) => old.extend_from_slice(value),
            None => drop(self.values.insert(key.into(), value.to_vec())),
        }
        self.waits.key_appeared(key, woken);
        Ok(())
    }

    /// Returns true if `key` has a value or its queue has an item.
    pub(crate) fn has(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || (!self.queues.is_empty() && self.queues.contains_key(key))
    }

    /// Returns true if all keys exist. Otherwise registers a wait of the client for the missing keys.
    pub(crate) fn wait<'a>(
        &mut self,
        client: ClientId,
        keys: impl Iterator<Item = &'a [u8]>,
    ) -> Result<bool, Refusal> {
        let State { values, queues, waits, .. } = self;
        let is_missing =
            |key: &&[u8]| !values.contains_key(*key) && (queues.is_empty() || !queues.contains_key(*key));
        let mut missing = keys.filter(is_missing).peekable();
        if missing.peek().is_none() {
            return Ok(true);
        }
        waits.add(client, missing)?;
        Ok(false)
    }

    pub(crate) fn delete(&mut self, key: &[u8]) -> bool {
        self.values.remove(key).is_some()
    }

    pub(crate) fn num_keys(&self) -> usize {
        self.values.len()
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &[u8]> {
        self.values.keys().map(|key| &**key)
    }

    pub(crate) fn queue_push(&mut self, key: &[u8], value: &[u8], woken: &mut Woken) {
        match self.queues.get_mut(key) {
            Some(queue) => queue.push_back(value.into()),
            None => drop(self.queues.insert(key.into(), VecDeque::from([value.into()]))),
        }
        self.waits.item_appeared(key, woken);
    }

    /// Removes the first item of a queue; returns the number of items before the removal, and the
    /// item.
    pub(crate) fn queue_pop(&mut self, client: ClientId, key: &[u8]) -> (usize, Option<Box<[u8]>>) {
        self.clear_offer(client);
        let Some(queue) = self.queues.get_mut(key) else { return (0, None) };
        let length = queue.len();
        let item = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(key);
        }
        (length, item)
    }

    /// Forgets that the client was woken for an item of a queue: it has taken the item or does not
    /// want it.
    pub(crate) fn clear_offer(&mut self, client: ClientId) {
        self.waits.clear_offer(client);
    }

    pub(crate) fn queue_len(&self, key: &[u8]) -> usize {
        self.queues.get(key).map_or(0, VecDeque::len)
    }

    /// Counts an arrival under `key`. Returns true if the barrier is complete; otherwise registers a
    /// wait of the client.
    pub(crate) fn barrier(
        &mut self,
        client: ClientId,
        key: &[u8],
        world_size: i64,
        woken: &mut Woken,
    ) -> Result<bool, Refusal> {
        let arrived = self.add(key, 1, woken)?;
        if arrived >= world_size {
            self.waits.barrier_complete(key, woken);
            return Ok(true);
        }
        self.waits.add_barrier(client, key)?;
        Ok(false)
    }

    /// Cancels all waits of the client. If the client was woken for an item of a queue and has not
    /// taken it, the next waiting client is woken for that item.
    pub(crate) fn cancel(&mut self, client: ClientId, woken: &mut Woken) {
        if let Some(key) = self.waits.cancel(client)
            && self.queues.contains_key(&*key)
        {
            self.waits.item_appeared(&key, woken);
        }
    }

    /// Sets the last will of the client: the value to store under `key` when the client has ended. An
    /// empty value removes the will.
    pub(crate) fn set_last_will(&mut self, client: ClientId, key: &[u8], value: &[u8]) {
        if value.is_empty() {
            self.last_wills.remove(&client);
        } else {
            self.last_wills.insert(client, (key.into(), value.into()));
        }
    }

    /// Handles the end of a client: cancels its waits, and stores the value of its last will if the key is
    /// absent.
    pub(crate) fn disconnect(&mut self, client: ClientId, woken: &mut Woken) {
        self.cancel(client, woken);
        if let Some((key, value)) = self.last_wills.remove(&client) {
            self.compare_set(&key, b"", &value, woken);
        }
    }

    /// Deletes all keys and queues that begin with none of `prefixes`; returns the number deleted.
    /// Waits for deleted keys continue.
    pub(crate) fn retain(&mut self, prefixes: &[&[u8]]) -> usize {
        let kept = |key: &[u8]| prefixes.iter().any(|prefix| key.starts_with(prefix));
        let before = self.values.len() + self.queues.len();
        self.values.retain(|key, _| kept(key));
        self.queues.retain(|key, _| kept(key));
        before - self.values.len() - self.queues.len()
    }

    /// Returns true if no wait is registered and all indexes of waits are empty.
    #[cfg(test)]
    pub(crate) fn waits_are_empty(&self) -> bool {
        self.waits.is_empty()
    }
}

/// Replaces a value in place, but does not keep a large buffer for a small value.
fn replace(old: &mut Vec<u8>, value: &[u8]) {
    const SLACK_BYTES: usize = 4096;
    if old.capacity() > value.len() + SLACK_BYTES {
        *old = value.to_vec();
    } else {
        old.clear();
        old.extend_from_slice(value);
    }
}

/// Parses a number as C's `strtoll` does: white space, a sign, digits, then anything.
///
/// Returns `None` without digits or if the number is out of range.
pub(crate) fn leading_number(text: &[u8]) -> Option<i64> {
    let start = text.iter().position(|byte| !byte.is_ascii_whitespace() && *byte != 0x0b)?;
    let text = &text[start..];
    let sign = usize::from(matches!(text[0], b'+' | b'-'));
    let digits = text[sign..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&text[..sign + digits]).ok()?.parse().ok()
}
