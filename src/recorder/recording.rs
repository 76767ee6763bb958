//! Decoding a recording. Pure.

use crate::layout::header::{CALL_COUNT, EXIT, LOST};
use crate::layout::{
    ENTRIES, ENTRY_LEN, Entry, Exit, FILE_BYTES, FILE_LEN, GROUP_LEN, GROUPS, Group, HEADER_LEN, Header,
    MAGIC, Operation, State, VERSION, entry_at, group_at,
};
use crate::names::Names;

/// The decoded recording of one process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recording {
    /// The identity of the process, and the time at which the recording started.
    pub header: Header,
    /// When and how the process ended; `None` until its launcher has written it.
    pub exit: Option<Exit>,
    /// The names of operations and element types that the writer uses.
    pub names: Names,
    /// The groups, in order of creation. Groups that ended early may be missing.
    pub groups: Vec<Group>,
    /// The last calls, in the order in which they were made.
    pub entries: Vec<Entry>,
    /// Number of all calls of the process, including those that were overwritten.
    pub calls: u64,
    /// Number of unreadable call records: incomplete when the process ended, or malformed.
    pub torn: usize,
    /// Number of calls that were not recorded because another thread was writing to their slot.
    pub lost: u64,
}

/// The reason why bytes cannot be decoded as a recording.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The bytes do not start with [`MAGIC`].
    #[error("not a recording of the flight recorder")]
    Foreign,
    /// The recording has another version of the layout.
    #[error("a recording of version {found}, and this program reads version {VERSION}")]
    Version {
        /// Version of the recording.
        found: u64,
    },
    /// There are too few bytes.
    #[error("cut short: {found} of {FILE_BYTES} bytes")]
    Truncated {
        /// Number of bytes.
        found: usize,
    },
}

impl Recording {
    /// Decodes the header of a recording. `bytes` needs only the first 2 KiB of the file.
    ///
    /// # Errors
    /// [`FormatError`] if the bytes are no recording, are cut short, or have another version of the
    /// layout.
    pub fn header(bytes: &[u8]) -> Result<Header, FormatError> {
        let truncated = FormatError::Truncated { found: bytes.len() };
        let words = words(bytes, HEADER_LEN);
        match words[..] {
            [MAGIC, VERSION, ..] => words.first_chunk().map(Header::decode).ok_or(truncated),
            [MAGIC, found, ..] => Err(FormatError::Version { found }),
            [MAGIC] | [] => Err(truncated),
            [_, ..] => Err(FormatError::Foreign),
        }
    }

    /// Decodes a recording. Costs one pass over `bytes`, whatever their contents. Malformed calls and
    /// groups are left out.
    ///
    /// # Errors
    /// [`FormatError`] if the bytes are no recording, are cut short, or have another version of the
    /// layout.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let header = Self::header(bytes)?;
        let words = words(bytes, FILE_LEN);
        if words.len() < FILE_LEN {
            return Err(FormatError::Truncated { found: bytes.len() });
        }
        let mut groups: Vec<Group> = (0..GROUPS)
            .filter_map(|slot| words[group_at(slot)..].first_chunk::<GROUP_LEN>())
            .filter_map(Group::decode)
            .collect();
        groups.sort_by_key(|group| group.number);
        let (mut entries, mut torn) = (Vec::new(), 0);
        for slot in 0..ENTRIES as u64 {
            let Some(words) = words[entry_at(slot)..].first_chunk::<ENTRY_LEN>() else { continue };
            match Entry::decode(words) {
                Some(entry) if entry.number % ENTRIES as u64 == slot => entries.push(entry),
                Some(_) | None => torn += usize::from(words[0] != 0),
            }
        }
        entries.sort_by_key(|entry| entry.number);
        let names = Names::parse(&header.names);
        let exit = Exit::decode([words[EXIT], words[EXIT + 1]]);
        // A slow thread may have set the count back.
        let calls = entries.last().map_or(0, |last: &Entry| last.number).max(words[CALL_COUNT]);
        Ok(Self { header, exit, names, groups, entries, calls, torn, lost: words[LOST] })
    }

    /// Returns the group with this number; `None` if its record was overwritten.
    #[must_use]
    pub fn group(&self, number: u32) -> Option<&Group> {
        self.groups.iter().find(|group| group.number == number)
    }

    /// Describes a call as text, with world ranks: `all_reduce(f32, 1000, sum)` or
    /// `send(f32, 1000, tag 7) to rank 3`.
    #[must_use]
    pub fn describe(&self, entry: &Entry) -> String {
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

    /// Returns the world ranks for which a call waits, as far as they are recorded.
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

/// Returns the first `count` words of a recording, or as many as there are.
fn words(bytes: &[u8], count: usize) -> Vec<u64> {
    bytes.as_chunks().0.iter().take(count).map(|&word| u64::from_le_bytes(word)).collect()
}
