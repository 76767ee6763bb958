//! One store's state, shared by the threads of this process and by a server's event loop.
//!
//! Threads wait on tickets of their own; connections are woken by the event loop, which a bell
//! (an eventfd) calls when a thread of this process has ended some connection's wait.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::state::{Caller, Map, State, Woken};

/// Callers from here on are threads of this process, below are connections.
const FIRST_THREAD: u64 = 1 << 63;

#[derive(Debug)]
pub(crate) struct Hub {
    shared: Mutex<Shared>,
    /// Wakes the event loop; `None` for a store without one.
    bell: Option<EventFd>,
}

/// What the lock guards.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) state: State,
    /// Woken by the operation in progress; empty between operations.
    pub(crate) woken: Woken,
    /// Connections whose wait ended and that the event loop has not told yet.
    connections: Woken,
    threads: Map<Caller, Arc<Ticket>>,
    thread_count: u64,
    /// The server is gone: nothing works any longer.
    closed: bool,
}

/// Where one thread sleeps.
#[derive(Debug, Default)]
pub(crate) struct Ticket {
    outcome: Mutex<Option<WaitEnd>>,
    changed: Condvar,
}

/// How a thread's wait ended, if not by its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitEnd {
    Ready,
    Closed,
}

/// The store's server was shut down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Closed;

impl Hub {
    /// A store for the threads of this process only.
    pub(crate) fn local() -> Hub {
        Hub { shared: Mutex::default(), bell: None }
    }

    /// A store with an event loop, which polls [`bell`](Hub::bell).
    pub(crate) fn served() -> io::Result<Hub> {
        let bell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Hub { shared: Mutex::default(), bell: Some(bell) })
    }

    pub(crate) fn bell(&self) -> Option<&EventFd> {
        self.bell.as_ref()
    }

    /// Calls the event loop.
    pub(crate) fn ring(&self) {
        if let Some(bell) = &self.bell {
            // Fails only when the counter is full: then the bell is ringing anyway.
            let _ = bell.write(1);
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out an operation for a thread and tells all whom it woke.
    ///
    /// # Errors
    /// [`Closed`].
    pub(crate) fn with<R>(&self, operation: impl FnOnce(&mut Shared) -> R) -> Result<R, Closed> {
        let mut shared = self.lock();
        if shared.closed {
            return Err(Closed);
        }
        let result = operation(&mut shared);
        shared.tell_threads();
        let ring = !shared.woken.is_empty();
        let Shared { woken, connections, .. } = &mut *shared;
        connections.append(woken);
        drop(shared);
        if ring {
            self.ring();
        }
        Ok(result)
    }

    /// Ends all waits of this process and every later call with [`Closed`].
    pub(crate) fn close(&self) {
        let mut shared = self.lock();
        shared.closed = true;
        for (_, ticket) in shared.threads.drain() {
            ticket.end(WaitEnd::Closed);
        }
    }
}

impl Shared {
    /// A caller for a thread of this process.
    pub(crate) fn new_thread(&mut self) -> Caller {
        self.thread_count += 1;
        Caller(FIRST_THREAD + self.thread_count)
    }

    /// A place to sleep until `caller` is woken.
    pub(crate) fn ticket(&mut self, caller: Caller) -> Arc<Ticket> {
        Arc::clone(self.threads.entry(caller).or_default())
    }

    /// `caller` waits no longer.
    pub(crate) fn give_up(&mut self, caller: Caller) {
        self.threads.remove(&caller);
        self.state.cancel(caller, &mut self.woken);
    }

    /// Wakes the threads among `woken` and leaves the connections there.
    fn tell_threads(&mut self) {
        let Shared { woken, threads, .. } = self;
        woken.retain(|caller| {
            if caller.0 < FIRST_THREAD {
                return true;
            }
            if let Some(ticket) = threads.remove(caller) {
                ticket.end(WaitEnd::Ready);
            }
            false
        });
    }

    /// For the event loop: wakes threads, and moves all connections to be told to `out`.
    pub(crate) fn take_woken(&mut self, out: &mut Woken) {
        if !self.woken.is_empty() {
            self.tell_threads();
            out.append(&mut self.woken);
        }
        out.append(&mut self.connections);
    }
}

impl Ticket {
    fn end(&self, how: WaitEnd) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(how);
        self.changed.notify_all();
    }

    /// How the wait ended, if it did.
    pub(crate) fn ended(&self) -> Option<WaitEnd> {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until the wait ends or `deadline` passes.
    pub(crate) fn sleep(&self, deadline: Instant) -> Option<WaitEnd> {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        while outcome.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            (outcome, _) = self.changed.wait_timeout(outcome, left).unwrap_or_else(PoisonError::into_inner);
        }
        *outcome
    }
}
