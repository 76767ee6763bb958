//! The transport of a group.

use std::fmt;

/// The transport that carries data between the ranks of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backend {
    /// Memory that all ranks share, since they are on one host. For buffers in host memory.
    SharedMemory,
    /// TCP connections between hosts, and shared memory inside each host. Ranks of a host also use TCP if
    /// memory cannot be shared, or sharing is disabled. For buffers in host memory.
    Tcp,
}

impl Backend {
    /// The transports that this build supports.
    pub const ALL: &[Self] = &[Self::SharedMemory, Self::Tcp];

    /// Returns the name of the transport, in lower case.
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

/// Returns true if this build can form groups, which needs at least one transport.
#[must_use]
pub const fn is_available() -> bool {
    !Backend::ALL.is_empty()
}
