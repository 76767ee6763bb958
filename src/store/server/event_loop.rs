//! The event loop of the server: it accepts, reads, answers and wakes clients.

use std::io::{self, ErrorKind};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::Control;
use super::connection::{Connection, ConnectionClosed, READ_BUFFER_BYTES, RequestContext};
use super::listen::configure;
use super::parallel_wake;
use crate::state::{ClientId, Map};
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
    /// Number of connections since the start, which is the [`ClientId`] of the last one. A late event or
    /// wake-up for a closed connection reaches no other connection, because no id is used again.
    last_client: u64,
    connections: Map<ClientId, Connection>,
    /// Buffer for the bytes of one read.
    read: Box<[u8]>,
    context: RequestContext,
}

impl EventLoop {
    pub(super) fn new(control: Arc<Control>, listeners: Vec<TcpListener>) -> io::Result<EventLoop> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        if let Some(wake_event) = &control.shared.wake_event {
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
            last_client: 0,
            connections: Map::default(),
            read: vec![0; READ_BUFFER_BYTES].into(),
            context,
        })
    }

    pub(super) fn run(mut self) {
        let mut events = vec![EpollEvent::empty(); MAX_EVENTS];
        while !self.control.stopping.load(Ordering::Acquire) {
            let timeout = self.accept_paused_until.map_or(EpollTimeout::NONE, milliseconds);
            let count = match self.epoll.wait(&mut events, timeout) {
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

    fn handle(&mut self, event: &EpollEvent) {
        match event.data() {
            WAKE_EVENT => {
                if let Some(wake_event) = &self.control.shared.wake_event {
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
        let EventLoop { connections, context, read, .. } = self;
        // An earlier event of the same batch may have closed the connection.
        let Some(connection) = connections.get_mut(&client) else { return };
        let mut result = Ok(());
        if ready.contains(EpollFlags::EPOLLOUT) {
            result = connection.on_writable(client, context);
        }
        if result.is_ok() && (ready & connection.interest).contains(EpollFlags::EPOLLIN) {
            result = connection.on_readable(client, read, context);
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
        let Some(connection) = self.connections.get_mut(&client) else { return };
        let wanted_interest = connection.wanted_interest();
        let watched = match result {
            Ok(()) if wanted_interest == connection.interest => return,
            Ok(()) => {
                connection.interest = wanted_interest;
                self.epoll.modify(&connection.stream, &mut EpollEvent::new(wanted_interest, client.0)).is_ok()
            }
            Err(ConnectionClosed) => false,
        };
        if !watched {
            self.close(client);
        }
    }

    fn close(&mut self, client: ClientId) {
        // Dropping a connection closes its socket, which also ends the epoll watch.
        if self.connections.remove(&client).is_none() {
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
                let mut streams = Vec::with_capacity(woken.len());
                woken.retain(|client| match self.connections.get(client) {
                    Some(connection) if connection.unsent_bytes() == 0 => {
                        streams.push((*client, &connection.stream));
                        false
                    }
                    _ => true,
                });
                woken.extend(parallel_wake::send_ready(&streams));
            }
            for &client in &woken {
                let Some(connection) = self.connections.get_mut(&client) else { continue };
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
                    // Without free descriptors, level-triggered listeners would make the loop spin.
                    self.watch_listeners(EpollFlags::empty());
                    self.accept_paused_until = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    fn add_connection(&mut self, stream: TcpStream) {
        if stream.set_nonblocking(true).is_err() {
            return;
        }
        self.last_client += 1;
        let client = ClientId(self.last_client);
        let connection = self.connections.entry(client).or_insert(Connection::new(stream));
        let event = EpollEvent::new(connection.interest, client.0);
        if let Err(error) = self.epoll.add(&connection.stream, event) {
            self.control.report(format!("the store cannot accept more clients: {error}"));
            self.close(client);
        }
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
        if let Some(wake_event) = &self.control.shared.wake_event {
            // The eventfd stays readable and would end every wait below at once.
            let _ = self.epoll.delete(wake_event);
        }
        self.control.shared.lock().drain_woken(&mut self.context.woken);
        self.reply_to_woken();
        let deadline = Instant::now() + FLUSH_TIME;
        let mut due: usize = 0;
        for (client, connection) in &mut self.connections {
            connection.interest = connection.wanted_interest() & EpollFlags::EPOLLOUT;
            due += usize::from(!connection.interest.is_empty());
            let event = &mut EpollEvent::new(connection.interest, client.0);
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
                let Some(connection) = self.connections.get_mut(&client) else { continue };
                let was_due = !connection.interest.is_empty();
                if connection.flush().is_err() || connection.unsent_bytes() == 0 {
                    due -= usize::from(was_due);
                    // Ends the byte stream to the client after all bytes that were sent.
                    let _ = connection.stream.shutdown(Shutdown::Write);
                    self.connections.remove(&client);
                }
            }
        }
    }
}

/// Returns the timeout for a wait until `until`, rounded up so that the wait does not end too early.
fn milliseconds(until: Instant) -> EpollTimeout {
    let left = until.saturating_duration_since(Instant::now()).as_micros().div_ceil(1000);
    EpollTimeout::from(u16::try_from(left).unwrap_or(u16::MAX))
}
