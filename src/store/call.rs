//! A call of an operation, as its errors describe it.

use std::io;
use std::time::Instant;

use crate::error::StoreError;

/// A call of a store's operation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) operation: &'static str,
    /// The keys for which the call may wait, as the user gave them.
    pub(crate) keys: &'a [&'a [u8]],
    pub(crate) deadline: Instant,
    started: Instant,
}

impl<'a> Call<'a> {
    /// Creates a call that starts now.
    pub(crate) fn new(operation: &'static str, keys: &'a [&'a [u8]], deadline: Instant) -> Call<'a> {
        Call { operation, keys, deadline, started: Instant::now() }
    }

    /// Creates the description, for an error, of an operation without keys that started at `started`.
    pub(crate) fn started_at(operation: &'static str, started: Instant) -> Call<'static> {
        Call { operation, keys: &[], deadline: started, started }
    }

    /// Returns the error at the deadline. `awaited` are keys as [`printable`](crate::keys::printable) returns
    /// them, or a description of something else.
    pub(crate) fn timeout(self, store: String, awaited: Vec<String>) -> StoreError {
        let Call { operation, started, .. } = self;
        StoreError::Timeout { store, operation, after: started.elapsed(), keys: awaited }
    }

    /// Returns the error of a program that was interrupted while the call waited. `awaited` is as in
    /// [`timeout`](Call::timeout).
    pub(crate) fn interrupted(self, store: String, awaited: Vec<String>) -> StoreError {
        let Call { operation, started, .. } = self;
        StoreError::Interrupted { store, operation, after: started.elapsed(), keys: awaited }
    }

    /// Returns the error for a connection or file that failed.
    pub(crate) fn lost(self, store: String, source: io::Error) -> StoreError {
        StoreError::Lost { store, operation: self.operation, source }
    }
}
