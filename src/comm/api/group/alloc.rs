//! Allocation of memory that all ranks of a host can access, so that collectives need no copy inside the
//! host.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::{CommError, Element, Group};
use crate::collectives::dtype::ReduceOp;
use crate::shm::allocations::{Allocation, Allocations, MappedRegion};
use crate::shm::fd_passing::{self, FdReceiver, FdSender};
use crate::shm::region::OwnedRegion;
use crate::shm::segment::{self, Segment};

/// This rank's elements, from [`Group::alloc`], in memory that the other ranks of the host can access.
///
/// Other ranks access the elements only during a collective to which this rank passes them. After a failed
/// collective, the passed elements are zero, in private memory.
pub struct SharedBuffer<T: Element> {
    elements: Elements<T>,
}

enum Elements<T: Element> {
    Shared { owned: OwnedRegion<T>, _allocation: Arc<Allocation> },
    Private(Vec<T>),
}

/// Bytes that rank 0 broadcasts before it passes the memory's file descriptor: a success flag, the
/// allocation's id, and the socket's name and secret.
const ANNOUNCEMENT_BYTES: usize = 1 + 8 + size_of::<fd_passing::SocketInfo>();

impl Group {
    /// Allocates zeroed memory for `len` elements that all ranks of the host can access. An
    /// [all-reduce](Self::all_reduce) of more than 16 KiB in this memory copies nothing: it reduces the ranks'
    /// elements in place.
    ///
    /// All ranks of the group call `alloc`, as a collective; each rank gets its own buffer, of the length
    /// that it passes. An all-reduce works in place if all ranks pass the whole buffer of one `alloc`, or
    /// equal pages of it. Otherwise, and in all other collectives, the buffer is treated as any other buffer.
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
        let bytes = bytes.ok_or_else(|| too_large::<T>(len))?;
        let shared = match &self.inner.memory {
            Some(allocations) => self.with_fixed_deadline().share(allocations, len, bytes)?,
            None => None,
        };
        let elements = shared.map_or_else(|| zeros(len).map(Elements::Private), Ok)?;
        Ok(SharedBuffer { elements })
    }

    /// Allocates memory with all ranks; returns `None` on all ranks if a rank fails or asks for 0 bytes.
    fn share<T: Element>(
        &self,
        allocations: &Allocations,
        len: usize,
        bytes: usize,
    ) -> Result<Option<Elements<T>>, CommError> {
        let (rank, mut all) = (self.rank(), vec![0; self.size()]);
        self.all_gather(&[bytes as u64], &mut all)?;
        let Some((regions, total)) = fd_passing::regions(&all) else {
            let what = "alloc: the ranks together ask for more memory than a process can address".to_owned();
            return Err(CommError::InvalidArgument(what));
        };
        if all.contains(&0) {
            return Ok(None);
        }
        let mut announcement = [0_u8; ANNOUNCEMENT_BYTES];
        let mut sender = None;
        if rank == 0 {
            match segment::create(total).and_then(FdSender::new) {
                Ok((made, socket_info)) => {
                    announcement[0] = 1;
                    announcement[1..9].copy_from_slice(&allocations.next_id().to_le_bytes());
                    announcement[9..].copy_from_slice(&socket_info);
                    sender = Some(made);
                }
                Err(error) => self.warn(&error),
            }
        }
        self.broadcast(&mut announcement, 0)?;
        let (id, socket_info) = announcement[1..].split_at(8);
        let id = u64::from_le_bytes(id.try_into().expect("the id takes 8 bytes"));
        let socket_info = socket_info.try_into().expect("the rest are the 32 bytes of the socket");
        if announcement[0] == 0 {
            return Ok(None);
        }
        // Each step completes on all ranks before the next step, so that no rank waits for a rank that
        // failed.
        let receiver = (rank > 0).then(|| FdReceiver::new(&socket_info)).transpose();
        let Some(receiver) = self.all_succeeded(receiver)? else { return Ok(None) };
        let sent = sender.as_ref().map_or(Ok(()), |sender| sender.send(self.size() - 1));
        if self.all_succeeded(sent)?.is_none() {
            return Ok(None);
        }
        let memory = match (sender, receiver) {
            (Some(sender), _) => Ok(sender.into_memory()),
            (None, Some(receiver)) => receiver.receive(),
            (None, None) => unreachable!("rank 0 has announced its sender, and other ranks are receivers"),
        };
        let made = memory.and_then(|memory| {
            segment::commit(&memory, regions[rank].clone())?;
            let segment = Arc::new(Segment::map(&memory, total)?);
            let owned = OwnedRegion::map(&memory, regions[rank].start, len)?;
            let own = Arc::clone(&owned.region);
            let mapped = |range| MappedRegion { segment: Arc::clone(&segment), range };
            let regions = regions.into_iter().map(mapped).collect();
            Ok((owned, Arc::new(Allocation { id, regions, own })))
        });
        let Some((owned, allocation)) = self.all_succeeded(made)? else { return Ok(None) };
        let MappedRegion { segment, range } = &allocation.regions[rank];
        segment.populate(range.clone());
        allocations.add(&allocation);
        Ok(Some(Elements::Shared { owned, _allocation: allocation }))
    }

    /// Returns this rank's result `done` if it is `Ok` on all ranks, else `None` on all ranks.
    pub(super) fn all_succeeded<R>(&self, done: io::Result<R>) -> Result<Option<R>, CommError> {
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
        log::warn!("{name}: rank {rank} cannot share memory, so collectives of this memory copy it: {error}");
    }
}

fn too_large<T: Element>(len: usize) -> CommError {
    CommError::InvalidArgument(format!(
        "alloc of {len} elements of {}: this is more memory than this process can get",
        T::DTYPE
    ))
}

fn zeros<T: Element>(len: usize) -> Result<Vec<T>, CommError> {
    let mut elements = Vec::new();
    elements.try_reserve_exact(len).map_err(|_| too_large::<T>(len))?;
    elements.resize_with(len, T::zero);
    Ok(elements)
}

impl<T: Element> SharedBuffer<T> {
    /// Returns true if other ranks can access the buffer.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        matches!(self.elements, Elements::Shared { .. })
    }

    /// Declares that only the first `bytes` bytes hold elements in use, at most all. An all-reduce of exactly
    /// these copies nothing, as one of the whole buffer does. If it fails, later elements are unspecified too.
    pub fn limit_use(&mut self, bytes: usize) {
        if let Elements::Shared { owned, .. } = &self.elements {
            owned.region.limit_use(bytes);
        }
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
