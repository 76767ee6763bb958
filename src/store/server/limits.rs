//! How many descriptors this process may have.

use std::io;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the soft limit of open descriptors to the hard limit; returns (before, after).
///
/// The limit is the process's and is inherited: whoever starts programs that use `select` should set
/// the first number again in the child.
///
/// # Errors
/// What the system said.
pub fn raise_descriptor_limit() -> io::Result<(u64, u64)> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok((soft, hard))
}
