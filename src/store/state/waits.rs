//! The waits of clients for keys, queue items and barriers, indexed by key, by barrier and by client.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{ClientId, Map, Refusal, Woken};
use crate::wire::{MAX_KEY_COUNT, MAX_REQUEST_BYTES};

/// Most unfinished waits of one client. Torch's client has at most one.
pub(crate) const MAX_WAITS_PER_CLIENT: usize = 1024;
/// Most missing keys over all unfinished waits of one client.
const MAX_AWAITED_KEYS: usize = MAX_KEY_COUNT;
/// Most bytes of missing keys over all unfinished waits of one client.
const MAX_AWAITED_BYTES: usize = MAX_REQUEST_BYTES;

/// All unfinished waits. A wait is identified by a number, in order of arrival.
///
/// With the index by key, one pass ends all waits for a key, even ten thousand.
///
/// Invariants: every number in an index names an unfinished wait. `by_key` names only waits for keys,
/// `by_barrier` only waits for barriers.
#[derive(Debug, Default)]
pub(super) struct Waits {
    last_number: u64,
    unfinished: Map<u64, Wait>,
    by_key: Map<Arc<[u8]>, BTreeSet<u64>>,
    by_barrier: Map<Arc<[u8]>, BTreeSet<u64>>,
    by_client: Map<ClientId, ClientWaits>,
    /// Clients that were woken for an item of a queue and have not taken it yet, with the key of the
    /// queue.
    offered: Map<ClientId, Arc<[u8]>>,
}

#[derive(Debug)]
struct Wait {
    client: ClientId,
    target: WaitTarget,
}

#[derive(Debug)]
enum WaitTarget {
    /// The keys that were missing when the wait began; `missing` of them are still missing.
    Keys {
        keys: Vec<Arc<[u8]>>,
        missing: usize,
    },
    Barrier(Arc<[u8]>),
}

/// The unfinished waits of one client.
#[derive(Debug, Default)]
struct ClientWaits {
    numbers: Vec<u64>,
    key_count: usize,
    key_bytes: usize,
}

impl Waits {
    /// Returns the number for a further wait of the client.
    fn next_number(&mut self, client: ClientId) -> Result<u64, Refusal> {
        if self.by_client.get(&client).is_some_and(|waits| waits.numbers.len() >= MAX_WAITS_PER_CLIENT) {
            return Err(Refusal::TooManyWaits);
        }
        self.last_number += 1;
        Ok(self.last_number)
    }

    /// Registers a wait for `missing_keys`. A key that is given twice counts once.
    pub(super) fn add<'a>(
        &mut self,
        client: ClientId,
        missing_keys: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), Refusal> {
        let number = self.next_number(client)?;
        let (count, bytes) =
            self.by_client.get(&client).map_or((0, 0), |waits| (waits.key_count, waits.key_bytes));
        let (mut keys, mut key_bytes) = (Vec::<Arc<[u8]>>::new(), 0);
        for key in missing_keys {
            if count + keys.len() >= MAX_AWAITED_KEYS || bytes + key_bytes + key.len() > MAX_AWAITED_BYTES {
                keys.iter().for_each(|key| remove(&mut self.by_key, key, number));
                return Err(Refusal::TooManyWaits);
            }
            if let Some(key) = insert(&mut self.by_key, key, number) {
                key_bytes += key.len();
                keys.push(key);
            }
        }
        let waits = self.by_client.entry(client).or_default();
        waits.numbers.push(number);
        waits.key_count += keys.len();
        waits.key_bytes += key_bytes;
        let missing = keys.len();
        self.unfinished.insert(number, Wait { client, target: WaitTarget::Keys { keys, missing } });
        Ok(())
    }

    pub(super) fn add_barrier(&mut self, client: ClientId, key: &[u8]) -> Result<(), Refusal> {
        let number = self.next_number(client)?;
        if let Some(key) = insert(&mut self.by_barrier, key, number) {
            self.by_client.entry(client).or_default().numbers.push(number);
            self.unfinished.insert(number, Wait { client, target: WaitTarget::Barrier(key) });
        }
        Ok(())
    }

    /// Handles that `key` has got a value: ends the waits for the key that miss no other key.
    pub(super) fn key_appeared(&mut self, key: &[u8], woken: &mut Woken) {
        if self.by_key.is_empty() {
            return;
        }
        let Some(numbers) = self.by_key.remove(key) else { return };
        woken.reserve(numbers.len());
        for number in numbers {
            if self.key_found(number) {
                woken.push(self.remove_finished(number));
            }
        }
    }

    /// Handles that the queue `key` has got an item: ends the first wait that misses only this queue.
    /// Earlier waits that also miss other keys count the queue as found and continue.
    pub(super) fn item_appeared(&mut self, key: &[u8], woken: &mut Woken) {
        let Some((name, mut numbers)) = self.by_key.remove_entry(key) else { return };
        while let Some(number) = numbers.pop_first() {
            if self.key_found(number) {
                let client = self.remove_finished(number);
                self.offered.insert(client, Arc::clone(&name));
                woken.push(client);
                break;
            }
        }
        if !numbers.is_empty() {
            self.by_key.insert(name, numbers);
        }
    }

    pub(super) fn barrier_complete(&mut self, key: &[u8], woken: &mut Woken) {
        for number in self.by_barrier.remove(key).unwrap_or_default() {
            woken.push(self.remove_finished(number));
        }
    }

    /// Forgets that the client was woken for an item of a queue.
    pub(super) fn clear_offer(&mut self, client: ClientId) {
        if !self.offered.is_empty() {
            self.offered.remove(&client);
        }
    }

    /// Removes all waits of the client. Returns the queue for whose item it was woken, if it has not
    /// taken the item.
    pub(super) fn cancel(&mut self, client: ClientId) -> Option<Arc<[u8]>> {
        for number in self.by_client.remove(&client).unwrap_or_default().numbers {
            match self.unfinished.remove(&number).map(|wait| wait.target) {
                Some(WaitTarget::Keys { keys, .. }) => {
                    keys.iter().for_each(|key| remove(&mut self.by_key, key, number));
                }
                Some(WaitTarget::Barrier(key)) => remove(&mut self.by_barrier, &key, number),
                None => unreachable!("by_client names only unfinished waits"),
            }
        }
        self.offered.remove(&client)
    }

    /// Counts one key of a wait as found. Returns true if it was the last missing one.
    fn key_found(&mut self, number: u64) -> bool {
        match self.unfinished.get_mut(&number).map(|wait| &mut wait.target) {
            Some(WaitTarget::Keys { missing, .. }) => {
                *missing -= 1;
                *missing == 0
            }
            Some(WaitTarget::Barrier(_)) | None => {
                unreachable!("by_key names only unfinished waits for keys")
            }
        }
    }

    /// Removes a wait that has ended and returns its client.
    fn remove_finished(&mut self, number: u64) -> ClientId {
        let wait = self.unfinished.remove(&number);
        let Wait { client, target } = wait.expect("the indexes name only unfinished waits");
        let waits = self.by_client.get_mut(&client).expect("by_client has every unfinished wait");
        if let WaitTarget::Keys { keys, .. } = &target {
            waits.key_count -= keys.len();
            waits.key_bytes -= keys.iter().map(|key| key.len()).sum::<usize>();
        }
        waits.numbers.retain(|other| *other != number);
        if waits.numbers.is_empty() {
            self.by_client.remove(&client);
        }
        client
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.unfinished.is_empty()
            && self.by_key.is_empty()
            && self.by_barrier.is_empty()
            && self.by_client.is_empty()
            && self.offered.is_empty()
    }
}

/// Adds the wait `number` to those for `key` in `index`. Returns the shared copy of the key, or `None`
/// if the wait was in the index already.
fn insert(index: &mut Map<Arc<[u8]>, BTreeSet<u64>>, key: &[u8], number: u64) -> Option<Arc<[u8]>> {
    if let Some((shared_key, _)) = index.get_key_value(key) {
        let shared_key = Arc::clone(shared_key);
        let is_new = index.get_mut(key).is_some_and(|numbers| numbers.insert(number));
        return is_new.then_some(shared_key);
    }
    let shared_key: Arc<[u8]> = key.into();
    index.insert(Arc::clone(&shared_key), BTreeSet::from([number]));
    Some(shared_key)
}

fn remove(index: &mut Map<Arc<[u8]>, BTreeSet<u64>>, key: &[u8], number: u64) {
    if let Some(numbers) = index.get_mut(key) {
        numbers.remove(&number);
        if numbers.is_empty() {
            index.remove(key);
        }
    }
}
