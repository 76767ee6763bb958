//! The connections of one client. Each operation uses a connection alone, so a thread in a long wait
//! does not block the other threads.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::connect::Address;
use super::connection::Connection;
use crate::call::Call;
use crate::error::StoreError;
use crate::interrupt;
use crate::keys::printable;

/// Most open connections, and so the most calls that run at once.
const MAX_CONNECTIONS: usize = 32;
/// Most unused connections that stay open.
const MAX_IDLE: usize = 2;
/// Time to open a further connection. The client was connected before, so the server is not still
/// starting: if it does not answer within this time, it has ended.
const REOPEN_TIME: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Pool {
    pub(super) address: Address,
    connections: Mutex<Connections>,
    /// Signalled when a connection was released or discarded.
    changed: Condvar,
}

#[derive(Debug)]
struct Connections {
    idle: Vec<Connection>,
    /// Number of connections, in use or idle.
    open: usize,
}

impl Pool {
    /// Creates a pool with its first connection.
    pub(super) fn new(address: Address, first: Connection) -> Pool {
        let connections = Mutex::new(Connections { idle: vec![first], open: 1 });
        Pool { address, connections, changed: Condvar::new() }
    }

    /// Returns a connection for exclusive use by `call`. Fails if all were in use until its deadline.
    ///
    /// The caller must call [`release`](Pool::release) or [`discard`](Pool::discard) afterwards.
    /// Opens a connection if none is idle.
    pub(super) fn acquire(&self, call: Call<'_>) -> Result<Connection, StoreError> {
        let awaited = || printable(call.keys.iter().copied());
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(connection) = connections.idle.pop() {
                return Ok(connection);
            }
            if connections.open < MAX_CONNECTIONS {
                break;
            }
            if Instant::now() >= call.deadline {
                return Err(call.timeout(self.address.to_string(), awaited()));
            }
            let until = interrupt::next_check(call.deadline);
            let left = until.saturating_duration_since(Instant::now());
            let timeout;
            (connections, timeout) =
                self.changed.wait_timeout(connections, left).unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() {
                // The check may take a lock, so it is made without this one.
                drop(connections);
                if interrupt::is_interrupted() {
                    return Err(call.interrupted(self.address.to_string(), awaited()));
                }
                connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
            }
        }
        connections.open += 1;
        drop(connections);
        let opened = self.address.connect(call.deadline.min(Instant::now() + REOPEN_TIME));
        if opened.is_err() {
            self.discard();
        }
        opened
    }

    /// Returns an acquired connection to the pool. A connection with unread bytes is closed.
    pub(super) fn release(&self, connection: Connection) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        if connection.is_reusable() && connections.idle.len() < MAX_IDLE {
            connections.idle.push(connection);
        } else {
            connections.open -= 1;
        }
        self.changed.notify_one();
    }

    /// Removes an acquired connection, which the caller has dropped, from the count.
    pub(super) fn discard(&self) {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner).open -= 1;
        self.changed.notify_one();
    }
}
