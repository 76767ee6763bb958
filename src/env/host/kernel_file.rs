//! Reads files that the kernel generates, those below /proc and /sys.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Initial capacity of the buffer. Most of these files fit into one read of this many bytes. Their reported
/// length is 0, so that [`std::fs::read_to_string`] starts with 32 bytes and reads eight times.
const USUAL_BYTES: usize = 8 << 10;

/// Returns the text of a file, or an empty text if the file cannot be read.
#[must_use]
pub fn read(path: &Path) -> String {
    let mut text = String::with_capacity(USUAL_BYTES);
    match File::open(path).and_then(|mut file| file.read_to_string(&mut text)) {
        Ok(_) => text,
        Err(_) => String::new(),
    }
}

/// Returns the name of a process; empty if the process has ended.
#[must_use]
pub fn process_name(pid: i32) -> String {
    read(Path::new(&format!("/proc/{pid}/comm"))).trim_end().to_owned()
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
