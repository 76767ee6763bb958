//! What is settled before the first round: when signals may come, and the job's secret.

use convoke_env::Token;
use nix::sys::signal::{SigSet, Signal};

use crate::config::{Config, Rendezvous as Choice};

/// What is sent to a launcher so that it ends.
const STOPPING: [Signal; 4] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT];

/// Holds back the signals that stop a job until the launcher has come to handle them: until then, PID 1 of a container
/// would not even notice them.
pub(crate) fn hold_signals() {
    // If it fails they act as always.
    let _ = SigSet::from_iter(STOPPING).thread_block();
}

/// Lets them come.
pub(super) fn release_signals() -> Result<(), String> {
    SigSet::from_iter(STOPPING).thread_unblock().map_err(|error| format!("cannot unblock signals: {error}"))
}

/// The secret of the job: given by the user, or made here if all workers are ours.
pub(super) fn token(config: &Config) -> Result<Option<Token>, String> {
    if let Some(token) = Token::from_process().map_err(|error| error.to_string())? {
        return Ok(Some(token));
    }
    let alone = match &config.rendezvous {
        Choice::Standalone => true,
        Choice::Static { .. } | Choice::Elastic { .. } => config.nodes.max == 1,
    };
    alone.then(Token::random).transpose().map_err(|error| format!("no random numbers: {error}"))
}
