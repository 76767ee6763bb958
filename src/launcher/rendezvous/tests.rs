//! Input from the store, which any process may have written: damaged texts are rejected as a whole.

use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::JobOutcome;
use super::ranks::{Ranks, RoleInfo};
use super::static_rendezvous::Registration;
use crate::report::Report;

/// Returns true if `text` parses as `T`. Asserts that the parsed value survives a round trip.
fn reads<T: Serialize + DeserializeOwned>(text: &[u8]) -> bool {
    let Ok(read) = serde_json::from_slice::<T>(text) else { return false };
    let again = serde_json::to_vec(&read).expect("what was read can be written");
    let same = serde_json::from_slice::<T>(&again).expect("what was written can be read");
    assert_eq!(serde_json::to_vec(&same).expect("the same"), again);
    true
}

const OUTCOMES: [&str; 5] = [
    r#"{"version":1,"node":3,"host":"b","what":{"failed":{"summary":"rank 3","report":"{}"}}}"#,
    r#"{"version":1,"node":0,"host":"a","what":{"error":{"text":"no folder"}}}"#,
    r#"{"version":1,"node":0,"host":"a","what":{"stopped":{"signal":15}}}"#,
    r#"{"version":1,"node":0,"host":"a","what":"lost"}"#,
    r#"{"version":1,"node":0,"host":"a","what":"succeeded"}"#,
];
const REGISTRATION: &str = r#"{"version":"0.1.0","host":"a","pid":7,"nodes":2}"#;
const ROLE_INFO: &str = r#"{"role": "x", "rank": 1, "local_world_size": 2}"#;
const RANKS: &str = "[0, 1, 0, 1]";

#[test]
fn messages_of_agents_are_decoded() {
    assert!(OUTCOMES.iter().all(|text| reads::<JobOutcome>(text.as_bytes())), "{OUTCOMES:?}");
    assert!(reads::<Registration>(REGISTRATION.as_bytes()));
    assert!(reads::<RoleInfo>(ROLE_INFO.as_bytes()));
    assert!(reads::<Ranks>(RANKS.as_bytes()));
}

proptest! {
    #[test]
    fn damaged_messages_cause_no_panic(
        which in 0..8_usize,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let text = [&OUTCOMES[..], &[REGISTRATION, ROLE_INFO, RANKS]].concat()[which];
        let mut bytes = text.as_bytes().to_vec();
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        for end in [bytes.len(), cut.index(bytes.len())] {
            let bytes = &bytes[..end];
            reads::<JobOutcome>(bytes);
            reads::<Registration>(bytes);
            reads::<RoleInfo>(bytes);
            reads::<Ranks>(bytes);
            let _ = Report::from_json(&String::from_utf8_lossy(bytes));
        }
    }
}
