//! The reasons why ranks of a host share no memory and use connections instead.

use std::io;

use rustix::io::Errno;

/// A reason why the ranks of a host cannot share memory.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unavailable {
    /// More ranks than the system can pass descriptors for in one message.
    #[error("{ranks} ranks of a host are more than the {max} that can share memory")]
    TooManyRanks { ranks: usize, max: usize },
    #[error("cannot get random numbers: {0}")]
    Random(#[from] getrandom::Error),
    /// Not enough memory, or less than the control group allows.
    #[error("cannot create {bytes} bytes of shared memory: {source}{}", hint(source))]
    Memory { bytes: usize, source: io::Error },
    /// The memory cannot be mapped, or is not sealed, so that it might become shorter.
    #[error("cannot map the shared memory: {source}{}", hint(source))]
    Map { source: io::Error },
    #[error("no file descriptor is left: {source}{}", hint(source))]
    Descriptors { source: io::Error },
    /// The receiver has reached its limit of open files: the system drops descriptors beyond it.
    #[error("{received} of {sent} file descriptors arrived: this process may open no more (`ulimit -n`)")]
    DescriptorsDropped { received: usize, sent: usize },
    #[error("cannot {what} a unix socket: {source}{}", hint(source))]
    Socket { what: &'static str, source: io::Error },
    #[error("rank {rank} closed its socket: {source}")]
    PeerGone { rank: usize, source: io::Error },
    /// The rank is usually in another PID or mount namespace, or on another machine of equal name.
    #[error(
        "rank {rank} cannot see the shared memory of this rank (is it in another container or namespace?)"
    )]
    NotShared { rank: usize },
    #[error("rank {rank} sent an invalid message")]
    InvalidMessage { rank: usize },
    /// A reason that another rank reported.
    #[error("rank {rank}: {what}")]
    PeerReported { rank: usize, what: String },
}

/// A hint what to do about the error.
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
