//! Membership of an elastic job: decides which nodes form a rendezvous round, their ranks, when all nodes
//! restart, and how the job ends. Pure.
//!
//! Each agent is a [`Member`]; one [`Coordinator`] decides for all members. They exchange no requests and
//! replies, but replicate two registers. A member repeats its latest [`Status`], the coordinator repeats its
//! latest [`messages::Order`], and a value with a higher sequence number replaces one with a lower. A lost,
//! late or duplicate message or a broken connection therefore loses no information.
//!
//! ```text
//!            Forming ── enough members are ready ──► Starting ─ record written ─► Live
//!               ▲                                                                 │
//!               └── a worker failed, a node was lost or stopped, a node joined ───┤
//!                                                                                 ▼
//!                                            all have succeeded, or a failure is final: Finished
//! ```

mod coordinator;
mod injected_bug;
pub(crate) mod leader_lease;
mod member;
mod messages;
mod rank_assignment;
mod record;
#[cfg(test)]
mod tests;

pub(crate) use coordinator::{Action, Coordinator, Event, IDLE_TIMEOUT_FACTOR, RECONNECT_TIMEOUT, Rules};
pub(crate) use member::{Command, Member};
pub(crate) use messages::{
    AgentId, Assignment, Departure, Failure, JobResult, JoinStatus, OrderMessage, Phase, Profile, Refusal,
    Status,
};
#[cfg(test)]
pub(crate) use messages::{Order, RestartCause};
pub(crate) use rank_assignment::{Ranks, assign};
pub(crate) use record::Record;
#[cfg(test)]
pub(crate) use record::RoundNode;
