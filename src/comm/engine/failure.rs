//! The failure of a group: its cause, on which all ranks agree through the store.

use std::time::{Duration, Instant};

use super::settings::Settings;
use crate::collectives::call::Call;
use crate::error::cause::{Cause, Report};
use crate::error::{CallContext, CommError};

/// Longest wait for the store to answer with the cause that holds for all ranks.
const CONFIRM_TIMEOUT: Duration = Duration::from_millis(100);

/// The reason why the group has failed, and whether the ranks have agreed on it (`confirmed`).
#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub(super) report: Report,
    confirmed: bool,
}

impl Failure {
    pub(super) fn unconfirmed(report: Report) -> Self {
        Self { report, confirmed: false }
    }

    /// Agrees with the other ranks on the cause: the first cause that any rank writes to the store holds for
    /// all ranks. The cause is unconfirmed if the store does not answer.
    pub(super) fn confirm(settings: &Settings, report: Report) -> Self {
        let served_by = settings.store_rank;
        if matches!(report.cause, Cause::PeerLost { rank, .. } if Some(rank) == served_by) {
            return Self::unconfirmed(report);
        }
        let key = &settings.abort_key;
        let deadline = Instant::now() + CONFIRM_TIMEOUT;
        let winner = settings.store.compare_set(key, b"", &report.encode(), deadline);
        match winner.ok().and_then(|bytes| Report::decode(&bytes).ok()) {
            Some(report) => Self { report, confirmed: true },
            None => Self::unconfirmed(report),
        }
    }

    /// Returns the rank whose loss is the cause.
    pub(super) fn lost_rank(&self) -> Option<usize> {
        if let Cause::PeerLost { rank, .. } = self.report.cause { Some(rank) } else { None }
    }

    /// Returns the error that `call`, with number `seq`, returns because of this failure. `received` holds
    /// the bytes that the call has received and expects.
    pub(super) fn error(
        &self,
        settings: &Settings,
        call: Option<Call>,
        seq: u64,
        received: (u64, u64),
    ) -> CommError {
        let context = CallContext {
            group: settings.name.clone(),
            call,
            seq,
            received_bytes: received.0,
            expected_bytes: received.1,
            reported_by: self.report.by,
            confirmed: self.confirmed,
        };
        let addresses = &settings.addresses;
        self.report.error(context, |rank| addresses.get(rank).map_or_else(String::new, ToString::to_string))
    }
}
