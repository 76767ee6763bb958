//! The cause for which a group ends, in the form in which ranks send it to each other and write it to the
//! store.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::collectives::call::Call;
use crate::error::{CallContext, CommError, LossReason, ReportError};
use crate::json;
use crate::transport::frame::CONTROL_PAYLOAD_BYTES;

/// Maximum number of ranks that a failure report names.
pub(crate) const MAX_REPORTED_RANKS: usize = 64;
/// Maximum number of characters that a failure report keeps of a text.
const TEXT_CHARS: usize = 256;

/// True if the last group of this process that failed did so because another rank failed first.
static IS_CONSEQUENCE: AtomicBool = AtomicBool::new(false);

/// Returns true if a failure that this process reports now most likely follows from another rank's failure.
pub(crate) fn is_consequence() -> bool {
    IS_CONSEQUENCE.load(Ordering::SeqCst)
}

/// Forgets that a failure of another rank ended a group, since a new group has formed after it.
pub(crate) fn clear_consequence() {
    IS_CONSEQUENCE.store(false, Ordering::SeqCst);
}

/// The reason why a group ends. With `Exhausted`, the reporting rank has no file descriptor or memory left.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub(crate) enum Cause {
    PeerLost { rank: usize, how: LossReason },
    Timeout { missing: Vec<usize>, after_ms: u64 },
    Mismatch { rank: usize, theirs: Call, theirs_seq: u64, ours: Call, ours_seq: u64 },
    Aborted { reason: String },
    Exhausted { what: String },
    Protocol { peer: usize, what: String },
    Unauthorized { from: String, what: String },
}

/// A cause, and the rank that found it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) by: usize,
    pub(crate) cause: Cause,
}

impl Report {
    pub(crate) fn new(by: usize, mut cause: Cause) -> Self {
        match &mut cause {
            Cause::Timeout { missing, .. } => missing.truncate(MAX_REPORTED_RANKS),
            Cause::Aborted { reason: text }
            | Cause::Exhausted { what: text }
            | Cause::Protocol { what: text, .. }
            | Cause::PeerLost { how: LossReason::Unreachable { what: text }, .. } => truncate(text),
            Cause::Unauthorized { from, what } => {
                truncate(from);
                truncate(what);
            }
            Cause::PeerLost { .. } | Cause::Mismatch { .. } => {}
        }
        Self { by, cause }
    }

    /// Notes, for [`is_consequence`], that a group in which this process is rank `me` ended for this cause.
    pub(crate) fn record(&self, me: usize) {
        let by_another = match self.cause {
            Cause::PeerLost { rank, .. } => rank != me,
            Cause::Aborted { .. } | Cause::Exhausted { .. } => self.by != me,
            // Any rank may detect these causes, so the error of another rank says no more than that of this
            // rank.
            Cause::Timeout { .. }
            | Cause::Mismatch { .. }
            | Cause::Protocol { .. }
            | Cause::Unauthorized { .. } => false,
        };
        IS_CONSEQUENCE.store(by_another, Ordering::SeqCst);
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let bytes = json::encode(self);
        debug_assert!(bytes.len() <= CONTROL_PAYLOAD_BYTES);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, ReportError> {
        let report: Self = serde_json::from_slice(bytes)?;
        Ok(Self::new(report.by, report.cause))
    }

    /// Returns the error for the call that `context` describes; `address` maps a rank to its address.
    pub(crate) fn error(&self, context: CallContext, address: impl Fn(usize) -> String) -> CommError {
        let context = Box::new(context);
        match self.cause.clone() {
            Cause::PeerLost { rank, how } => {
                CommError::PeerLost { rank, address: address(rank), how, context }
            }
            Cause::Timeout { missing, after_ms } => {
                CommError::Timeout { missing, after: Duration::from_millis(after_ms), context }
            }
            Cause::Mismatch { rank, theirs, theirs_seq, ours, ours_seq } => {
                CommError::Mismatch { rank, theirs, theirs_seq, by: self.by, ours, ours_seq, context }
            }
            Cause::Aborted { reason } => CommError::Aborted { by: self.by, reason, context },
            Cause::Exhausted { what } => CommError::Exhausted { rank: self.by, what, context },
            Cause::Protocol { peer, what } => CommError::Protocol { peer, what, context },
            Cause::Unauthorized { from, what } => CommError::Unauthorized { from, what },
        }
    }
}

fn truncate(text: &mut String) {
    if let Some((index, _)) = text.char_indices().nth(TEXT_CHARS) {
        text.truncate(index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::call::CallKind;
    use crate::collectives::dtype::Dtype;

    fn causes() -> Vec<Cause> {
        let call = Call::new(CallKind::Barrier, Dtype::U8, None, 0, 0);
        vec![
            Cause::PeerLost { rank: 3, how: LossReason::Signal { signal: 9 } },
            Cause::PeerLost { rank: 3, how: LossReason::Unreachable { what: "\u{1}".repeat(5000) } },
            Cause::Timeout { missing: (0..1000).map(|rank| rank + usize::MAX / 2).collect(), after_ms: 5 },
            Cause::Mismatch { rank: 1, theirs: call, theirs_seq: 7, ours: call, ours_seq: 8 },
            Cause::Aborted { reason: "\u{1F980}".repeat(5000) },
            Cause::Exhausted { what: "x".repeat(5000) },
            Cause::Protocol { peer: 0, what: "\"".repeat(5000) },
            Cause::Unauthorized { from: "x".repeat(5000), what: "\n".repeat(5000) },
        ]
    }

    #[test]
    fn reports_round_trip_and_fit_in_a_frame() {
        for cause in causes() {
            let report = Report::new(2, cause);
            let bytes = report.encode();
            assert!(bytes.len() <= CONTROL_PAYLOAD_BYTES, "{}", bytes.len());
            assert_eq!(Report::decode(&bytes).unwrap(), report);
        }
    }

    #[test]
    fn random_reports_never_cause_a_panic() {
        let good: Vec<_> = causes().into_iter().map(|cause| Report::new(0, cause).encode()).collect();
        let decode = |bytes: &[u8]| Report::decode(bytes).ok();
        let encode = |report: &Report| {
            let bytes = report.encode();
            assert!(bytes.len() <= CONTROL_PAYLOAD_BYTES);
            bytes
        };
        convoke_testkit::fuzz(
            "random_reports_never_cause_a_panic",
            &good,
            4 * CONTROL_PAYLOAD_BYTES,
            decode,
            encode,
        );
    }
}
