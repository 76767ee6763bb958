//! The one loop that accepts, reads, answers and wakes.

use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::Control;
use super::connection::{Connection, Desk, Interest, Over};
use super::fan_out;
use super::listen::set_options;
use crate::state::Caller;
use crate::wire::encode::byte;

/// Events taken from the kernel at once.
const EVENTS: usize = 1024;
/// Connections accepted before others are served again.
const ACCEPTS_AT_ONCE: usize = 64;
/// While descriptors are short, a listener rests this long or until a connection closes.
const ACCEPT_REST: Duration = Duration::from_millis(100);
/// How long replies that are due are still sent at the end.
const FLUSH_TIME: Duration = Duration::from_millis(500);

/// Token of the bell; listeners have the ones below it, from the top.
const BELL: u64 = u64::MAX;
/// Tokens from here on are listeners. Below, a token is a connection's [`Caller`].
const FIRST_LISTENER: u64 = u64::MAX - 0xffff;

/// Level-triggered: one read per wake-up serves all that has come, and what was left is reported
/// again, so no connection can keep the others waiting.
pub(super) struct EventLoop {
    epoll: Epoll,
    control: Arc<Control>,
    listeners: Vec<TcpListener>,
    /// Until when the listeners rest.
    resting_until: Option<Instant>,
    connections: Slots,
    desk: Desk,
}

impl EventLoop {
    pub(super) fn new(control: Arc<Control>, listeners: Vec<TcpListener>) -> io::Result<EventLoop> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        if let Some(bell) = control.hub.bell() {
            epoll.add(bell, EpollEvent::new(EpollFlags::EPOLLIN, BELL))?;
        }
        for (listener, token) in listeners.iter().zip(FIRST_LISTENER..) {
            set_options(listener)?;
            epoll.add(listener, EpollEvent::new(EpollFlags::EPOLLIN, token))?;
        }
        let desk = Desk::new(Arc::clone(&control.hub));
        Ok(EventLoop { epoll, control, listeners, resting_until: None, connections: Slots::default(), desk })
    }

    pub(super) fn run(mut self) {
        let mut events = vec![EpollEvent::empty(); EVENTS];
        while !self.control.stopping.load(Ordering::Acquire) {
            let count = match self.epoll.wait(&mut events, self.timeout()) {
                Ok(count) => count,
                Err(Errno::EINTR) => continue,
                Err(error) => {
                    return self.control.report(format!("the store stopped: epoll failed: {error}"));
                }
            };
            for event in &events[..count] {
                self.handle(event);
                self.tell_woken();
            }
            self.end_rest();
        }
        self.finish(&mut events);
    }

    fn timeout(&self) -> EpollTimeout {
        match self.resting_until {
            None => EpollTimeout::NONE,
            Some(until) => milliseconds(until),
        }
    }

    fn handle(&mut self, event: &EpollEvent) {
        match event.data() {
            BELL => {
                if let Some(bell) = self.control.hub.bell() {
                    // It rang, so there is a number to read.
                    let _ = bell.read();
                }
                self.control.hub.lock().take_woken(&mut self.desk.woken);
            }
            token @ FIRST_LISTENER.. => self.accept((token - FIRST_LISTENER) as usize),
            token => self.serve(Caller(token), event.events()),
        }
    }

    /// Reads, answers, sends, as the connection is ready for.
    fn serve(&mut self, caller: Caller, ready: EpollFlags) {
        let EventLoop { connections, desk, .. } = self;
        // It may have been closed by an earlier event of the same batch.
        let Some(connection) = connections.get_mut(caller) else { return };
        let mut result = Ok(());
        if ready.contains(EpollFlags::EPOLLOUT) {
            result = connection.writable(caller, desk);
        }
        if result.is_ok() && ready.contains(EpollFlags::EPOLLIN) && connection.interest.read {
            result = connection.readable(caller, desk);
        }
        // Reported even when not asked for: the client is gone, whatever is still due to it.
        let gone = ready.contains(EpollFlags::EPOLLERR)
            || (ready.contains(EpollFlags::EPOLLHUP) && !ready.contains(EpollFlags::EPOLLIN));
        if gone {
            result = Err(Over);
        }
        self.settle(caller, result);
    }

    /// After work on a connection: closes it if it is over, otherwise has it watched as it now needs.
    fn settle(&mut self, caller: Caller, result: Result<(), Over>) {
        let Some(connection) = self.connections.get_mut(caller) else { return };
        let wanted = connection.wanted();
        let watched = match result {
            Ok(()) if wanted == connection.interest => return,
            Ok(()) => {
                connection.interest = wanted;
                self.epoll.modify(&connection.stream, &mut EpollEvent::new(flags(wanted), caller.0)).is_ok()
            }
            Err(Over) => false,
        };
        if !watched {
            self.close(caller);
        }
    }

    fn close(&mut self, caller: Caller) {
        if self.connections.remove(caller).is_none() {
            return;
        }
        let mut shared = self.control.hub.lock();
        let shared = &mut *shared;
        shared.state.disconnect(caller, &mut shared.woken);
        shared.take_woken(&mut self.desk.woken);
        if self.resting_until.is_some() {
            self.resting_until = Some(Instant::now());
        }
    }

    /// Sends their byte to all whose wait has ended.
    fn tell_woken(&mut self) {
        while !self.desk.woken.is_empty() {
            let mut woken = std::mem::take(&mut self.desk.woken);
            if woken.len() >= fan_out::MANY {
                let streams = self.connections.free_to_send(&mut woken);
                woken.extend(fan_out::tell(&streams));
            }
            for &caller in &woken {
                let Some(connection) = self.connections.get_mut(caller) else { continue };
                let result = connection.send(&[byte::READY]);
                self.settle(caller, result);
            }
            woken.clear();
            woken.shrink_to(fan_out::MANY);
            // Closing one may have woken others.
            if self.desk.woken.is_empty() {
                self.desk.woken = woken;
                return;
            }
        }
    }

    fn accept(&mut self, listener: usize) {
        for _ in 0..ACCEPTS_AT_ONCE {
            match self.listeners[listener].accept() {
                Ok((stream, _)) => self.admit(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // The client was gone before it was its turn.
                Err(error)
                    if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {}
                Err(error) => {
                    self.control.report(format!("the store cannot accept more clients: {error}"));
                    return self.rest();
                }
            }
        }
    }

    fn admit(&mut self, stream: TcpStream) {
        if stream.set_nonblocking(true).is_err() {
            return;
        }
        let caller = self.connections.insert(Connection::new(stream));
        let Some(connection) = self.connections.get_mut(caller) else { return };
        let event = EpollEvent::new(flags(connection.interest), caller.0);
        if let Err(error) = self.epoll.add(&connection.stream, event) {
            self.control.report(format!("the store cannot accept more clients: {error}"));
            self.close(caller);
        }
    }

    /// Stops accepting for a while: with no descriptor left, the listeners would be ready for ever.
    fn rest(&mut self) {
        self.watch_listeners(EpollFlags::empty());
        self.resting_until = Some(Instant::now() + ACCEPT_REST);
    }

    fn end_rest(&mut self) {
        if self.resting_until.is_some_and(|until| until <= Instant::now()) {
            self.resting_until = None;
            self.watch_listeners(EpollFlags::EPOLLIN);
        }
    }

    fn watch_listeners(&self, flags: EpollFlags) {
        for (listener, token) in self.listeners.iter().zip(FIRST_LISTENER..) {
            if let Err(error) = self.epoll.modify(listener, &mut EpollEvent::new(flags, token)) {
                self.control.report(format!("the store accepts no clients: {error}"));
            }
        }
    }

    /// Sends what is due for at most [`FLUSH_TIME`]; then everything closes.
    fn finish(mut self, events: &mut [EpollEvent]) {
        self.listeners.clear();
        if let Some(bell) = self.control.hub.bell() {
            // It rings, and would end every wait below at once.
            let _ = self.epoll.delete(bell);
        }
        self.control.hub.lock().take_woken(&mut self.desk.woken);
        self.tell_woken();
        let deadline = Instant::now() + FLUSH_TIME;
        let mut due: usize = 0;
        for (caller, connection) in self.connections.iter_mut() {
            connection.interest = Interest { read: false, write: connection.unsent_bytes() > 0 };
            due += usize::from(connection.interest.write);
            let event = &mut EpollEvent::new(flags(connection.interest), caller.0);
            // If it cannot be watched it is closed without its replies.
            let _ = self.epoll.modify(&connection.stream, event);
        }
        while due > 0 && Instant::now() < deadline {
            let count = match self.epoll.wait(events, milliseconds(deadline)) {
                Ok(count) => count,
                Err(Errno::EINTR) => continue,
                Err(_) => break,
            };
            for event in &events[..count] {
                let caller = Caller(event.data());
                let Some(connection) = self.connections.get_mut(caller) else { continue };
                let was_due = connection.interest.write;
                if connection.flush().is_err() || connection.unsent_bytes() == 0 {
                    due -= usize::from(was_due);
                    let _ = connection.hang_up();
                    self.connections.remove(caller);
                }
            }
        }
    }
}

fn flags(interest: Interest) -> EpollFlags {
    let mut flags = EpollFlags::empty();
    flags.set(EpollFlags::EPOLLIN, interest.read);
    flags.set(EpollFlags::EPOLLOUT, interest.write);
    flags
}

/// Until then, rounded up so that time has passed when the wait ends.
fn milliseconds(until: Instant) -> EpollTimeout {
    let left = until.saturating_duration_since(Instant::now()).as_micros().div_ceil(1000);
    EpollTimeout::from(u16::try_from(left).unwrap_or(u16::MAX))
}

/// Connections by their [`Caller`]: a slot's index, and above it how often the slot was used, so that
/// a late event or wake-up for a closed connection does not reach its successor.
#[derive(Debug, Default)]
struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

#[derive(Debug, Default)]
struct Slot {
    uses: u32,
    connection: Option<Connection>,
}

/// The counter of uses stays clear of the tokens of threads, listeners and the bell.
const USES_MASK: u32 = 0x3fff_ffff;

impl Slots {
    fn insert(&mut self, connection: Connection) -> Caller {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.uses = slot.uses.wrapping_add(1) & USES_MASK;
        slot.connection = Some(connection);
        Caller(u64::from(slot.uses) << 32 | u64::from(index))
    }

    fn get_mut(&mut self, caller: Caller) -> Option<&mut Connection> {
        self.slot(caller)?.connection.as_mut()
    }

    /// Takes the connection out; dropping it closes the socket, and with it epoll's watch.
    fn remove(&mut self, caller: Caller) -> Option<Connection> {
        let connection = self.slot(caller)?.connection.take()?;
        self.free.push(caller.0 as u32);
        Some(connection)
    }

    fn slot(&mut self, caller: Caller) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(caller.0 as u32 as usize)?;
        (u64::from(slot.uses) == caller.0 >> 32).then_some(slot)
    }

    /// The sockets of those of `callers` who have nothing to be sent before; they are removed from it.
    fn free_to_send(&self, callers: &mut Vec<Caller>) -> Vec<(Caller, &TcpStream)> {
        let mut streams = Vec::with_capacity(callers.len());
        callers.retain(|&caller| {
            let slot = self.slots.get(caller.0 as u32 as usize);
            let connection = slot
                .filter(|slot| u64::from(slot.uses) == caller.0 >> 32)
                .and_then(|slot| slot.connection.as_ref())
                .filter(|connection| connection.unsent_bytes() == 0);
            if let Some(connection) = connection {
                streams.push((caller, &connection.stream));
            }
            connection.is_none()
        });
        streams
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = (Caller, &mut Connection)> {
        self.slots.iter_mut().enumerate().filter_map(|(index, slot)| {
            let caller = Caller(u64::from(slot.uses) << 32 | index as u64);
            slot.connection.as_mut().map(|connection| (caller, connection))
        })
    }
}
