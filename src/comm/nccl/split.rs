//! How a communicator is cut.

use std::ffi::c_int;
use std::ptr::{self, NonNull};

use super::communicator::Communicator;
use super::error::NcclError;
use super::free::Enter;
use super::functions::Functions;
use super::types::{Comm, Config, NO_COLOR};

/// A split that is under way: NCCL writes the new communicator here when it is done.
pub(crate) struct Splitting {
    functions: &'static Functions,
    enter: Enter,
    /// Its place stays the same while NCCL knows it.
    into: Box<Into>,
    /// Whether NCCL writes no more.
    settled: bool,
}

#[allow(unsafe_code)]
// SAFETY: as of a communicator; `into` is written before the parent says that it is done, and read only then.
unsafe impl Send for Splitting {}

/// Where NCCL writes the new communicator.
struct Into(*mut Comm);

impl Default for Into {
    fn default() -> Self {
        Self(ptr::null_mut())
    }
}

#[allow(unsafe_code)]
impl Communicator {
    /// Begins to cut this group: ranks with the same color are together, in the order of `key`. All ranks call it. When
    /// [`Self::progress`] of this one says that it is done, [`Splitting::take`] has the new one.
    ///
    /// What the call itself returns says nothing of that: it is done only when `progress` says so.
    pub(crate) fn begin_split(&self, color: Option<usize>, key: usize) -> Result<Splitting, NcclError> {
        let mut into = Box::<Into>::default();
        let mut config = Config::nonblocking();
        let color = color.map_or(NO_COLOR, |color| color as c_int);
        // SAFETY: NCCL copies what `config` says, and writes to `into` until it says that it is done; until then
        // `Splitting` keeps it (see its `drop`).
        let result = unsafe {
            (self.functions.comm_split)(self.raw(), color, key as c_int, &raw mut into.0, &raw mut config)
        };
        self.check("ncclCommSplit", result)?;
        Ok(Splitting { functions: self.functions, enter: self.enter.clone(), into, settled: false })
    }
}

impl Splitting {
    /// The new communicator; `None` for a rank without a color. Only when the parent's call is done.
    pub(crate) fn take(mut self) -> Option<Communicator> {
        self.settled = true;
        let handle = Some(NonNull::new(self.into.0)?);
        Some(Communicator { functions: self.functions, handle, enter: self.enter.clone() })
    }
}

impl Drop for Splitting {
    fn drop(&mut self) {
        if !self.settled {
            // It was given up, and may yet be written to: 8 bytes, once for each group that fails so.
            let _ = Box::leak(std::mem::take(&mut self.into));
        }
    }
}
