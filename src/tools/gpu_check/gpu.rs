//! The GPU under test, and groups on it.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use convoke_comm::device::cudarc::driver::{CudaContext, CudaStream, DriverError};
use convoke_comm::device::{self, DeviceError, DeviceOptions};
use convoke_comm::nccl::NcclError;
use convoke_comm::{CommError, Group, GroupOptions};
use convoke_store::{MemoryStore, Store};
use convoke_train::TrainError;
use cudarc::nccl::result::NcclError as RawError;

/// An error because of which a check cannot run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckError {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Nccl(#[from] NcclError),
    #[error(transparent)]
    Train(#[from] TrainError),
    #[error("NCCL, called by cudarc: {0:?}")]
    Raw(cudarc::nccl::sys::ncclResult_t),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("cannot write the report {}: {source}", path.display())]
    Report { path: PathBuf, source: io::Error },
    #[error("{0}")]
    Other(String),
}

impl From<DriverError> for CheckError {
    fn from(error: DriverError) -> Self {
        Self::Device(DeviceError::driver("the GPU failed")(error))
    }
}

impl From<RawError> for CheckError {
    fn from(error: RawError) -> Self {
        Self::Raw(error.0)
    }
}

/// The first GPU that is visible to this process.
pub(crate) struct Gpu {
    pub(crate) context: Arc<CudaContext>,
}

impl Gpu {
    pub(crate) fn new() -> Result<Self, CheckError> {
        Ok(Self { context: device::open(0)? })
    }

    /// Returns a group of this process alone, with the GPU as its device.
    pub(crate) fn group(&self) -> Result<Group, CheckError> {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let group = Group::new(store, 0, 1, GroupOptions::default())?;
        Ok(group.with_device(&self.context, DeviceOptions::default())?)
    }

    pub(crate) fn stream(&self) -> Result<Arc<CudaStream>, CheckError> {
        Ok(self.context.new_stream()?)
    }
}
