//! The reasons why NCCL cannot be used.

use std::fmt;
use std::path::PathBuf;

use super::candidates;

/// A version of NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// The major version, such as 2 of 2.30.7.
    pub major: u32,
    /// The minor version, such as 30.
    pub minor: u32,
    /// The patch level, such as 7.
    pub patch: u32,
}

impl Version {
    /// The oldest usable version: the first that can abort during setup, and split communicators.
    pub(super) const MINIMUM: Self = Self { major: 2, minor: 18, patch: 0 };

    /// Decodes NCCL's version number: 2708 is 2.7.8; from 2.9 on, 21803 is 2.18.3.
    pub(super) fn from_code(code: i32) -> Option<Self> {
        let code = u32::try_from(code).ok().filter(|&code| code >= 1000)?;
        let (major, hundreds) = if code < 10_000 { (code / 1000, 10) } else { (code / 10_000, 100) };
        Some(Self { major, minor: code / 100 % hundreds, patch: code % 100 })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The reason why NCCL cannot be used.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// The library was not found.
    #[error(
        "NCCL was not found{}; install it (pip install nvidia-nccl-cu13, or apt-get install libnccl2), or say where it is \
         in {}",
        display_tried(tried),
        candidates::LIBRARY_VARIABLE
    )]
    NotFound {
        /// The places that were tried, with the system's errors.
        tried: Vec<(PathBuf, String)>,
    },
    /// The library is older than convoke needs.
    #[error("{} is NCCL {version}; {} or newer is needed", path.display(), Version::MINIMUM)]
    TooOld {
        /// The library.
        path: PathBuf,
        /// The version that the library reports.
        version: Version,
    },
    /// The library is not NCCL, or is broken.
    #[error("{} is not a usable NCCL library: {what}", path.display())]
    Unusable {
        /// The library.
        path: PathBuf,
        /// The missing function or other defect.
        what: String,
    },
    /// A call failed.
    #[error("{function}: {what} ({})", detail.as_deref().unwrap_or("set NCCL_DEBUG=WARN for more details"))]
    Call {
        /// The name of the function.
        function: &'static str,
        /// NCCL's description of the error.
        what: String,
        /// NCCL's last error message, if it has one. `NCCL_DEBUG=WARN` prints more on standard output.
        detail: Option<String>,
    },
}

convoke_env::debug_as_display!(NcclError);

impl NcclError {
    /// The error for a call that reported success but returned nothing.
    pub(crate) fn empty_result(function: &'static str) -> Self {
        Self::Call { function, what: "it succeeded but returned nothing".to_owned(), detail: None }
    }
}

/// The places that were tried, for display.
fn display_tried(tried: &[(PathBuf, String)]) -> impl fmt::Display {
    fmt::from_fn(move |f| {
        for (index, (place, said)) in tried.iter().enumerate() {
            let before = if index == 0 { ": tried" } else { "," };
            // The system's message usually begins with the path.
            match said.strip_prefix(&*place.to_string_lossy()) {
                Some(rest) => write!(f, "{before} {}{rest}", place.display())?,
                None => write!(f, "{before} {} ({said})", place.display())?,
            }
        }
        Ok(())
    })
}
