//! The classes of failures. Pure. docs/reference/failure-model.md lists the classes for users; a test
//! compares the two lists.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The class of a failure: what kind of event ended a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Class {
    Exception,
    Panic,
    Abort,
    Segfault,
    BusError,
    IllegalInstruction,
    ArithmeticError,
    OutOfMemory,
    DeviceOutOfMemory,
    Killed,
    Terminated,
    CpuLimit,
    FileSizeLimit,
    DiskFull,
    MissingLibrary,
    ImportError,
    MissingProgram,
    NotExecutable,
    CpuBinding,
    UsageError,
    ResourceLimit,
    AddressInUse,
    EarlyExit,
    Signal,
    Exit,
    Timeout,
    PeerLost,
    Stopped,
    /// A class that this version does not know, sent by a launcher of another version.
    #[serde(other)]
    Unknown,
}

/// How well a class of failure explains why the job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CauseKind {
    /// The failure arose in this process, so it can be the root cause.
    Primary,
    /// The failure most likely follows from a failure in another process.
    Consequence,
    /// The launcher ended the process.
    ByLauncher,
}

impl Class {
    /// All classes that this version assigns.
    #[cfg(test)]
    pub(crate) const ALL: [Self; 28] = [
        Self::Exception,
        Self::Panic,
        Self::Abort,
        Self::Segfault,
        Self::BusError,
        Self::IllegalInstruction,
        Self::ArithmeticError,
        Self::OutOfMemory,
        Self::DeviceOutOfMemory,
        Self::Killed,
        Self::Terminated,
        Self::CpuLimit,
        Self::FileSizeLimit,
        Self::DiskFull,
        Self::MissingLibrary,
        Self::ImportError,
        Self::MissingProgram,
        Self::NotExecutable,
        Self::CpuBinding,
        Self::UsageError,
        Self::ResourceLimit,
        Self::AddressInUse,
        Self::EarlyExit,
        Self::Signal,
        Self::Exit,
        Self::Timeout,
        Self::PeerLost,
        Self::Stopped,
    ];

    pub(crate) fn cause_kind(self) -> CauseKind {
        match self {
            Self::Timeout | Self::PeerLost => CauseKind::Consequence,
            Self::Stopped => CauseKind::ByLauncher,
            _ => CauseKind::Primary,
        }
    }
}

/// Formats the class by its name in the JSON report.
impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}
