//! The flight recorder's file: what a worker was doing in its groups, in a form that outlives it.
//!
//! A worker of the runtime writes one file, a *recording*, into the folder that CONVOKE_FLIGHT_DIR names. It maps the
//! file and only stores into memory, so what stands there survives SIGKILL. The launcher and `convoke-flight` read
//! the recordings of several workers together and say who waits for whom.
//!
//! ```text
//! file ─► layout, names ─► recording ─► standing ─► text
//! ```
//!
//! - [`layout`]: where what stands in a recording, and both directions between that and types.
//! - [`names`]: the words for calls, element types and algorithms, which the writer brings along: so a reader shows
//!   those of a newer runtime too.
//! - [`folder`]: reading files, also while their worker writes.
//! - [`standing`]: who waits for whom. Its [`fmt::Display`](std::fmt::Display) is one line for each group.
//! - [`process`]: which process wrote it, and whether that lives.
//!
//! Whatever stands in a file is taken as untrusted: nothing here panics, loops or allocates for what it says.

pub mod folder;
pub mod layout;
pub mod names;
pub mod process;
mod recording;
pub mod standing;
#[cfg(test)]
mod tests;
mod text;

pub use recording::{FormatError, Recording};
pub use text::{Ranks, span};
