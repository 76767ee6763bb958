//! Buffers registered with NCCL, which it can access directly.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop, sys};

use super::backend::DeviceBackend;
use super::buffer::device_memory;
use super::core::Core;
use super::driver::bind;
use crate::api::group::Group;
use crate::error::{CommError, DeviceError};
use crate::nccl::{NcclError, RegistrationHandle};

/// The longest time to wait for operations before a dropped buffer is deregistered.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(10);

/// A buffer registered with NCCL because it is used often; from [`Group::register`]. It gives access to the
/// elements like the buffer itself. Dropping it waits at most 10 seconds for all device operations of the
/// group, and deregisters the buffer. If they are not done by then, the memory is never freed.
pub struct Registration<T> {
    /// The registration; taken by `drop`.
    registration: Option<RegistrationHandle>,
    core: Weak<Core>,
    /// The buffer, dropped after it is deregistered.
    buffer: ManuallyDrop<CudaSlice<T>>,
}

/// A buffer that could not be registered, unchanged, with the reason.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct Unregistered<T> {
    /// The reason.
    pub error: CommError,
    /// The buffer.
    pub buffer: CudaSlice<T>,
}

impl Group {
    /// Registers a buffer that will be used often, as with `ncclCommRegister`. If the machine supports it,
    /// operations on the buffer need no copies into NCCL's own memory. The registration is local to this
    /// rank. NCCL omits the copies only if all ranks register their buffers, and only for memory that
    /// CUDA can share between processes (CUDA IPC). Memory of `cuMemAlloc` can be shared. Memory of
    /// `cuMemAllocAsync` from the device's default pool cannot.
    ///
    /// # Errors
    /// [`Unregistered`], with the buffer and one of these errors: [`CommError::Unsupported`] if NCCL is older
    /// than 2.19 or the group is staged through the host. [`CommError::Device`] if the group has no device,
    /// or NCCL fails or is busy.
    #[allow(clippy::result_large_err)] // with the buffer, which must not be lost
    pub fn register<T>(&self, buffer: CudaSlice<T>) -> Result<Registration<T>, Unregistered<T>> {
        match self.register_buffer(&buffer) {
            Ok((registration, core)) => {
                Ok(Registration { registration: Some(registration), core, buffer: ManuallyDrop::new(buffer) })
            }
            Err(error) => Err(Unregistered { error, buffer }),
        }
    }

    fn register_buffer<T>(
        &self,
        buffer: &CudaSlice<T>,
    ) -> Result<(RegistrationHandle, Weak<Core>), CommError> {
        let core = &DeviceBackend::of(self)?.core;
        let unsupported =
            |what: &str| CommError::Unsupported(format!("registered memory is not available {what}"));
        let busy = || {
            let what = "another NCCL call of this process has not returned yet".to_owned();
            DeviceError::from(NcclError::Call { function: "ncclCommRegister", what, detail: None })
        };
        let staged = || unsupported("when data are staged through host memory");
        let nccl = core.transport.nccl().ok_or_else(staged)?;
        let _nccl_guard = nccl.lock_calls(self.limit().deadline()).ok_or_else(busy)?;
        let communicator = nccl.communicator();
        let Some(communicator) = &*communicator else {
            return Err(CommError::Destroyed { group: self.name().to_owned() });
        };
        bind(&core.context).map_err(DeviceError::driver("the device failed"))?;
        let (at, _wait) = buffer.device_ptr(buffer.stream());
        // SAFETY: the buffer is kept, and deregistered before it is freed.
        #[allow(unsafe_code)]
        let registration =
            unsafe { communicator.register(at, buffer.num_bytes()) }.map_err(DeviceError::from)?;
        let old = || unsupported(&format!("with NCCL {}", nccl.library.version()));
        Ok((registration.ok_or_else(old)?, Arc::downgrade(core)))
    }
}

impl<T> Registration<T> {
    /// Deregisters the buffer. Returns whether the buffer may be freed.
    fn deregister(&mut self) -> bool {
        // A communicator that was freed holds no registrations.
        let Some((registration, core)) = self.registration.take().zip(self.core.upgrade()) else {
            return true;
        };
        if core.group.check_process().is_err() {
            return false;
        }
        let Some(nccl) = core.transport.nccl() else { unreachable!("only NCCL registers memory") };
        let until = Instant::now() + DEREGISTER_TIMEOUT;
        if !core.finish_all(until) {
            return false;
        }
        let Some(_nccl_guard) = nccl.lock_calls(until) else { return false };
        if let Some(communicator) = &*nccl.communicator() {
            if bind(&core.context).is_err() {
                return false;
            }
            communicator.deregister(registration);
        }
        true
    }
}

impl<T> Drop for Registration<T> {
    fn drop(&mut self) {
        if self.deregister() {
            // SAFETY: dropped once, as the last action.
            #[allow(unsafe_code)]
            unsafe {
                ManuallyDrop::drop(&mut self.buffer);
            }
        }
    }
}

impl<T> std::ops::Deref for Registration<T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.buffer
    }
}

// The buffer is not accessible as a `CudaSlice`, so it cannot be moved out while NCCL knows it.
device_memory! { [T] Registration<T>, |registration| registration.buffer.len(), buffer; }

impl<T> fmt::Debug for Registration<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").field("len", &self.buffer.len()).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Unregistered<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unregistered").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<T> From<Unregistered<T>> for CommError {
    fn from(unregistered: Unregistered<T>) -> Self {
        unregistered.error
    }
}
