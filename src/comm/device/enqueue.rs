//! The way of an operation onto a stream.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use cudarc::driver::{CudaStream, DriverError, sys};
use smallvec::SmallVec;

use super::begun::Begun;
use super::driver::bind;
use super::element::Of;
use super::ending::Failure;
use super::patience::Patience;
use super::side::{Core, Way, lock, try_lock};
use super::staged::Staging;
use super::watch::commands;
use super::words::{By, in_nccl, peers};
use crate::call::Call;
use crate::engine::{Limit, Ticket};
use crate::error::CommError;
use crate::flight::Told;
use crate::nccl::{Communicator, NcclError, Progress, Step};

impl Core {
    /// Carries out the steps of one call, which has so many buffers, on a stream, behind its earlier work.
    /// That is NCCL's work, or the whole call if the group is staged through the host.
    ///
    /// # Safety
    ///
    /// As [`Communicator::enqueue`], of a stream of this side's context.
    #[allow(unsafe_code)]
    pub(super) unsafe fn enqueue(
        self: &Arc<Self>,
        call: Call,
        (steps, buffers): (&[Step<Of, By>], usize),
        stream: &CudaStream,
        limit: Limit,
    ) -> Result<Option<Arc<Begun>>, CommError> {
        let seq = self.seq.fetch_add(1, Ordering::Relaxed);
        self.check(call, seq)?;
        let limit = limit.begun();
        bind(&self.context).map_err(|error| self.broken(error, call, seq))?;
        let ticket = Arc::new(Ticket::nonblocking(limit, Arc::clone(&self.chores)));
        let _ = ticket.step.set(self.track.begin(&Told::device(call, seq, self.track.ns(ticket.made))));
        let mut patience = Patience::new(call, seq, limit);
        // SAFETY: the caller promises it.
        let carried_out = unsafe { self.carry_out(steps, stream, &mut patience) };
        // The lock is held until this operation is registered, so no other call uses NCCL before.
        let recorded = carried_out.and_then(|alone| {
            // Events that are captured in a graph belong to the graph, which has not been launched.
            let broken = |error| self.broken(error, call, seq);
            if is_captured(stream).map_err(broken)? {
                return Ok(None);
            }
            let recorded = self.events.record(stream).map_err(broken)?;
            Ok(Some((recorded, alone)))
        });
        let (recorded, alone) = match recorded {
            Ok(Some(recorded)) => recorded,
            Ok(None) => {
                ticket.complete(Ok(None));
                return Ok(None);
            }
            Err(error) => {
                ticket.complete(Ok(None));
                if let Some(step) = ticket.step.get() {
                    step.end(false);
                }
                return Err(error);
            }
        };
        let (deadline, key) = (ticket.deadline, stream.cu_stream() as usize);
        let (peers, core) = (peers(steps), Arc::downgrade(self));
        let begun = Arc::new(Begun { ticket, call, seq, recorded, peers, core });
        let mut watch = self.watched();
        let first = watch.is_empty();
        let many = watch.add(Arc::clone(&begun), key, deadline, commands(steps.len(), buffers));
        drop((watch, alone));
        if first {
            self.bell.notify_all();
        }
        if many {
            self.reap();
            self.hand_on_chores();
        }
        Ok(Some(begun))
    }

    /// Returns the guard that keeps other calls out of NCCL.
    ///
    /// # Safety
    ///
    /// As [`Self::enqueue`].
    #[allow(unsafe_code)]
    unsafe fn carry_out(
        self: &Arc<Self>,
        steps: &[Step<Of, By>],
        stream: &CudaStream,
        patience: &mut Patience,
    ) -> Result<Option<MutexGuard<'_, ()>>, CommError> {
        // Limits the number of operations under way.
        self.wait_for(patience, || {
            if self.watched().is_full() {
                self.reap();
                self.hand_on_chores();
            }
            (!self.watched().is_full()).then_some(())
        })?;
        match &self.way {
            Way::Nccl { library, communicator } => {
                let version = library.version();
                let steps: Result<SmallVec<[Step; 2]>, String> =
                    steps.iter().map(|step| in_nccl(*step, version)).collect();
                let steps = steps.map_err(CommError::Unsupported)?;
                // SAFETY: the caller promises it.
                unsafe { self.enqueue_nccl(communicator, &steps, stream, patience) }.map(Some)
            }
            Way::Staged(staging) => {
                // SAFETY: the caller promises it.
                unsafe { self.stage(staging, steps, stream, patience) }.map(|()| None)
            }
        }
    }

    /// # Safety
    /// As [`Self::enqueue`].
    #[allow(unsafe_code)]
    unsafe fn enqueue_nccl(
        self: &Arc<Self>,
        communicator: &Mutex<Option<Communicator>>,
        steps: &[Step],
        stream: &CudaStream,
        patience: &mut Patience,
    ) -> Result<MutexGuard<'_, ()>, CommError> {
        let (call, seq) = (patience.call, patience.seq);
        let alone = self.wait_for(patience, || self.try_alone_in_nccl())?;
        let ask = |ask: &dyn Fn(&Communicator) -> Result<Progress, NcclError>| {
            let guard = lock(communicator);
            let Some(known) = &*guard else { return Err(self.error(call, seq)) };
            let progress = ask(known);
            drop(guard);
            progress.map_err(|error| self.nccl_failed(error, call, seq))
        };
        // SAFETY: the caller promises it.
        let begun = ask(&|known| unsafe { known.enqueue(steps, stream.cu_stream().cast()) });
        let mut entered = begun.map(|progress| progress == Progress::UnderWay);
        // The event that is recorded next covers only operations that NCCL has enqueued, so wait for that.
        while let Ok(true) = entered {
            entered = self
                .pause(patience)
                .and_then(|()| ask(&Communicator::progress))
                .map(|progress| progress == Progress::UnderWay);
        }
        // NCCL may be in the middle of this call; `have_let_go` waits for it.
        entered.map(|_| alone).inspect_err(|_| self.have_let_go())
    }

    /// # Safety
    /// As [`Self::enqueue`].
    #[allow(unsafe_code)]
    unsafe fn stage(
        &self,
        staging: &Mutex<Staging>,
        steps: &[Step<Of, By>],
        stream: &CudaStream,
        patience: &mut Patience,
    ) -> Result<(), CommError> {
        let mut staging = self.wait_for(patience, || try_lock(staging))?;
        let (call, seq) = (patience.call, patience.seq);
        let broken = |error| self.broken(error, call, seq);
        if is_captured(stream).map_err(broken)? {
            return Err(CommError::Unsupported("operations through the host in a graph of CUDA".to_owned()));
        }
        let group = self.group.with_timeout(patience.rest());
        let settle = || {
            let recorded = self.events.record(stream).map_err(broken)?;
            self.wait_for(patience, || recorded.is_over().map(|over| over.then_some(())).transpose())?
                .map_err(broken)
        };
        // SAFETY: the caller promises it.
        let staged = unsafe { staging.carry_out(&group, steps, stream, settle) };
        if let Err(CommError::Device(error)) = &staged {
            // The other ranks wait for this one, so the group ends.
            self.fail(Failure::Device(error.clone()));
        }
        staged
    }
}

/// Returns whether the stream is capturing a graph, so that its operations are not executed.
fn is_captured(stream: &CudaStream) -> Result<bool, DriverError> {
    stream.capture_status().map(|status| status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}
