//! Keys, queues, waits and barriers of one store. Pure: callers are numbers, who must be told is returned.
//!
//! What each operation means is torch's TCPStore server to the letter, but for one thing: a wait
//! ends only when its keys are there (torch's server ends it on any COMPARE_SET of a key, even one
//! that failed).

#[cfg(test)]
mod tests;
mod waits;

use std::collections::{HashMap, VecDeque};

use crate::wire::MAX_REPLY_BYTES;
use waits::Waits;

/// A map whose hashes nobody outside can foresee.
pub(crate) type Map<K, V> = HashMap<K, V, foldhash::fast::RandomState>;

/// Who asks: a connection or a thread of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Caller(pub(crate) u64);

/// Those whose wait has just ended; each is owed one [`READY`](crate::wire::encode::byte::READY).
pub(crate) type Woken = Vec<Caller>;

/// Why the store cannot do what was asked; nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("the value under this key is not a number")]
    NotANumber,
    #[error("a value or reply of more than {MAX_REPLY_BYTES} bytes")]
    TooLong,
    #[error("too many unfinished waits of one caller")]
    TooManyWaits,
}

/// A key, and what to store there if it is absent when its caller is gone.
#[derive(Debug)]
struct LastWillEntry {
    key: Box<[u8]>,
    value: Box<[u8]>,
}

/// All that one store holds.
#[derive(Debug, Default)]
pub(crate) struct State {
    values: Map<Box<[u8]>, Vec<u8>>,
    /// Never holds an empty queue.
    queues: Map<Box<[u8]>, VecDeque<Box<[u8]>>>,
    waits: Waits,
    last_wills: Map<Caller, LastWillEntry>,
}

impl State {
    pub(crate) fn set(&mut self, key: &[u8], value: &[u8], woken: &mut Woken) {
        match self.values.get_mut(key) {
            Some(old) => replace(old, value),
            None => {
                self.values.insert(key.into(), value.to_vec());
            }
        }
        self.waits.key_appeared(key, woken);
    }

    pub(crate) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice)
    }

    /// The value after the operation; of an absent key that stays absent, `expected`.
    pub(crate) fn compare_set<'a>(
        &'a mut self,
        key: &[u8],
        expected: &'a [u8],
        desired: &'a [u8],
        woken: &mut Woken,
    ) -> &'a [u8] {
        let store = match self.values.get(key) {
            None => expected.is_empty(),
            Some(current) => current == expected,
        };
        if store {
            self.set(key, desired, woken);
            return desired;
        }
        self.values.get(key).map_or(expected, Vec::as_slice)
    }

    /// The sum. It wraps around, as torch's does.
    pub(crate) fn add(&mut self, key: &[u8], delta: i64, woken: &mut Woken) -> Result<i64, Refusal> {
        let old = match self.values.get(key) {
            None => 0,
            Some(text) => leading_number(text).ok_or(Refusal::NotANumber)?,
        };
        let sum = old.wrapping_add(delta);
        let mut digits = [0; MAX_DIGITS];
        self.set(key, decimal(sum, &mut digits), woken);
        Ok(sum)
    }

    pub(crate) fn append(&mut self, key: &[u8], value: &[u8], woken: &mut Woken) -> Result<(), Refusal> {
        match self.values.get_mut(key) {
            Some(old) if old.len() + value.len() > MAX_REPLY_BYTES => return Err(Refusal::TooLong),
            Some(old) => old.extend_from_slice(value),
            None => {
                self.values.insert(key.into(), value.to_vec());
            }
        }
        self.waits.key_appeared(key, woken);
        Ok(())
    }

    /// Whether `key` has a value or its queue an item.
    pub(crate) fn has(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || (!self.queues.is_empty() && self.queues.contains_key(key))
    }

    /// True if all keys are there; otherwise the caller waits for those that are not.
    pub(crate) fn wait<'a>(
        &mut self,
        caller: Caller,
        keys: impl Iterator<Item = &'a [u8]> + Clone,
    ) -> Result<bool, Refusal> {
        if keys.clone().all(|key| self.has(key)) {
            return Ok(true);
        }
        let mut missing = self.waits.begin(caller)?;
        for key in keys {
            if !self.has(key) {
                self.waits.add_key(&mut missing, key)?;
            }
        }
        self.waits.commit(missing);
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
            None => {
                self.queues.insert(key.into(), VecDeque::from([value.into()]));
            }
        }
        self.waits.item_appeared(key, woken);
    }

    /// How many items there were, and the first of them.
    pub(crate) fn queue_pop(&mut self, caller: Caller, key: &[u8]) -> (usize, Option<Box<[u8]>>) {
        self.forget_item(caller);
        let Some(queue) = self.queues.get_mut(key) else { return (0, None) };
        let length = queue.len();
        let item = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(key);
        }
        (length, item)
    }

    /// The caller has come for the item it was woken for, or will not come.
    pub(crate) fn forget_item(&mut self, caller: Caller) {
        self.waits.forget_item(caller);
    }

    pub(crate) fn queue_len(&self, key: &[u8]) -> usize {
        self.queues.get(key).map_or(0, VecDeque::len)
    }

    /// Counts an arrival under `key`. True if the barrier is complete; otherwise the caller waits.
    pub(crate) fn barrier(
        &mut self,
        caller: Caller,
        key: &[u8],
        world_size: i64,
        woken: &mut Woken,
    ) -> Result<bool, Refusal> {
        let arrived = self.add(key, 1, woken)?;
        if arrived >= world_size {
            self.waits.barrier_complete(key, woken);
            return Ok(true);
        }
        self.waits.add_barrier(caller, key)?;
        Ok(false)
    }

    /// Ends all waits of the caller. An item it was woken for and has not taken is
    /// offered to the next who waits, so that none lies there unseen.
    pub(crate) fn cancel(&mut self, caller: Caller, woken: &mut Woken) {
        if let Some(key) = self.waits.cancel(caller)
            && self.queues.contains_key(&*key)
        {
            self.waits.item_appeared(&key, woken);
        }
    }

    /// Remembers what to store when the caller is gone; an empty value forgets it.
    pub(crate) fn set_last_will(&mut self, caller: Caller, key: &[u8], value: &[u8]) {
        if value.is_empty() {
            self.last_wills.remove(&caller);
        } else {
            self.last_wills.insert(caller, LastWillEntry { key: key.into(), value: value.into() });
        }
    }

    /// Handles the end of a client: cancels its waits and runs its last will.
    pub(crate) fn disconnect(&mut self, caller: Caller, woken: &mut Woken) {
        self.cancel(caller, woken);
        self.run_last_will(caller, woken);
    }

    /// Stores the last will of the caller, if it has one and the key is absent.
    fn run_last_will(&mut self, caller: Caller, woken: &mut Woken) {
        if let Some(LastWillEntry { key, value }) = self.last_wills.remove(&caller) {
            self.compare_set(&key, b"", &value, woken);
        }
    }

    /// Deletes all keys and queues that begin with none of `prefixes`; returns how many. Waits stay.
    pub(crate) fn retain(&mut self, prefixes: &[&[u8]]) -> usize {
        let kept = |key: &[u8]| prefixes.iter().any(|prefix| key.starts_with(prefix));
        let before = self.values.len() + self.queues.len();
        self.values.retain(|key, _| kept(key));
        self.queues.retain(|key, _| kept(key));
        before - self.values.len() - self.queues.len()
    }

    /// Whether nobody waits and nothing about waiting is remembered.
    #[cfg(test)]
    pub(crate) fn waits_are_empty(&self) -> bool {
        self.waits.is_empty()
    }
}

/// Overwrites in place, but does not keep a large buffer for a small value.
fn replace(old: &mut Vec<u8>, value: &[u8]) {
    const SLACK_BYTES: usize = 4096;
    if old.capacity() > value.len() + SLACK_BYTES {
        *old = value.to_vec();
    } else {
        old.clear();
        old.extend_from_slice(value);
    }
}

/// Digits and sign of the longest i64.
const MAX_DIGITS: usize = 20;

/// `value` as decimal text.
fn decimal(value: i64, digits: &mut [u8; MAX_DIGITS]) -> &[u8] {
    let mut start = MAX_DIGITS;
    let mut rest = value.unsigned_abs();
    loop {
        start -= 1;
        digits[start] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    if value < 0 {
        start -= 1;
        digits[start] = b'-';
    }
    &digits[start..]
}

/// Reads a number as C's `strtoll` does: blanks, a sign, digits, then anything. `None` without
/// digits or out of range.
pub(crate) fn leading_number(text: &[u8]) -> Option<i64> {
    let text = &text[text.iter().take_while(|byte| byte.is_ascii_whitespace() || **byte == 0x0b).count()..];
    let (negative, digits) = match text.split_first() {
        Some((b'-', rest)) => (true, rest),
        Some((b'+', rest)) => (false, rest),
        Some(_) | None => (false, text),
    };
    let count = digits.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if count == 0 {
        return None;
    }
    digits[..count].iter().try_fold(0_i64, |number, digit| {
        let digit = i64::from(digit - b'0');
        let number = number.checked_mul(10)?;
        if negative { number.checked_sub(digit) } else { number.checked_add(digit) }
    })
}
