//! Reads files that the kernel generates, below /proc and /sys.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Most of these files fit into one read of this many bytes. Their reported length is 0, so that
/// [`std::fs::read_to_string`] starts with 32 bytes and reads eight times.
const USUAL_BYTES: usize = 8 << 10;

/// Returns the text of a file. Returns an empty text if the system does not provide it.
pub(crate) fn read(path: &Path) -> String {
    let mut text = String::with_capacity(USUAL_BYTES);
    match File::open(path).and_then(|mut file| file.read_to_string(&mut text)) {
        Ok(_) => text,
        Err(_) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_file_reads_as_empty_text() {
        assert!(read(Path::new("/proc/self/status")).contains("SigIgn:"));
        assert_eq!(read(Path::new("/proc/self/none")), "");
    }
}
