//! Finds NCCL and opens it.

#![allow(unsafe_code)]

use std::ffi::c_int;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use super::candidates::{Candidate, candidates};
use super::error::{NcclError, Version};
use super::functions::Functions;
use super::types::SUCCESS;

/// NCCL as this process has found it. It is never closed, since it runs its own threads.
pub struct Library {
    path: PathBuf,
    version: Version,
    pub(super) functions: Functions,
    _handle: Handle,
}

impl Library {
    /// Returns the library of this process, which is looked for once.
    ///
    /// The environment variable `CONVOKE_NCCL_SO` names it. Otherwise it is `libnccl.so.2` as the system's
    /// loader finds it: already loaded, as by a Python program, in `LD_LIBRARY_PATH`, or in the system's
    /// packages. The last choice is the wheel `nvidia-nccl-cu*` in `VIRTUAL_ENV`, `CONDA_PREFIX` or the
    /// system's Python.
    ///
    /// # Errors
    /// [`NcclError::NotFound`] with the paths that were tried. [`NcclError::TooOld`] if the library is older
    /// than convoke needs. [`NcclError::Unusable`] if it is not NCCL, or lacks a function.
    pub fn load() -> Result<&'static Self, NcclError> {
        static OF_PROCESS: OnceLock<Result<Library, NcclError>> = OnceLock::new();
        let loaded =
            OF_PROCESS.get_or_init(|| Self::open(&candidates(|name| std::env::var_os(name), entries)));
        loaded.as_ref().map_err(Clone::clone)
    }

    /// Opens the first of `candidates` that exists and is new enough. If none is, the error describes the
    /// first candidate that exists.
    pub(super) fn open(candidates: &[Candidate]) -> Result<Self, NcclError> {
        let (mut tried, mut refused) = (Vec::new(), None);
        for candidate in candidates {
            if candidate.guessed && !candidate.path.exists() {
                continue;
            }
            // SAFETY: opening a library runs its initialisers. Its name says that it is NCCL, which every
            // program that links it relies on too.
            let opened = unsafe { Handle::open(Some(&candidate.path), RTLD_NOW | RTLD_LOCAL) };
            match opened {
                Ok(handle) => match Self::from_handle(handle, &candidate.path) {
                    Ok(library) => return Ok(library),
                    Err(error) => {
                        refused.get_or_insert(error);
                    }
                },
                Err(error) => tried.push((candidate.path.clone(), text_of(&error))),
            }
        }
        Err(refused.unwrap_or(NcclError::NotFound { tried }))
    }

    fn from_handle(handle: Handle, path: &Path) -> Result<Self, NcclError> {
        let unusable = |what: String| NcclError::Unusable { path: path.to_owned(), what };
        // SAFETY: the library has the name of NCCL, so this is the function of `nccl.h`.
        let get_version =
            unsafe { handle.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion") };
        let get_version = *get_version.map_err(|_| unusable("it has no ncclGetVersion".to_owned()))?;
        let mut code = 0;
        // SAFETY: writes one number.
        let result = unsafe { get_version(&raw mut code) };
        let version = Version::from_code(code).filter(|_| result == SUCCESS);
        let version = version.ok_or_else(|| unusable(format!("it reports the invalid version {code}")))?;
        if version < Version::MINIMUM {
            return Err(NcclError::TooOld { path: path.to_owned(), version });
        }
        if version.major != Version::MINIMUM.major {
            let known = Version::MINIMUM.major;
            return Err(unusable(format!("it is NCCL {version}, and only NCCL {known} is known here")));
        }
        // SAFETY: the library is NCCL 2, whose versions only add functions to `nccl.h`: those that it has are
        // of the types that `Functions` declares.
        let functions = unsafe { Functions::load(&handle) };
        let functions = functions.map_err(|absent| unusable(format!("it has no {absent}")))?;
        let path = file_at(get_version as usize).unwrap_or_else(|| path.to_owned());
        Ok(Self { path, version, functions, _handle: handle })
    }

    /// Returns the path of the library file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the version of the library.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, version, .. } = self;
        f.debug_struct("Library").field("path", path).field("version", version).finish_non_exhaustive()
    }
}

/// The loader's error message, without the prefix of `libloading`.
fn text_of(error: &libloading::Error) -> String {
    let source = std::error::Error::source(error);
    source.map_or_else(|| error.to_string(), ToString::to_string)
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries.flatten().map(|entry| entry.path()).collect()
}

/// The file that is mapped at an address of this process.
fn file_at(address: usize) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let number = |digits| usize::from_str_radix(digits, 16).ok();
        let holds = (number(start)?..number(end)?).contains(&address);
        rest.find('/').filter(|_| holds).map(|at| PathBuf::from(&rest[at..]))
    })
}
