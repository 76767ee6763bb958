//! A random program: groups, and operations that all their ranks carry out in one order. Pure.

use std::fmt;
use std::sync::Arc;

use crate::{Dtype, ReduceOp};

use super::values::{TYPES, hash};
use convoke_testkit::Random;

/// The number of operations of a program.
pub(crate) const STEPS: usize = 200;
/// The largest number of ranks.
const WORLD: usize = 5;
/// The number of tags of a sequence; the last of them are for messages that must not match others.
pub(crate) const TAGS_PER_SEQUENCE: u32 = 1000;

#[derive(Debug)]
pub(crate) struct RandomProgram {
    pub(crate) seed: u64,
    /// The ranks of each group in the world, in group order. The first group is the world.
    pub(crate) groups: Vec<Vec<usize>>,
    pub(crate) group_creations: Vec<GroupCreation>,
    pub(crate) sequences: Vec<Sequence>,
    pub(crate) steps: Vec<ProgramStep>,
    /// If set, each sequence has its own thread on each rank; otherwise one thread runs all.
    pub(crate) threads: bool,
    /// If set, connections deliver in the most awkward pieces.
    pub(crate) faulty_links: bool,
    pub(crate) termination: Termination,
}

/// An operation that makes groups from another.
#[derive(Debug)]
pub(crate) struct GroupCreation {
    pub(crate) parent: usize,
    pub(crate) how: NewGroups,
    /// The indices of the new groups.
    pub(crate) groups: std::ops::Range<usize>,
}

#[derive(Debug)]
pub(crate) enum NewGroups {
    /// A subgroup of these ranks of the parent.
    Subgroup(Vec<usize>),
    /// A split by each rank's color and key.
    Split(Vec<(Option<u32>, i64)>),
}

/// Operations of one group, one after the other: its collectives, or messages with their own tags.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) group: usize,
    pub(crate) collectives: bool,
}

#[derive(Debug)]
pub(crate) struct ProgramStep {
    pub(crate) sequence: usize,
    pub(crate) operation: ProgramOperation,
}

#[derive(Debug)]
pub(crate) enum ProgramOperation {
    Collective(Collective),
    Objects(Objects),
    MonitoredBarrier,
    Messages(Arc<Messages>),
}

#[derive(Debug, Clone)]
pub(crate) struct Collective {
    pub(crate) kind: CollectiveKind,
    pub(crate) dtype: Dtype,
    pub(crate) op: ReduceOp,
    pub(crate) root: usize,
    /// One length, or one for each buffer of a list, for each rank, or for each pair of ranks.
    pub(crate) lens: Vec<usize>,
    /// If set, the sums of the values are rounded.
    pub(crate) rounded: bool,
    pub(crate) seed: u64,
}

impl Collective {
    /// A random number for the factor of a rank, if the operation has one.
    pub(crate) fn factor(&self, rank: usize) -> u64 {
        hash(self.seed, rank, usize::MAX)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CollectiveKind {
    Barrier,
    AllReduce,
    AllReduceInto,
    AllReduceList,
    Broadcast,
    BroadcastList,
    Reduce,
    ReduceInto,
    ReduceList,
    Scan,
    ExclusiveScan,
    AllGather,
    AllGatherInPlace,
    AllGatherV,
    AllGatherList,
    ReduceScatter,
    ReduceScatterInPlace,
    ReduceScatterV,
    ReduceScatterList,
    Gather,
    GatherV,
    Scatter,
    ScatterV,
    AllToAll,
    AllToAllInPlace,
    AllToAllV,
}

pub(crate) const KINDS: [CollectiveKind; 26] = [
    CollectiveKind::Barrier,
    CollectiveKind::AllReduce,
    CollectiveKind::AllReduceInto,
    CollectiveKind::AllReduceList,
    CollectiveKind::Broadcast,
    CollectiveKind::BroadcastList,
    CollectiveKind::Reduce,
    CollectiveKind::ReduceInto,
    CollectiveKind::ReduceList,
    CollectiveKind::Scan,
    CollectiveKind::ExclusiveScan,
    CollectiveKind::AllGather,
    CollectiveKind::AllGatherInPlace,
    CollectiveKind::AllGatherV,
    CollectiveKind::AllGatherList,
    CollectiveKind::ReduceScatter,
    CollectiveKind::ReduceScatterInPlace,
    CollectiveKind::ReduceScatterV,
    CollectiveKind::ReduceScatterList,
    CollectiveKind::Gather,
    CollectiveKind::GatherV,
    CollectiveKind::Scatter,
    CollectiveKind::ScatterV,
    CollectiveKind::AllToAll,
    CollectiveKind::AllToAllInPlace,
    CollectiveKind::AllToAllV,
];

impl CollectiveKind {
    fn is_list(self) -> bool {
        matches!(
            self,
            Self::AllReduceList
                | Self::BroadcastList
                | Self::ReduceList
                | Self::AllGatherList
                | Self::ReduceScatterList
        )
    }

    pub(crate) fn is_scan(self) -> bool {
        matches!(self, Self::Scan | Self::ExclusiveScan)
    }

    pub(crate) fn reduces(self) -> bool {
        let of_blocks =
            [Self::ReduceScatter, Self::ReduceScatterInPlace, Self::ReduceScatterV, Self::ReduceScatterList];
        let of_one = [Self::Reduce, Self::ReduceInto, Self::ReduceList];
        self.is_all_reduce() || self.is_scan() || of_one.contains(&self) || of_blocks.contains(&self)
    }

    /// Returns whether all ranks get equal sums.
    pub(crate) fn is_all_reduce(self) -> bool {
        matches!(self, Self::AllReduce | Self::AllReduceInto | Self::AllReduceList)
    }

    /// The number of lengths in [`Collective::lens`] for a group of `size` and lists of so many buffers. Also
    /// how many times each of them a rank has at most.
    pub(crate) fn shape(self, size: usize, buffers: usize) -> (usize, usize) {
        match self {
            Self::Barrier => (0, 1),
            Self::AllGatherV | Self::ReduceScatterV | Self::GatherV | Self::ScatterV => (size, 1),
            Self::AllToAllV => (size * size, 1),
            Self::AllGather | Self::AllGatherInPlace | Self::ReduceScatter | Self::ReduceScatterInPlace => {
                (1, size)
            }
            Self::Gather | Self::Scatter | Self::AllToAll | Self::AllToAllInPlace => (1, size),
            Self::AllGatherList | Self::ReduceScatterList => (buffers, size),
            kind if kind.is_list() => (buffers, 1),
            _ => (1, 1),
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Objects {
    Broadcast { root: usize, seed: u64 },
    AllGather { seed: u64 },
    Gather { root: usize, seed: u64 },
    Scatter { root: usize, seed: u64 },
}

#[derive(Debug, Clone)]
pub(crate) struct Messages {
    pub(crate) pattern: Pattern,
    pub(crate) dtype: Dtype,
    pub(crate) list: Vec<Message>,
    pub(crate) seed: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// The messages one after the other.
    Plain,
    /// Each rank sends to one and receives from one.
    SendRecv,
    /// All messages in one batch.
    Batch,
    /// One rank receives from any source.
    AnySource,
    /// The receiver probes first.
    Probe,
}

#[derive(Debug, Clone)]
pub(crate) struct Message {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) tag: u32,
    pub(crate) len: usize,
}

/// The termination of a program: success, or an error that all ranks of a group must report alike.
#[derive(Debug, Clone)]
pub(crate) enum Termination {
    /// All handles are dropped.
    HandlesDropped,
    /// All groups are destroyed in order, while handles exist.
    Destroyed,
    /// One rank of a group does something that the others do not expect.
    Faulty(FaultCase),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct FaultCase {
    pub(crate) group: usize,
    pub(crate) culprit: usize,
    pub(crate) fault: Fault,
    /// If set, the remaining ranks continue in a group of their own.
    pub(crate) shrinks: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    MismatchedCall,
    Abort,
    /// The rank drops all its handles.
    Leave,
    Destroy,
}

impl Fault {
    /// Returns whether the rank leaves the group.
    pub(crate) fn is_leave(self) -> bool {
        matches!(self, Self::Leave | Self::Destroy)
    }
}

impl RandomProgram {
    /// The program that `seed` determines.
    pub(crate) fn random(seed: u64) -> Self {
        let random = &mut Random::from_seed(seed);
        let world = [1, 2, 2, 2, 3, 3, 3, 4, 4, WORLD, WORLD][random.below(11)];
        let (mut groups, mut group_creations) = (vec![(0..world).collect::<Vec<_>>()], Vec::new());
        for _ in 0..random.below(4) {
            let creation = random_group_creation(&mut groups, random);
            group_creations.push(creation);
        }
        let mut sequences = Vec::new();
        for (group, ranks) in groups.iter().enumerate() {
            sequences.push(Sequence { group, collectives: true });
            let of_messages = if ranks.len() > 1 { random.below(3) } else { 0 };
            sequences.extend((0..of_messages).map(|_| Sequence { group, collectives: false }));
        }
        let mut steps = Vec::new();
        for number in 0..STEPS {
            let sequence = random.below(sequences.len());
            let size = groups[sequences[sequence].group].len();
            let operation = match sequences[sequence].collectives {
                true if random.below(12) == 0 => ProgramOperation::Objects(random_objects(size, random)),
                true if random.below(30) == 0 => ProgramOperation::MonitoredBarrier,
                true => ProgramOperation::Collective(random_collective(size, random)),
                false => {
                    ProgramOperation::Messages(Arc::new(random_messages(sequence, number, size, random)))
                }
            };
            steps.push(ProgramStep { sequence, operation });
        }
        let (threads, faulty_links) = (random.below(2) == 0, random.below(4) == 0);
        let termination = random_termination(&groups, random);
        Self { seed, groups, group_creations, sequences, steps, threads, faulty_links, termination }
    }

    pub(crate) fn world(&self) -> usize {
        self.groups[0].len()
    }
}

/// Prints everything but the steps.
impl fmt::Display for RandomProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { groups, group_creations, threads, faulty_links, termination, .. } = self;
        write!(
            f,
            "groups {groups:?} by {group_creations:?}, threads: {threads}, faulty links: {faulty_links}, termination: {termination:?}"
        )
    }
}

fn random_group_creation(groups: &mut Vec<Vec<usize>>, random: &mut Random) -> GroupCreation {
    let parent = random.below(groups.len());
    let ranks = groups[parent].clone();
    let first = groups.len();
    let how = if random.below(2) == 0 {
        let mut chosen: Vec<usize> = (0..ranks.len()).filter(|_| random.below(3) > 0).collect();
        if chosen.is_empty() {
            chosen.push(random.below(ranks.len()));
        }
        shuffle(&mut chosen, random);
        groups.push(chosen.iter().map(|&rank| ranks[rank]).collect());
        NewGroups::Subgroup(chosen)
    } else {
        let color = |random: &mut Random| [None, Some(0), Some(1), Some(7), Some(7)][random.below(5)];
        let of_each: Vec<_> = ranks.iter().map(|_| (color(random), random.below(3) as i64 - 1)).collect();
        for color in [0, 1, 7] {
            let has = |rank: &usize| of_each[*rank].0 == Some(color);
            let mut together: Vec<usize> = (0..ranks.len()).filter(has).collect();
            together.sort_by_key(|&rank| (of_each[rank].1, rank));
            if !together.is_empty() {
                groups.push(together.iter().map(|&rank| ranks[rank]).collect());
            }
        }
        NewGroups::Split(of_each)
    };
    GroupCreation { parent, how, groups: first..groups.len() }
}

fn shuffle<T>(list: &mut [T], random: &mut Random) {
    for index in (1..list.len()).rev() {
        list.swap(index, random.below(index + 1));
    }
}

/// The sizes in bytes at which algorithms, small messages and read-ahead change.
const THRESHOLDS: [usize; 7] = [4 << 10, 8 << 10, 12 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10];

/// A random length: `times` of it are mostly few bytes, sometimes close to a threshold.
fn random_len(element_bytes: usize, times: usize, random: &mut Random) -> usize {
    let around =
        |bytes: usize, random: &mut Random| (bytes / element_bytes / times + random.below(3)).max(1) - 1;
    match random.below(100) {
        0..10 => 0,
        10..70 => random.below(40),
        70..88 => random.below(1500) / times,
        88..97 => around(THRESHOLDS[random.below(3)], random),
        _ => around(THRESHOLDS[3 + random.below(3)], random),
    }
}

fn random_type(random: &mut Random) -> Dtype {
    TYPES[random.below(TYPES.len())]
}

fn random_collective(size: usize, random: &mut Random) -> Collective {
    let kind = KINDS[random.below(KINDS.len())];
    let dtype = random_type(random);
    let (lens, times) = kind.shape(size, random.below(4));
    let lens = (0..lens).map(|_| random_len(dtype.size_bytes(), times, random)).collect();
    let fits = |op: &ReduceOp| op.accepts(dtype) && !(kind.is_scan() && *op == ReduceOp::Avg);
    let ops: Vec<ReduceOp> = ReduceOp::ALL.into_iter().filter(fits).collect();
    let rounded = kind.is_all_reduce() && random.below(3) == 0;
    let (op, root) = (ops[random.below(ops.len())], random.below(size));
    Collective { kind, dtype, op, root, lens, rounded, seed: random.next() }
}

fn random_objects(size: usize, random: &mut Random) -> Objects {
    let (root, seed) = (random.below(size), random.next());
    match random.below(4) {
        0 => Objects::Broadcast { root, seed },
        1 => Objects::AllGather { seed },
        2 => Objects::Gather { root, seed },
        _ => Objects::Scatter { root, seed },
    }
}

/// Messages of a sequence with its own tags, in a group of at least two.
fn random_messages(sequence: usize, number: usize, size: usize, random: &mut Random) -> Messages {
    let dtype = random_type(random);
    let tags = sequence as u32 * TAGS_PER_SEQUENCE;
    // A tag that no other message of the sequence has.
    let own_tag = tags + 10 + number as u32;
    let len = |random: &mut Random| random_len(dtype.size_bytes(), 1, random);
    let other_than = |rank: usize, random: &mut Random| (rank + 1 + random.below(size - 1)) % size;
    let (pattern, list) = match random.below(5) {
        0 => {
            let distance = 1 + random.below(size - 1);
            let tag = tags + random.below(3) as u32;
            let one = |from| Message { from, to: (from + distance) % size, tag, len: len(random) };
            (Pattern::SendRecv, (0..size).map(one).collect())
        }
        1 => {
            let (to, len) = (random.below(size), len(random));
            let mut senders: Vec<usize> =
                (0..size).filter(|&rank| rank != to && random.below(3) > 0).collect();
            shuffle(&mut senders, random);
            let one = |from| Message { from, to, tag: own_tag, len };
            (Pattern::AnySource, senders.into_iter().map(one).collect())
        }
        2 => {
            let from = random.below(size);
            let one = Message { from, to: other_than(from, random), tag: own_tag, len: len(random) };
            (Pattern::Probe, vec![one])
        }
        which => {
            let list = (0..1 + random.below(4))
                .map(|_| {
                    let (from, tag) = (random.below(size), tags + random.below(3) as u32);
                    Message { from, to: other_than(from, random), tag, len: len(random) }
                })
                .collect();
            (if which == 3 { Pattern::Plain } else { Pattern::Batch }, list)
        }
    };
    Messages { pattern, dtype, list, seed: random.next() }
}

fn random_termination(groups: &[Vec<usize>], random: &mut Random) -> Termination {
    let group = random.below(groups.len());
    let fault = [Fault::MismatchedCall, Fault::Abort, Fault::Leave, Fault::Destroy][random.below(4)];
    // Subgroups keep their parents alive, so a rank can leave only the world, together with everything else.
    let group = if fault == Fault::Leave { 0 } else { group };
    let (culprit, shrinks) = (random.below(groups[group].len()), random.below(2) == 0);
    match random.below(2) {
        0 if groups[group].len() > 1 => Termination::Faulty(FaultCase { group, culprit, fault, shrinks }),
        _ if random.below(3) == 0 => Termination::Destroyed,
        _ => Termination::HandlesDropped,
    }
}
