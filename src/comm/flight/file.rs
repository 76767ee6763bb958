//! The memory of a recording: a mapped file, or ordinary memory that is saved to a file when a group fails.
//!
//! Nothing here may harm the worker. Only a file with allocated blocks is mapped, since a memory write to a
//! page for which the disk has no room raises SIGBUS. The file must be on a local file system, since a memory
//! write to a page of a network file may wait for the file server. After any error the worker records in
//! ordinary memory.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use convoke_recorder::folder::EXTENSION;
use convoke_recorder::layout::{FILE_BYTES, FILE_LEN, Header};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::statfs::{
    BTRFS_SUPER_MAGIC, EXT4_SUPER_MAGIC, F2FS_SUPER_MAGIC, FsType, OVERLAYFS_SUPER_MAGIC, TMPFS_MAGIC,
    XFS_SUPER_MAGIC, fstatfs,
};

use super::call_ring::CallRing;
use super::map::map;
use crate::limits;

/// Local file systems on which memory writes to blocks that `fallocate` has allocated do not fail. (ext2,
/// ext3 and ext4 share one number.)
const LOCAL_FILE_SYSTEMS: [FsType; 6] = [
    BTRFS_SUPER_MAGIC,
    EXT4_SUPER_MAGIC,
    F2FS_SUPER_MAGIC,
    OVERLAYFS_SUPER_MAGIC,
    TMPFS_MAGIC,
    XFS_SUPER_MAGIC,
];
/// Most recordings of one rank and pid in one folder.
const MAX_FILES: u32 = 100;
/// The longest time for which a failing operation waits until its recording is saved.
const SAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// The file to which a recording in ordinary memory is saved.
#[derive(Debug)]
pub(super) struct RecordingFile {
    folder: PathBuf,
    name: String,
    /// The path of the saved file; `None` before the first save. Locked during a save.
    path: Arc<Mutex<Option<PathBuf>>>,
}

impl RecordingFile {
    /// Returns the memory of a new recording: zeroed words, mapped from a new file in `folder` if possible.
    /// Otherwise also returns the file to which to save them, if there is a folder.
    pub(super) fn open(folder: Option<PathBuf>, header: &Header) -> (&'static [AtomicU64], Option<Self>) {
        let name = match header.rank {
            Some(rank) => format!("rank-{rank}.{}", header.process.pid),
            None => format!("pid-{}", header.process.pid),
        };
        if let Some(path) = &folder {
            match mapped(path, &name) {
                Ok(words) => return (words, None),
                Err(error) => {
                    log::warn!(
                        "cannot record calls in folder {}: {error}; they are recorded in memory",
                        path.display()
                    );
                }
            }
        }
        Self::in_memory(folder, name)
    }

    pub(super) fn in_memory(folder: Option<PathBuf>, name: String) -> (&'static [AtomicU64], Option<Self>) {
        let words: Vec<AtomicU64> = (0..FILE_LEN).map(|_| AtomicU64::new(0)).collect();
        let file = folder.map(|folder| Self { folder, name, path: Arc::default() });
        (Box::leak(words.into_boxed_slice()), file)
    }

    /// Saves the recording to a file in the folder, or overwrites the earlier save. It reports no errors and
    /// waits for at most a second, since the calling operation is about to return an error and must not be
    /// delayed.
    pub(super) fn save(&self, ring: &CallRing) {
        let Self { folder, name, path } = self;
        let (folder, name, path, bytes) = (folder.clone(), name.clone(), Arc::clone(path), ring.bytes());
        let (done, wait) = channel();
        let save = move || {
            let mut path = path.lock().unwrap_or_else(PoisonError::into_inner);
            if limits::check_file_size(bytes.len()).is_err() {
                // Exceeding the file size limit would kill the process.
            } else if let Some(path) = &*path {
                let _ = fs::write(path, bytes);
            } else if let Ok((mut file, made)) = create(&folder, &name) {
                match file.write_all(&bytes) {
                    Ok(()) => *path = Some(made),
                    Err(_) => drop(fs::remove_file(made)),
                }
            }
            let _ = done.send(());
        };
        if std::thread::Builder::new().name("convoke-flight".to_owned()).spawn(save).is_ok() {
            let _ = wait.recv_timeout(SAVE_TIMEOUT);
        }
    }
}

/// Creates the recording's file in `folder` and maps it.
fn mapped(folder: &Path, name: &str) -> io::Result<&'static [AtomicU64]> {
    let (file, path) = create(folder, name)?;
    let mapped = allocate(&file).and_then(|()| map(&file, FILE_LEN));
    if mapped.is_err() {
        let _ = fs::remove_file(path);
    }
    mapped
}

/// Creates a file with a name that no other file in `folder` has. Returns the file and its path.
fn create(folder: &Path, name: &str) -> io::Result<(fs::File, PathBuf)> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    for number in 0..MAX_FILES {
        let number = if number == 0 { String::new() } else { format!(".{number}") };
        let path = folder.join(format!("{name}{number}.{EXTENSION}"));
        match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            opened => return opened.map(|file| (file, path)),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Sets the length of the file and allocates the disk blocks for it.
fn allocate(file: &fs::File) -> io::Result<()> {
    if !LOCAL_FILE_SYSTEMS.contains(&fstatfs(file.as_fd())?.filesystem_type()) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    limits::check_file_size(FILE_BYTES)?;
    fallocate(file, FallocateFlags::empty(), 0, FILE_BYTES as i64)?;
    Ok(())
}
