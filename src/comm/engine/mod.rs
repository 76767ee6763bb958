//! Runs the operations of groups. Each group has one engine, driven by a thread that waits for an operation
//! of the group ([`progress_lock`]).
//!
//! Between blocking calls no data moves, except that of nonblocking operations: a background thread drives
//! the engine if no thread waits for them.

mod affinity;
mod broken;
pub(crate) mod callbacks;
mod collectives;
mod completion;
mod connect;
mod control;
mod ending;
mod events;
mod exclusive;
mod execution;
mod failure;
mod fast_path;
pub(crate) mod handshake;
mod lifecycle;
mod liveness;
mod lost_peers;
mod message_watch;
mod messages;
mod missing;
#[cfg(all(test, loom))]
mod models;
pub(crate) mod mux;
mod operation;
mod peer;
mod poller;
mod probe;
mod progress;
mod progress_lock;
mod recording;
mod settings;
mod shared;
mod shared_memory;
mod start;
mod state;
mod streams;
mod submission;
mod sync;
mod teardown;
#[cfg(test)]
mod tests;
mod wait_policy;
mod waits;

pub(crate) use completion::{Completion, TimeLimit};
pub(crate) use operation::{Operation, Transport, run_single_rank};
pub(crate) use settings::{ParentLinks, Settings};
pub(crate) use shared::Shared;
pub(crate) use state::Engine;
pub(crate) use streams::Shape;
pub(crate) use wait_policy::{CorePlace, CoreSharing, Oversubscription};
