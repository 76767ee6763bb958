//! Splits a communicator.

use std::ffi::c_int;
use std::ptr::{self, NonNull};

use super::communicator::Communicator;
use super::error::NcclError;
use super::free::SetDevice;
use super::functions::Functions;
use super::types::{Comm, Config, NO_COLOR};

/// A split in progress: NCCL writes the new communicator to `into` when the split is done.
pub(crate) struct PendingSplit {
    functions: &'static Functions,
    set_device: SetDevice,
    /// The destination of NCCL's write; its address stays fixed until NCCL has written.
    into: Box<SplitResult>,
    /// Set once NCCL will no longer write to `into`.
    settled: bool,
}

#[allow(unsafe_code)]
// SAFETY: as for a communicator. NCCL writes `into` before the parent reports that it is done, and it is read
// only then.
unsafe impl Send for PendingSplit {}

/// The cell to which NCCL writes the new communicator.
struct SplitResult(*mut Comm);

impl Default for SplitResult {
    fn default() -> Self {
        Self(ptr::null_mut())
    }
}

#[allow(unsafe_code)]
impl Communicator {
    /// Begins to split this communicator: ranks with the same color get one new communicator, in the order of
    /// their keys. All ranks call it; those that want no communicator pass `None`. When [`Self::progress`] of
    /// this communicator reports that the split is done, [`PendingSplit::into_communicator`] returns the new
    /// one.
    ///
    /// The result of this call does not tell whether the split is done: only `progress` does.
    pub(crate) fn begin_split(
        &self,
        color_and_key: Option<(usize, usize)>,
    ) -> Result<PendingSplit, NcclError> {
        let mut into = Box::<SplitResult>::default();
        let mut config = Config::nonblocking();
        let (color, key) = color_and_key.map_or((NO_COLOR, 0), |(color, key)| (color as c_int, key as c_int));
        // SAFETY: NCCL copies `config`, and writes to `into` until it reports that it is done. `PendingSplit`
        // keeps `into` until then (see its `drop`).
        let result =
            unsafe { (self.functions.comm_split)(self.raw(), color, key, &raw mut into.0, &raw mut config) };
        self.check("ncclCommSplit", result)?;
        Ok(PendingSplit {
            functions: self.functions,
            set_device: self.set_device.clone(),
            into,
            settled: false,
        })
    }
}

impl PendingSplit {
    /// Returns the new communicator; `None` for a rank without a color. Call it only when the parent
    /// communicator reports that the split is done.
    pub(crate) fn into_communicator(mut self) -> Option<Communicator> {
        self.settled = true;
        let handle = Some(NonNull::new(self.into.0)?);
        Some(Communicator { functions: self.functions, handle, set_device: self.set_device.clone() })
    }
}

impl Drop for PendingSplit {
    fn drop(&mut self) {
        if !self.settled {
            // The split was abandoned, and NCCL may still write here: leak 8 bytes, once for each group that
            // fails so.
            let _ = Box::leak(std::mem::take(&mut self.into));
        }
    }
}
