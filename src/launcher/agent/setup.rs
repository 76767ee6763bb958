//! Preparations before the first round: signal masking and the secret of the job.

use convoke_env::Token;
use nix::sys::signal::{SigSet, Signal};

use crate::config::{Config, Rendezvous as Choice};

/// Signals by which users and schedulers end a launcher.
const STOP_SIGNALS: [Signal; 4] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT];

/// Blocks the signals that stop a job. They stay pending until the launcher handles them. Without that, PID 1
/// of a container would ignore them.
pub(crate) fn block_signals() {
    // If blocking fails, the signals keep their usual effect.
    let _ = SigSet::from_iter(STOP_SIGNALS).thread_block();
}

/// Returns the secret of the job. The user may provide it. Otherwise the launcher creates it if all workers
/// are its own.
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
