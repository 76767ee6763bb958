//! The calls of spawn on this thread: the one that a rank must reach, and the errors of earlier ones.
//!
//! A rank is this program, run again from its start, so it makes the spawner's earlier calls of spawn before
//! it reaches its own. In a rank these calls start nothing, and must return the results that the spawner got,
//! so that the rank takes the same path. So the spawner passes the errors to its ranks.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::SpawnError;

/// Variable that holds the [`SpawnCall`] as JSON and so marks a process as a spawned rank.
pub(super) const VARIABLE: &str = "CONVOKE_SPAWN";
/// Limit on the size of the variable in bytes; Linux limits a variable to 128 KiB.
const MAX_VARIABLE_BYTES: usize = 100 << 10;
/// Limit on the number of errors that are kept. A rank sees calls with older errors as successful.
const MAX_ERRORS: usize = 64;

/// The call of spawn that a rank must reach.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SpawnCall {
    /// Pid of the process that spawns.
    pub(super) spawner: u32,
    /// Number of the call of spawn on its thread, counted from 0.
    pub(super) number: u64,
    /// File, line and column of the call.
    pub(super) place: String,
    /// The errors of earlier calls by number. A call that is missing has succeeded.
    pub(super) errors: BTreeMap<u64, SpawnError>,
}

thread_local! {
    /// The number of the next call of spawn on this thread.
    static NEXT: Cell<u64> = const { Cell::new(0) };
    /// The errors of earlier calls on this thread, by number.
    static ERRORS: RefCell<BTreeMap<u64, SpawnError>> = const { RefCell::new(BTreeMap::new()) };
}

/// Returns the number of the call of spawn that starts now, counted on its thread.
pub(super) fn next_number() -> u64 {
    NEXT.replace(NEXT.get() + 1)
}

/// Stores the error of call `number` for the ranks of later calls.
pub(super) fn record_error(number: u64, error: &SpawnError) {
    ERRORS.with_borrow_mut(|errors| {
        errors.insert(number, error.copy());
        if errors.len() > MAX_ERRORS {
            errors.pop_first();
        }
    });
}

impl SpawnCall {
    /// Returns call `number` of this process and thread.
    pub(super) fn of_this_thread(number: u64, place: String) -> Self {
        let copied = |(&number, error): (&u64, &SpawnError)| (number, error.copy());
        let errors = ERRORS.with_borrow(|errors| errors.iter().map(copied).collect());
        Self { spawner: std::process::id(), number, place, errors }
    }

    /// Returns the call that this process must reach as a rank; `None` if it is not a rank.
    pub(super) fn from_process() -> Result<Option<Self>, SpawnError> {
        std::env::var(VARIABLE).ok().map(|text| Self::decode(&text)).transpose()
    }

    fn decode(text: &str) -> Result<Self, SpawnError> {
        serde_json::from_str(text).map_err(|error| {
            SpawnError::Unusable(format!(
                "{VARIABLE} is not what the spawner has set ({error}): does the program change its environment?"
            ))
        })
    }

    /// Returns the text of [`VARIABLE`] for the ranks. To fit the limit, the standard error of the oldest
    /// calls is dropped first, since it is the least useful.
    pub(super) fn encode(&mut self) -> String {
        let encode = |call: &Self| serde_json::to_string(call).expect("a call is plain data");
        let mut text = encode(self);
        for number in self.errors.keys().copied().collect::<Vec<_>>() {
            if text.len() <= MAX_VARIABLE_BYTES {
                break;
            }
            if let Some(SpawnError::Failed { stderr, .. } | SpawnError::Unreached { stderr, .. }) =
                self.errors.get_mut(&number)
            {
                stderr.clear();
            }
            text = encode(self);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::time::Duration;

    use convoke_env::ExitCause;
    use convoke_testkit::fuzz;

    use super::*;

    fn failed(stderr: &str) -> SpawnError {
        SpawnError::Failed { rank: 1, size: 2, how: ExitCause::Signal(9), stderr: stderr.to_owned() }
    }

    fn call(errors: impl IntoIterator<Item = SpawnError>) -> SpawnCall {
        let errors = (0..).zip(errors).collect();
        SpawnCall { spawner: 7, number: 99, place: "a folder/x.rs:1:2".to_owned(), errors }
    }

    #[test]
    fn errors_are_passed_to_ranks_unchanged_and_bounded() {
        let mut sent = call([
            failed("words\n"),
            SpawnError::Timeout { ranks: vec![1], after: Duration::from_millis(1) },
            SpawnError::system("do this", io::Error::other("no")),
            SpawnError::Unusable("not so".to_owned()),
        ]);
        let received = SpawnCall::decode(&sent.encode()).unwrap();
        assert_eq!((received.spawner, received.number, &received.place), (7, 99, &sent.place));
        let texts = |call: &SpawnCall| call.errors.values().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(texts(&received), texts(&sent));
        let mut long = call((0..MAX_ERRORS).map(|_| failed(&"x".repeat(4 << 10))));
        let text = long.encode();
        assert!(text.len() < 128 << 10);
        assert_eq!(SpawnCall::decode(&text).unwrap().errors.len(), MAX_ERRORS);
    }

    #[test]
    fn damaged_calls_are_refused_without_panic() {
        let good = call([failed("words\n")]).encode();
        let error = SpawnCall::decode(&good[1..]).unwrap_err();
        assert!(error.to_string().contains(VARIABLE), "{error}");
        let read = |bytes: &[u8]| {
            let call = SpawnCall::decode(std::str::from_utf8(bytes).ok()?).ok()?;
            Some((call.spawner, call.number, call.place))
        };
        let encode = |(spawner, number, place): &(u32, u64, String)| {
            let (spawner, number, place) = (*spawner, *number, place.clone());
            serde_json::to_vec(&SpawnCall { spawner, number, place, errors: BTreeMap::new() }).unwrap()
        };
        fuzz("spawn::damaged_calls_are_refused_without_panic", &[&good], 1 << 16, read, encode);
    }
}
