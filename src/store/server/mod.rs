//! The store server: one event loop on one thread, any number of listening addresses.

mod connection;
mod event_loop;
mod limits;
mod listen;
mod parallel_wake;

use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::{fmt, io, thread};

use crate::memory::MemoryStore;
use crate::shared_store::SharedStore;
use crate::store::Store;
use event_loop::EventLoop;
pub use limits::raise_descriptor_limit;
pub use listen::listen;

/// The reason why a server cannot be started.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Another program listens at this address.
    #[error("{address} is in use: another store or program listens there")]
    InUse {
        /// The requested address.
        address: SocketAddr,
    },
    /// The system refused to listen at this address.
    #[error("cannot listen at {address}: {source}")]
    Listen {
        /// The requested address.
        address: SocketAddr,
        /// The error of the system call.
        source: io::Error,
    },
    /// No address was given.
    #[error("no address to listen at")]
    NoAddress,
    /// Another system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The attempted action, such as "start a thread".
        what: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
}

/// Prints the [`Display`](fmt::Display) text, because a `main` that returns an error prints `Debug`.
impl fmt::Debug for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A running TCPStore server for torch's and convoke's clients; dropping it shuts it down.
///
/// One thread serves all clients, ten thousand and more. To wake thousands of clients at once, the
/// server starts up to three short-lived helper threads. A protocol error closes only the connection
/// that caused it. The server stops reading from a client that does not read its replies, until the
/// client reads them. The keys are lost when the server shuts down.
pub struct StoreServer {
    addresses: Vec<SocketAddr>,
    control: Arc<Control>,
    view: MemoryStore,
    thread: Option<JoinHandle<()>>,
    /// The process that runs the thread.
    pid: u32,
}

/// State shared by the event loop and the [`StoreServer`] that owns it.
#[derive(Debug)]
struct Control {
    shared: Arc<SharedStore>,
    stopping: AtomicBool,
    warning: Mutex<Option<String>>,
}

impl StoreServer {
    /// Starts a server that listens at all of `addresses`.
    ///
    /// Port 0 selects a free port, the same for all addresses with port 0. `[::]` accepts IPv4 as
    /// well; on a system without IPv6 it is replaced by `0.0.0.0`. Raises this process's soft limit
    /// of descriptors to the hard limit (see [`raise_descriptor_limit`]).
    ///
    /// # Errors
    /// [`ServeError`], which names the address.
    pub fn bind(addresses: &[SocketAddr]) -> Result<StoreServer, ServeError> {
        StoreServer::serve(listen(addresses)?)
    }

    /// Starts a server on sockets that already listen.
    ///
    /// # Errors
    /// [`ServeError::NoAddress`] if `listeners` is empty. [`ServeError::System`] if a system call
    /// fails.
    pub fn serve(listeners: Vec<TcpListener>) -> Result<StoreServer, ServeError> {
        let failed = |what| move |source| ServeError::System { what, source };
        if listeners.is_empty() {
            return Err(ServeError::NoAddress);
        }
        let _ = raise_descriptor_limit();
        let addresses: Result<Vec<_>, _> = listeners.iter().map(TcpListener::local_addr).collect();
        let addresses = addresses.map_err(failed("ask for the address of a socket"))?;
        let shared = Arc::new(SharedStore::with_event_loop().map_err(failed("create an eventfd"))?);
        let (stopping, warning) = (AtomicBool::new(false), Mutex::new(None));
        let control = Arc::new(Control { shared: Arc::clone(&shared), stopping, warning });
        let event_loop = EventLoop::new(Arc::clone(&control), listeners).map_err(failed("set up epoll"))?;
        let thread = thread::Builder::new()
            .name("convoke-store".into())
            .spawn(move || event_loop.run())
            .map_err(failed("start a thread"))?;
        let view = MemoryStore::of(shared, &addresses[0].to_string());
        Ok(StoreServer { addresses, control, view, thread: Some(thread), pid: std::process::id() })
    }

    /// Returns the port of the first address.
    pub fn port(&self) -> u16 {
        self.addresses[0].port()
    }

    /// Returns the addresses at which the server listens, in the given order, with the actual ports.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Returns a store over the server's keys for threads of this process.
    ///
    /// Keys and waits behave as for a TCP client, but an operation costs a lock instead of a round
    /// trip. After [`shutdown`](StoreServer::shutdown) every operation fails with
    /// [`StoreError::Lost`](crate::StoreError::Lost).
    pub fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.view.clone())
    }

    /// Deletes all keys and queues that begin with none of `prefixes`; returns the number deleted.
    ///
    /// Prefixes apply to keys as they are on the wire: key `k` of a TCP client is `/k`, and torch's
    /// count of workers is `init/`. Waits for deleted keys continue.
    pub fn retain(&self, prefixes: &[&[u8]]) -> usize {
        self.control.shared.lock().state.retain(prefixes)
    }

    /// Returns the first problem since this function was last called, such as a lack of descriptors.
    /// The server keeps running unless the text says that it stopped.
    pub fn take_warning(&self) -> Option<String> {
        self.control.warning.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Stops listening, sends outstanding replies for at most half a second, closes all connections
    /// and ends the thread. Dropping the server does this too.
    pub fn shutdown(self) {
        drop(self);
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // A forked child has a copy of this object, and no thread of the server.
            return std::mem::forget(self.thread.take());
        }
        self.control.shared.shut_down();
        self.control.stopping.store(true, Ordering::Release);
        self.control.shared.wake_event_loop();
        // An error means that the loop panicked; the panic hook has already reported that.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl fmt::Debug for StoreServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreServer").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

impl Control {
    /// Stores a warning for the owner of the server. Later warnings are ignored until the owner has
    /// [taken](StoreServer::take_warning) the first.
    fn report(&self, warning: String) {
        self.warning.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(warning);
    }
}
