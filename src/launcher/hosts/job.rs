//! A job on hosts, as the flags describe it.

use std::ffi::OsString;
use std::time::Duration;

use super::list::Host;
use crate::cli::VERSION;

/// A job on hosts.
#[derive(Debug, Clone)]
pub(crate) struct HostsJob {
    pub(crate) hosts: Vec<Host>,
    /// The remote shell and its first arguments (`--rsh`).
    pub(crate) shell: Vec<String>,
    /// `--start-timeout`
    pub(crate) start_timeout: Duration,
    /// `--copy-binary`
    pub(crate) copies_program: bool,
    /// The first words of the launchers' command line, such as `check`.
    pub(crate) command: Vec<OsString>,
    /// Flags of the launchers, and the program with its arguments.
    pub(crate) arguments: Vec<OsString>,
    /// True if the flags do not give the number of workers, so that slots of hosts do.
    pub(crate) slots_count: bool,
    /// Variables for all hosts.
    pub(crate) variables: Vec<(OsString, OsString)>,
}

impl HostsJob {
    /// Returns the output of `--dry-run`.
    pub(crate) fn describe(&self) -> String {
        let mut text = format!("convoke {VERSION}, dry run: nothing is started\n\n");
        for (node, host) in self.hosts.iter().enumerate() {
            let slots = host
                .slots
                .filter(|_| self.slots_count)
                .map_or_else(String::new, |slots| format!(" --nproc-per-node={slots}"));
            let join = |words: &[OsString]| {
                words.iter().map(|word| format!(" {}", word.to_string_lossy())).collect::<String>()
            };
            let (command, arguments) = (join(&self.command), join(&self.arguments));
            text += &format!("node {node} on {}: convoke{command}{slots}{arguments}\n", host.name);
        }
        let names: Vec<_> = self.variables.iter().map(|(name, _)| name.to_string_lossy()).collect();
        text += &format!("\nAll hosts get these variables of this shell: {}\n", names.join(" "));
        text
    }
}
