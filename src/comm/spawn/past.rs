//! How earlier calls of spawn on this thread have ended.
//!
//! A rank comes past those calls again, where they are skipped and must return the same, or it would not come to
//! its own. So the spawner hands on what they have returned.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::SpawnError;

/// Tells a rank of the errors, as JSON: number of the call, error.
pub(super) const VARIABLE: &str = "CONVOKE_SPAWN_PAST";
/// The kernel takes variables of up to 128 KiB.
const VARIABLE_BYTES: usize = 100 << 10;
/// Most errors that are told; to ranks, calls whose errors are older have succeeded.
const ERRORS: usize = 64;

/// The errors of calls by their number; calls that are not there have succeeded.
type Errors = BTreeMap<u64, SpawnError>;

thread_local! {
    static PAST: RefCell<Past> = const { RefCell::new(Past { calls: 0, errors: Errors::new() }) };
}

struct Past {
    calls: u64,
    errors: Errors,
}

/// The number of this call on its thread.
pub(super) fn next_call() -> u64 {
    PAST.with_borrow_mut(|past| {
        past.calls += 1;
        past.calls - 1
    })
}

/// Keeps how `call` has ended, in the form in which ranks will hear of it.
pub(super) fn remember(call: u64, outcome: &Result<(), SpawnError>) {
    let Err(error) = outcome else { return };
    let copy = serde_json::to_vec(error).and_then(|bytes| serde_json::from_slice(&bytes));
    if let Ok(error) = copy {
        PAST.with_borrow_mut(|past| {
            past.errors.insert(call, error);
            if past.errors.len() > ERRORS {
                past.errors.pop_first();
            }
        });
    }
}

/// What ranks are told.
pub(super) fn told() -> String {
    PAST.with_borrow_mut(|past| {
        let encode = |errors: &Errors| serde_json::to_string(errors).unwrap_or_default();
        let mut text = encode(&past.errors);
        for call in past.errors.keys().copied().collect::<Vec<_>>() {
            if text.len() <= VARIABLE_BYTES {
                break;
            }
            // The last words of long ago are missed least.
            if let Some(SpawnError::Failed { stderr, .. } | SpawnError::Unreached { stderr, .. }) =
                past.errors.get_mut(&call)
            {
                stderr.clear();
            }
            text = encode(&past.errors);
        }
        text
    })
}

/// As a rank: how `call` ended for the spawner.
pub(super) fn outcome_of(call: u64) -> Result<(), SpawnError> {
    let text = std::env::var(VARIABLE).unwrap_or_default();
    let mut errors = serde_json::from_str::<Errors>(&text).unwrap_or_default();
    errors.remove(&call).map_or(Ok(()), Err)
}
