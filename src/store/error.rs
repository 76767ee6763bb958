//! Why a store operation failed.

use std::io;
use std::time::Duration;

/// Why a store operation failed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The deadline passed; the store stays usable.
    #[error("store at {store}: {operation} timed out after {} ms, waiting for {}", after.as_millis(), keys.join(", "))]
    Timeout {
        /// Address or path of the store.
        store: String,
        /// Name of the operation.
        operation: &'static str,
        /// How long was waited.
        after: Duration,
        /// Keys that were waited for, printable, at most 8 of them.
        keys: Vec<String>,
    },
    /// Nobody answered as a store at this address until the deadline.
    #[error("no store at {store} after {} ms and {attempts} attempts: {last}", after.as_millis())]
    Unreachable {
        /// Address of the store.
        store: String,
        /// How long was tried.
        after: Duration,
        /// How often.
        attempts: u32,
        /// What the last attempt met.
        last: String,
    },
    /// The store went away in the middle; the connection cannot be used again.
    #[error("store at {store} was lost during {operation}: {}", lost_how(source))]
    Lost {
        /// Address or path of the store.
        store: String,
        /// Name of the operation.
        operation: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The other side does not speak the protocol, or the file is damaged.
    #[error("store at {store}: {what}")]
    Protocol {
        /// Address or path of the store.
        store: String,
        /// What was seen.
        what: String,
    },
    /// The request cannot be made: a key or value is too long, or a value is not a number.
    #[error("store: {what}")]
    Invalid {
        /// What is wrong, and the limit.
        what: String,
    },
    /// This kind of store has no such operation.
    #[error("a {store} has no {operation}")]
    Unsupported {
        /// Kind of the store.
        store: &'static str,
        /// Name of the operation.
        operation: &'static str,
    },
}

/// A process that ends closes its connections, whatever the system calls that.
fn lost_how(source: &io::Error) -> String {
    match source.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionAborted
        | io::ErrorKind::BrokenPipe => "its process has ended, or closed the connection".to_owned(),
        _ => source.to_string(),
    }
}

/// As [`Display`](std::fmt::Display): what a `main` prints that returns it.
impl std::fmt::Debug for StoreError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}
