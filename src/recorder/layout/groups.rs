//! The records of groups. Pure.

use convoke_env::Generation;

use super::words::{
    NONE, byte, encode_generation, generation, get_line, high, low, optional, pair, put_text,
};
use super::{GROUP_LEN, LISTED_RANKS, lock};

/// The states and kinds of failures, by their numbers in a group record. The number of a kind is 0 for none.
const STATES: [GroupState; 5] =
    [GroupState::Forming, GroupState::Formed, GroupState::Unformed, GroupState::Failed, GroupState::Left];
const KINDS: [CauseKind; 4] = [CauseKind::Lost, CauseKind::Timeout, CauseKind::Mismatch, CauseKind::Aborted];

/// A group of which the process was a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Number of the group in this recording, from 1.
    pub number: u32,
    /// State of the group.
    pub state: GroupState,
    /// Cause of the group's failure, as far as this rank knows it; `None` without a failure.
    pub cause: Option<Cause>,
    /// Rank of this process in the group.
    pub rank: u32,
    /// Number of ranks of the group.
    pub size: u32,
    /// Id of the group in the headers of frames between ranks. It is unique within a generation.
    pub id: u64,
    /// Generation of the job; `None` until it is known.
    pub generation: Option<Generation>,
    /// Time at which this rank started to form the group, see
    /// [`Header::started_ns`](super::Header::started_ns).
    pub created_ns: u64,
    /// Time at which the group ended; 0 before that.
    pub ended_ns: u64,
    /// Name of the group, cut to 152 bytes.
    pub name: String,
    /// World ranks of the group's ranks, at most [`LISTED_RANKS`]; `None` if the ranks in the group
    /// and in the world are equal.
    pub world_ranks: Option<Vec<u32>>,
}

/// The state of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupState {
    /// The ranks are connecting to each other.
    Forming,
    /// The ranks are connected.
    Formed,
    /// The ranks could not connect to each other.
    Unformed,
    /// The group has failed.
    Failed,
    /// This rank has left the group without a failure.
    Left,
}

/// The cause of a group's failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cause {
    /// Kind of the failure.
    pub kind: CauseKind,
    /// The rank that probably caused the failure, if there is one.
    pub suspect: Option<u32>,
    /// The rank that detected the failure.
    pub reported_by: u32,
}

/// The kind of a group's failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CauseKind {
    /// A rank died or its connection was lost.
    Lost,
    /// A call timed out.
    Timeout,
    /// Two ranks made different calls at the same place in the sequence of calls.
    Mismatch,
    /// The program aborted the group.
    Aborted,
    /// The group failed for another reason.
    Other,
}

impl Group {
    /// Encodes the group record, with its lock word.
    #[must_use]
    pub fn encode(&self) -> [u64; GROUP_LEN] {
        let mut words = [0; GROUP_LEN];
        let kind = self.cause.map_or(0, |cause| 1 + cause.kind as u64);
        words[0] = lock(u64::from(self.number));
        words[1] = self.state as u64 | kind << 8;
        words[2] = pair(self.rank, self.size);
        words[3] = self.id;
        words[4..6].copy_from_slice(&encode_generation(self.generation));
        words[6] = self.created_ns;
        words[7] = self.ended_ns;
        if let Some(Cause { suspect, reported_by, .. }) = self.cause {
            words[8] = pair(suspect.unwrap_or(NONE), reported_by);
        }
        let listed =
            self.world_ranks.as_ref().map(|world_ranks| &world_ranks[..world_ranks.len().min(LISTED_RANKS)]);
        words[9] = listed.map_or(u64::MAX, |listed| listed.len() as u64);
        put_text(&mut words[12..32], &self.name);
        for (word, ranks) in words[32..].iter_mut().zip(listed.unwrap_or_default().chunks(2)) {
            *word = pair(ranks[0], ranks.get(1).copied().unwrap_or(NONE));
        }
        words
    }

    /// Returns the world rank of a rank of this group. A rank whose world rank is not recorded is
    /// returned as it is.
    #[must_use]
    pub fn world_rank(&self, rank: u32) -> u32 {
        let listed = self.world_ranks.as_ref().and_then(|world_ranks| world_ranks.get(rank as usize));
        listed.copied().unwrap_or(rank)
    }

    /// Decodes a group record; `None` if the record is empty, incomplete or malformed.
    #[must_use]
    pub fn decode(words: &[u64; GROUP_LEN]) -> Option<Self> {
        let number = u32::try_from(words[0] >> 1).ok().filter(|&number| number > 0 && words[0] & 1 == 0)?;
        let kind = usize::from(byte(words[1], 1)).checked_sub(1);
        let kind = kind.map(|number| *KINDS.get(number).unwrap_or(&CauseKind::Other));
        let (suspect, reported_by) = (optional(low(words[8])), high(words[8]));
        let listed = usize::try_from(words[9]).ok().filter(|&listed| listed <= LISTED_RANKS);
        let ranks = || words[32..].iter().flat_map(|&word| [low(word), high(word)]);
        Some(Self {
            number,
            state: *STATES.get(usize::from(byte(words[1], 0)))?,
            cause: kind.map(|kind| Cause { kind, suspect, reported_by }),
            rank: low(words[2]),
            size: high(words[2]),
            id: words[3],
            generation: generation(words[4], words[5]),
            created_ns: words[6],
            ended_ns: words[7],
            name: get_line(&words[12..32]),
            world_ranks: listed.map(|listed| ranks().take(listed).collect()),
        })
    }
}
