//! Who waits for which key.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{Caller, Map, Refusal, Woken};
use crate::wire::{MAX_KEY_COUNT, MAX_REQUEST_BYTES};

/// Most unfinished waits of one caller. Torch's client never has more than one.
pub(crate) const MAX_WAITS_PER_CALLER: usize = 1024;
/// Most missing keys over all unfinished waits of one caller.
const MAX_AWAITED_KEYS: usize = MAX_KEY_COUNT;
/// Most bytes of them.
const MAX_AWAITED_BYTES: usize = MAX_REQUEST_BYTES;

/// Waits are numbered in order of arrival; the index by key is what makes ten thousand waits for one
/// key end in one pass.
#[derive(Debug, Default)]
pub(super) struct Waits {
    last_number: u64,
    unfinished: Map<u64, Wait>,
    by_key: Map<Arc<[u8]>, BTreeSet<u64>>,
    by_barrier: Map<Arc<[u8]>, BTreeSet<u64>>,
    by_caller: Map<Caller, Own>,
    /// Woken for an item of this queue, and not yet come to take it.
    offered: Map<Caller, Arc<[u8]>>,
}

/// One unfinished wait.
#[derive(Debug)]
struct Wait {
    caller: Caller,
    awaits: Awaits,
}

#[derive(Debug)]
enum Awaits {
    /// The keys that were missing at first; `missing` of them still are.
    Keys {
        keys: Vec<Arc<[u8]>>,
        missing: usize,
    },
    Barrier {
        key: Arc<[u8]>,
    },
}

/// The unfinished waits of one caller.
#[derive(Debug, Default)]
struct Own {
    numbers: Vec<u64>,
    key_count: usize,
    key_bytes: usize,
}

/// A wait in the making.
#[derive(Debug)]
pub(super) struct Draft {
    number: u64,
    caller: Caller,
    keys: Vec<Arc<[u8]>>,
    key_bytes: usize,
}

impl Waits {
    pub(super) fn begin(&mut self, caller: Caller) -> Result<Draft, Refusal> {
        if self.by_caller.get(&caller).is_some_and(|own| own.numbers.len() >= MAX_WAITS_PER_CALLER) {
            return Err(Refusal::TooManyWaits);
        }
        self.last_number += 1;
        Ok(Draft { number: self.last_number, caller, keys: Vec::new(), key_bytes: 0 })
    }

    /// A key named twice counts once.
    pub(super) fn add_key(&mut self, draft: &mut Draft, key: &[u8]) -> Result<(), Refusal> {
        let (count, bytes) =
            self.by_caller.get(&draft.caller).map_or((0, 0), |own| (own.key_count, own.key_bytes));
        let over = count + draft.keys.len() >= MAX_AWAITED_KEYS
            || bytes + draft.key_bytes + key.len() > MAX_AWAITED_BYTES;
        if over {
            for key in &draft.keys {
                remove(&mut self.by_key, key, draft.number);
            }
            return Err(Refusal::TooManyWaits);
        }
        if let Some(key) = insert(&mut self.by_key, key, draft.number) {
            draft.key_bytes += key.len();
            draft.keys.push(key);
        }
        Ok(())
    }

    pub(super) fn commit(&mut self, draft: Draft) {
        let Draft { number, caller, keys, key_bytes } = draft;
        let own = self.by_caller.entry(caller).or_default();
        own.numbers.push(number);
        own.key_count += keys.len();
        own.key_bytes += key_bytes;
        let missing = keys.len();
        self.unfinished.insert(number, Wait { caller, awaits: Awaits::Keys { keys, missing } });
    }

    pub(super) fn add_barrier(&mut self, caller: Caller, key: &[u8]) -> Result<(), Refusal> {
        let draft = self.begin(caller)?;
        if let Some(key) = insert(&mut self.by_barrier, key, draft.number) {
            self.by_caller.entry(caller).or_default().numbers.push(draft.number);
            self.unfinished.insert(draft.number, Wait { caller, awaits: Awaits::Barrier { key } });
        }
        Ok(())
    }

    /// `key` has a value: nobody waits for it any longer.
    pub(super) fn key_appeared(&mut self, key: &[u8], woken: &mut Woken) {
        if self.by_key.is_empty() {
            return;
        }
        let Some(numbers) = self.by_key.remove(key) else { return };
        woken.reserve(numbers.len());
        for number in numbers {
            if self.one_less(number) {
                woken.extend(self.finish(number));
            }
        }
    }

    /// The queue `key` has an item for one of those who wait for it: the first that needs only this.
    pub(super) fn item_appeared(&mut self, key: &[u8], woken: &mut Woken) {
        let Some((name, mut numbers)) = self.by_key.remove_entry(key) else { return };
        while let Some(number) = numbers.pop_first() {
            if !self.one_less(number) {
                continue;
            }
            if let Some(caller) = self.finish(number) {
                self.offered.insert(caller, Arc::clone(&name));
                woken.push(caller);
                break;
            }
        }
        if !numbers.is_empty() {
            self.by_key.insert(name, numbers);
        }
    }

    pub(super) fn barrier_complete(&mut self, key: &[u8], woken: &mut Woken) {
        for number in self.by_barrier.remove(key).unwrap_or_default() {
            woken.extend(self.finish(number));
        }
    }

    /// The caller has come for an item.
    pub(super) fn forget_item(&mut self, caller: Caller) {
        if !self.offered.is_empty() {
            self.offered.remove(&caller);
        }
    }

    /// Drops all waits of the caller; returns the queue whose item it was woken for and did not take.
    pub(super) fn cancel(&mut self, caller: Caller) -> Option<Arc<[u8]>> {
        for number in self.by_caller.remove(&caller).unwrap_or_default().numbers {
            match self.unfinished.remove(&number).map(|wait| wait.awaits) {
                Some(Awaits::Keys { keys, .. }) => {
                    keys.iter().for_each(|key| remove(&mut self.by_key, key, number));
                }
                Some(Awaits::Barrier { key }) => remove(&mut self.by_barrier, &key, number),
                None => {}
            }
        }
        self.offered.remove(&caller)
    }

    /// Counts one key of a wait as there; whether it was the last.
    fn one_less(&mut self, number: u64) -> bool {
        match self.unfinished.get_mut(&number).map(|wait| &mut wait.awaits) {
            Some(Awaits::Keys { missing, .. }) => {
                *missing -= 1;
                *missing == 0
            }
            Some(Awaits::Barrier { .. }) | None => false,
        }
    }

    /// Forgets a wait that is over; whose it was.
    fn finish(&mut self, number: u64) -> Option<Caller> {
        let Wait { caller, awaits } = self.unfinished.remove(&number)?;
        if let Some(own) = self.by_caller.get_mut(&caller) {
            if let Awaits::Keys { keys, .. } = &awaits {
                own.key_count -= keys.len();
                own.key_bytes -= keys.iter().map(|key| key.len()).sum::<usize>();
            }
            own.numbers.retain(|own| *own != number);
            if own.numbers.is_empty() {
                self.by_caller.remove(&caller);
            }
        }
        Some(caller)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.unfinished.is_empty()
            && self.by_key.is_empty()
            && self.by_barrier.is_empty()
            && self.by_caller.is_empty()
            && self.offered.is_empty()
    }
}

/// Enters `number` under `key`; the key's shared name unless it was there already.
fn insert(index: &mut Map<Arc<[u8]>, BTreeSet<u64>>, key: &[u8], number: u64) -> Option<Arc<[u8]>> {
    if let Some((name, _)) = index.get_key_value(key) {
        let name = Arc::clone(name);
        let new = index.get_mut(key).is_some_and(|numbers| numbers.insert(number));
        return new.then_some(name);
    }
    let name: Arc<[u8]> = key.into();
    index.insert(Arc::clone(&name), BTreeSet::from([number]));
    Some(name)
}

fn remove(index: &mut Map<Arc<[u8]>, BTreeSet<u64>>, key: &[u8], number: u64) {
    if let Some(numbers) = index.get_mut(key) {
        numbers.remove(&number);
        if numbers.is_empty() {
            index.remove(key);
        }
    }
}
