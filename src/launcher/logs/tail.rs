//! Keeps the last bytes of a worker's stderr, for the report of a failure.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The number of bytes kept of each worker's stderr: enough for a long traceback with some output after it.
pub(super) const TAIL_BYTES: usize = 32 << 10;

/// The last bytes of a stderr that the launcher copies. Clones share the bytes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tail(Arc<Mutex<TailBuffer>>);

#[derive(Debug, Default)]
struct TailBuffer {
    bytes: Vec<u8>,
    /// True if earlier bytes were dropped.
    cut: bool,
}

impl Tail {
    /// Adds bytes that the launcher has just copied.
    pub(super) fn push(&self, bytes: &[u8]) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes.len() >= TAIL_BYTES {
            kept.cut |= bytes.len() > TAIL_BYTES || !kept.bytes.is_empty();
            kept.bytes.clear();
            kept.bytes.extend_from_slice(&bytes[bytes.len() - TAIL_BYTES..]);
            return;
        }
        // Drops old bytes only when the buffer has twice the needed size, so that each byte is moved at most
        // about once.
        if kept.bytes.len() + bytes.len() > 2 * TAIL_BYTES {
            let gone = kept.bytes.len() + bytes.len() - TAIL_BYTES;
            kept.bytes.drain(..gone);
            kept.cut = true;
        }
        kept.bytes.extend_from_slice(bytes);
    }

    fn get(&self) -> (Vec<u8>, bool) {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let start = kept.bytes.len().saturating_sub(TAIL_BYTES);
        (kept.bytes[start..].to_vec(), kept.cut || start > 0)
    }
}

/// Where the report gets the last lines of a worker's stderr.
#[derive(Debug, Clone)]
pub(crate) enum StderrTail {
    /// Nowhere: the output bypassed the launcher, or its last lines are not needed.
    Unknown,
    /// From the bytes that the launcher kept while it copied the output.
    Stream(Tail),
    /// From the file to which the worker itself writes.
    File(PathBuf),
}

impl StderrTail {
    /// Returns the last bytes of the stderr, and whether others came before them. Returns no bytes if they
    /// cannot be read.
    pub(crate) fn read(&self) -> (Vec<u8>, bool) {
        match self {
            Self::Unknown => (Vec::new(), false),
            Self::Stream(tail) => tail.get(),
            Self::File(path) => end_of_file(path).unwrap_or_default(),
        }
    }
}

fn end_of_file(path: &Path) -> io::Result<(Vec<u8>, bool)> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    let start = len.saturating_sub(TAIL_BYTES as u64);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(TAIL_BYTES as u64).read_to_end(&mut bytes)?;
    Ok((bytes, start > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_keeps_the_last_bytes_for_any_chunk_sizes() {
        for step in [1, 7, 1000, TAIL_BYTES - 1, TAIL_BYTES, 3 * TAIL_BYTES] {
            let all: Vec<u8> = (0..5 * TAIL_BYTES + 13).map(|at| (at % 251) as u8).collect();
            let tail = Tail::default();
            for part in all.chunks(step) {
                tail.push(part);
            }
            let (kept, cut) = tail.get();
            assert_eq!((kept.as_slice(), cut), (&all[all.len() - TAIL_BYTES..], true), "in steps of {step}");
        }
        let tail = Tail::default();
        tail.push(b"short");
        assert_eq!(tail.get(), (b"short".to_vec(), false));
    }

    #[test]
    fn tail_of_a_file_reads_only_its_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [vec![b'a'; 10], vec![b'b'; TAIL_BYTES]].concat()).unwrap();
        assert_eq!(StderrTail::File(file.path().to_owned()).read(), (vec![b'b'; TAIL_BYTES], true));
        assert_eq!(StderrTail::File("/no/such/file".into()).read(), (Vec::new(), false));
        assert_eq!(StderrTail::Unknown.read(), (Vec::new(), false));
    }
}
