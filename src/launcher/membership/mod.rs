//! Who is in an elastic job: which nodes form which round, with which ranks, when all start anew, and how it ends.
//! Pure.
//!
//! Each agent is a [`Member`]; one [`Coordinator`] decides for all of them. What they tell each other are two registers,
//! not a dialogue: a member repeats its [`Status`], the coordinator its latest [`Order`], and the higher number counts. So
//! nothing is lost with a message that is lost, late or doubled, or with a connection.
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
