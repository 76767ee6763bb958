//! Enqueues operations on a stream.

#![allow(unsafe_code)]

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use cudarc::driver::{CudaStream, DriverError, sys};
use smallvec::SmallVec;

use super::call_wait::CallWait;
use super::core::{Core, EnqueuedOperation, Failure};
use super::driver::bind;
use super::pending::{Search, commands};
use super::staged::Staging;
use super::transport::{DeviceTransport, NcclTransport, try_lock};
use super::type_mapping::{Step, peers, to_nccl};
use crate::collectives::call::Call;
use crate::engine::{Completion, TimeLimit};
use crate::error::CommError;
use crate::flight::CallInfo;
use crate::nccl::{Communicator, NcclCall, NcclError, Progress};

impl Core {
    /// Enqueues the steps of one call, with its number of buffers, on a stream, after the earlier work there.
    /// If the group is staged through the host, the steps are complete when this returns.
    ///
    /// # Safety
    /// As [`Communicator::enqueue`], of a stream of this backend's context.
    pub(super) unsafe fn enqueue(
        self: &Arc<Self>,
        call: Call,
        (steps, buffers): (&[Step], usize),
        stream: &CudaStream,
        limit: TimeLimit,
    ) -> Result<Option<Arc<EnqueuedOperation>>, CommError> {
        let seq = self.seq.fetch_add(1, Ordering::Relaxed);
        self.check(call, seq)?;
        let limit = limit.started();
        bind(&self.context).map_err(|error| self.driver_failed(error, call, seq))?;
        let completion = Completion::nonblocking(limit, Arc::clone(&self.callback_queue));
        let info = CallInfo::device(call, seq, self.flight.ns(completion.started_at));
        let _ = completion.step.set(self.flight.begin(&info));
        let mut call_wait = CallWait::new(call, seq, limit);
        // SAFETY: the caller promises it.
        let carried_out = unsafe { self.carry_out(steps, stream, &mut call_wait) };
        // The guard is held until this operation is pending, so no other call uses NCCL before.
        let recorded = carried_out.and_then(|nccl_guard| {
            // While a stream captures a CUDA graph, an event would belong to the graph, which has not been
            // launched.
            let failed = |error| self.driver_failed(error, call, seq);
            if is_captured(stream).map_err(failed)? {
                return Ok(None);
            }
            let recorded = self.events.record(stream).map_err(failed)?;
            Ok(Some((recorded, nccl_guard)))
        });
        if !matches!(recorded, Ok(Some(_))) {
            completion.complete(Ok(None));
        }
        if let (Err(_), Some(step)) = (&recorded, completion.step.get()) {
            step.end(false);
        }
        let Some((recorded, nccl_guard)) = recorded? else { return Ok(None) };
        let (deadline, key) = (completion.deadline, stream.cu_stream() as usize);
        let (peers, core) = (peers(steps), Arc::downgrade(self));
        let operation = Arc::new(EnqueuedOperation { completion, call, seq, recorded, peers, core });
        let mut pending = self.pending();
        let many = pending.add(Arc::clone(&operation), key, deadline, commands(steps.len(), buffers));
        let must_wake = pending.must_wake_watchdog();
        drop((pending, nccl_guard));
        if must_wake {
            self.watchdog.wake();
        }
        if many {
            self.reap(Search::Quick);
            self.notify_callbacks();
        }
        Ok(Some(operation))
    }

    /// Carries out the steps; returns the guard that keeps other calls out of NCCL, or `None` without NCCL.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn carry_out(
        self: &Arc<Self>,
        steps: &[Step],
        stream: &CudaStream,
        call_wait: &mut CallWait,
    ) -> Result<Option<MutexGuard<'_, ()>>, CommError> {
        // Waits until fewer commands are in progress: a full CUDA queue blocks its callers.
        self.wait_for(call_wait, || {
            if self.pending().is_full() {
                self.reap(Search::Quick);
                self.notify_callbacks();
            }
            (!self.pending().is_full()).then_some(())
        })?;
        match &self.transport {
            DeviceTransport::Nccl(nccl) => {
                let version = nccl.library.version();
                let mut calls: SmallVec<[NcclCall; 2]> = SmallVec::with_capacity(steps.len());
                for step in steps {
                    calls.push(to_nccl(*step, version).map_err(CommError::Unsupported)?);
                }
                // SAFETY: the caller promises it.
                unsafe { self.enqueue_nccl(nccl, &calls, stream, call_wait) }.map(Some)
            }
            DeviceTransport::Staged(staging) => {
                // SAFETY: the caller promises it.
                unsafe { self.stage(staging, steps, stream, call_wait) }.map(|()| None)
            }
        }
    }

    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn enqueue_nccl<'a>(
        self: &'a Arc<Self>,
        nccl: &'a NcclTransport,
        steps: &[NcclCall],
        stream: &CudaStream,
        call_wait: &mut CallWait,
    ) -> Result<MutexGuard<'a, ()>, CommError> {
        let (call, seq) = (call_wait.call, call_wait.seq);
        let nccl_guard = self.wait_for(call_wait, || nccl.try_lock_calls())?;
        let ask = |ask: &dyn Fn(&Communicator) -> Result<Progress, NcclError>| {
            let guard = nccl.communicator();
            let Some(known) = &*guard else { return Err(self.error(call, seq)) };
            let progress = ask(known);
            drop(guard);
            progress.map_err(|error| {
                self.fail(Failure::Device(error.into()));
                self.error(call, seq)
            })
        };
        // SAFETY: the caller promises it.
        let mut entered = ask(&|known| unsafe { known.enqueue(steps, stream.cu_stream().cast()) });
        // The event that is recorded next covers only operations that NCCL has enqueued, so wait for that.
        while let Ok(Progress::InProgress) = entered {
            entered = self.pause(call_wait).and_then(|()| ask(&Communicator::progress));
        }
        // NCCL may still be in this call; `ensure_aborted` aborts it and waits for its end.
        entered.map(|_| nccl_guard).inspect_err(|_| self.ensure_aborted())
    }

    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn stage(
        &self,
        staging: &Mutex<Staging>,
        steps: &[Step],
        stream: &CudaStream,
        call_wait: &mut CallWait,
    ) -> Result<(), CommError> {
        let mut staging = self.wait_for(call_wait, || try_lock(staging))?;
        let (call, seq) = (call_wait.call, call_wait.seq);
        let failed = |error| self.driver_failed(error, call, seq);
        if is_captured(stream).map_err(failed)? {
            return Err(CommError::Unsupported(
                "operations staged through host memory in a CUDA graph".to_owned(),
            ));
        }
        let group = self.group.with_timeout(call_wait.remaining());
        let settle = || {
            let recorded = self.events.record(stream).map_err(failed)?;
            self.wait_for(call_wait, || recorded.is_complete().map(|over| over.then_some(())).transpose())?
                .map_err(failed)
        };
        // SAFETY: the caller promises it.
        let staged = unsafe { staging.carry_out(&group, steps, stream, settle) };
        if let Err(CommError::Device(error)) = &staged {
            // The other ranks wait for this rank, so the group ends.
            self.fail(Failure::Device(error.clone()));
        }
        staged
    }
}

/// Returns whether the stream is capturing a graph, so that its operations are not executed.
fn is_captured(stream: &CudaStream) -> Result<bool, DriverError> {
    stream.capture_status().map(|status| status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}
