//! The flight recorder's file: the communication calls of a worker in its groups, readable after the worker
//! died.
//!
//! A worker of the runtime writes one file, a *recording*, into the folder that CONVOKE_FLIGHT_DIR names. The
//! worker maps the file and only writes to that memory, so the contents survive SIGKILL. The launcher and
//! `convoke-flight` read the recordings of several workers together and report who waits for whom.
//!
//! ```text
//! file ─► layout, names ─► recording ─► snapshot ─► text
//! ```
//!
//! - [`layout`]: the position of each value in a recording, and the conversion from and to types.
//! - [`names`]: the names of calls, element types and algorithms. The writer stores its own names, so that an
//!   older reader can show the names of a newer runtime.
//! - [`folder`]: reading recordings from files, even while a worker writes to them.
//! - [`snapshot`]: for each group, who waits for whom. Its [`fmt::Display`](std::fmt::Display) is one line.
//! - [`process`]: the identity of the process that wrote a recording, and whether that process is running.
//!
//! The contents of a file are untrusted. No value in it can cause a panic, an endless loop or a large
//! allocation.

pub mod folder;
pub mod layout;
pub mod names;
pub mod process;
mod recording;
pub mod snapshot;
#[cfg(test)]
mod tests;
mod text;

pub use recording::{FormatError, Recording};
pub use text::{RankList, format_duration};
