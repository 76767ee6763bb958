//! Why NCCL cannot be used.

use std::fmt;
use std::path::PathBuf;

use super::places;

/// A version of NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// As in 2.30.7: 2.
    pub major: u32,
    /// 30.
    pub minor: u32,
    /// 7.
    pub patch: u32,
}

impl Version {
    /// The first that can be told to abort while it is setting up, and splits groups.
    pub(super) const LEAST: Self = Self { major: 2, minor: 18, patch: 0 };

    /// From NCCL's own number: 2708 is 2.7.8, from 2.9 on 21803 is 2.18.3.
    pub(super) fn of(code: i32) -> Option<Self> {
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

/// Why NCCL cannot be used.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// There is no such library.
    #[error(
        "NCCL was not found{}; install it (pip install nvidia-nccl-cu13, or apt-get install libnccl2), or say where it is \
         in {}",
        Tried(tried),
        places::CHOSEN
    )]
    NotFound {
        /// Where it was looked for, and what the system said.
        tried: Vec<(PathBuf, String)>,
    },
    /// It is older than what convoke needs.
    #[error("{} is NCCL {version}; {} or newer is needed", path.display(), Version::LEAST)]
    TooOld {
        /// The library.
        path: PathBuf,
        /// What it says it is.
        version: Version,
    },
    /// It is no NCCL, or a broken one.
    #[error("{} is no NCCL that can be used: {what}", path.display())]
    Unusable {
        /// The library.
        path: PathBuf,
        /// What is missing or wrong.
        what: String,
    },
    /// A call failed.
    #[error("{function}: {what}{}", Detail(detail.as_deref()))]
    Call {
        /// Name of the function.
        function: &'static str,
        /// What NCCL says that went wrong.
        what: String,
        /// What it says beside that, if anything. `NCCL_DEBUG=WARN` has it say more on standard output.
        detail: Option<String>,
    },
}

/// As [`Display`](fmt::Display): what a `main` prints that returns it.
impl fmt::Debug for NcclError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl NcclError {
    /// It said that all is well, and gave nothing.
    pub(crate) fn nothing(function: &'static str) -> Self {
        Self::Call { function, what: "it gave nothing".to_owned(), detail: None }
    }
}

/// What NCCL says beside the name of an error.
struct Detail<'a>(Option<&'a str>);

impl fmt::Display for Detail<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(detail) => write!(f, " ({detail})"),
            None => write!(f, " (NCCL_DEBUG=WARN has NCCL say more)"),
        }
    }
}

/// What was tried, for people.
struct Tried<'a>(&'a [(PathBuf, String)]);

impl fmt::Display for Tried<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (place, said)) in self.0.iter().enumerate() {
            let before = if index == 0 { ": tried" } else { "," };
            // The system's words begin with the name as a rule.
            match said.strip_prefix(&*place.to_string_lossy()) {
                Some(rest) => write!(f, "{before} {}{rest}", place.display())?,
                None => write!(f, "{before} {} ({said})", place.display())?,
            }
        }
        Ok(())
    }
}
