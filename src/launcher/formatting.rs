//! Formats signals and ranks for messages. Pure.

use nix::sys::signal::Signal;

use crate::config::cpu_ranges;

/// Formats a signal as `SIGTERM`, or as `signal 40` if it has no name.
pub(crate) fn signal(number: i32) -> String {
    Signal::try_from(number).map_or_else(|_| format!("signal {number}"), |known| known.as_str().to_owned())
}

/// `rank 3`, `ranks 0-2,5`.
pub(crate) fn ranks(ranks: &[usize]) -> String {
    let mut ranks = ranks.to_vec();
    ranks.sort_unstable();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", cpu_ranges(&ranks))
}
