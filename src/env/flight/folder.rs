//! Recordings in files and folders.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::layout::{Exit, FILE_BYTES, HEADER_WORDS, Header, header, slots};
use super::recording::Recording;

/// How the names of recordings end.
pub const EXTENSION: &str = "flight";
/// Most files that are looked at, most recordings that are read, and how deep below a folder.
const FILES: usize = 1 << 16;
const RECORDINGS: usize = 4096;
const DEPTH: usize = 4;
/// How often a place is read again that its writer is changing.
const TRIES: usize = 16;

/// What was found.
#[derive(Debug, Default)]
pub struct Found {
    /// Recordings, in the order of their paths.
    pub recordings: Vec<(PathBuf, Recording)>,
    /// What could not be read, and why.
    pub skipped: Vec<(PathBuf, String)>,
}

/// Reads the recordings that are `wanted`: the files in `paths`, and in folders among them all files whose names end in
/// `.flight`, also in folders below, at most 4 levels. At most 4096 are read.
#[must_use]
pub fn read(paths: &[PathBuf], wanted: impl Fn(&Header) -> bool) -> Found {
    let mut found = Found::default();
    let mut files = Vec::new();
    for path in paths {
        list(path, DEPTH, true, &mut files, &mut found.skipped);
    }
    for path in files {
        match read_file(&path, &wanted) {
            Ok(Some(_)) if found.recordings.len() == RECORDINGS => {
                found.skipped.push((path, format!("only {RECORDINGS} recordings are read")));
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
    named: bool,
    files: &mut Vec<PathBuf>,
    skipped: &mut Vec<(PathBuf, String)>,
) {
    let is_ours = path.extension().is_some_and(|extension| extension == EXTENSION);
    // Links in a folder are not followed.
    let metadata = match if named { fs::metadata(path) } else { fs::symlink_metadata(path) } {
        Ok(metadata) => metadata,
        Err(error) if named => return skipped.push((path.to_owned(), error.to_string())),
        // It went while we looked.
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
    } else if metadata.is_file() && (named || is_ours) && files.len() < FILES {
        files.push(path.to_owned());
    } else if named {
        // Opening a pipe would wait for its other end.
        skipped.push((path.to_owned(), "not a file".to_owned()));
    }
}

/// Reads one recording if it is wanted, also while it is being written.
fn read_file(path: &Path, wanted: &impl Fn(&Header) -> bool) -> Result<Option<Recording>, String> {
    let text = |error: io::Error| error.to_string();
    let file = File::open(path).map_err(text)?;
    let mut bytes = Vec::with_capacity(FILE_BYTES);
    (&file).take(8 * HEADER_WORDS as u64).read_to_end(&mut bytes).map_err(text)?;
    let header = Recording::header(&bytes).map_err(|error| error.to_string())?;
    if !wanted(&header) {
        return Ok(None);
    }
    (&file).take((FILE_BYTES - bytes.len()) as u64).read_to_end(&mut bytes).map_err(text)?;
    if bytes.len() == FILE_BYTES {
        settle(&file, &mut bytes).map_err(text)?;
    }
    Recording::decode(&bytes).map(Some).map_err(|error| error.to_string())
}

/// Writes into the recording at `path` how its process ended.
///
/// # Errors
/// The file cannot be written.
pub fn write_exit(path: &Path, exit: &Exit) -> io::Result<()> {
    let file = File::options().write(true).open(path)?;
    let bytes: Vec<u8> = exit.encode().iter().flat_map(|word| word.to_le_bytes()).collect();
    file.write_all_at(&bytes, 8 * header::EXIT as u64)
}

/// A copy is not made in one piece: what was changed while it was made is read again until it stands still.
fn settle(file: &File, bytes: &mut [u8]) -> io::Result<()> {
    for (at, length) in slots().map(|(at, words)| (8 * at, 8 * words)) {
        let mut again = vec![0; length];
        let mut tries = 0;
        while {
            file.read_exact_at(&mut again, at as u64)?;
            bytes[at..at + length] != again
        } {
            bytes[at..at + length].copy_from_slice(&again);
            tries += 1;
            if tries == TRIES {
                // An odd lock says that it cannot be read.
                bytes[at] |= 1;
                break;
            }
        }
    }
    Ok(())
}
