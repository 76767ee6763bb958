//! Handles of operations that are under way.

use std::fmt;
use std::future::Future;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use super::buffers::Memory;
use super::{CommError, Group};
#[cfg(feature = "nccl")]
use crate::device::begun::Begun;
use crate::engine::{Outcome, Ticket};

/// An operation that is under way, and the memory it works on.
///
/// The memory comes back with the result: from [`wait`](Self::wait), or from `.await`, under any runtime. The
/// operation goes on whether or not anybody waits; whoever waits helps. A handle that is dropped lets its
/// operation go on: the memory is freed when it is done, and the last handle of the group waits for it when it is
/// dropped. In a scope the scope then waits.
///
/// After an error the memory is not given back, its contents would be unspecified; nobody touches it any more.
#[must_use = "the result is known only to who waits for it"]
pub struct Work<M: Memory> {
    state: Option<State<M>>,
}

struct State<M> {
    /// `None` if there was nothing to do.
    ticket: Option<Arc<Ticket>>,
    /// Of an operation on a device.
    #[cfg(feature = "nccl")]
    begun: Option<Arc<Begun>>,
    group: Group,
    /// Initialised. Not a plain `M`: the engine writes where it points to, and a `Box` or `&mut` that is moved
    /// would claim that nobody else does.
    memory: MaybeUninit<M>,
}

impl<M: Memory> Work<M> {
    pub(super) fn new(group: Group, ticket: Option<Arc<Ticket>>, memory: MaybeUninit<M>) -> Self {
        let state = State {
            ticket,
            #[cfg(feature = "nccl")]
            begun: None,
            group,
            memory,
        };
        Self { state: Some(state) }
    }

    /// Waits until it is done.
    ///
    /// # Errors
    /// What the blocking call returns.
    pub fn wait(mut self) -> Result<M::Output, CommError> {
        loop {
            self.help(None);
            if let Some(result) = self.result() {
                return result;
            }
        }
    }

    /// Waits at most `time`; gives the handle back if it is not done by then. The operation's own deadline is
    /// another one, and ends it for good.
    ///
    /// # Errors
    /// What the blocking call returns.
    pub fn wait_timeout(mut self, time: Duration) -> Result<Result<M::Output, Self>, CommError> {
        let until = Instant::now().checked_add(time);
        self.help(until);
        match self.result() {
            Some(result) => result.map(Ok),
            None => Ok(Err(self)),
        }
    }

    /// Its result if it is done now, else the handle back.
    ///
    /// # Errors
    /// What the blocking call returns.
    pub fn test(self) -> Result<Result<M::Output, Self>, CommError> {
        if let Some(State { ticket: Some(ticket), group, .. }) = &self.state
            && !ticket.is_done()
            && !self.is_on_device()
        {
            group.nudge();
        }
        self.wait_timeout(Duration::ZERO)
    }

    /// Whether it is done, well or not.
    #[must_use]
    pub fn is_completed(&self) -> bool {
        #[cfg(feature = "nccl")]
        if let Some(begun) = self.begun() {
            return begun.look();
        }
        self.ticket().is_none_or(|ticket| ticket.is_done())
    }

    /// Has `callback` called once when it is done, well or not; at once if it is. On whichever thread found out,
    /// outside of all locks; it may begin operations, and should not wait for them.
    pub fn on_complete(&self, callback: impl FnOnce() + Send + 'static) {
        self.hurry();
        match self.ticket() {
            Some(ticket) => {
                if let Err(callback) = ticket.call(Box::new(callback)) {
                    callback();
                }
            }
            None => callback(),
        }
    }

    /// A descriptor that polls as readable once it is done, for event loops that wait for many things; `None` if
    /// it was done from the start. Nobody should read from it. It lives as long as the handle.
    ///
    /// # Errors
    /// [`CommError::System`] if the process has no descriptor left.
    pub fn descriptor(&self) -> Result<Option<BorrowedFd<'_>>, CommError> {
        self.hurry();
        self.ticket().map(|ticket| ticket.descriptor()).transpose()
    }

    fn ticket(&self) -> Option<&Arc<Ticket>> {
        self.state.as_ref()?.ticket.as_ref()
    }

    #[cfg(feature = "nccl")]
    fn begun(&self) -> Option<&Arc<Begun>> {
        self.state.as_ref()?.begun.as_ref()
    }

    fn is_on_device(&self) -> bool {
        #[cfg(feature = "nccl")]
        return self.begun().is_some();
        #[cfg(not(feature = "nccl"))]
        false
    }

    /// Nobody drives a device: who waits for a ticket of one without looking has it looked at for him.
    fn hurry(&self) {
        #[cfg(feature = "nccl")]
        if let Some(begun) = self.begun() {
            begun.hurry();
        }
    }

    /// Drives until it is done or `until`.
    fn help(&self, until: Option<Instant>) {
        #[cfg(feature = "nccl")]
        if let Some(begun) = self.begun() {
            return begun.wait(until);
        }
        if let Some(State { ticket: Some(ticket), group, .. }) = &self.state {
            group.wait_for(std::slice::from_ref(ticket), until);
        }
    }

    /// Its result, once it is done.
    fn result(&mut self) -> Option<Result<M::Output, CommError>> {
        if !self.is_completed() {
            return None;
        }
        let State { ticket, memory, .. } = self.state.take()?;
        // SAFETY: initialised from the start, and read once: `state` is gone.
        #[allow(unsafe_code)]
        let memory = unsafe { memory.assume_init() };
        let outcome: Outcome = ticket.and_then(|ticket| ticket.take()).unwrap_or(Ok(None));
        Some(outcome.map(|envelope| memory.give_back(envelope)))
    }
}

#[cfg(feature = "nccl")]
impl Work<()> {
    /// Of an operation on a device; `None` if there was nothing to do, or nothing that can be waited for.
    pub(crate) fn on_device(group: Group, begun: Option<Arc<Begun>>) -> Self {
        let ticket = begun.as_ref().map(|begun| Arc::clone(begun.ticket()));
        Self { state: Some(State { ticket, begun, group, memory: MaybeUninit::new(()) }) }
    }

    /// Has a stream wait until it is done; the host does not. What is enqueued there later finds the result.
    ///
    /// # Errors
    /// [`CommError::Device`] if the device failed.
    pub fn wait_on(&self, stream: &cudarc::driver::CudaStream) -> Result<(), CommError> {
        self.begun().map_or(Ok(()), |begun| begun.hold(stream)).map_err(CommError::from)
    }
}

impl<M: Memory> Future for Work<M> {
    type Output = Result<M::Output, CommError>;

    /// # Panics
    /// If it is polled again after it was ready.
    #[allow(clippy::panic)]
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let work = self.get_mut();
        work.hurry();
        if let Some(ticket) = work.ticket()
            && ticket.wake(context.waker())
        {
            return Poll::Pending;
        }
        match work.result() {
            Some(result) => Poll::Ready(result),
            None => panic!("a Work was polled after it was ready"),
        }
    }
}

/// Nothing in it is pinned: the memory is elsewhere.
impl<M: Memory> Unpin for Work<M> {}

impl<M: Memory> Drop for Work<M> {
    fn drop(&mut self) {
        let is_on_device = self.is_on_device();
        let Some(State { ticket, group, memory, .. }) = self.state.take() else { return };
        // SAFETY: initialised from the start, and read once: `state` is gone. If the engine still works on it, it
        // is kept alive below, or is borrowed and the scope waits.
        #[allow(unsafe_code)]
        let memory = unsafe { memory.assume_init() };
        let Some(ticket) = ticket else { return };
        ticket.drop_handle();
        if ticket.is_done() {
            return;
        }
        match memory.into_owned() {
            // With the group, whose side on the device must not end while this is under way.
            Some(owned) if is_on_device => drop(ticket.keep(Box::new((owned, group)))),
            // The group, if nobody else has it, takes leave when this is done.
            Some(owned) => drop(ticket.keep(Box::new(owned))),
            None => {}
        }
    }
}

impl<M: Memory> fmt::Debug for Work<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("is_completed", &self.is_completed()).finish_non_exhaustive()
    }
}

/// Waits until all are done; their results in the same order.
///
/// # Errors
/// The first error in that order, after all are done.
pub fn wait_all<M: Memory>(works: impl IntoIterator<Item = Work<M>>) -> Result<Vec<M::Output>, CommError> {
    let results: Vec<_> = works.into_iter().map(Work::wait).collect();
    results.into_iter().collect()
}

/// Waits until one of them is done, takes it out of the list, and gives its former place in it and its result;
/// `None` if the list is empty. The others move up.
///
/// # Errors
/// That of the one that is done.
pub fn wait_any<M: Memory>(works: &mut Vec<Work<M>>) -> Result<Option<(usize, M::Output)>, CommError> {
    let Some(first) = works.first().and_then(|work| work.state.as_ref()).map(|state| state.group.clone())
    else {
        return Ok(None);
    };
    loop {
        if let Some(index) = works.iter().position(Work::is_completed) {
            return works.remove(index).wait().map(|output| Some((index, output)));
        }
        let of_first = |work: &&Work<M>| {
            !work.is_on_device() && work.state.as_ref().is_some_and(|state| state.group.is_same(&first))
        };
        let tickets: Vec<_> = works.iter().filter(of_first).filter_map(Work::ticket).cloned().collect();
        if tickets.len() == works.len() {
            first.wait_for(&tickets, None);
        } else {
            // One thread cannot drive several groups at a time; their own threads do.
            let me = Waker::from(Arc::new(Unpark(std::thread::current())));
            works.iter().for_each(Work::hurry);
            if works.iter().filter_map(Work::ticket).all(|ticket| ticket.wake(&me)) {
                std::thread::park();
            }
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
