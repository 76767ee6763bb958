//! The results of earlier calls of spawn on this thread.
//!
//! A rank runs through the earlier calls again before it reaches its own. There they start nothing and must
//! return the spawner's results, so that the rank takes the same path. So the spawner passes the results
//! on.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::SpawnError;

/// Variable that holds the errors for a rank, as a JSON map from call number to error.
pub(super) const VARIABLE: &str = "CONVOKE_SPAWN_PAST";
/// Limit on the size of the variable in bytes; Linux limits a variable to 128 KiB.
const VARIABLE_BYTES: usize = 100 << 10;
/// Limit on the errors that are kept. A rank sees calls with older errors as successful.
const ERRORS: usize = 64;

/// The errors of calls by call number. A call that is missing has succeeded.
type Errors = BTreeMap<u64, SpawnError>;

thread_local! {
    static PAST: RefCell<Past> = const { RefCell::new(Past { calls: 0, errors: Errors::new() }) };
}

struct Past {
    calls: u64,
    errors: Errors,
}

/// Returns the number of this call on its thread.
pub(super) fn next_call() -> u64 {
    PAST.with_borrow_mut(|past| {
        past.calls += 1;
        past.calls - 1
    })
}

/// Stores the error of `call` in the form that ranks will read.
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

/// Returns the JSON text of [`VARIABLE`] for the ranks.
pub(super) fn told() -> String {
    PAST.with_borrow_mut(|past| {
        let encode = |errors: &Errors| serde_json::to_string(errors).unwrap_or_default();
        let mut text = encode(&past.errors);
        for call in past.errors.keys().copied().collect::<Vec<_>>() {
            if text.len() <= VARIABLE_BYTES {
                break;
            }
            // Standard error of the oldest calls is the least useful, so it is dropped first.
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

/// Returns, in a rank, the result that `call` had in the spawner.
pub(super) fn outcome_of(call: u64) -> Result<(), SpawnError> {
    let text = std::env::var(VARIABLE).unwrap_or_default();
    let mut errors = serde_json::from_str::<Errors>(&text).unwrap_or_default();
    errors.remove(&call).map_or(Ok(()), Err)
}
