//! The event loop of the server: it accepts, reads, answers and wakes clients.

use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::Control;
use super::connection::{Connection, ConnectionClosed, Interest, RequestContext};
use super::listen::configure;
use super::parallel_wake;
use crate::state::ClientId;
use crate::wire::encode::byte;

/// Most events that one `epoll_wait` returns.
const MAX_EVENTS: usize = 1024;
/// Most connections accepted before other events are handled.
const MAX_ACCEPTS: usize = 64;
/// Time without accepting connections after file descriptors ran out; it ends earlier if a connection
/// closes.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Longest time to send outstanding replies at shutdown.
const FLUSH_TIME: Duration = Duration::from_millis(500);

/// Epoll token of the eventfd with which other threads wake the event loop.
const WAKE_EVENT: u64 = u64::MAX;
/// Lowest epoll token of a listener. Tokens below are the [`ClientId`]s of connections.
const FIRST_LISTENER: u64 = u64::MAX - 0xffff;

/// The server's connections and the epoll instance that watches them.
///
/// Epoll is level-triggered. Each event costs one read, and unread bytes cause another event, so no
/// connection delays the others.
pub(super) struct EventLoop {
    epoll: Epoll,
    control: Arc<Control>,
    listeners: Vec<TcpListener>,
    /// Time at which accepting starts again; `None` while accepting is not paused.
    accept_paused_until: Option<Instant>,
    connections: ConnectionTable,
    context: RequestContext,
}

impl EventLoop {
    pub(super) fn new(control: Arc<Control>, listeners: Vec<TcpListener>) -> io::Result<EventLoop> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        if let Some(wake_event) = control.shared.wake_event() {
            epoll.add(wake_event, EpollEvent::new(EpollFlags::EPOLLIN, WAKE_EVENT))?;
        }
        for (listener, token) in listeners.iter().zip(FIRST_LISTENER..) {
            configure(listener)?;
            epoll.add(listener, EpollEvent::new(EpollFlags::EPOLLIN, token))?;
        }
        let context = RequestContext::new(Arc::clone(&control.shared));
        Ok(EventLoop {
            epoll,
            control,
            listeners,
            accept_paused_until: None,
            connections: ConnectionTable::default(),
            context,
        })
    }

    pub(super) fn run(mut self) {
        let mut events = vec![EpollEvent::empty(); MAX_EVENTS];
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
                self.reply_to_woken();
            }
            self.resume_accepting();
        }
        self.flush_and_close(&mut events);
    }

    fn timeout(&self) -> EpollTimeout {
        match self.accept_paused_until {
            None => EpollTimeout::NONE,
            Some(until) => milliseconds(until),
        }
    }

    fn handle(&mut self, event: &EpollEvent) {
        match event.data() {
            WAKE_EVENT => {
                if let Some(wake_event) = self.control.shared.wake_event() {
                    // The event was reported, so the eventfd has a value to read.
                    let _ = wake_event.read();
                }
                self.control.shared.lock().drain_woken(&mut self.context.woken);
            }
            token @ FIRST_LISTENER.. => self.accept((token - FIRST_LISTENER) as usize),
            token => self.serve(ClientId(token), event.events()),
        }
    }

    /// Writes to and reads from a connection, as far as epoll has reported it ready.
    fn serve(&mut self, client: ClientId, ready: EpollFlags) {
        let EventLoop { connections, context, .. } = self;
        // An earlier event of the same batch may have closed the connection.
        let Some(connection) = connections.get_mut(client) else { return };
        let mut result = Ok(());
        if ready.contains(EpollFlags::EPOLLOUT) {
            result = connection.on_writable(client, context);
        }
        if result.is_ok() && ready.contains(EpollFlags::EPOLLIN) && connection.interest.read {
            result = connection.on_readable(client, context);
        }
        // Epoll reports errors and hang-ups always. The client is gone, and unsent replies are
        // dropped.
        let gone = ready.contains(EpollFlags::EPOLLERR)
            || (ready.contains(EpollFlags::EPOLLHUP) && !ready.contains(EpollFlags::EPOLLIN));
        if gone {
            result = Err(ConnectionClosed);
        }
        self.update_or_close(client, result);
    }

    /// Closes the connection if `result` is an error; otherwise updates the events it is watched for.
    fn update_or_close(&mut self, client: ClientId, result: Result<(), ConnectionClosed>) {
        let Some(connection) = self.connections.get_mut(client) else { return };
        let wanted_interest = connection.wanted_interest();
        let watched = match result {
            Ok(()) if wanted_interest == connection.interest => return,
            Ok(()) => {
                connection.interest = wanted_interest;
                self.epoll
                    .modify(&connection.stream, &mut EpollEvent::new(flags(wanted_interest), client.0))
                    .is_ok()
            }
            Err(ConnectionClosed) => false,
        };
        if !watched {
            self.close(client);
        }
    }

    fn close(&mut self, client: ClientId) {
        if self.connections.remove(client).is_none() {
            return;
        }
        let mut locked = self.control.shared.lock();
        let locked = &mut *locked;
        locked.state.disconnect(client, &mut locked.woken);
        locked.drain_woken(&mut self.context.woken);
        if self.accept_paused_until.is_some() {
            self.accept_paused_until = Some(Instant::now());
        }
    }

    /// Sends the READY byte to all connections whose wait has ended.
    fn reply_to_woken(&mut self) {
        while !self.context.woken.is_empty() {
            let mut woken = std::mem::take(&mut self.context.woken);
            if woken.len() >= parallel_wake::PARALLEL_THRESHOLD {
                let streams = self.connections.split_off_writable(&mut woken);
                woken.extend(parallel_wake::send_ready(&streams));
            }
            for &client in &woken {
                let Some(connection) = self.connections.get_mut(client) else { continue };
                let result = connection.send(&[byte::READY]);
                self.update_or_close(client, result);
            }
            woken.clear();
            woken.shrink_to(parallel_wake::PARALLEL_THRESHOLD);
            // Closing a connection stores the value of its last will, which may have ended the waits
            // of other clients.
            if self.context.woken.is_empty() {
                self.context.woken = woken;
                return;
            }
        }
    }

    fn accept(&mut self, listener: usize) {
        for _ in 0..MAX_ACCEPTS {
            match self.listeners[listener].accept() {
                Ok((stream, _)) => self.add_connection(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // The client closed the connection before it was accepted.
                Err(error)
                    if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {}
                Err(error) => {
                    self.control.report(format!("the store cannot accept more clients: {error}"));
                    return self.pause_accepting();
                }
            }
        }
    }

    fn add_connection(&mut self, stream: TcpStream) {
        if stream.set_nonblocking(true).is_err() {
            return;
        }
        let (client, connection) = self.connections.insert(Connection::new(stream));
        let event = EpollEvent::new(flags(connection.interest), client.0);
        if let Err(error) = self.epoll.add(&connection.stream, event) {
            self.control.report(format!("the store cannot accept more clients: {error}"));
            self.close(client);
        }
    }

    /// Stops accepting for a while. Without free descriptors, level-triggered listeners would make
    /// the loop spin.
    fn pause_accepting(&mut self) {
        self.watch_listeners(EpollFlags::empty());
        self.accept_paused_until = Some(Instant::now() + ACCEPT_PAUSE);
    }

    fn resume_accepting(&mut self) {
        if self.accept_paused_until.is_some_and(|until| until <= Instant::now()) {
            self.accept_paused_until = None;
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

    /// Sends outstanding replies for at most [`FLUSH_TIME`], then closes all connections.
    fn flush_and_close(mut self, events: &mut [EpollEvent]) {
        self.listeners.clear();
        if let Some(wake_event) = self.control.shared.wake_event() {
            // The eventfd stays readable and would end every wait below at once.
            let _ = self.epoll.delete(wake_event);
        }
        self.control.shared.lock().drain_woken(&mut self.context.woken);
        self.reply_to_woken();
        let deadline = Instant::now() + FLUSH_TIME;
        let mut due: usize = 0;
        for (client, connection) in self.connections.iter_mut() {
            connection.interest = Interest { read: false, write: connection.unsent_bytes() > 0 };
            due += usize::from(connection.interest.write);
            let event = &mut EpollEvent::new(flags(connection.interest), client.0);
            // A connection that epoll cannot watch is closed without its unsent replies.
            let _ = self.epoll.modify(&connection.stream, event);
        }
        while due > 0 && Instant::now() < deadline {
            let count = match self.epoll.wait(events, milliseconds(deadline)) {
                Ok(count) => count,
                Err(Errno::EINTR) => continue,
                Err(_) => break,
            };
            for event in &events[..count] {
                let client = ClientId(event.data());
                let Some(connection) = self.connections.get_mut(client) else { continue };
                let was_due = connection.interest.write;
                if connection.flush().is_err() || connection.unsent_bytes() == 0 {
                    due -= usize::from(was_due);
                    let _ = connection.shut_down_write();
                    self.connections.remove(client);
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

/// Returns the timeout for a wait until `until`, rounded up so that the wait does not end too early.
fn milliseconds(until: Instant) -> EpollTimeout {
    let left = until.saturating_duration_since(Instant::now()).as_micros().div_ceil(1000);
    EpollTimeout::from(u16::try_from(left).unwrap_or(u16::MAX))
}

/// Connections by their [`ClientId`].
///
/// The lower 32 bits of an id are the index of a slot, the upper 32 bits count the uses of that slot.
/// So a late event or wake-up for a closed connection does not reach the next connection in its slot.
#[derive(Debug, Default)]
struct ConnectionTable {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

#[derive(Debug, Default)]
struct Slot {
    uses: u32,
    connection: Option<Connection>,
}

/// Bits of the counter of a slot's uses. With so few bits, client ids of connections stay below those
/// of threads and below the epoll tokens of listeners and of the wake event.
const USES_MASK: u32 = 0x3fff_ffff;

impl ConnectionTable {
    fn insert(&mut self, connection: Connection) -> (ClientId, &mut Connection) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.uses = slot.uses.wrapping_add(1) & USES_MASK;
        let client = ClientId(u64::from(slot.uses) << 32 | u64::from(index));
        (client, slot.connection.insert(connection))
    }

    fn get_mut(&mut self, client: ClientId) -> Option<&mut Connection> {
        self.slot(client)?.connection.as_mut()
    }

    /// Removes a connection. Dropping it closes its socket, which also ends the epoll watch.
    fn remove(&mut self, client: ClientId) -> Option<Connection> {
        let connection = self.slot(client)?.connection.take()?;
        self.free.push(client.0 as u32);
        Some(connection)
    }

    fn slot(&mut self, client: ClientId) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(client.0 as u32 as usize)?;
        (u64::from(slot.uses) == client.0 >> 32).then_some(slot)
    }

    /// Removes the connections without unsent bytes from `clients` and returns their sockets.
    fn split_off_writable(&self, clients: &mut Vec<ClientId>) -> Vec<(ClientId, &TcpStream)> {
        let mut streams = Vec::with_capacity(clients.len());
        clients.retain(|&client| {
            let slot = self.slots.get(client.0 as u32 as usize);
            let connection = slot
                .filter(|slot| u64::from(slot.uses) == client.0 >> 32)
                .and_then(|slot| slot.connection.as_ref())
                .filter(|connection| connection.unsent_bytes() == 0);
            if let Some(connection) = connection {
                streams.push((client, &connection.stream));
            }
            connection.is_none()
        });
        streams
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = (ClientId, &mut Connection)> {
        self.slots.iter_mut().enumerate().filter_map(|(index, slot)| {
            let client = ClientId(u64::from(slot.uses) << 32 | index as u64);
            slot.connection.as_mut().map(|connection| (client, connection))
        })
    }
}
