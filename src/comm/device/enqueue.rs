//! How an operation gets on a stream.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use cudarc::driver::{CudaStream, sys};
use smallvec::SmallVec;

use super::begun::{Begun, Poll};
use super::driver::bind;
use super::element::Of;
use super::ending::Failure;
use super::side::{Core, Way, lock};
use super::watch::LOOK;
use super::words::{By, in_nccl, peers};
use crate::call::Call;
use crate::cause::{Cause, Report};
use crate::engine::{Limit, Ticket};
use crate::error::CommError;
use crate::flight::Told;
use crate::nccl::{Communicator, Library, Progress, Step};

impl Core {
    /// Carries out the steps of one call on a stream, behind what is there: NCCL's, or all of it if it goes through the
    /// host.
    ///
    /// # Safety
    /// As [`Communicator::enqueue`], of a stream of this side's context.
    #[allow(unsafe_code)]
    pub(super) unsafe fn enqueue(
        self: &Arc<Self>,
        call: Call,
        steps: &[Step<Of, By>],
        stream: &CudaStream,
        limit: Limit,
    ) -> Result<Option<Arc<Begun>>, CommError> {
        let seq = self.seq.fetch_add(1, Ordering::Relaxed);
        self.check(call, seq)?;
        let limit = limit.begun();
        bind(&self.context).map_err(|error| self.broken(error, call, seq))?;
        let ticket = Arc::new(Ticket::nonblocking(limit, Arc::clone(&self.chores)));
        let _ = ticket.step.set(self.track.begin(&Told::device(call, seq, self.track.ns(ticket.made))));
        let room = self.await_room(call, seq, &ticket);
        let enqueued = room.and_then(|()| match &self.way {
            // SAFETY: the caller's.
            Way::Nccl { library, communicator } => unsafe {
                self.enqueue_nccl(call, seq, (*library, communicator), steps, stream, &ticket)
            },
            Way::Staged(staging) => {
                let group =
                    self.group.with_timeout(ticket.deadline.saturating_duration_since(Instant::now()));
                let mut staging = staging.lock().unwrap_or_else(PoisonError::into_inner);
                // SAFETY: the caller's.
                unsafe { staging.carry_out(&group, steps, stream) }
            }
        });
        if let Err(error) = enqueued {
            ticket.complete(Ok(None));
            if let Some(step) = ticket.step.get() {
                step.end(false);
            }
            return Err(error);
        }
        // Events of what is captured in a graph tell of the graph, which nobody has launched.
        let status = stream.capture_status().map_err(|error| self.broken(error, call, seq))?;
        if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            ticket.complete(Ok(None));
            return Ok(None);
        }
        let recorded = self.events.record(stream).map_err(|error| self.broken(error, call, seq))?;
        let (deadline, key) = (ticket.deadline, stream.cu_stream() as usize);
        let (peers, core) = (peers(steps), Arc::downgrade(self));
        let begun = Arc::new(Begun { ticket, call, seq, recorded, peers, core });
        let mut watch = self.watched();
        let (first, many) = (watch.is_empty(), watch.add(Arc::clone(&begun), key, deadline, steps.len()));
        let done = if many { watch.reap(|begun| begun.recorded.is_over()).0 } else { Vec::new() };
        drop(watch);
        if first {
            self.bell.notify_all();
        }
        if !done.is_empty() {
            done.iter().for_each(|begun| begun.ticket.complete(Ok(None)));
            self.hand_on_chores();
        }
        Ok(Some(begun))
    }

    /// Waits until few enough operations are under way.
    fn await_room(&self, call: Call, seq: u64, ticket: &Ticket) -> Result<(), CommError> {
        let (mut wait, mut looked) = (Poll::default(), Instant::now());
        while self.watched().is_full() {
            self.check_in_time(call, seq, ticket, &mut looked)?;
            self.reap();
            self.hand_on_chores();
            wait.pause();
        }
        Ok(())
    }

    /// Whether an operation that cannot be enqueued yet may be waited for. It may be the watchdog that waits, in a callback: so it
    /// is also looked whether the group goes on.
    fn check_in_time(
        &self,
        call: Call,
        seq: u64,
        ticket: &Ticket,
        looked: &mut Instant,
    ) -> Result<(), CommError> {
        let now = Instant::now();
        if now - *looked >= LOOK {
            self.look_around();
            *looked = now;
        }
        if now >= ticket.deadline {
            let after_ms = ticket.timeout.as_millis() as u64;
            let cause = Cause::Timeout { missing: Vec::new(), after_ms };
            self.fail(Failure::Own(Report::new(self.group.rank(), cause)));
        }
        self.check(call, seq)
    }

    /// # Safety
    /// As [`Self::enqueue`].
    #[allow(unsafe_code)]
    unsafe fn enqueue_nccl(
        &self,
        call: Call,
        seq: u64,
        (library, communicator): (&'static Library, &Mutex<Option<Communicator>>),
        steps: &[Step<Of, By>],
        stream: &CudaStream,
        ticket: &Ticket,
    ) -> Result<(), CommError> {
        let version = library.version();
        let steps: Result<SmallVec<[Step; 2]>, String> =
            steps.iter().map(|step| in_nccl(*step, version)).collect();
        let steps = steps.map_err(CommError::Unsupported)?;
        let raw = stream.cu_stream().cast();
        let _alone = self.alone_in_nccl();
        let guard = lock(communicator);
        let Some(known) = &*guard else { return Err(self.error(call, seq)) };
        // SAFETY: the caller's.
        let mut progress = unsafe { known.enqueue(&steps, raw) };
        drop(guard);
        let (mut wait, mut looked) = (Poll::default(), Instant::now());
        // Only what is enqueued is before the event that is recorded next.
        while let Ok(Progress::UnderWay) = progress {
            self.check_in_time(call, seq, ticket, &mut looked)?;
            wait.pause();
            let guard = lock(communicator);
            let Some(known) = &*guard else { return Err(self.error(call, seq)) };
            progress = known.progress();
        }
        progress.map(drop).map_err(|error| self.nccl_failed(error, call, seq))
    }
}
