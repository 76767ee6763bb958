//! Checks of resource limits before an allocation, for limits that kill the process (SIGXFSZ, out of
//! memory) instead of returning an error.

use std::io;
use std::path::Path;

use convoke_env::host::cgroup;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit};

/// Checks that the file size limit of this process allows a file, also one in memory, of `bytes` bytes.
///
/// # Errors
/// `EFBIG` if the file size limit (`ulimit -f`) is lower.
pub(crate) fn check_file_size(bytes: usize) -> io::Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(most) if (bytes as u64) > most => Err(Errno::FBIG.into()),
        Some(_) | None => Ok(()),
    }
}

/// Checks that the control groups of this process have `bytes` bytes of free memory.
///
/// # Errors
/// `ENOMEM` if they have less. Limits that cannot be read are ignored.
pub(crate) fn check_memory(bytes: usize) -> io::Result<()> {
    match cgroup::free_memory(Path::new("/")) {
        Some(free) if (bytes as u64) > free => Err(Errno::NOMEM.into()),
        Some(_) | None => Ok(()),
    }
}

/// Returns true if the error means that no file descriptor is left.
pub(crate) fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// Returns the message for an error that [`is_out_of_descriptors`], in a group of `size` ranks, of which
/// `on_host` are on this host.
pub(crate) fn descriptor_limit_message(error: &io::Error, size: usize, on_host: usize) -> String {
    // Descriptors: the listener and its duplicate, an epoll set, an eventfd; three connections to each
    // peer; an eventfd and a pidfd for each rank of this host.
    let needed = 4 + 3 * size.saturating_sub(1) + 2 * on_host;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let (Some(most), true) = (current, Errno::from_io_error(error) == Some(Errno::MFILE)) else {
        return format!("{error}, and a group of {size} ranks needs up to {needed}: raise fs.file-max");
    };
    let enough = (most + needed as u64).next_power_of_two();
    let bound = maximum.map_or_else(String::new, |maximum| format!(", at most {maximum} here"));
    format!(
        "all {most} that this process may have are open, and a group of {size} ranks needs up to {needed}: raise the limit \
         (`ulimit -n {enough}`{bound}), or drop groups that are not used"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_exhaustion_error_states_the_number_needed() {
        let text = descriptor_limit_message(&Errno::MFILE.into(), 4, 4);
        assert!(text.contains("4 ranks needs up to 21") && text.contains("`ulimit -n "), "{text}");
        let text = descriptor_limit_message(&Errno::NFILE.into(), 4, 0);
        assert!(text.contains("needs up to 13: raise fs.file-max"), "{text}");
        assert!(is_out_of_descriptors(&Errno::MFILE.into()) && !is_out_of_descriptors(&Errno::AGAIN.into()));
    }

    #[test]
    fn nothing_fits_within_any_limit() {
        assert!(check_file_size(0).is_ok() && check_memory(0).is_ok());
    }
}
