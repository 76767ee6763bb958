//! Connections of one client, so that a thread in a long wait does not hold up the others.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::connect::Address;
use super::connection::Connection;
use crate::error::StoreError;

/// Most connections at a time: so many threads can be in a wait while others go on.
const MAX_CONNECTIONS: usize = 32;
/// Most connections kept while nobody uses them.
const MAX_IDLE: usize = 2;
/// A store that was there once is tried for this long when a new connection is needed: it is not
/// starting, so if it is not there now, it is gone.
const REOPEN_TIME: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Pool {
    pub(super) address: Address,
    connections: Mutex<Connections>,
    /// A connection came back or was dropped.
    changed: Condvar,
}

#[derive(Debug)]
struct Connections {
    idle: Vec<Connection>,
    /// In use or idle.
    open: usize,
}

impl Pool {
    /// A pool with its first connection.
    pub(super) fn new(address: Address, first: Connection) -> Pool {
        let connections = Mutex::new(Connections { idle: vec![first], open: 1 });
        Pool { address, connections, changed: Condvar::new() }
    }

    /// A connection for the caller alone; `None` if all were in use until the deadline. It must be
    /// given to [`put_back`](Pool::put_back) or [`forget`](Pool::forget).
    pub(super) fn take(&self, deadline: Instant) -> Result<Option<Connection>, StoreError> {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(connection) = connections.idle.pop() {
                return Ok(Some(connection));
            }
            if connections.open < MAX_CONNECTIONS {
                break;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            (connections, _) =
                self.changed.wait_timeout(connections, left).unwrap_or_else(PoisonError::into_inner);
        }
        connections.open += 1;
        drop(connections);
        let opened = self.address.reach(deadline.min(Instant::now() + REOPEN_TIME));
        if opened.is_err() {
            self.forget();
        }
        opened.map(Some)
    }

    /// The connection is in step and free.
    pub(super) fn put_back(&self, connection: Connection) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        if connections.idle.len() < MAX_IDLE {
            connections.idle.push(connection);
        } else {
            connections.open -= 1;
        }
        self.changed.notify_one();
    }

    /// A connection that was taken is no more.
    pub(super) fn forget(&self) {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner).open -= 1;
        self.changed.notify_one();
    }
}
