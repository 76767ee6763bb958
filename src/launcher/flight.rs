//! Manages the workers' flight recordings ([`convoke_recorder`]): their folder, their evaluation after a
//! failure, and their removal.
//!
//! Workers that use convoke's runtime record the operations of their groups. The default folder is in this
//! launcher's log folder. The workers create it, so that no folder exists if none of them records. The
//! launcher removes it after the job has succeeded. CONVOKE_FLIGHT_DIR names another folder, which keeps its
//! recordings. If the variable is empty, workers record nothing in files.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use convoke_env::{Generation, vars};
use convoke_recorder::layout::{Exit, Header};
use convoke_recorder::process;
use convoke_recorder::snapshot::{Observer, snapshots};
use convoke_recorder::{Recording, folder};
use nix::unistd::{AccessFlags, access};

use crate::config::FlightDir;
use crate::messages::print_message;
use crate::report;

/// Name of the folder of recordings in the log folder of a launcher.
const FOLDER_NAME: &str = "flight";
/// Most communication groups that a report describes.
const MAX_GROUPS: usize = 8;

/// The folder of the flight recordings; none if workers record nothing in files.
#[derive(Debug)]
pub(crate) struct FlightFolder {
    folder: Option<PathBuf>,
    /// True if the launcher removes the folder after the job has succeeded.
    remove_on_success: bool,
}

/// What the launcher knows of the workers of a round that has ended.
#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) generation: Option<Generation>,
    pub(crate) began: SystemTime,
    /// Rank of each worker that has ended, and how it ended.
    pub(crate) exits: Vec<(usize, Exit)>,
}

impl FlightFolder {
    /// Chooses the folder. `log_folder` is the log folder of this launcher, if there is one.
    pub(crate) fn new(config: &FlightDir, log_folder: Option<&Path>) -> Self {
        let FlightDir::Path(folder) = config else {
            let log_folder = log_folder.filter(|_| *config == FlightDir::LogFolder);
            return Self {
                folder: log_folder.map(|folder| folder.join(FOLDER_NAME)),
                remove_on_success: true,
            };
        };
        // Workers may change their working directory, so the path must be absolute.
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.clone());
        let writable = || access(&folder, AccessFlags::W_OK).map_err(std::io::Error::from);
        let usable = fs::create_dir_all(&folder).and_then(|()| writable()).inspect_err(|error| {
            let (name, folder) = (vars::FLIGHT_DIR, folder.display());
            print_message(&format!("warning: {name}={folder}: {error}; calls are not recorded in files"));
        });
        Self { folder: usable.ok().map(|()| folder), remove_on_success: false }
    }

    /// Returns the folder whose path the workers get.
    pub(crate) fn folder(&self) -> Option<&OsStr> {
        self.folder.as_deref().map(Path::as_os_str)
    }

    /// Returns what the recordings show about a round, for its report; `None` without recordings. Also writes
    /// into each recording how its worker ended, for those who read it later.
    pub(crate) fn analyze(&self, round: &Round) -> Option<report::FlightSummary> {
        let folder = self.folder.as_ref()?;
        let here = process::current();
        let wanted = |header: &Header| round.contains(header, here.boot_id);
        let mut recordings = folder::read(std::slice::from_ref(folder), wanted).recordings;
        for (path, recording) in &mut recordings {
            if let Some(exit) = round.exit(recording, here.boot_id) {
                recording.exit = Some(exit);
                // If the exit status cannot be written, the recording contains less but remains readable.
                let _ = folder::write_exit(path, &exit);
            }
        }
        if recordings.is_empty() {
            return None;
        }
        let observers: Vec<Observer<'_>> = (recordings.iter())
            .map(|(_, recording)| Observer {
                recording,
                status: process::status(&recording.header.process, &here),
            })
            .collect();
        let open = snapshots(&observers, unix_ns(SystemTime::now()));
        let open = open.into_iter().filter(|snapshot| snapshot.is_open());
        let mut groups: Vec<String> = open.map(|snapshot| snapshot.to_string()).collect();
        if groups.len() > MAX_GROUPS {
            let more = groups.len() - MAX_GROUPS;
            groups.truncate(MAX_GROUPS);
            groups.push(format!("and {more} more groups"));
        }
        Some(report::FlightSummary { folder: folder.display().to_string(), groups })
    }

    /// Removes the recordings after the job has succeeded, since nobody needs them.
    pub(crate) fn discard(&self) {
        if let Some(folder) = self.folder.as_ref().filter(|_| self.remove_on_success) {
            // The folder usually exists only if the workers use convoke's runtime.
            let _ = fs::remove_dir_all(folder);
        }
    }
}

impl Round {
    /// Returns whether a recording was made in this round, by a worker of this node or another.
    fn contains(&self, header: &Header, boot_id: u128) -> bool {
        match (self.generation, header.generation) {
            (Some(ours), Some(theirs)) => ours == theirs,
            // A round of another launcher has no generation. Its recordings are told apart by host and start
            // time.
            (None, None) => {
                header.process.boot_id == boot_id && header.started_unix_ns >= unix_ns(self.began)
            }
            (Some(_), None) | (None, Some(_)) => false,
        }
    }

    fn exit(&self, recording: &Recording, boot_id: u128) -> Option<Exit> {
        let header = &recording.header;
        let rank = header.rank.filter(|_| header.process.boot_id == boot_id)? as usize;
        self.exits.iter().find(|(ended, _)| *ended == rank).map(|(_, exit)| *exit)
    }
}

/// Converts a time to nanoseconds since 1970.
pub(crate) fn unix_ns(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
