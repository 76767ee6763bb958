//! The state of one store, shared by threads of this process and by a server's event loop.
//!
//! A waiting thread sleeps on its own [`Waiter`]. A waiting connection is answered by the event loop.
//! When an operation of a thread ends the wait of a connection, the thread wakes the event loop
//! through an eventfd.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::state::{ClientId, Map, State, Woken};

/// Client ids from here on belong to threads of this process; lower ids belong to connections.
const FIRST_THREAD: u64 = 1 << 63;

#[derive(Debug)]
pub(crate) struct SharedStore {
    inner: Mutex<LockedStore>,
    /// Wakes the event loop; `None` for a store without one.
    pub(crate) wake_event: Option<EventFd>,
}

/// The data behind the lock of a [`SharedStore`].
#[derive(Debug, Default)]
pub(crate) struct LockedStore {
    pub(crate) state: State,
    /// Clients woken by the operation in progress; empty between operations.
    pub(crate) woken: Woken,
    /// Connections whose wait has ended and to which the event loop has not yet sent the reply.
    woken_connections: Woken,
    waiters: Map<ClientId, Arc<Waiter>>,
    thread_count: u64,
    /// The server was shut down: every later operation fails.
    is_shut_down: bool,
}

/// The condition variable on which one waiting thread sleeps, and the outcome of its wait.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    outcome: Mutex<Option<WaitEnd>>,
    changed: Condvar,
}

/// The reason why a thread's wait ended before its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitEnd {
    Ready,
    ShutDown,
}

impl SharedStore {
    /// Creates a store for threads of this process only.
    pub(crate) fn in_process() -> SharedStore {
        SharedStore { inner: Mutex::default(), wake_event: None }
    }

    /// Creates a store with an event loop, which polls `wake_event`.
    pub(crate) fn with_event_loop() -> io::Result<SharedStore> {
        let wake_event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(SharedStore { inner: Mutex::default(), wake_event: Some(wake_event) })
    }

    /// Wakes the event loop, if there is one.
    pub(crate) fn wake_event_loop(&self) {
        if let Some(wake_event) = &self.wake_event {
            // A write fails only if the counter is full, and a full counter wakes the loop as well.
            let _ = wake_event.write(1);
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, LockedStore> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a store operation for a thread of this process, and wakes all clients whose wait the
    /// operation ended. Returns `None` if the server was shut down.
    pub(crate) fn with<R>(&self, operation: impl FnOnce(&mut LockedStore) -> R) -> Option<R> {
        let mut locked = self.lock();
        if locked.is_shut_down {
            return None;
        }
        let result = operation(&mut locked);
        locked.wake_threads();
        let wakes_connections = !locked.woken.is_empty();
        let LockedStore { woken, woken_connections, .. } = &mut *locked;
        woken_connections.append(woken);
        drop(locked);
        if wakes_connections {
            self.wake_event_loop();
        }
        Some(result)
    }

    /// Ends all waits of this process and makes every later operation fail.
    pub(crate) fn shut_down(&self) {
        let mut locked = self.lock();
        locked.is_shut_down = true;
        for (_, waiter) in locked.waiters.drain() {
            waiter.end_wait(WaitEnd::ShutDown);
        }
    }
}

impl LockedStore {
    /// Returns a new client id for a thread of this process.
    pub(crate) fn new_thread(&mut self) -> ClientId {
        self.thread_count += 1;
        ClientId(FIRST_THREAD + self.thread_count)
    }

    /// Returns the waiter on which the thread `client` sleeps; creates it if there is none.
    pub(crate) fn waiter(&mut self, client: ClientId) -> Arc<Waiter> {
        Arc::clone(self.waiters.entry(client).or_default())
    }

    pub(crate) fn cancel_wait(&mut self, client: ClientId) {
        self.waiters.remove(&client);
        self.state.cancel(client, &mut self.woken);
    }

    /// Wakes the threads in `woken`, and leaves the connections in `woken`.
    fn wake_threads(&mut self) {
        let LockedStore { woken, waiters, .. } = self;
        woken.retain(|client| {
            if client.0 < FIRST_THREAD {
                return true;
            }
            if let Some(waiter) = waiters.remove(client) {
                waiter.end_wait(WaitEnd::Ready);
            }
            false
        });
    }

    /// Wakes threads, and moves all woken connections to `out`. Only the event loop calls this.
    pub(crate) fn drain_woken(&mut self, out: &mut Woken) {
        if !self.woken.is_empty() {
            self.wake_threads();
            out.append(&mut self.woken);
        }
        out.append(&mut self.woken_connections);
    }
}

impl Waiter {
    fn end_wait(&self, outcome: WaitEnd) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        self.changed.notify_all();
    }

    /// Returns the outcome of the wait; `None` while the wait lasts.
    pub(crate) fn outcome(&self) -> Option<WaitEnd> {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until the wait ends or `deadline` passes; returns `None` at the deadline.
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
