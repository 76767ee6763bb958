//! The errors of store operations.

use std::io;
use std::time::Duration;

use crate::interrupt::INTERRUPTED;

/// The reason why a store operation failed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The deadline passed. The store remains usable.
    #[error("store at {store}: {operation} timed out after {} ms, waiting for {}", after.as_millis(), keys.join(", "))]
    Timeout {
        /// Address or path of the store.
        store: String,
        /// Name of the operation.
        operation: &'static str,
        /// The time waited.
        after: Duration,
        /// The awaited keys, escaped, at most 8 of them.
        keys: Vec<String>,
    },
    /// The program was interrupted while the call waited, see
    /// [`set_interrupt_check`](crate::interrupt::set_interrupt_check). The operation may have taken effect.
    #[error("store at {store}: {operation} was {INTERRUPTED}, after {} ms{}", after.as_millis(), describe_awaited(keys))]
    Interrupted {
        /// Address or path of the store.
        store: String,
        /// Name of the operation.
        operation: &'static str,
        /// The time waited.
        after: Duration,
        /// The keys of the call, escaped, at most 8 of them; none if the client was still connecting.
        keys: Vec<String>,
    },
    /// No store answered at this address until the deadline.
    #[error("no store at {store} after {} ms and {attempts} attempts: {last}", after.as_millis())]
    Unreachable {
        /// Address of the store.
        store: String,
        /// The time spent on attempts.
        after: Duration,
        /// Number of attempts.
        attempts: u32,
        /// The error of the last attempt.
        last: String,
    },
    /// The connection or the file failed during an operation. The operation may have taken effect.
    #[error("store at {store} was lost during {operation}: {}", describe_loss(source))]
    Lost {
        /// Address or path of the store.
        store: String,
        /// Name of the operation.
        operation: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
    /// The peer broke the protocol, or the file is damaged.
    #[error("store at {store}: {what}")]
    Protocol {
        /// Address or path of the store.
        store: String,
        /// Description of the wrong bytes or reply.
        what: String,
    },
    /// The request was refused: a key or value is too long, or a value is not a number.
    #[error("store: {what}")]
    Invalid {
        /// Description of the wrong argument, with the limit.
        what: String,
    },
    /// This kind of store does not have the operation.
    #[error("a {store} does not support {operation}")]
    Unsupported {
        /// Kind of the store.
        store: &'static str,
        /// Name of the operation.
        operation: &'static str,
    },
}

fn describe_awaited(keys: &[String]) -> String {
    if keys.is_empty() { String::new() } else { format!(", waiting for {}", keys.join(", ")) }
}

/// Describes the loss of a store, for an error message. When the process of a store ends, its connections are
/// closed, which the system reports as one of several errors.
fn describe_loss(source: &io::Error) -> String {
    match source.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionAborted
        | io::ErrorKind::BrokenPipe => "its process has ended, or closed the connection".to_owned(),
        _ => source.to_string(),
    }
}

/// Prints the [`Display`](std::fmt::Display) text, because a `main` that returns an error prints `Debug`.
impl std::fmt::Debug for StoreError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}
