//! Combines the recordings of several workers to a snapshot of each group: who waits for whom. Pure.
//!
//! ```text
//! recordings ─► groups ─► members of each group ─► position of each member ─► a line (text)
//! ```
//!
//! Groups in two recordings are the same group if job, name, group id and generation are equal. Times
//! in recordings of one boot are compared by CLOCK_MONOTONIC, other times by the wall clocks of the
//! hosts.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use convoke_env::{ExitCause, Generation};
use serde::Serialize;

use crate::layout::{Cause, CauseKind, Entry, Group, GroupState, Header, Operation, State};
use crate::process::ProcessStatus;
use crate::recording::Recording;

/// Most group records, over all recordings, that are used.
const MAX_GROUP_RECORDS: usize = 4096;

/// The recording of one process, and the status of the process.
#[derive(Debug, Clone, Copy)]
pub struct Observer<'a> {
    /// The recording of the process.
    pub recording: &'a Recording,
    /// The status of the process now.
    pub status: ProcessStatus,
}

/// The state of one group, as far as its members have recorded it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GroupSnapshot {
    /// Id of the job.
    pub run_id: String,
    /// Name of the group.
    pub group: String,
    /// Generation of the group; `None` if it was not known yet.
    pub generation: Option<String>,
    /// Number of ranks of the group.
    pub size: u32,
    /// Members whose recording has this group, in order of rank.
    pub members: Vec<Member>,
    /// Ranks whose recording does not have this group.
    pub absent: Vec<u32>,
    /// Ranks without a recording, as ranges (first, last).
    pub unrecorded: Vec<(u32, u32)>,
    /// Description of the failure by the member that failed first; `None` without a failure.
    pub failure: Option<String>,
    /// True if a later group of the job has the same name.
    pub superseded: bool,
}

/// One rank of a group. All ranks in snapshots are world ranks, as far as they are known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Member {
    /// World rank of the member.
    pub rank: u32,
    /// Index of the member's recording in the argument of [`snapshots`].
    pub recording: usize,
    /// True if the member's process is running; `None` if that is unknown.
    pub alive: Option<bool>,
    /// True if the process ended by itself (not with exit code 0, not stopped by the launcher) before
    /// this rank's membership in the group had ended.
    pub died: bool,
    /// Position of the member.
    pub position: Position,
}

/// The position of a rank in the sequence of calls of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "position", rename_all = "snake_case")]
pub enum Position {
    /// The rank is connecting to the other ranks.
    Forming {
        /// Milliseconds since the rank started to form the group; `None` if that is unknown.
        for_ms: Option<u64>,
    },
    /// The rank could not connect to the other ranks.
    Unformed,
    /// The rank is in no call.
    Idle {
        /// The rank's last completed collective in this group; `None` if there was none.
        after: Option<CallSummary>,
        /// Milliseconds since the end of that collective, or since the creation of the group; `None`
        /// if that is unknown.
        for_ms: Option<u64>,
    },
    /// The rank is in a call of another group, or forms another group.
    Elsewhere {
        /// The rank's last completed collective in this group; `None` if there was none.
        after: Option<CallSummary>,
        /// Name of the other group.
        group: String,
        /// The rank's call in the other group.
        #[serde(rename = "step")]
        call: CallSummary,
    },
    /// The rank is in a call of this group.
    Waiting {
        /// The call in which the rank is.
        #[serde(rename = "step")]
        call: CallSummary,
        /// Milliseconds since the call was made; `None` if that is unknown.
        for_ms: Option<u64>,
    },
    /// The rank was in a call when the group failed.
    Failed {
        /// The call in which the rank was.
        #[serde(rename = "step")]
        call: CallSummary,
    },
    /// The rank has left the group without a failure.
    Left {
        /// The rank's last completed collective in this group; `None` if there was none.
        after: Option<CallSummary>,
    },
}

/// A call as a snapshot shows it to readers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CallSummary {
    /// Sequence number of a collective in its group, from 0; `None` for messages.
    pub seq: Option<u64>,
    /// Text of the call, see [`Recording::describe`].
    #[serde(rename = "call")]
    pub text: String,
    /// Ranks for which the call waits, as far as they are recorded.
    pub waits_for: Vec<u32>,
}

/// Most nanoseconds by which other ranks notice that a stopped rank is gone before its launcher writes its end.
const MAX_STOP_NS: i128 = 1_000_000_000;

/// Returns a snapshot of each group, in order of creation.
///
/// `observers` are the recordings, each with the status of the process that it records. `now` is the
/// current time, in nanoseconds since 1970. A rank's waiting time is counted until `now`, until its
/// process ended, or until the group failed, whichever came first. It is `None` if the process has
/// ended, its launcher has not written when, and the group has not failed. Only the first 4096 group
/// records of all recordings together are used.
#[must_use]
pub fn snapshots(observers: &[Observer<'_>], now: u64) -> Vec<GroupSnapshot> {
    let clocks = &Clocks::new(observers);
    let mut records: BTreeMap<Key<'_>, Vec<RecordedGroup<'_>>> = BTreeMap::new();
    let groups = observers.iter().enumerate().flat_map(|(index, observer)| {
        let created = move |group: &Group| clocks.unix(index, group.created_ns);
        let groups = observer.recording.groups.iter();
        groups.map(move |group| RecordedGroup { index, observer, group, created: created(group) })
    });
    for record in groups.take(MAX_GROUP_RECORDS) {
        let Header { run_id, generation, .. } = &record.observer.recording.header;
        let generation = record.group.generation.or(*generation);
        let key = (run_id.as_str(), record.group.name.as_str(), record.group.id, generation);
        records.entry(key).or_default().push(record);
    }
    let mut records: Vec<_> = records.into_iter().collect();
    records.sort_by_key(|(_, records)| records.iter().map(|record| record.created).min());
    let snapshots = records.into_iter().map(|(key, records)| snapshot(key, records, observers, clocks, now));
    let mut all: Vec<GroupSnapshot> = snapshots.collect();
    let mut later = BTreeSet::new();
    for snapshot in all.iter_mut().rev() {
        snapshot.superseded = !later.insert((snapshot.run_id.clone(), snapshot.group.clone()));
    }
    all
}

/// The identity of a group: id of the job, name, group id, generation.
type Key<'a> = (&'a str, &'a str, u64, Option<Generation>);

/// A group record, and the recording that contains it, with the index of the recording.
#[derive(Clone, Copy)]
struct RecordedGroup<'a> {
    index: usize,
    observer: &'a Observer<'a>,
    group: &'a Group,
    /// When the group was created, in nanoseconds since 1970.
    created: i128,
}

/// For each recording, one instant by two clocks: nanoseconds since 1970, and CLOCK_MONOTONIC.
/// Recordings of one boot share an instant.
struct Clocks(Vec<(i128, i128)>);

impl Clocks {
    fn new(observers: &[Observer<'_>]) -> Self {
        let mut of_boot = BTreeMap::new();
        let mut pairs = Vec::new();
        for Observer { recording, .. } in observers {
            let header = &recording.header;
            let own = (i128::from(header.started_unix_ns), i128::from(header.started_ns));
            let shared = *of_boot.entry(header.process.boot_id).or_insert(own);
            pairs.push(if header.process.boot_id == 0 { own } else { shared });
        }
        Self(pairs)
    }

    /// Converts a time of the recording to nanoseconds since 1970.
    fn unix(&self, index: usize, ns: u64) -> i128 {
        let (unix, own) = self.0[index];
        unix + i128::from(ns) - own
    }

    /// Returns the milliseconds from a time of the recording (0: unknown) to `until`.
    fn since(&self, index: usize, ns: u64, until: Option<i128>) -> Option<u64> {
        u64::try_from((until? - self.unix(index, ns)) / 1_000_000).ok().filter(|_| ns > 0)
    }
}

fn snapshot(
    (run_id, name, _, generation): Key<'_>,
    mut records: Vec<RecordedGroup<'_>>,
    observers: &[Observer<'_>],
    clocks: &Clocks,
    now: u64,
) -> GroupSnapshot {
    // If two recordings have this rank of the group, only the group record that was created later is
    // kept.
    records.sort_by_key(|record| (record.group.rank, Reverse(record.created)));
    records.dedup_by_key(|record| record.group.rank);
    // All records of a group have the same world ranks.
    let first = records.first().expect("a group comes from at least one record").group;
    let size = records.iter().map(|record| record.group.size).fold(first.size, u32::max);
    let failed_at = |record: RecordedGroup<'_>| clocks.unix(record.index, record.group.ended_ns);
    let stopped_at = |rank: u32| {
        let record = records.iter().find(|record| record.group.rank == rank)?;
        record.observer.recording.exit.filter(|exit| exit.stopped).map(|exit| i128::from(exit.unix_ns))
    };
    // A rank that the launcher stops may notice before its end that others are gone. The group did not fail for this.
    let notices_stop = |record: &RecordedGroup<'_>, Cause { kind, suspect, reported_by }: Cause| {
        kind == CauseKind::Lost
            && stopped_at(reported_by).is_some()
            && suspect.and_then(stopped_at).is_some_and(|at| at < failed_at(*record) + MAX_STOP_NS)
    };
    let failed =
        |record: &&RecordedGroup<'_>| record.group.cause.is_some_and(|cause| !notices_stop(record, cause));
    let first_failed = records.iter().filter(failed).copied().min_by_key(|&record| failed_at(record));
    let until = |record: &RecordedGroup<'_>| {
        let ended = match record.observer.recording.exit {
            Some(exit) => Some(exit.unix_ns),
            None => (record.observer.status != ProcessStatus::Gone).then_some(now),
        };
        first_failed.map(failed_at).into_iter().chain(ended.map(i128::from)).min()
    };
    let somebody_lives = records.iter().any(|record| record.observer.status == ProcessStatus::Alive);
    let causes = || records.iter().filter_map(|record| record.group.cause);
    let lost: BTreeSet<u32> =
        causes().filter(|cause| cause.kind == CauseKind::Lost).filter_map(|cause| cause.suspect).collect();
    let members = records.iter().map(|record| {
        let ended =
            matches!(record.group.state, GroupState::Failed | GroupState::Left | GroupState::Unformed);
        let Observer { recording: Recording { exit, .. }, status } = record.observer;
        let gone = *status == ProcessStatus::Gone || exit.is_some();
        let died = match exit {
            Some(exit) => !exit.stopped && exit.cause != ExitCause::Code(0),
            // The rank was reported as lost, or its process has ended while processes of other
            // ranks are running.
            None => gone && (lost.contains(&record.group.rank) || somebody_lives),
        };
        Member {
            rank: first.world_rank(record.group.rank),
            recording: record.index,
            alive: (gone || *status == ProcessStatus::Alive).then_some(!gone),
            died: died && !ended,
            position: position(*record, clocks, until(record)),
        }
    });
    let present: BTreeSet<u32> = records.iter().map(|record| record.group.rank).collect();
    let headers = observers.iter().map(|observer| &observer.recording.header);
    let same_round = headers.filter(|header| header.generation.is_some() && header.generation == generation);
    let others = same_round.filter_map(|header| header.rank);
    let absent: BTreeSet<u32> = others
        .filter_map(|rank| rank_of(first, rank))
        .filter(|rank| *rank < size && !present.contains(rank))
        .collect();
    let known: BTreeSet<u32> = present.union(&absent).copied().collect();
    let unrecorded = gaps(&known, size).into_iter();
    GroupSnapshot {
        run_id: run_id.to_owned(),
        group: name.to_owned(),
        generation: generation.map(|generation| generation.to_string()),
        size,
        members: members.collect(),
        absent: absent.iter().map(|&rank| first.world_rank(rank)).collect(),
        unrecorded: unrecorded.map(|(a, b)| (first.world_rank(a), first.world_rank(b))).collect(),
        failure: first_failed.and_then(|record| record.group.cause).map(|cause| failure(cause, first)),
        superseded: false,
    }
}

/// Returns the numbers below `size` that are not in `known`, as ranges (first, last).
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

/// Returns the rank that the process with `world_rank` has in `group`; `None` if it is not a member.
fn rank_of(group: &Group, world_rank: u32) -> Option<u32> {
    let Some(world_ranks) = &group.world_ranks else { return Some(world_rank) };
    (0..).zip(world_ranks).find(|&(_, &rank)| rank == world_rank).map(|(rank, _)| rank)
}

fn failure(cause: Cause, group: &Group) -> String {
    let suspect = cause.suspect.map(|rank| format!("rank {}", group.world_rank(rank)));
    let suspect = suspect.as_deref().unwrap_or("a rank");
    let by = group.world_rank(cause.reported_by);
    match cause.kind {
        CauseKind::Lost => format!("{suspect} was lost, says rank {by}"),
        CauseKind::Timeout => format!("rank {by} timed out waiting for {suspect}"),
        CauseKind::Mismatch => format!("the calls of {suspect} and rank {by} differ"),
        CauseKind::Aborted => format!("rank {by} aborted the group"),
        CauseKind::Other => format!("{suspect} broke the protocol, says rank {by}"),
    }
}

fn position(record: RecordedGroup<'_>, clocks: &Clocks, until: Option<i128>) -> Position {
    let RecordedGroup { index, observer: Observer { recording, .. }, group, .. } = record;
    let calls = || recording.entries.iter().filter(|entry| entry.group == group.number);
    let summary = |entry: &Entry| summary(recording, entry);
    let since = |ns: u64| clocks.since(index, ns, until);
    let last = calls().filter(|entry| entry.operation == Operation::Collective && entry.state == State::Done);
    let last = last.max_by_key(|entry| entry.seq);
    let after = || last.map(summary);
    let idle_since = last.map_or(group.created_ns, |entry| entry.ended_ns);
    let idle = || Position::Idle { after: after(), for_ms: since(idle_since) };
    // Collectives have precedence over messages: collectives run one after another, while messages may
    // be waiting at the same time.
    let first = |state: fn(&&Entry) -> bool| {
        calls().filter(state).min_by_key(|entry| (entry.operation != Operation::Collective, entry.number))
    };
    match group.state {
        GroupState::Forming => Position::Forming { for_ms: since(group.created_ns) },
        GroupState::Unformed => Position::Unformed,
        GroupState::Left => Position::Left { after: after() },
        GroupState::Formed => match first(is_open) {
            Some(entry) => Position::Waiting { call: summary(entry), for_ms: since(entry.enqueued_ns) },
            None => elsewhere(record, after()).unwrap_or_else(idle),
        },
        GroupState::Failed => match first(|entry| entry.state == State::Failed || is_open(entry)) {
            Some(entry) => Position::Failed { call: summary(entry) },
            None => idle(),
        },
    }
}

fn is_open(entry: &&Entry) -> bool {
    matches!(entry.state, State::Queued | State::Running)
}

/// Returns the position of a process that is in a call of another group, or forms another group.
fn elsewhere(record: RecordedGroup<'_>, after: Option<CallSummary>) -> Option<Position> {
    let RecordedGroup { observer: Observer { recording, .. }, group, .. } = record;
    let open = recording.entries.iter().filter(is_open).find(|entry| entry.group != group.number);
    if let Some(entry) = open {
        let other = recording.group(entry.group).filter(|other| other.state == GroupState::Formed)?;
        let call = summary(recording, entry);
        return Some(Position::Elsewhere { after, group: other.name.clone(), call });
    }
    let forming = recording.groups.iter().find(|other| other.state == GroupState::Forming)?;
    let call = CallSummary { seq: None, text: "forming the group".to_owned(), waits_for: Vec::new() };
    Some(Position::Elsewhere { after, group: forming.name.clone(), call })
}

fn summary(recording: &Recording, entry: &Entry) -> CallSummary {
    let seq = (entry.operation == Operation::Collective).then_some(entry.seq);
    CallSummary { seq, text: recording.describe(entry), waits_for: recording.waits_for(entry) }
}

impl GroupSnapshot {
    /// Returns true if a member waits, waited when its process ended or the group failed, or died, and
    /// no later group has the same name.
    #[must_use]
    pub fn is_open(&self) -> bool {
        let stuck = |member: &Member| match member.position {
            Position::Idle { .. } | Position::Elsewhere { .. } | Position::Left { .. } => member.died,
            _ => true,
        };
        !self.superseded && self.members.iter().any(stuck)
    }

    /// Returns the ranks at the ends of the chains of waiting that start at `waiting`.
    ///
    /// A rank that is waiting is not the end of a chain: the chain continues with the ranks for which
    /// that rank waits. Returns an empty set if the members wait only for each other.
    pub(crate) fn awaited(&self, waiting: &[&Member]) -> BTreeSet<u32> {
        let of = |rank: u32| waiting.iter().find(|member| member.rank == rank).map(|member| &member.position);
        let mut queue: Vec<u32> = waiting.iter().map(|member| member.rank).collect();
        let mut seen: BTreeSet<u32> = queue.iter().copied().collect();
        let mut ends = BTreeSet::new();
        while let Some(rank) = queue.pop() {
            match of(rank) {
                Some(Position::Waiting { call, .. } | Position::Failed { call }) => {
                    queue.extend(call.waits_for.iter().filter(|&&next| seen.insert(next)));
                }
                Some(_) | None => {
                    ends.insert(rank);
                }
            }
        }
        ends
    }
}
