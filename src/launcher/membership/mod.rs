//! Membership of an elastic job: which nodes form a round, their ranks, when all restart, and how the job
//! ends. Pure.
//!
//! Each agent is a [`Member`]; one [`Coordinator`] decides for all of them. They do not hold a dialogue but
//! replicate two registers.
//! A member repeats its [`Status`], the coordinator repeats its latest [`Order`], and the higher number
//! counts.
//! A lost, late or duplicate message or a broken connection therefore loses no information.
//!
//! ```text
//!            Forming ── enough members are ready ──► Starting ── written down ──► Live
//!               ▲                                                                 │
//!               └── a worker failed, a node is lost, or another one has come ─────┤
//!                                                                                 ▼
//!                                            all have succeeded, or a failure is final: Over
//! ```

mod bug;
mod coordinator;
pub(crate) mod mandate;
mod member;
mod messages;
mod record;
mod seats;
#[cfg(test)]
mod tests;

pub(crate) use coordinator::{Action, Coordinator, Event, LENIENCE, Rules};
pub(crate) use member::{Member, News};
pub(crate) use messages::{
    AgentId, Assignment, Departure, Ending, Failure, Muster, OrderMessage, Phase, Profile, Refusal, Status,
};
#[cfg(test)]
pub(crate) use messages::{Cause, Order};
pub(crate) use record::Record;
#[cfg(test)]
pub(crate) use record::Seat;
pub(crate) use seats::{Ranks, assign};
