//! What is settled before the first round: signals and the job's secret.

use convoke_env::Token;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::Pid;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::run::News;
use crate::config::{Config, Rendezvous as Choice};
use crate::os::die_by;

/// What is sent to a launcher so that it ends.
const STOPPING: [Signal; 4] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT];

/// Passes signals on to the select loop.
pub(super) fn watch_signals(config: &Config, tell: &mpsc::UnboundedSender<News>) -> Result<(), String> {
    let watch = |kind: SignalKind, news: fn(Signal) -> News, name: Signal| {
        let mut stream = signal(kind).map_err(|error| format!("cannot handle {name}: {error}"))?;
        let tell = tell.clone();
        tokio::spawn(async move { while stream.recv().await.is_some() && tell.send(news(name)).is_ok() {} });
        Ok::<(), String>(())
    };
    for &signal in &config.signals {
        watch(SignalKind::from_raw(signal as i32), News::Signalled, signal)?;
    }
    watch(SignalKind::child(), |_| News::ChildEnded, Signal::SIGCHLD)?;
    if Pid::this().as_raw() == 1 {
        // The kernel keeps from PID 1 what it does not handle: `docker stop` would have no effect.
        for name in STOPPING.into_iter().filter(|signal| !config.signals.contains(signal)) {
            let mut stream = signal(SignalKind::from_raw(name as i32))
                .map_err(|error| format!("cannot handle {name}: {error}"))?;
            tokio::spawn(async move {
                if stream.recv().await.is_some() {
                    die_by(name);
                }
            });
        }
    }
    SigSet::from_iter(STOPPING).thread_unblock().map_err(|error| format!("cannot unblock signals: {error}"))
}

/// Holds back the signals that stop a job until [`watch_signals`] has come to handle them: until then, PID 1 of a
/// container would not even notice them.
pub(crate) fn hold_signals() {
    // If it fails they act as always.
    let _ = SigSet::from_iter(STOPPING).thread_block();
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
