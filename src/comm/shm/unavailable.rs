//! The reasons why ranks of a host share no memory and use connections instead.

use std::io;

use rustix::io::Errno;

/// A reason why the ranks of a host cannot share memory.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unavailable {
    /// The host has more ranks than one message on a unix socket can carry file descriptors for.
    #[error("{ranks} ranks of a host are more than the {max} that can share memory")]
    TooManyRanks { ranks: usize, max: usize },
    #[error("cannot get random numbers: {0}")]
    Random(#[from] getrandom::Error),
    /// The machine has too little memory, or a limit of the control group (cgroup) or of the file size is too
    /// low.
    #[error("cannot create {bytes} bytes of shared memory: {source}{}", hint(source))]
    Memory { bytes: usize, source: io::Error },
    /// The shared memory cannot be mapped, or it is not sealed: another process could then shorten it.
    #[error("cannot map the shared memory: {source}{}", hint(source))]
    Map { source: io::Error },
    #[error("no file descriptor is left: {source}{}", hint(source))]
    Descriptors { source: io::Error },
    /// The kernel dropped file descriptors from a received message, because this process has reached its
    /// limit of open files.
    #[error("{received} of {sent} file descriptors arrived: this process may open no more (`ulimit -n`)")]
    DescriptorsDropped { received: usize, sent: usize },
    #[error("cannot {what} a unix socket: {source}{}", hint(source))]
    Socket { what: &'static str, source: io::Error },
    #[error("rank {rank} closed its socket: {source}")]
    PeerGone { rank: usize, source: io::Error },
    /// Rank `rank` has not mapped this rank's shared memory. It is usually in another PID or mount namespace,
    /// or on another machine of equal host name.
    #[error(
        "rank {rank} cannot see the shared memory of this rank (is it in another container or namespace?)"
    )]
    NotShared { rank: usize },
    #[error("rank {rank} sent an invalid message")]
    InvalidMessage { rank: usize },
    /// Rank `rank` reported why it cannot share memory.
    #[error("rank {rank}: {what}")]
    PeerReported { rank: usize, what: String },
}

/// Returns a hint on the cause of `error` and its remedy; an empty text for other causes.
fn hint(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => " (this process may open no more files: `ulimit -n`)",
        Some(Errno::NFILE) => " (no process may open more files: fs.file-max)",
        Some(Errno::FBIG) => " (this process may make no file that large: `ulimit -f`)",
        Some(Errno::NOSPC | Errno::NOMEM) => " (the machine or the control group has no more memory)",
        Some(Errno::PERM | Errno::ACCESS | Errno::NOSYS) => " (a sandbox forbids it)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_shared_memory_limit_has_its_hint() {
        let text = |errno: Errno| Unavailable::Memory { bytes: 7, source: errno.into() }.to_string();
        assert_eq!(
            text(Errno::MFILE),
            "cannot create 7 bytes of shared memory: Too many open files (os error 24) (this process may \
             open no more files: `ulimit -n`)"
        );
        assert!(text(Errno::FBIG).ends_with(" (this process may make no file that large: `ulimit -f`)"));
        assert!(text(Errno::NOSPC).ends_with(" (the machine or the control group has no more memory)"));
        assert!(text(Errno::PERM).ends_with(" (a sandbox forbids it)"));
        assert!(text(Errno::INTR).ends_with("(os error 4)"));
    }
}
