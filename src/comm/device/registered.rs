//! Memory that NCCL knows, so that it may go there directly.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, DevicePtr};

use super::error::DeviceError;
use super::side::Core;
use crate::error::CommError;
use crate::group::Group;
use crate::nccl::Registered;

/// A buffer that NCCL knows as one that is used often; from [`Group::register`]. Its elements are reached through it, and it is
/// given back when it is dropped.
pub struct Registration<T> {
    /// Taken when it is dropped.
    known: Option<Registered>,
    core: Arc<Core>,
    /// Dropped after NCCL has forgotten it.
    buffer: CudaSlice<T>,
}

impl Group {
    /// Has NCCL know a buffer that will be used often, as with `ncclCommRegister`: where the machine can, operations on it
    /// need no copies into NCCL's own memory. Local to this rank; whether the others register theirs is up to them, but
    /// NCCL gains only where all do.
    ///
    /// # Errors
    /// [`CommError::Unsupported`] if this version of NCCL cannot (2.19 is the first) or the group goes through the host.
    /// [`CommError::Device`].
    pub fn register<T>(&self, buffer: CudaSlice<T>) -> Result<Registration<T>, CommError> {
        let core = Arc::clone(&self.side()?.core);
        let unsupported = |what: &str| Err(CommError::Unsupported(format!("registered memory {what}")));
        let known = {
            let _alone = core.alone_in_nccl();
            let Some((library, communicator)) = core.nccl() else { return unsupported("through the host") };
            let Some(communicator) = &*communicator else {
                return Err(CommError::Destroyed { group: self.name().to_owned() });
            };
            let stream = buffer.stream();
            core.context.bind_to_thread().map_err(DeviceError::driver("the device failed"))?;
            let (at, _wait) = buffer.device_ptr(stream);
            // SAFETY: the buffer is kept, and taken back before it goes.
            #[allow(unsafe_code)]
            let known =
                unsafe { communicator.register(at, buffer.num_bytes()) }.map_err(DeviceError::from)?;
            match known {
                Some(known) => known,
                None => return unsupported(&format!("with NCCL {}", library.version())),
            }
        };
        Ok(Registration { known: Some(known), core, buffer })
    }
}

impl<T> std::ops::Deref for Registration<T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.buffer
    }
}

impl<T> std::ops::DerefMut for Registration<T> {
    fn deref_mut(&mut self) -> &mut CudaSlice<T> {
        &mut self.buffer
    }
}

impl<T> Drop for Registration<T> {
    fn drop(&mut self) {
        if self.core.group.of_this_process().is_err() {
            return;
        }
        let _alone = self.core.alone_in_nccl();
        if let (Some(known), Some((_, communicator))) = (self.known.take(), self.core.nccl())
            && let Some(communicator) = &*communicator
        {
            communicator.deregister(known);
        }
    }
}

impl<T> fmt::Debug for Registration<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").field("len", &self.buffer.len()).finish_non_exhaustive()
    }
}
