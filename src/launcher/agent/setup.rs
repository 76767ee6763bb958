//! Prepares the launcher before the first round: masks signals and gets the token of the job.

use convoke_env::Token;
use nix::sys::signal::{SigSet, Signal};

use crate::config::{Config, Rendezvous as Choice};

/// Signals by which users and schedulers end a launcher.
const STOP_SIGNALS: [Signal; 4] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT];

/// Blocks the signals that stop a job. They stay pending until the event loop reads them. PID 1 of a
/// container would otherwise ignore them.
pub(crate) fn block_signals() {
    // If blocking fails, the signals keep their default actions.
    let _ = SigSet::from_iter(STOP_SIGNALS).thread_block();
}

/// Returns the token of the job. The user may provide it. Otherwise the launcher creates one if the job has
/// only this node, and returns `None` for several nodes.
pub(super) fn token(config: &Config) -> Result<Option<Token>, String> {
    if let Some(token) = Token::from_process().map_err(|error| error.to_string())? {
        return Ok(Some(token));
    }
    let alone = match &config.rendezvous {
        Choice::Standalone => true,
        Choice::Static { .. } | Choice::Elastic { .. } => config.nodes.max == 1,
    };
    alone.then(Token::random).transpose().map_err(|error| format!("cannot get random numbers: {error}"))
}
