//! Allocation of memory that all ranks of a host can access, so that collectives need no copy inside the
//! host.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{CommError, Element, Group};
use crate::dtype::ReduceOp;
use crate::shm::allocations::{Allocation, Allocations};
use crate::shm::handout::{self, Giver, Taker};
use crate::shm::part::Owned;
use crate::shm::segment::{self, Segment};

/// A slice of elements in memory that the other ranks of the host can access, from [`Group::alloc`].
///
/// Other ranks access it only during a collective to which this rank passes it. After a failed collective,
/// the passed elements are zero, in private memory.
pub struct SharedBuffer<T: Element> {
    elements: Elements<T>,
}

enum Elements<T: Element> {
    Shared { owned: Owned<T>, _allocation: Arc<Allocation> },
    Private(Vec<T>),
}

/// Bytes of the broadcast that announces the memory: a success flag, the id, the invitation.
const WORDS: usize = 1 + 8 + size_of::<handout::Invitation>();

impl Group {
    /// Allocates zeroed memory for `len` elements that all ranks of the host can access. In it, an
    /// [all-reduce](Self::all_reduce) of more than 8 KiB copies nothing: it reduces the ranks' elements in
    /// place.
    ///
    /// All ranks of the group call it, as a collective; each gets its own buffer, of the length that it
    /// passes. An all-reduce works in place if all ranks pass the whole buffer of one `alloc`, or equal
    /// pages of it. Otherwise, and in all other collectives, it is treated as any buffer.
    ///
    /// If not all ranks share memory, or the allocation fails (which is logged), all ranks get private
    /// memory. [`SharedBuffer::is_shared`] tells which.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if the size is too large. Otherwise the errors of
    /// [`Self::all_gather`].
    ///
    /// # Cost
    /// Five small collectives. Two file descriptors are open during the call. The memory is committed at
    /// once.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<SharedBuffer<T>, CommError> {
        self.inner.check_caller()?;
        let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok());
        let Some(bytes) = bytes else {
            return Err(too_much::<T>(len));
        };
        let shared = match &self.inner.memory {
            Some(allocations) => self.in_parts().share::<T>(allocations, len, bytes)?,
            None => None,
        };
        let elements = match shared {
            Some((owned, allocation)) => Elements::Shared { owned, _allocation: allocation },
            None => Elements::Private(zeros(len)?),
        };
        Ok(SharedBuffer { elements })
    }

    /// Allocates memory with all ranks; returns `None` on all ranks if that fails on any.
    fn share<T: Element>(
        &self,
        allocations: &Allocations,
        len: usize,
        bytes: usize,
    ) -> Result<Option<Made<T>>, CommError> {
        let (rank, mut all) = (self.rank(), vec![0; self.size()]);
        self.all_gather(&[bytes as u64], &mut all)?;
        let Some((regions, total)) = handout::regions(&all) else {
            let what = "alloc: all ranks together ask for more than there can be".to_owned();
            return Err(CommError::InvalidArgument(what));
        };
        if all.contains(&0) {
            return Ok(None);
        }
        let mut words = [0_u8; WORDS];
        let mut giver = None;
        if rank == 0 {
            match Giver::new(total) {
                Ok((made, invitation)) => {
                    words[0] = 1;
                    words[1..9].copy_from_slice(&allocations.next_id().to_le_bytes());
                    words[9..].copy_from_slice(&invitation);
                    giver = Some(made);
                }
                Err(error) => self.warn(&error),
            }
        }
        self.broadcast(&mut words, 0)?;
        let (id, invitation) = words[1..].split_at(8);
        let id = id.try_into().map_or(0, u64::from_le_bytes);
        let invitation = invitation.try_into().unwrap_or([0; 32]);
        if words[0] == 0 {
            return Ok(None);
        }
        // Each step is complete on all ranks before the next one starts.
        let taker = (rank > 0).then(|| Taker::new(&invitation)).transpose();
        let Some(taker) = self.all_could(taker)? else { return Ok(None) };
        let given = giver.as_ref().map_or(Ok(()), |giver| giver.give(self.size() - 1));
        if self.all_could(given)?.is_none() {
            return Ok(None);
        }
        let memory = match (giver, taker) {
            (Some(giver), _) => Ok(giver.into_memory()),
            (None, Some(taker)) => taker.take(),
            (None, None) => Err(io::ErrorKind::Other.into()),
        };
        let made = memory.and_then(|memory| {
            segment::commit(&memory, regions[rank].clone())?;
            map(&memory, (id, regions, total), rank, len)
        });
        let Some((owned, allocation)) = self.all_could(made)? else { return Ok(None) };
        allocation.all.populate(allocation.regions[rank].clone());
        allocations.add(&allocation);
        Ok(Some((owned, allocation)))
    }

    /// Returns the result of this rank if all ranks succeeded, else `None` on all ranks.
    fn all_could<R>(&self, done: io::Result<R>) -> Result<Option<R>, CommError> {
        let mut all = [u8::from(done.is_ok())];
        self.all_reduce(&mut all, ReduceOp::Min)?;
        Ok(match done {
            Ok(done) => Some(done).filter(|_| all == [1]),
            Err(error) => {
                self.warn(&error);
                None
            }
        })
    }

    fn warn(&self, error: &io::Error) {
        let (name, rank) = (self.name(), self.rank());
        log::warn!("{name}: rank {rank} cannot make memory for all ranks, so each uses its own: {error}");
    }
}

/// The buffer of a rank and the allocation that contains it.
type Made<T> = (Owned<T>, Arc<Allocation>);

/// Id of an allocation, regions of all ranks, total size in bytes.
type Plan = (u64, Vec<std::ops::Range<usize>>, usize);

fn map<T: Element>(
    memory: &OwnedFd,
    (id, regions, total): Plan,
    rank: usize,
    len: usize,
) -> io::Result<Made<T>> {
    let all = Segment::map(memory, total)?;
    let owned = Owned::map(memory, regions[rank].start, len)?;
    let own = Arc::clone(owned.part());
    Ok((owned, Arc::new(Allocation { id, all, regions, own })))
}

fn too_much<T: Element>(len: usize) -> CommError {
    CommError::InvalidArgument(format!("alloc of {len} elements of {}: there is no such memory", T::DTYPE))
}

fn zeros<T: Element>(len: usize) -> Result<Vec<T>, CommError> {
    let mut elements = Vec::new();
    let refused = elements.try_reserve_exact(len).is_err();
    if refused {
        return Err(too_much::<T>(len));
    }
    elements.resize_with(len, T::zero);
    Ok(elements)
}

impl<T: Element> SharedBuffer<T> {
    /// Returns true if other ranks can access the buffer.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        matches!(self.elements, Elements::Shared { .. })
    }
}

impl<T: Element> From<Vec<T>> for SharedBuffer<T> {
    /// Wraps elements in private memory.
    fn from(elements: Vec<T>) -> Self {
        Self { elements: Elements::Private(elements) }
    }
}

impl<T: Element> Default for SharedBuffer<T> {
    /// Returns an empty buffer.
    fn default() -> Self {
        Vec::new().into()
    }
}

impl<T: Element> Deref for SharedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.elements {
            Elements::Shared { owned, .. } => owned,
            Elements::Private(elements) => elements,
        }
    }
}

impl<T: Element> DerefMut for SharedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.elements {
            Elements::Shared { owned, .. } => owned,
            Elements::Private(elements) => elements,
        }
    }
}

impl<T: Element> fmt::Debug for SharedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedBuffer")
            .field("len", &self.len())
            .field("shared", &self.is_shared())
            .finish_non_exhaustive()
    }
}
