//! Carries out requests and encodes their replies. Pure.

use crate::state::{ClientId, Refusal, State, Woken};
use crate::wire::encode::{blob, byte, number};
use crate::wire::{MAX_REPLY_BYTES, Request};

/// Carries out `request` and appends its reply to `out`. A wait whose keys are missing gets its reply
/// later.
///
/// Adds the other clients whose wait this request ended to `woken`. The READY bytes for the client's
/// own waits go to `out`, before the reply.
///
/// # Errors
/// [`Refusal`]. The protocol has no reply for a refused request, so the caller must close the
/// connection.
pub(crate) fn answer(
    state: &mut State,
    client: ClientId,
    request: Request<'_>,
    out: &mut Vec<u8>,
    woken: &mut Woken,
) -> Result<(), Refusal> {
    let woken_before = woken.len();
    match request {
        Request::Validate => {}
        Request::Set { key, value } => state.set(key, value, woken),
        Request::CompareSet { key, expected, desired } => {
            let mut reply = Vec::new();
            blob(&mut reply, state.compare_set(key, expected, desired, woken));
            reply_to_own_waits(client, woken_before, out, woken);
            out.extend_from_slice(&reply);
        }
        Request::Get { key } => blob(out, value_or_empty(state, key)),
        Request::Add { key, delta } => {
            let sum = state.add(key, delta, woken)?;
            reply_to_own_waits(client, woken_before, out, woken);
            number(out, sum);
        }
        Request::Check { mut keys } => {
            out.push(if keys.all(|key| state.has(key)) { byte::READY } else { byte::MISSING });
        }
        Request::Wait { keys } => {
            if state.wait(client, keys)? {
                out.push(byte::READY);
            }
        }
        Request::NumKeys => count(out, state.num_keys()),
        Request::Delete { key } => number(out, i64::from(state.delete(key))),
        Request::Append { key, value } => state.append(key, value, woken)?,
        Request::MultiGet { keys } => {
            let values = || keys.map(|key| value_or_empty(state, key));
            check_reply_length(values())?;
            values().for_each(|value| blob(out, value));
        }
        Request::MultiSet { mut pairs } => {
            while let (Some(key), Some(value)) = (pairs.next(), pairs.next()) {
                state.set(key, value, woken);
            }
        }
        Request::CancelWait => {
            state.cancel(client, woken);
            out.push(byte::CANCELLED);
        }
        Request::Ping { nonce } => out.extend_from_slice(&nonce.to_le_bytes()),
        Request::QueuePush { key, value } => state.queue_push(key, value, woken),
        Request::QueuePop { key } => {
            let (length, item) = state.queue_pop(client, key);
            count(out, length);
            if let Some(item) = item {
                blob(out, &item);
            }
        }
        Request::QueueLen { key } => count(out, state.queue_len(key)),
        Request::ListKeys => {
            check_reply_length(state.keys())?;
            count(out, state.num_keys());
            state.keys().for_each(|key| blob(out, key));
        }
        Request::SetLastWill { key, value } => state.set_last_will(client, key, value),
        Request::Barrier { key, world_size } => {
            let complete = state.barrier(client, key, world_size, woken)?;
            reply_to_own_waits(client, woken_before, out, woken);
            if complete {
                out.push(byte::READY);
            }
        }
    }
    // A request without a reply of its own may have ended waits of this client too.
    reply_to_own_waits(client, woken_before, out, woken);
    Ok(())
}

/// Returns the value of `key`. The protocol has no reply for an absent key: it reads as empty.
fn value_or_empty<'a>(state: &'a State, key: &[u8]) -> &'a [u8] {
    state.get(key).unwrap_or_default()
}

/// Removes the entries of `client` from `woken`, from index `before` on, and appends a READY byte to
/// `out` for each.
fn reply_to_own_waits(client: ClientId, before: usize, out: &mut Vec<u8>, woken: &mut Woken) {
    for _ in woken.extract_if(before.., |other| *other == client) {
        out.push(byte::READY);
    }
}

fn count(out: &mut Vec<u8>, value: usize) {
    number(out, i64::try_from(value).expect("lengths of collections fit into an i64"));
}

/// Checks the length of a reply before it is built.
fn check_reply_length<'a>(mut blobs: impl Iterator<Item = &'a [u8]>) -> Result<(), Refusal> {
    let total = blobs.try_fold(8_usize, |total, blob| {
        Some(total + 8 + blob.len()).filter(|total| *total <= MAX_REPLY_BYTES)
    });
    total.map(drop).ok_or(Refusal::TooLong)
}
