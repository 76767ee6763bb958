//! Memory that NCCL knows, so that it may go there directly.

use std::error::Error;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop, sys};

use super::driver::bind;
use super::error::DeviceError;
use super::side::Core;
use crate::error::CommError;
use crate::group::Group;
use crate::nccl::{NcclError, Registered};

/// How long a buffer that is given back is waited for: operations may use it.
const GIVE_BACK: Duration = Duration::from_secs(10);

/// A buffer that NCCL knows as one that is used often; from [`Group::register`]. Its elements are reached through it, as those
/// of the buffer itself. It is given back when it is dropped, when all operations of the group that are under way are done;
/// one that is not in 10 seconds keeps the memory for good.
pub struct Registration<T> {
    /// Taken when it is dropped.
    known: Option<Registered>,
    core: Weak<Core>,
    /// Dropped after NCCL has forgotten it.
    buffer: ManuallyDrop<CudaSlice<T>>,
}

/// A buffer that NCCL does not know, as it was, and why.
pub struct Unregistered<T> {
    /// Why.
    pub error: CommError,
    /// What was to be registered.
    pub buffer: CudaSlice<T>,
}

impl Group {
    /// Has NCCL know a buffer that will be used often, as with `ncclCommRegister`: where the machine can, operations on it
    /// need no copies into NCCL's own memory. Local to this rank; whether the others register theirs is up to them, but
    /// NCCL gains only where all do, and only with memory that the driver shares between processes.
    ///
    /// # Errors
    /// [`Unregistered`], with the buffer: [`CommError::Unsupported`] if this version of NCCL cannot (2.19 is the first)
    /// or the group goes through the host. [`CommError::Device`].
    #[allow(clippy::result_large_err)] // with the buffer, which must not be lost
    pub fn register<T>(&self, buffer: CudaSlice<T>) -> Result<Registration<T>, Unregistered<T>> {
        match self.make_known(&buffer) {
            Ok((known, core)) => {
                Ok(Registration { known: Some(known), core, buffer: ManuallyDrop::new(buffer) })
            }
            Err(error) => Err(Unregistered { error, buffer }),
        }
    }

    fn make_known<T>(&self, buffer: &CudaSlice<T>) -> Result<(Registered, Weak<Core>), CommError> {
        let core = &self.side()?.core;
        let unsupported = |what: &str| Err(CommError::Unsupported(format!("registered memory {what}")));
        let busy = || {
            let what = "another call is still under way".to_owned();
            DeviceError::from(NcclError::Call { function: "ncclCommRegister", what, detail: None })
        };
        let _alone = core.alone_in_nccl(self.limit().deadline()).ok_or_else(busy)?;
        let Some((library, communicator)) = core.nccl() else { return unsupported("through the host") };
        let Some(communicator) = &*communicator else {
            return Err(CommError::Destroyed { group: self.name().to_owned() });
        };
        bind(&core.context).map_err(DeviceError::driver("the device failed"))?;
        let (at, _wait) = buffer.device_ptr(buffer.stream());
        // SAFETY: the buffer is kept, and taken back before it goes.
        #[allow(unsafe_code)]
        let known = unsafe { communicator.register(at, buffer.num_bytes()) }.map_err(DeviceError::from)?;
        match known {
            Some(known) => Ok((known, Arc::downgrade(core))),
            None => unsupported(&format!("with NCCL {}", library.version())),
        }
    }
}

impl<T> Registration<T> {
    /// Has NCCL forget the buffer; whether that may be freed.
    fn give_back(&mut self) -> bool {
        // A communicator that was freed knows nothing any more.
        let Some((known, core)) = self.known.take().zip(self.core.upgrade()) else { return true };
        if core.group.of_this_process().is_err() {
            return false;
        }
        let until = Instant::now() + GIVE_BACK;
        if !core.finish_all(until) {
            return false;
        }
        let Some(_alone) = core.alone_in_nccl(until) else { return false };
        if let Some((_, communicator)) = core.nccl()
            && let Some(communicator) = &*communicator
        {
            if bind(&core.context).is_err() {
                return false;
            }
            communicator.deregister(known);
        }
        true
    }
}

impl<T> Drop for Registration<T> {
    fn drop(&mut self) {
        if self.give_back() {
            // SAFETY: dropped once, as the last thing.
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

// The buffer is not to be had as a whole: what NCCL knows stays in its place.
impl<T> DeviceSlice<T> for Registration<T> {
    fn len(&self) -> usize {
        self.buffer.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.buffer.stream()
    }
}

impl<T> DevicePtr<T> for Registration<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.buffer.device_ptr(stream)
    }
}

impl<T> DevicePtrMut<T> for Registration<T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.buffer.device_ptr_mut(stream)
    }
}

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

impl<T> fmt::Display for Unregistered<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> Error for Unregistered<T> {}

impl<T> From<Unregistered<T>> for CommError {
    fn from(unregistered: Unregistered<T>) -> Self {
        unregistered.error
    }
}
