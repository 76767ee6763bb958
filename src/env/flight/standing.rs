//! Who waits for whom: what the recordings of several workers say together. Pure.
//!
//! ```text
//! recordings ─► for each group its members ─► for each member where it is ─► a line (text)
//! ```
//!
//! A group is the same in two recordings if job, name, number on the wire and generation are. Times are compared by the
//! clock of the boot where recordings share one, else by the wall clocks of their hosts.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::layout::{Cause, CauseKind, Entry, Group, GroupState, Operation, State};
use super::process::Life;
use super::recording::Recording;
use crate::ExitCause;

/// Most groups and members that are looked at.
const GROUPS: usize = 4096;

/// A recording, and whether its process lives.
#[derive(Debug, Clone, Copy)]
pub struct Witness<'a> {
    /// What it recorded.
    pub recording: &'a Recording,
    /// Whether it lives.
    pub life: Life,
}

/// One group, as far as it was recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Standing {
    /// Id of its job.
    pub run_id: String,
    /// Its name.
    pub group: String,
    /// Its generation; `None` if it was not known yet.
    pub generation: Option<String>,
    /// Its number of ranks.
    pub size: u32,
    /// The ranks of whom there is a recording, by rank.
    pub members: Vec<Member>,
    /// Ranks of whom there is a recording, which does not know this group.
    pub absent: Vec<u32>,
    /// Ranks of whom there is none, as ranges from first to last.
    pub unrecorded: Vec<(u32, u32)>,
    /// Why it failed, if it did, as the first member that knows says.
    pub failure: Option<String>,
    /// A later group of the job has its name.
    pub superseded: bool,
}

/// One rank of a group. All ranks here are those in the world, where they are known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Member {
    /// Its rank.
    pub rank: u32,
    /// Index of its recording.
    pub recording: usize,
    /// Whether its process lives; `None` if that cannot be told from here.
    pub alive: Option<bool>,
    /// It ended by itself while it was needed.
    pub died: bool,
    /// Where it is.
    pub position: Position,
}

/// Where a rank is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "position", rename_all = "snake_case")]
pub enum Position {
    /// It looks for the other ranks.
    Forming {
        /// For how long.
        for_ms: Option<u64>,
    },
    /// It did not find them.
    Unformed,
    /// In no call.
    Idle {
        /// Its last collective; `None` if there was none.
        after: Option<Step>,
        /// Since the end of that, or since the group formed.
        for_ms: Option<u64>,
    },
    /// In a call of another group.
    Elsewhere {
        /// Its last collective in this one.
        after: Option<Step>,
        /// The other group.
        group: String,
        /// What it does there.
        step: Step,
    },
    /// In a call.
    Waiting {
        /// Which.
        step: Step,
        /// Since it was called.
        for_ms: Option<u64>,
    },
    /// It was in a call when the group failed.
    Failed {
        /// Which.
        step: Step,
    },
    /// It has left the group in good order.
    Left {
        /// Its last collective.
        after: Option<Step>,
    },
}

/// A call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Step {
    /// Which collective of its group, from 0; `None` for messages.
    pub seq: Option<u64>,
    /// What was called.
    pub call: String,
    /// Ranks that it waits for, the first few of them.
    pub waits_for: Vec<u32>,
}

/// What the recordings say of each group, in the order in which the groups were made.
///
/// `now` is the present, in nanoseconds since 1970. How long somebody waits is counted up to the end of its process, or
/// up to the failure of the group if that came before. Where a process is gone and nobody has written when, that is
/// left open.
#[must_use]
pub fn standings(witnesses: &[Witness<'_>], now: u64) -> Vec<Standing> {
    let clocks = Clocks::new(witnesses);
    let mut parts: BTreeMap<Key<'_>, Vec<Part<'_>>> = BTreeMap::new();
    let groups = witnesses.iter().enumerate().flat_map(|(index, witness)| {
        witness.recording.groups.iter().map(move |group| Part { index, witness, group })
    });
    for part in groups.take(GROUPS) {
        let own = part.group.generation.or(part.witness.recording.header.generation);
        let run_id = part.witness.recording.header.run_id.as_str();
        let key =
            (run_id, part.group.name.as_str(), part.group.id, own.map(|generation| generation.to_string()));
        parts.entry(key).or_default().push(part);
    }
    let mut all: Vec<(i128, Standing)> = parts
        .into_iter()
        .map(|(key, parts)| {
            let made = parts.iter().map(|part| clocks.unix(part.index, part.group.made_ns)).min();
            (made.unwrap_or(0), standing(key, parts, witnesses, &clocks, now))
        })
        .collect();
    all.sort_by_key(|(made, _)| *made);
    let mut all: Vec<Standing> = all.into_iter().map(|(_, standing)| standing).collect();
    let mut later = BTreeSet::new();
    for standing in all.iter_mut().rev() {
        standing.superseded = !later.insert((standing.run_id.clone(), standing.group.clone()));
    }
    all
}

/// Id of the job, name, number on the wire, generation.
type Key<'a> = (&'a str, &'a str, u64, Option<String>);

/// A group in one recording.
#[derive(Clone, Copy)]
struct Part<'a> {
    index: usize,
    witness: &'a Witness<'a>,
    group: &'a Group,
}

/// Relates the clocks of recordings: for each boot one moment by both of its clocks.
struct Clocks(Vec<(i128, i128)>);

impl Clocks {
    fn new(witnesses: &[Witness<'_>]) -> Self {
        let mut of_boot = BTreeMap::new();
        let mut pairs = Vec::new();
        for Witness { recording, .. } in witnesses {
            let header = &recording.header;
            let own = (i128::from(header.started_unix_ns), i128::from(header.started_ns));
            let shared = *of_boot.entry(header.process.boot_id).or_insert(own);
            pairs.push(if header.process.boot_id == 0 { own } else { shared });
        }
        Self(pairs)
    }

    /// A moment of this recording, in nanoseconds since 1970.
    fn unix(&self, index: usize, ns: u64) -> i128 {
        let (unix, own) = self.0[index];
        unix + i128::from(ns) - own
    }

    /// Milliseconds from a moment of this recording to another.
    fn since(&self, index: usize, ns: u64, until: Option<i128>) -> Option<u64> {
        u64::try_from((until? - self.unix(index, ns)) / 1_000_000).ok().filter(|_| ns > 0)
    }
}

fn standing(
    (run_id, name, _, generation): Key<'_>,
    mut parts: Vec<Part<'_>>,
    witnesses: &[Witness<'_>],
    clocks: &Clocks,
    now: u64,
) -> Standing {
    // Of two that claim to be the same rank the later.
    parts.sort_by_key(|part| {
        (part.group.rank, std::cmp::Reverse(clocks.unix(part.index, part.group.made_ns)))
    });
    parts.dedup_by_key(|part| part.group.rank);
    let size = parts.iter().map(|part| part.group.size).max().unwrap_or(0);
    let failed = |part: &&Part<'_>| part.group.cause.is_some();
    let failed_at = |part: Part<'_>| clocks.unix(part.index, part.group.ended_ns);
    let first_failed = parts.iter().filter(failed).copied().min_by_key(|&part| failed_at(part));
    let until = |part: &Part<'_>| {
        let ended = match part.witness.recording.exit {
            Some(exit) => Some(exit.unix_ns),
            None => (part.witness.life != Life::Gone).then_some(now),
        };
        first_failed.map(failed_at).into_iter().chain(ended.map(i128::from)).min()
    };
    let somebody_lives = parts.iter().any(|part| part.witness.life == Life::Alive);
    // All know the same.
    let first = parts.first().map(|part| part.group);
    let world_rank = |rank: u32| first.map_or(rank, |group| group.world_rank(rank));
    let causes = || parts.iter().filter_map(|part| part.group.cause);
    let lost: BTreeSet<u32> =
        causes().filter(|cause| cause.kind == CauseKind::Lost).filter_map(|cause| cause.blamed).collect();
    let members: Vec<Member> = parts
        .iter()
        .map(|part| {
            let ended =
                matches!(part.group.state, GroupState::Failed | GroupState::Left | GroupState::Unformed);
            let exit = part.witness.recording.exit;
            let gone = part.witness.life == Life::Gone || exit.is_some();
            let died = match exit {
                Some(exit) => !exit.stopped && exit.cause != ExitCause::Code(0),
                // One that others miss, or that is gone while others go on.
                None => gone && (lost.contains(&part.group.rank) || somebody_lives),
            };
            Member {
                rank: world_rank(part.group.rank),
                recording: part.index,
                alive: (gone || part.witness.life == Life::Alive).then_some(!gone),
                died: died && !ended,
                position: position(*part, clocks, until(part)),
            }
        })
        .collect();
    let present: BTreeSet<u32> = parts.iter().map(|part| part.group.rank).collect();
    let same_round = |witness: &&Witness<'_>| {
        let own = witness.recording.header.generation.map(|generation| generation.to_string());
        own.is_some() && own == generation
    };
    let others: BTreeSet<u32> =
        witnesses.iter().filter(same_round).filter_map(|witness| witness.recording.header.rank).collect();
    let absent: BTreeSet<u32> = (others.into_iter())
        .filter_map(|rank| rank_of(first?, rank))
        .filter(|rank| *rank < size && !present.contains(rank))
        .collect();
    let known: BTreeSet<u32> = present.union(&absent).copied().collect();
    Standing {
        run_id: run_id.to_owned(),
        group: name.to_owned(),
        generation,
        size,
        members,
        absent: absent.iter().map(|&rank| world_rank(rank)).collect(),
        unrecorded: gaps(&known, size).into_iter().map(|(a, b)| (world_rank(a), world_rank(b))).collect(),
        failure: first_failed.and_then(|part| part.group.cause).map(|cause| failure(cause, &world_rank)),
        superseded: false,
    }
}

/// What is missing of the numbers below `size`, as ranges.
fn gaps(known: &BTreeSet<u32>, size: u32) -> Vec<(u32, u32)> {
    let mut out = Vec::new();
    let mut next = 0;
    for &rank in known.iter().chain([&size]) {
        if next < rank {
            out.push((next, rank - 1));
        }
        next = next.max(rank.saturating_add(1));
    }
    out
}

/// The rank in `group` of a rank of the world.
fn rank_of(group: &Group, world_rank: u32) -> Option<u32> {
    match &group.origin {
        None => Some(world_rank),
        Some(origin) => {
            origin.iter().position(|&rank| rank == world_rank).and_then(|at| u32::try_from(at).ok())
        }
    }
}

fn failure(cause: Cause, world_rank: &dyn Fn(u32) -> u32) -> String {
    let blamed =
        cause.blamed.map_or_else(|| "a rank".to_owned(), |rank| format!("rank {}", world_rank(rank)));
    let by = world_rank(cause.by);
    match cause.kind {
        CauseKind::Lost => format!("{blamed} was lost, says rank {by}"),
        CauseKind::Timeout => format!("rank {by} timed out waiting for {blamed}"),
        CauseKind::Mismatch => format!("the calls of {blamed} and rank {by} differ"),
        CauseKind::Aborted => format!("rank {by} gave it up"),
        CauseKind::Other => format!("{blamed} broke the protocol, says rank {by}"),
    }
}

fn position(part: Part<'_>, clocks: &Clocks, until: Option<i128>) -> Position {
    let Part { index, witness: Witness { recording, .. }, group } = part;
    let calls = || recording.entries.iter().filter(|entry| entry.group == group.number);
    let step = |entry: &Entry| step(recording, entry);
    let last = calls().filter(|entry| entry.operation == Operation::Collective && entry.state == State::Done);
    let last = last.max_by_key(|entry| entry.seq);
    let after = || last.map(step);
    // Collectives first: they come one after the other, and messages may wait beside them.
    let first = |state: fn(&&Entry) -> bool| {
        calls().filter(state).min_by_key(|entry| (entry.operation != Operation::Collective, entry.number))
    };
    match group.state {
        GroupState::Forming => Position::Forming { for_ms: clocks.since(index, group.made_ns, until) },
        GroupState::Unformed => Position::Unformed,
        GroupState::Left => Position::Left { after: after() },
        GroupState::Formed => match first(is_open) {
            Some(entry) => {
                Position::Waiting { step: step(entry), for_ms: clocks.since(index, entry.enqueued_ns, until) }
            }
            None => elsewhere(part, after()).unwrap_or_else(|| idle(last, after(), part, clocks, until)),
        },
        GroupState::Failed => match first(|entry| entry.state == State::Failed || is_open(entry)) {
            Some(entry) => Position::Failed { step: step(entry) },
            None => idle(last, after(), part, clocks, until),
        },
    }
}

fn is_open(entry: &&Entry) -> bool {
    matches!(entry.state, State::Queued | State::Running)
}

fn idle(
    last: Option<&Entry>,
    after: Option<Step>,
    part: Part<'_>,
    clocks: &Clocks,
    until: Option<i128>,
) -> Position {
    let since = last.map_or(part.group.made_ns, |entry| entry.ended_ns);
    Position::Idle { after, for_ms: clocks.since(part.index, since, until) }
}

/// What this process does in another group, or for one.
fn elsewhere(part: Part<'_>, after: Option<Step>) -> Option<Position> {
    let Part { witness: Witness { recording, .. }, group, .. } = part;
    let open = recording.entries.iter().filter(is_open).find(|entry| entry.group != group.number);
    if let Some(entry) = open {
        let other = recording.group(entry.group).filter(|other| other.state == GroupState::Formed)?;
        let step = step(recording, entry);
        return Some(Position::Elsewhere { after, group: other.name.clone(), step });
    }
    let forming = recording.groups.iter().find(|other| other.state == GroupState::Forming)?;
    let step = Step { seq: None, call: "looking for its ranks".to_owned(), waits_for: Vec::new() };
    Some(Position::Elsewhere { after, group: forming.name.clone(), step })
}

fn step(recording: &Recording, entry: &Entry) -> Step {
    let seq = (entry.operation == Operation::Collective).then_some(entry.seq);
    Step { seq, call: recording.words(entry), waits_for: recording.waits_for(entry) }
}

impl Standing {
    /// Whether somebody waits, waited when it ended, or died.
    #[must_use]
    pub fn is_open(&self) -> bool {
        let stuck = |member: &Member| match member.position {
            Position::Forming { .. }
            | Position::Unformed
            | Position::Waiting { .. }
            | Position::Failed { .. } => true,
            Position::Idle { .. } | Position::Elsewhere { .. } | Position::Left { .. } => member.died,
        };
        !self.superseded && self.members.iter().any(stuck)
    }

    /// The ranks for whom those among `waiting` wait in the end: who waits with them in the same call passes on to
    /// those that it waits for itself. Empty if they wait only for each other.
    pub(super) fn awaited(&self, waiting: &[&Member]) -> BTreeSet<u32> {
        let of = |rank: u32| waiting.iter().find(|member| member.rank == rank).map(|member| &member.position);
        let mut queue: Vec<u32> = waiting.iter().map(|member| member.rank).collect();
        let mut seen: BTreeSet<u32> = queue.iter().copied().collect();
        let mut ends = BTreeSet::new();
        while let Some(rank) = queue.pop() {
            match of(rank) {
                Some(Position::Waiting { step, .. } | Position::Failed { step }) => {
                    queue.extend(step.waits_for.iter().filter(|&&next| seen.insert(next)));
                }
                Some(_) | None => {
                    ends.insert(rank);
                }
            }
        }
        ends
    }
}
