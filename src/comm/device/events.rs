//! Events of CUDA, used again and again: making one costs more than recording it.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, sys};

use super::driver::bind;

/// Events that are kept for later.
const KEPT: usize = 1024;

/// The events of one device that nobody uses.
#[derive(Debug)]
pub(super) struct Events {
    context: Arc<CudaContext>,
    free: Mutex<Vec<CudaEvent>>,
}

impl Events {
    pub(super) fn new(context: Arc<CudaContext>) -> Arc<Self> {
        Arc::new(Self { context, free: Mutex::default() })
    }

    /// An event that is over when `stream` has come to where it is now.
    pub(super) fn record(self: &Arc<Self>, stream: &CudaStream) -> Result<Recorded, DriverError> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let event = free.map_or_else(|| self.context.new_event(None), Ok)?;
        event.record(stream)?;
        Ok(Recorded { event: Some(event), of: Arc::clone(self) })
    }
}

/// An event in use.
#[derive(Debug)]
pub(super) struct Recorded {
    /// Until it is dropped.
    event: Option<CudaEvent>,
    of: Arc<Events>,
}

impl Recorded {
    /// Whether the stream has come past it. An error is one of the device, which does nothing more.
    pub(super) fn is_over(&self) -> Result<bool, DriverError> {
        // It may be asked by a thread that has had nothing to do with devices.
        bind(&self.of.context)?;
        let _relaxed = Relaxed::new()?;
        self.event.as_ref().map_or(Ok(true), CudaEvent::try_is_complete)
    }

    /// Has `stream` wait until it is over; the host does not.
    pub(super) fn hold(&self, stream: &CudaStream) -> Result<(), DriverError> {
        self.event.as_ref().map_or(Ok(()), |event| stream.wait(event))
    }
}

/// While it lives this thread may ask for events though some thread captures a graph.
struct Relaxed {
    before: sys::CUstreamCaptureMode,
}

#[allow(unsafe_code)]
impl Relaxed {
    fn new() -> Result<Self, DriverError> {
        let mut before = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges what this thread has.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut before) }.result()?;
        Ok(Self { before })
    }
}

#[allow(unsafe_code)]
impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as above. It fails only if the argument is no mode.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.before) };
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        let mut free = self.of.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < KEPT {
            free.extend(self.event.take());
        }
    }
}
