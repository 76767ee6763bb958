//! Carries out operations: one engine for each group, driven by whichever thread waits.
//!
//! A call puts its task into the mailbox and tries to take the seat (the lock of the engine). Who has
//! the seat drives everybody's tasks until its own is done; the others sleep until theirs is done or the
//! seat is free. There is no thread of our own, and nothing happens while no call is in progress.

pub(crate) mod buffer;
mod connect;
mod control;
mod core;
mod door;
mod failure;
mod leave;
mod look;
mod messages;
mod poller;
pub(crate) mod run;
mod state;
#[cfg(test)]
mod tests;
mod ticket;

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::Thread;
use std::time::Duration;

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::call::Call;
use crate::dtype::Element;
use crate::error::CommError;
use crate::kernels::Kernel;
use crate::plan::Plan;
use buffer::Lent;
pub(crate) use core::Engine;
pub(crate) use state::Settings;
use ticket::Ticket;

/// An operation with its memory.
#[derive(Debug)]
pub(crate) enum Work {
    Collective { call: Call, plan: Arc<Plan>, lent: Lent, kernel: Option<Kernel> },
    Send { to: usize, call: Call, lent: Lent },
    Recv { from: usize, call: Call, lent: Lent },
}

/// An operation, who waits for it and how long.
#[derive(Debug)]
pub(crate) struct Task {
    work: Work,
    ticket: Arc<Ticket>,
}

/// What threads tell the one that drives.
#[derive(Debug)]
pub(crate) struct Mailbox {
    letters: Mutex<Letters>,
    /// Whether `letters` holds tasks or an abort: saves the driver the lock.
    flag: AtomicBool,
    /// Whether the driver sleeps and the bell must be rung.
    asleep: AtomicBool,
    bell: EventFd,
}

#[derive(Debug, Default)]
struct Letters {
    tasks: Vec<Task>,
    abort: Option<String>,
    waiting: Vec<Thread>,
}

impl Mailbox {
    pub(crate) fn new() -> std::io::Result<Self> {
        let bell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let (flag, asleep) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { letters: Mutex::default(), flag, asleep, bell })
    }

    fn letters(&self) -> MutexGuard<'_, Letters> {
        self.letters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn post(&self, write: impl FnOnce(&mut Letters)) {
        write(&mut self.letters());
        self.flag.store(true, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            let _ = self.bell.write(1);
        }
    }

    /// Tasks and the reason of an abort, if any came.
    fn collect(&self) -> Option<(Vec<Task>, Option<String>)> {
        if !self.flag.load(Ordering::Relaxed) || !self.flag.swap(false, Ordering::SeqCst) {
            return None;
        }
        let mut letters = self.letters();
        Some((std::mem::take(&mut letters.tasks), letters.abort.take()))
    }

    /// Announces that the driver is about to sleep; whether it may.
    fn fall_asleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        !self.flag.load(Ordering::SeqCst)
    }

    fn wake(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }
}

/// An engine that several threads use.
#[derive(Debug)]
pub(crate) struct Shared {
    seat: Mutex<Engine>,
    mailbox: Arc<Mailbox>,
}

impl Shared {
    pub(crate) fn new(engine: Engine) -> Self {
        let mailbox = Arc::clone(engine.mailbox());
        Self { seat: Mutex::new(engine), mailbox }
    }

    /// Carries out an operation on `buf` and waits for it.
    pub(crate) fn call_mut<T: Element>(
        &self,
        buf: &mut [T],
        timeout: Duration,
        work: impl FnOnce(Lent) -> Work,
    ) -> Result<(), CommError> {
        // SAFETY:
        // - valid for reads and writes of so many bytes: they are those of `buf`.
        // - any bytes are a value: `Element` is sealed over plain numbers.
        // - nobody else touches them until the `Lent` is gone: `buf` is borrowed exclusively until
        //   `call` returns, and the engine has let go by then (see there).
        #[allow(unsafe_code)]
        let lent = unsafe { Lent::new(buf.as_mut_ptr().cast(), size_of_val(buf)) };
        self.call(work(lent), timeout)
    }

    /// As [`Self::call_mut`], for an operation that only reads `buf`.
    pub(crate) fn call_ref<T: Element>(
        &self,
        buf: &[T],
        timeout: Duration,
        work: impl FnOnce(Lent) -> Work,
    ) -> Result<(), CommError> {
        // SAFETY:
        // - valid for reads of so many initialised bytes: they are those of `buf`.
        // - nobody writes there until the `Lent` is gone: `buf` is borrowed until `call` returns, and
        //   the engine has let go by then (see there).
        #[allow(unsafe_code)]
        let lent = unsafe { Lent::read_only(buf.as_ptr().cast(), size_of_val(buf)) };
        self.call(work(lent), timeout)
    }

    /// As [`Self::call_mut`], for an operation that reads `send` and fills or changes `recv`; the numbers say
    /// at which element of the plan's row they begin.
    pub(crate) fn call_both<T: Element>(
        &self,
        (send, send_at): (&[T], usize),
        (recv, recv_at): (&mut [T], usize),
        timeout: Duration,
        work: impl FnOnce(Lent) -> Work,
    ) -> Result<(), CommError> {
        let bytes = |elements: usize| elements.saturating_mul(size_of::<T>());
        // SAFETY: as in `call_ref` and `call_mut`; as `recv` is borrowed exclusively, they do not overlap.
        #[allow(unsafe_code)]
        let lent = unsafe {
            let send = Lent::read_only(send.as_ptr().cast(), size_of_val(send)).at(bytes(send_at));
            send.with(Lent::new(recv.as_mut_ptr().cast(), size_of_val(recv)).at(bytes(recv_at)))
        };
        self.call(work(lent), timeout)
    }

    /// Carries out an operation and waits for it.
    ///
    /// When it returns, the engine has let go of the memory in `work`: a ticket is completed only
    /// by whoever took its task out of the engine, and this returns only with a completed ticket. If
    /// it unwinds instead, the seat is poisoned, and whoever takes it next first forgets all tasks.
    fn call(&self, work: Work, timeout: Duration) -> Result<(), CommError> {
        let ticket = Arc::new(Ticket::new(timeout));
        let task = Task { work, ticket: Arc::clone(&ticket) };
        self.mailbox.post(|letters| letters.tasks.push(task));
        loop {
            if let Some(outcome) = ticket.take() {
                return outcome;
            }
            match self.take_seat().or_else(|| self.queue_for_seat()) {
                Some(mut seat) => seat.engine.drive(&ticket),
                // Whoever has the seat wakes us when our task is done, or when the seat is free.
                None if !ticket.is_done() => std::thread::park(),
                None => {}
            }
        }
    }

    fn take_seat(&self) -> Option<Seat<'_>> {
        match self.seat.try_lock() {
            Ok(engine) => Some(Seat { engine, _next: Next(&self.mailbox) }),
            Err(TryLockError::Poisoned(poisoned)) => {
                let mut engine = poisoned.into_inner();
                engine.forget_everything();
                Some(Seat { engine, _next: Next(&self.mailbox) })
            }
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Asks to be woken when the seat is free; by then it may be free already.
    fn queue_for_seat(&self) -> Option<Seat<'_>> {
        self.mailbox.letters().waiting.push(std::thread::current());
        self.take_seat()
    }

    /// Ends the group for `reason`, from any thread.
    pub(crate) fn abort(&self, reason: String) {
        self.mailbox.post(|letters| letters.abort = Some(reason));
        if let Some(mut seat) = self.take_seat() {
            seat.engine.collect();
        }
    }

    /// Says farewell and closes everything.
    pub(crate) fn leave(&self) {
        self.seat.lock().unwrap_or_else(PoisonError::into_inner).leave();
    }
}

/// The engine, while one thread drives it. Fields are dropped in order: first the lock, then the
/// threads that wait for it are woken.
struct Seat<'a> {
    engine: MutexGuard<'a, Engine>,
    _next: Next<'a>,
}

struct Next<'a>(&'a Mailbox);

impl Drop for Next<'_> {
    fn drop(&mut self) {
        for thread in std::mem::take(&mut self.0.letters().waiting) {
            thread.unpark();
        }
    }
}

impl Mailbox {
    fn bell(&self) -> std::os::fd::BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
