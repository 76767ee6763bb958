//! Formats signals, numbers and addresses for messages. Pure.

use nix::sys::signal::Signal;

/// Formats a signal as `SIGTERM`, or as `signal 40` if it has no name.
pub(crate) fn signal(number: i32) -> String {
    Signal::try_from(number).map_or_else(|_| format!("signal {number}"), |known| known.as_str().to_owned())
}

/// Formats rank numbers as `rank 3` or `ranks 0-2,5`.
pub(crate) fn ranks(ranks: &[usize]) -> String {
    let mut ranks = ranks.to_vec();
    ranks.sort_unstable();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", ranges(&ranks))
}

/// Formats ascending numbers as `0-3,8`.
pub(crate) fn ranges(numbers: &[usize]) -> String {
    let parts = numbers.chunk_by(|a, b| a + 1 == *b).map(|part| match part {
        [first, .., last] => format!("{first}-{last}"),
        part => part.iter().map(ToString::to_string).collect(),
    });
    parts.collect::<Vec<_>>().join(",")
}

/// Joins host and port to `host:port`. An IPv6 address gets brackets.
pub(crate) fn address(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// Formats a number with its noun: `1 node`, `2 nodes`.
pub(crate) fn count(number: usize, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}
