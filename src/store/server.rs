//! The store server: one event loop on one thread, any number of listening addresses.

mod connection;
mod event_loop;
mod fan_out;
mod limits;
mod listen;

use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::{fmt, io, thread};

use crate::hub::Hub;
use crate::memory::MemoryStore;
use crate::store::Store;
use event_loop::EventLoop;
pub use limits::raise_descriptor_limit;
pub use listen::listen;

/// Why a server cannot be started.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Somebody listens there already.
    #[error("{address} is in use: another store or program listens there")]
    InUse {
        /// The address asked for.
        address: SocketAddr,
    },
    /// The address cannot be listened at.
    #[error("cannot listen at {address}: {source}")]
    Listen {
        /// The address asked for.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// No address was given.
    #[error("no address to listen at")]
    NoAddress,
    /// The system refused something else.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

/// As [`Display`](fmt::Display): what a `main` prints that returns it.
impl fmt::Debug for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A running TCPStore server; dropping it ends it.
///
/// Serves torch's and convoke's clients from one thread, ten thousand of them and more; only when
/// thousands are to be woken at once do up to three others help for that moment. A connection
/// that sends garbage is closed and no other; one that does not read its replies is not read from
/// until it does. The store lives and dies with this value.
pub struct StoreServer {
    addresses: Vec<SocketAddr>,
    shared: Arc<Control>,
    view: MemoryStore,
    thread: Option<JoinHandle<()>>,
}

/// What the event loop and its owner share.
#[derive(Debug)]
struct Control {
    hub: Arc<Hub>,
    stopping: AtomicBool,
    trouble: Mutex<Option<String>>,
}

impl StoreServer {
    /// Starts a server that listens at all of `addresses`.
    ///
    /// Port 0 asks for a free port; the first address picks it and other port-0 addresses follow.
    /// `[::]` means IPv4 as well, and `0.0.0.0` alone where the system has no IPv6. Raises this
    /// process's soft limit of descriptors to the hard one (see [`raise_descriptor_limit`]).
    ///
    /// # Errors
    /// [`ServeError`], which names the address.
    pub fn bind(addresses: &[SocketAddr]) -> Result<StoreServer, ServeError> {
        StoreServer::serve(listen(addresses)?)
    }

    /// Starts a server on sockets that listen already.
    ///
    /// # Errors
    /// [`ServeError::NoAddress`], [`ServeError::System`].
    pub fn serve(listeners: Vec<TcpListener>) -> Result<StoreServer, ServeError> {
        let failed = |what| move |source| ServeError::System { what, source };
        if listeners.is_empty() {
            return Err(ServeError::NoAddress);
        }
        let _ = raise_descriptor_limit();
        let addresses: Result<Vec<_>, _> = listeners.iter().map(TcpListener::local_addr).collect();
        let addresses = addresses.map_err(failed("ask for the address of a socket"))?;
        let hub = Arc::new(Hub::served().map_err(failed("create an eventfd"))?);
        let shared = Arc::new(Control {
            hub: Arc::clone(&hub),
            stopping: AtomicBool::new(false),
            trouble: Mutex::new(None),
        });
        let event_loop = EventLoop::new(Arc::clone(&shared), listeners).map_err(failed("set up epoll"))?;
        let thread = thread::Builder::new()
            .name("convoke-store".into())
            .spawn(move || event_loop.run())
            .map_err(failed("start a thread"))?;
        let view = MemoryStore::of_server(hub, &addresses[0].to_string());
        Ok(StoreServer { addresses, shared, view, thread: Some(thread) })
    }

    /// The port of the first address.
    pub fn port(&self) -> u16 {
        self.addresses[0].port()
    }

    /// Where it listens, in the order given, ports filled in.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// The server's keys as its TCP clients see them, without a socket.
    ///
    /// Every operation works and waits wake up as over TCP, but an operation is a lock instead of a
    /// round trip. After [`shutdown`](StoreServer::shutdown) it fails with
    /// [`StoreError::Lost`](crate::StoreError::Lost).
    pub fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.view.clone())
    }

    /// Deletes all keys and queues that begin with none of `prefixes`; returns how many.
    ///
    /// Prefixes are of keys as on the wire: a TCP client's key `k` is `/k`, and the count of workers
    /// that torch keeps is `init/`. Waits go on.
    pub fn retain(&self, prefixes: &[&[u8]]) -> usize {
        self.shared.hub.lock().state.retain(prefixes)
    }

    /// What has hindered the server since the last call, such as a lack of descriptors. It goes on
    /// serving meanwhile.
    pub fn take_trouble(&self) -> Option<String> {
        self.shared.trouble.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Stops listening, sends the replies that are due for at most half a second, closes all
    /// connections and ends the thread. Also done by dropping.
    pub fn shutdown(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.hub.close();
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.hub.ring();
        // A panic of the loop has been reported by its thread already.
        let _ = thread.join();
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for StoreServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreServer").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

impl Control {
    /// Records trouble for the owner; the first one counts until it is asked for.
    fn report(&self, trouble: String) {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(trouble);
    }
}
