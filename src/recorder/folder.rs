//! Reading recordings from files and folders.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::layout::{Exit, FILE_BYTES, HEADER_LEN, Header, header, slots};
use crate::recording::Recording;

/// Extension of the file names of recordings.
pub const EXTENSION: &str = "flight";
/// Most files that one search opens.
const MAX_FILES: usize = 1 << 16;
/// Most recordings that one search returns.
const MAX_RECORDINGS: usize = 4096;
/// Most levels of folders below a given folder.
const MAX_DEPTH: usize = 4;
/// Most attempts to read a group record or call record that its writer is changing.
const MAX_ATTEMPTS: usize = 16;

/// The result of a search for recordings.
#[derive(Debug, Default)]
pub struct FoundRecordings {
    /// Recordings, in the order of their paths.
    pub recordings: Vec<(PathBuf, Recording)>,
    /// Paths that could not be read, each with the reason.
    pub skipped: Vec<(PathBuf, String)>,
}

/// Reads the recordings in `paths` for whose header `wanted` returns true.
///
/// A path may be a file or a folder. In folders, and in folders below them up to 4 levels, files whose
/// names end in `.flight` are read. At most 4096 recordings are returned.
#[must_use]
pub fn read(paths: &[PathBuf], wanted: impl Fn(&Header) -> bool) -> FoundRecordings {
    let mut found = FoundRecordings::default();
    let mut files = Vec::new();
    for path in paths {
        list(path, MAX_DEPTH, true, &mut files, &mut found.skipped);
    }
    for path in files {
        match read_file(&path, &wanted) {
            Ok(Some(_)) if found.recordings.len() == MAX_RECORDINGS => {
                found.skipped.push((path, format!("only {MAX_RECORDINGS} recordings are read")));
                break;
            }
            Ok(Some(recording)) => found.recordings.push((path, recording)),
            Ok(None) => {}
            Err(why) => found.skipped.push((path, why)),
        }
    }
    found
}

fn list(
    path: &Path,
    depth: usize,
    is_given: bool,
    files: &mut Vec<PathBuf>,
    skipped: &mut Vec<(PathBuf, String)>,
) {
    let is_recording = path.extension().is_some_and(|extension| extension == EXTENSION);
    // Symbolic links in a folder are not followed.
    let metadata = match if is_given { fs::metadata(path) } else { fs::symlink_metadata(path) } {
        Ok(metadata) => metadata,
        Err(error) if is_given => return skipped.push((path.to_owned(), error.to_string())),
        // The file was removed during the search.
        Err(_) => return,
    };
    if metadata.is_dir() {
        match fs::read_dir(path) {
            Ok(entries) if depth > 0 => {
                let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
                paths.sort();
                paths.iter().for_each(|path| list(path, depth - 1, false, files, skipped));
            }
            Ok(_) => {}
            Err(error) => skipped.push((path.to_owned(), error.to_string())),
        }
    } else if metadata.is_file() && (is_given || is_recording) && files.len() < MAX_FILES {
        files.push(path.to_owned());
    } else if is_given {
        // Only regular files are opened: opening a pipe would block until its other end is opened.
        skipped.push((path.to_owned(), "not a file".to_owned()));
    }
}

/// Reads one recording, even while it is being written. Returns `None` if `wanted` returns false for
/// its header.
fn read_file(path: &Path, wanted: &impl Fn(&Header) -> bool) -> Result<Option<Recording>, String> {
    let text = |error: io::Error| error.to_string();
    let file = File::open(path).map_err(text)?;
    let mut bytes = Vec::with_capacity(FILE_BYTES);
    (&file).take(8 * HEADER_LEN as u64).read_to_end(&mut bytes).map_err(text)?;
    let header = Recording::header(&bytes).map_err(|error| error.to_string())?;
    if !wanted(&header) {
        return Ok(None);
    }
    (&file).take((FILE_BYTES - bytes.len()) as u64).read_to_end(&mut bytes).map_err(text)?;
    if bytes.len() == FILE_BYTES {
        reread_changed(&file, &mut bytes).map_err(text)?;
    }
    Recording::decode(&bytes).map(Some).map_err(|error| error.to_string())
}

/// Writes into the recording at `path` when and how its process ended. The launcher does this.
///
/// # Errors
/// Fails if the file cannot be opened or written.
pub fn write_exit(path: &Path, exit: &Exit) -> io::Result<()> {
    let file = File::options().write(true).open(path)?;
    let bytes: Vec<u8> = exit.encode().iter().flat_map(|word| word.to_le_bytes()).collect();
    file.write_all_at(&bytes, 8 * header::EXIT as u64)
}

/// Reads each group record and call record again into `bytes`, the copy of the file, until two reads
/// agree: the writer may have changed the record during the first read.
fn reread_changed(file: &File, bytes: &mut [u8]) -> io::Result<()> {
    for (at, length) in slots().map(|(at, words)| (8 * at, 8 * words)) {
        let mut again = vec![0; length];
        let mut attempts = 0;
        while {
            file.read_exact_at(&mut again, at as u64)?;
            bytes[at..at + length] != again
        } {
            bytes[at..at + length].copy_from_slice(&again);
            attempts += 1;
            if attempts == MAX_ATTEMPTS {
                // An odd lock word marks the record as unreadable.
                bytes[at] |= 1;
                break;
            }
        }
    }
    Ok(())
}
