//! Allocation of buffers. A request that exceeds the free memory is an error here, so that the OOM killer
//! does not kill the process later.

use std::fs;

use super::error::PerfError;

pub(crate) fn try_filled_vec<T: Copy>(len: usize, value: T, what: &str) -> Result<Vec<T>, PerfError> {
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(len).map_err(|_| PerfError::Allocation { what: what.to_owned() })?;
    buffer.resize(len, value);
    Ok(buffer)
}

/// Checks that the host has free memory for `bytes` on each of its `ranks`. The kernel overcommits memory, so
/// an allocation does not fail; the OOM killer would end the process later.
pub(crate) fn check_available(what: &str, bytes: usize, ranks: usize) -> Result<(), PerfError> {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    match available(&text) {
        Some(free) if bytes.saturating_mul(ranks) > free => {
            Err(PerfError::Memory { what: what.to_owned(), bytes, ranks, free })
        }
        _ => Ok(()),
    }
}

/// Number of bytes that programs can allocate without swapping, according to /proc/meminfo.
fn available(meminfo: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<usize>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_and_checked_against_the_need() {
        assert_eq!(available("MemTotal:  9 kB\nMemAvailable:    3 kB\n"), Some(3072));
        assert_eq!(available("MemTotal:  9 kB\n"), None);
        assert!(check_available("a call", 1, 1).is_ok());
        let error = check_available("a call", usize::MAX, 4).unwrap_err().to_string();
        assert!(error.contains("a call needs buffers of") && error.contains("--max-bytes"), "{error}");
    }

    #[test]
    fn too_large_buffer_is_an_error() {
        assert!(try_filled_vec(usize::MAX / 2, 0_u8, "all").is_err());
        assert_eq!(try_filled_vec(2, 7_u16, "two").unwrap(), [7, 7]);
    }
}
