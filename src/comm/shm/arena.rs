//! The memory of the groups that the ranks of a host make from their first group: parts of one sparse memory
//! file, so that a group needs no descriptor and no exchange of descriptors.
//!
//! Each rank of the first group owns a range of the file, and gives out parts of it, each once. The first
//! rank of a group on its host says which of its parts the group uses. The pages of a part are allocated
//! before they are used, and freed when all ranks of the group have closed the part.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::FallocateFlags;

use super::layout::{Layout, MAX_RANKS};
use super::segment::{self, Segment};

/// The size of the range of one rank. It takes address space of the file, and no memory.
const RANK_BYTES: usize = 1 << 55;
const BYTES: usize = MAX_RANKS.next_power_of_two() * RANK_BYTES;

#[derive(Debug)]
pub(crate) struct Arena {
    memory: OwnedFd,
    /// The size of a part, enough for all ranks of the host.
    part_bytes: usize,
    /// The number of parts of this rank that were reserved.
    reserved: AtomicU64,
}

/// The part of an arena that one group uses.
#[derive(Debug)]
pub(crate) struct Part {
    arena: Arc<Arena>,
    at: usize,
    layout: Layout,
}

impl Arena {
    pub(super) fn create() -> io::Result<OwnedFd> {
        segment::create_sparse(BYTES)
    }

    /// Makes the arena of a host of `ranks` ranks from its memory file.
    pub(super) fn new(memory: OwnedFd, ranks: usize) -> io::Result<Self> {
        segment::check_sealed(&memory, BYTES)?;
        let part_bytes = Layout::sparse(ranks).bytes.next_power_of_two();
        Ok(Self { memory, part_bytes, reserved: AtomicU64::new(0) })
    }

    /// Reserves `count` parts in the range of this rank, and returns the number of the first. Returns `None`
    /// if this rank has given out all of its parts.
    pub(crate) fn reserve(&self, count: u64) -> Option<u64> {
        let number = self.reserved.fetch_add(count, Ordering::Relaxed);
        (number + count <= (RANK_BYTES / self.part_bytes) as u64).then_some(number)
    }

    /// Maps part `number` of the rank `owner` of the host, for a group of `ranks` ranks, and allocates the
    /// first pages. Fails if the machine or the control group does not have enough memory, or there is no
    /// such part.
    pub(crate) fn map(self: &Arc<Self>, owner: usize, number: u64, ranks: usize) -> io::Result<Segment> {
        let (layout, number) = (Layout::sparse(ranks), usize::try_from(number).unwrap_or(usize::MAX));
        let is_valid =
            layout.bytes <= self.part_bytes && owner < MAX_RANKS && number < RANK_BYTES / self.part_bytes;
        if !is_valid {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let at = owner * RANK_BYTES + number * self.part_bytes;
        let part = Part { arena: Arc::clone(self), at, layout };
        part.commit(layout.first_pages())?;
        Segment::map_range(&self.memory, at, layout.bytes, Some(part))
    }
}

impl Part {
    pub(super) fn commit(&self, range: Range<usize>) -> io::Result<()> {
        segment::commit(&self.arena.memory, self.at + range.start..self.at + range.end)
    }

    /// Notes that this rank closes the part, which it has mapped as `segment`. Returns whether it is the last
    /// rank to do so.
    pub(super) fn close(&self, segment: &Segment) -> bool {
        let before = segment.word(Layout::CLOSED_COUNT).fetch_add(1, Ordering::AcqRel);
        before + 1 == self.layout.ranks as u64
    }

    /// Frees the pages, which no rank has mapped any more.
    pub(super) fn free(&self) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (at, bytes) = (self.at as u64, self.layout.bytes as u64);
        if let Err(error) = rustix::fs::fallocate(self.arena.memory.as_fd(), flags, at, bytes) {
            log::warn!("cannot free the shared memory of a group: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocated(arena: &Arena) -> u64 {
        rustix::fs::fstat(&arena.memory).unwrap().st_blocks as u64 * 512
    }

    #[test]
    fn parts_take_memory_when_used_and_none_when_all_ranks_have_closed_them() {
        let arena = Arc::new(Arena::new(Arena::create().unwrap(), 16).unwrap());
        assert_eq!((arena.reserve(2), arena.reserve(1)), (Some(0), Some(2)));
        let map = |number| [0, 1].map(|_| arena.map(MAX_RANKS - 1, number, 2).unwrap());
        let (one, [other, _]) = (map(0), map(7));
        let first = Layout::sparse(2).first_pages().end as u64;
        assert_eq!(allocated(&arena), 2 * first);
        one[0].commit(Layout::sparse(2).all_rounds(1)).unwrap();
        assert!(allocated(&arena) > 2 << 20);
        one[0].word(Layout::FAILURE_FLAG).store(5, Ordering::Relaxed);
        assert_eq!(one[1].word(Layout::FAILURE_FLAG).load(Ordering::Relaxed), 5);
        assert_eq!(other.word(Layout::FAILURE_FLAG).load(Ordering::Relaxed), 0);
        let [a, b] = one;
        drop(a);
        assert!(allocated(&arena) > 2 << 20, "a rank still uses it");
        drop(b);
        assert_eq!(allocated(&arena), first);
    }

    #[test]
    fn parts_outside_the_file_are_refused() {
        let arena = Arc::new(Arena::new(Arena::create().unwrap(), 4).unwrap());
        for (owner, number, ranks) in [(MAX_RANKS, 0, 2), (0, u64::MAX, 2), (0, 1 << 40, 2), (0, 0, 64)] {
            assert!(arena.map(owner, number, ranks).is_err(), "part {number} of {owner} for {ranks} ranks");
        }
        assert!(arena.reserve(1 << 50).is_none());
    }
}
