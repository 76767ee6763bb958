//! The limit of open descriptors of this process.

use std::io;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the soft limit of open descriptors to the hard limit; returns (before, after).
///
/// The limit applies to the whole process, and child processes inherit it. A program that starts
/// children that use `select` should restore the old soft limit, the first number, in the children.
///
/// # Errors
/// Fails if the system refuses to read or to set the limit.
pub fn raise_descriptor_limit() -> io::Result<(u64, u64)> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok((soft, hard))
}
