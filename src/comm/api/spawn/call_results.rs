//! The results of earlier calls of spawn on this thread.
//!
//! A rank is this program, run again from its start, so it makes the spawner's earlier calls of spawn before
//! it reaches its own. In a rank these calls start nothing, and must return the results that the spawner got,
//! so that the rank takes the same path. So the spawner passes the results to its ranks.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::SpawnError;

/// Environment variable that passes the errors to a rank, as a JSON map from call number to error.
pub(super) const VARIABLE: &str = "CONVOKE_SPAWN_PAST";
/// Limit on the size of the variable in bytes; Linux limits a variable to 128 KiB.
const MAX_VARIABLE_BYTES: usize = 100 << 10;
/// Limit on the number of errors that are kept. A rank sees calls with older errors as successful.
const MAX_ERRORS: usize = 64;

/// The errors of calls by call number. A call that is missing has succeeded.
type Errors = BTreeMap<u64, SpawnError>;

thread_local! {
    static RESULTS: RefCell<CallResults> = const { RefCell::new(CallResults { calls: 0, errors: Errors::new() }) };
}

struct CallResults {
    calls: u64,
    errors: Errors,
}

/// Returns the number of the call of spawn that starts now, counted on its thread.
pub(super) fn next_call() -> u64 {
    RESULTS.with_borrow_mut(|results| {
        results.calls += 1;
        results.calls - 1
    })
}

/// Stores the error of `call` in the form that ranks will read.
pub(super) fn record_error(call: u64, outcome: &Result<(), SpawnError>) {
    let Err(error) = outcome else { return };
    let copy = serde_json::to_vec(error).and_then(|bytes| serde_json::from_slice(&bytes));
    let error = copy.expect("an error is plain data, and is read as it was written");
    RESULTS.with_borrow_mut(|results| {
        results.errors.insert(call, error);
        if results.errors.len() > MAX_ERRORS {
            results.errors.pop_first();
        }
    });
}

/// Returns the JSON text of [`VARIABLE`] for the ranks.
pub(super) fn encode_errors() -> String {
    RESULTS.with_borrow_mut(|results| {
        let encode = |errors: &Errors| serde_json::to_string(errors).expect("errors are plain data");
        let mut text = encode(&results.errors);
        for call in results.errors.keys().copied().collect::<Vec<_>>() {
            if text.len() <= MAX_VARIABLE_BYTES {
                break;
            }
            // To fit the limit, standard error of the oldest calls is dropped first, since it is the least
            // useful.
            if let Some(SpawnError::Failed { stderr, .. } | SpawnError::Unreached { stderr, .. }) =
                results.errors.get_mut(&call)
            {
                stderr.clear();
            }
            text = encode(&results.errors);
        }
        text
    })
}

/// Returns, in a rank, the result that `call` had in the spawner.
pub(super) fn result_of(call: u64) -> Result<(), SpawnError> {
    let text = std::env::var(VARIABLE).unwrap_or_default();
    decode_errors(&text)?.remove(&call).map_or(Ok(()), Err)
}

/// Decodes the text of [`VARIABLE`]. It is empty if all calls have succeeded.
fn decode_errors(text: &str) -> Result<Errors, SpawnError> {
    if text.is_empty() {
        return Ok(Errors::new());
    }
    serde_json::from_str(text).map_err(|error| {
        SpawnError::Unusable(format!(
            "{VARIABLE} is not what the spawner has set ({error}): does the program change its environment?"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_results_of_earlier_calls_are_an_error_and_no_success() {
        let errors = Errors::from([(3, SpawnError::Unusable("a test".to_owned()))]);
        let text = serde_json::to_string(&errors).unwrap();
        assert_eq!(decode_errors(&text).unwrap()[&3].to_string(), errors[&3].to_string());
        assert!(decode_errors("").unwrap().is_empty());
        let error = decode_errors(&text[1..]).unwrap_err();
        assert!(error.to_string().contains(VARIABLE), "{error}");
    }
}
