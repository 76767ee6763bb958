//! The flags that only `convoke check` has.

use std::path::PathBuf;
use std::time::Duration;

use crate::cli::{CliError, Env, ParsedArgs};
use crate::config::Config;

/// Longest wait for the other nodes if a scheduler or `--hosts` starts all nodes at once.
const WAIT_STARTED_AT_ONCE: Duration = Duration::from_secs(3);
/// Longest wait for the other nodes in Kubernetes, where pods may start minutes apart.
const WAIT_POD: Duration = Duration::from_secs(300);
/// Longest wait for the other nodes if somebody starts them by hand.
const WAIT_BY_HAND: Duration = Duration::from_secs(60);

/// The flags of `convoke check` itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) json: bool,
    pub(crate) failed_hosts: Option<PathBuf>,
    /// True if the throughput of all pairs is measured.
    pub(crate) net: bool,
    /// `--wait`, if the user has set it.
    wait: Option<Duration>,
    pub(super) is_pod: bool,
}

impl Options {
    pub(crate) fn new(args: &ParsedArgs, env: Env<'_>) -> Result<Self, CliError> {
        let wait = match args.get("wait") {
            None => None,
            Some(value) => {
                let seconds = value.float("60")?;
                if !(0.1..=86_400.0).contains(&seconds) {
                    return Err(value.error("must be from 0.1 to 86400 seconds", "60"));
                }
                Some(Duration::from_secs_f64(seconds))
            }
        };
        Ok(Self {
            json: args.is_on("json"),
            failed_hosts: args.get_nonempty("failed-hosts").map(|value| PathBuf::from(&value.text)),
            net: args.is_on("net"),
            wait,
            is_pod: env("KUBERNETES_SERVICE_HOST").is_some(),
        })
    }

    /// Returns the longest wait for the other nodes.
    pub(super) fn wait(&self, config: &Config) -> Duration {
        let default = match &config.scheduled {
            _ if self.is_pod => WAIT_POD,
            Some(_) => WAIT_STARTED_AT_ONCE,
            None => WAIT_BY_HAND,
        };
        self.wait.unwrap_or(default)
    }
}
