//! A pool of CUDA events: creating one costs more than recording it.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, sys};

use super::driver::bind;

const MAX_FREE_EVENTS: usize = 1024;

#[derive(Debug)]
pub(super) struct EventPool {
    pub(super) context: Arc<CudaContext>,
    pub(super) free: Mutex<Vec<CudaEvent>>,
}

impl EventPool {
    /// Returns an event that completes when `stream` has executed all work enqueued so far.
    pub(super) fn record(self: &Arc<Self>, stream: &CudaStream) -> Result<RecordedEvent, DriverError> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let event = free.map_or_else(|| self.context.new_event(None), Ok)?;
        event.record(stream)?;
        Ok(RecordedEvent { event: Some(event), pool: Arc::clone(self) })
    }
}

#[derive(Debug)]
pub(super) struct RecordedEvent {
    /// The event; `None` once it is dropped.
    event: Option<CudaEvent>,
    pool: Arc<EventPool>,
}

impl RecordedEvent {
    /// Returns whether the stream has passed the event. An error means that the device has failed for good.
    pub(super) fn is_complete(&self) -> Result<bool, DriverError> {
        // The calling thread may not have used the device before, so its context is set first.
        bind(&self.pool.context)?;
        let _capture_mode = RelaxedCapture::new()?;
        self.event.as_ref().map_or(Ok(true), CudaEvent::try_is_complete)
    }

    /// Makes `stream`, but not the host, wait for the event.
    pub(super) fn block_stream(&self, stream: &CudaStream) -> Result<(), DriverError> {
        self.event.as_ref().map_or(Ok(()), |event| stream.wait(event))
    }
}

/// While this value exists, its thread may query events even if another thread captures a graph.
struct RelaxedCapture {
    before: sys::CUstreamCaptureMode,
}

#[allow(unsafe_code)]
impl RelaxedCapture {
    fn new() -> Result<Self, DriverError> {
        let mut before = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges the capture mode of this thread.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut before) }.result()?;
        Ok(Self { before })
    }
}

#[allow(unsafe_code)]
impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // SAFETY: exchanges the capture mode of this thread. It fails only if the argument is no mode.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.before) };
    }
}

impl Drop for RecordedEvent {
    fn drop(&mut self) {
        let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < MAX_FREE_EVENTS {
            free.extend(self.event.take());
        }
    }
}
