//! A recording as a value. Pure.

use super::layout::{
    ENTRIES, ENTRY_WORDS, Entry, Exit, FILE_BYTES, FILE_WORDS, GROUP_WORDS, GROUPS, Group, HEADER_WORDS,
    Header, MAGIC, Operation, State, VERSION, entry_at, group_at, header,
};
use super::names::Names;

/// What one process recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recording {
    /// Which process, and when.
    pub header: Header,
    /// How the process ended, once its launcher has written that.
    pub exit: Option<Exit>,
    /// Its words for calls.
    pub names: Names,
    /// Its groups, the first first. Of those that have ended early ones may be missing.
    pub groups: Vec<Group>,
    /// Its last calls, the first first.
    pub entries: Vec<Entry>,
    /// Number of calls that it made, also of those that are not here any more.
    pub calls: u64,
    /// Calls that cannot be read: they were being written when the process ended, or make no sense.
    pub torn: usize,
    /// Calls that were not recorded because two threads met in one slot.
    pub lost: u64,
}

/// Bytes that are not a recording.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// They do not begin like one.
    #[error("not a recording of the flight recorder")]
    Foreign,
    /// One of another version of this program.
    #[error("a recording of version {found}, and this program reads version {VERSION}")]
    Version {
        /// Its version.
        found: u64,
    },
    /// It is too short.
    #[error("cut short: {found} of {FILE_BYTES} bytes")]
    Truncated {
        /// Its length in bytes.
        found: usize,
    },
}

impl Recording {
    /// Reads the header of a recording: its first 2 KiB are enough.
    ///
    /// # Errors
    /// [`FormatError`].
    pub fn header(bytes: &[u8]) -> Result<Header, FormatError> {
        let (words, _) = bytes.as_chunks::<8>();
        let truncated = FormatError::Truncated { found: bytes.len() };
        let word = |index: usize| words.get(index).map(|&word| u64::from_le_bytes(word));
        match (word(0), word(1)) {
            (Some(MAGIC), Some(VERSION)) => {}
            (Some(MAGIC), Some(found)) => return Err(FormatError::Version { found }),
            (Some(MAGIC) | None, _) => return Err(truncated),
            (Some(_), _) => return Err(FormatError::Foreign),
        }
        let words: Vec<u64> = words.iter().take(HEADER_WORDS).map(|&word| u64::from_le_bytes(word)).collect();
        words.first_chunk().map(Header::decode).ok_or(truncated)
    }

    /// Reads a recording. Costs one pass over `bytes`, whatever stands there.
    ///
    /// # Errors
    /// [`FormatError`]. Calls and groups that make no sense are left out.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let decoded = Self::header(bytes)?;
        let words: Vec<u64> =
            bytes.as_chunks::<8>().0.iter().take(FILE_WORDS).map(|&word| u64::from_le_bytes(word)).collect();
        if words.len() < FILE_WORDS {
            return Err(FormatError::Truncated { found: bytes.len() });
        }
        let mut groups: Vec<Group> = (0..GROUPS)
            .filter_map(|slot| words[group_at(slot)..].first_chunk::<GROUP_WORDS>())
            .filter_map(Group::decode)
            .collect();
        groups.sort_by_key(|group| group.number);
        let (mut entries, mut torn) = (Vec::new(), 0);
        for slot in 0..ENTRIES as u64 {
            let Some(words) = words[entry_at(slot)..].first_chunk::<ENTRY_WORDS>() else { continue };
            match Entry::decode(words) {
                Some(entry) if entry.number % ENTRIES as u64 == slot => entries.push(entry),
                Some(_) | None => torn += usize::from(words[0] != 0),
            }
        }
        entries.sort_by_key(|entry| entry.number);
        let names = Names::read(&decoded.names);
        let exit = Exit::decode([words[header::EXIT], words[header::EXIT + 1]]);
        let (calls, lost) = (words[header::CLAIMED], words[header::LOST]);
        Ok(Self { header: decoded, exit, names, groups, entries, calls, torn, lost })
    }

    /// The group with this number, if it is still known.
    #[must_use]
    pub fn group(&self, number: u32) -> Option<&Group> {
        self.groups.iter().find(|group| group.number == number)
    }

    /// A call in words: `all_reduce(f32, 1000, sum)`, `send(f32, 1000, tag 7) to rank 3`. Ranks are those in the world.
    #[must_use]
    pub fn words(&self, entry: &Entry) -> String {
        let call = self.names.call(&entry.call);
        let peer = match entry.waits_for {
            0 => "any rank".to_owned(),
            _ => format!("rank {}", self.world_rank(entry, entry.peers[0])),
        };
        match entry.operation {
            Operation::Collective => call,
            Operation::Send => format!("{} to {peer}", call.replacen("send/recv", "send", 1)),
            Operation::Recv => format!("{} from {peer}", call.replacen("send/recv", "recv", 1)),
            Operation::Probe => {
                let [_, _, _, _, t0, t1, t2, t3, ..] = entry.call;
                format!("probe(tag {}) from {peer}", u32::from_le_bytes([t0, t1, t2, t3]))
            }
        }
    }

    /// The ranks in the world that a call waits for, as far as they are listed.
    #[must_use]
    pub fn waits_for(&self, entry: &Entry) -> Vec<u32> {
        if entry.state == State::Done {
            return Vec::new();
        }
        let mut ranks: Vec<u32> =
            entry.listed_peers().iter().map(|&rank| self.world_rank(entry, rank)).collect();
        ranks.sort_unstable();
        ranks
    }

    fn world_rank(&self, entry: &Entry, rank: u32) -> u32 {
        self.group(entry.group).map_or(rank, |group| group.world_rank(rank))
    }
}
