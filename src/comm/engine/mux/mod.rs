//! The connections of a process to the other processes of its job, which all groups of the process share.
//!
//! The first group, usually the world, makes the multiplexer: its ranks are the *processes*. Each pair of
//! processes has one control connection. The groups that are made from the first group *join* the
//! multiplexer. Each pair of ranks of a group has a [channel](channel) for control frames, which is part of
//! the connection between their processes: the header of each frame names the group. A Close frame ends a
//! channel, and the connection goes on.
//!
//! [Data links](data) between ranks that share no memory also begin as parts of this connection.
//!
//! The multiplexer also has what else belongs to a process: the listener and the handshakes, the launcher's
//! channel, the descriptors that report the end of other processes, and the threads that [sleep](sleepers).
//! A thread of any group that polls hands each event to its group, and wakes the thread that sleeps there.
//! The multiplexer calls no group, so each group keeps its own failures, deadlines and order of calls.

mod channel;
mod closing;
mod data;
mod inbox;
mod link;
mod membership;
mod polling;
mod routing;
mod sleepers;
mod state;

pub(super) use closing::ClosingConn;
pub(crate) use membership::Membership;
pub(crate) use sleepers::{Doorbell, Slot};
pub(super) use state::Event;
pub(crate) use state::{Agent, Mux};
