//! What carries the bytes of a group.

use std::fmt;

use crate::group::Group;

/// What carries the bytes of a group between its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backend {
    /// Memory that all ranks share: they are on one host. For buffers in host memory.
    SharedMemory,
    /// TCP connections between hosts, and memory inside each; or connections everywhere, where memory cannot be shared
    /// or shall not be. For buffers in host memory.
    Tcp,
}

impl Backend {
    /// The backends of this build.
    pub const ALL: &[Self] = &[Self::SharedMemory, Self::Tcp];

    /// Its name, in lower case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SharedMemory => "shm",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whether this build can make groups: it has a backend.
#[must_use]
pub const fn is_available() -> bool {
    !Backend::ALL.is_empty()
}

impl Group {
    /// What carries the bytes of this group.
    #[must_use]
    pub fn backend(&self) -> Backend {
        if self.is_in_memory() { Backend::SharedMemory } else { Backend::Tcp }
    }
}
