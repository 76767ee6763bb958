//! From a request to the bytes of its reply. Pure.

use crate::state::{Caller, Refusal, State, Woken};
use crate::wire::encode::{blob, byte, number};
use crate::wire::{MAX_REPLY_BYTES, Request};

/// Carries out `request` and appends the reply, if it has one yet, to `out`.
///
/// Those whose wait this ended are pushed to `woken`; what the caller itself is owed goes to `out`,
/// in the order in which it came about.
///
/// # Errors
/// [`Refusal`]: the protocol has no reply that says so, and the connection must be closed.
pub(crate) fn answer(
    state: &mut State,
    caller: Caller,
    request: Request<'_>,
    out: &mut Vec<u8>,
    woken: &mut Woken,
) -> Result<(), Refusal> {
    let woken_before = woken.len();
    match request {
        Request::Validate => {}
        Request::Set { key, value } => {
            state.set(key, value, woken);
            own_wake_ups(caller, woken_before, out, woken);
        }
        Request::CompareSet { key, expected, desired } => {
            let mut reply = Vec::new();
            blob(&mut reply, state.compare_set(key, expected, desired, woken));
            own_wake_ups(caller, woken_before, out, woken);
            out.extend_from_slice(&reply);
        }
        Request::Get { key } => blob(out, state.get(key).unwrap_or_default()),
        Request::Add { key, delta } => {
            let sum = state.add(key, delta, woken)?;
            own_wake_ups(caller, woken_before, out, woken);
            number(out, sum);
        }
        Request::Check { mut keys } => {
            out.push(if keys.all(|key| state.has(key)) { byte::READY } else { byte::MISSING });
        }
        Request::Wait { keys } => {
            if state.wait(caller, keys)? {
                out.push(byte::READY);
            }
        }
        Request::NumKeys => count(out, state.num_keys()),
        Request::Delete { key } => number(out, i64::from(state.delete(key))),
        Request::Append { key, value } => {
            state.append(key, value, woken)?;
            own_wake_ups(caller, woken_before, out, woken);
        }
        Request::MultiGet { keys } => {
            let values = || keys.map(|key| state.get(key).unwrap_or_default());
            fits(values())?;
            values().for_each(|value| blob(out, value));
        }
        Request::MultiSet { mut pairs } => {
            while let (Some(key), Some(value)) = (pairs.next(), pairs.next()) {
                state.set(key, value, woken);
            }
            own_wake_ups(caller, woken_before, out, woken);
        }
        Request::CancelWait => {
            state.cancel(caller, woken);
            out.push(byte::CANCELLED);
        }
        Request::Ping { nonce } => out.extend_from_slice(&nonce.to_le_bytes()),
        Request::QueuePush { key, value } => {
            state.queue_push(key, value, woken);
            own_wake_ups(caller, woken_before, out, woken);
        }
        Request::QueuePop { key } => {
            let (length, item) = state.queue_pop(caller, key);
            count(out, length);
            if let Some(item) = item {
                blob(out, &item);
            }
        }
        Request::QueueLen { key } => count(out, state.queue_len(key)),
        Request::ListKeys => {
            fits(state.keys())?;
            count(out, state.num_keys());
            state.keys().for_each(|key| blob(out, key));
        }
        Request::SetLastWill { key, value } => state.set_last_will(caller, key, value),
        Request::Barrier { key, world_size } => {
            let complete = state.barrier(caller, key, world_size, woken)?;
            own_wake_ups(caller, woken_before, out, woken);
            if complete {
                out.push(byte::READY);
            }
        }
    }
    Ok(())
}

/// Moves the caller's own wake-ups since `before` to `out`, ahead of replies still to come.
fn own_wake_ups(caller: Caller, before: usize, out: &mut Vec<u8>, woken: &mut Woken) {
    if woken.len() == before {
        return;
    }
    let mut at = before;
    while at < woken.len() {
        if woken[at] == caller {
            woken.remove(at);
            out.push(byte::READY);
        } else {
            at += 1;
        }
    }
}

fn count(out: &mut Vec<u8>, value: usize) {
    number(out, i64::try_from(value).unwrap_or(i64::MAX));
}

/// Judges a reply before it is built.
fn fits<'a>(mut blobs: impl Iterator<Item = &'a [u8]>) -> Result<(), Refusal> {
    let total = blobs.try_fold(8_usize, |total, blob| {
        Some(total + 8 + blob.len()).filter(|total| *total <= MAX_REPLY_BYTES)
    });
    total.map(|_| ()).ok_or(Refusal::TooLong)
}
