//! Memory that a program has made itself and lets the other ranks of the host access.

#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{CommError, Group};
use crate::error::require;
use crate::shm::allocations::{Allocation, Allocations, MappedRegion};
use crate::shm::fd_passing::{FdReceiver, FdSender, SocketInfo};
use crate::shm::region::{PAGE_BYTES, Region};
use crate::shm::segment::Segment;

/// Memory of the program that the other ranks of the host can access, from [`Group::adopt`]. They access it
/// no more when the handle is dropped and no operation uses the memory.
pub struct Adopted {
    allocation: Option<Arc<Allocation>>,
}

/// Size of a rank's announcement: the number of the allocation, the offset in the file, the size of the
/// memory, and the socket over which the rank passes the descriptor. The number of rank 0 counts.
const ANNOUNCEMENT_BYTES: usize = 3 * 8 + size_of::<SocketInfo>();

impl Group {
    /// Lets the other ranks of the host access memory that the program has already: `bytes` bytes at
    /// `address`, which the program has mapped from byte `offset` of the file `memory` on. The memory is then
    /// treated as if [`Group::alloc`] had made it: an all-reduce of all of it, or of equal pages, copies
    /// nothing.
    ///
    /// All ranks of the group call `adopt`, as a collective, each with its own file and memory. If not all
    /// ranks share memory, or a system call fails (which is logged), the memory stays private on all ranks.
    /// [`Adopted::is_shared`] tells which.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if `address` or `offset` is no multiple of the page size. Otherwise the
    /// errors of [`Self::all_gather`].
    ///
    /// # Cost
    /// Seven small collectives, and a mapping for each rank of the host. During the call twice as many file
    /// descriptors are open as the group has ranks.
    ///
    /// # Safety
    /// Until the returned handle is dropped and all operations on the memory are done:
    ///
    /// - `address` stays a shared mapping of these bytes of the file, readable and writable. All of its last
    ///   page belongs to it.
    /// - No process makes the file shorter.
    /// - After a failed operation on the memory, its pages are private and zero, as after [`Group::alloc`]:
    ///   the group replaces the mapping. The program must tolerate this.
    pub unsafe fn adopt(
        &self,
        memory: BorrowedFd<'_>,
        offset: u64,
        address: NonNull<u8>,
        bytes: usize,
    ) -> Result<Adopted, CommError> {
        self.inner.check_caller()?;
        let at = usize::try_from(offset).unwrap_or(usize::MAX);
        require(address.addr().get().is_multiple_of(PAGE_BYTES) && at.is_multiple_of(PAGE_BYTES), || {
            format!("adopt: address {address:p} and offset {offset} must be multiples of {PAGE_BYTES}")
        })?;
        let allocation = match &self.inner.memory {
            Some(allocations) => {
                // SAFETY: the caller promises it.
                let own = unsafe { Region::adopt(address, bytes) };
                self.with_fixed_deadline().share_adopted(allocations, memory, at, own, bytes)?
            }
            None => None,
        };
        Ok(Adopted { allocation })
    }

    /// Returns whether collectives of the `bytes` bytes at `address` may copy nothing: they are memory of
    /// [`Group::alloc`] or [`Group::adopt`], and begin and end with a page of it.
    #[must_use]
    pub fn is_shared_memory(&self, address: *const u8, bytes: usize) -> bool {
        let allocations = self.inner.memory.as_ref();
        allocations.is_some_and(|allocations| allocations.find(address.addr(), bytes).is_some())
    }

    /// Maps the memory of all ranks; returns `None` on all ranks if a rank fails or has no bytes.
    fn share_adopted(
        &self,
        allocations: &Allocations,
        memory: BorrowedFd<'_>,
        at: usize,
        own: Region,
        bytes: usize,
    ) -> Result<Option<Arc<Allocation>>, CommError> {
        let rank = self.rank();
        let is_used = if bytes > 0 { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) };
        let sender = is_used.and_then(|()| FdSender::new(memory.try_clone_to_owned()?));
        let Some((sender, socket_info)) = self.all_succeeded(sender)? else { return Ok(None) };
        let id = if rank == 0 { allocations.next_id() } else { 0 };
        let mut announcement = [0_u8; ANNOUNCEMENT_BYTES];
        announcement[..24].copy_from_slice(bytemuck::bytes_of(&[id, at as u64, bytes as u64]));
        announcement[24..].copy_from_slice(&socket_info);
        let mut announcements = vec![0; self.size() * ANNOUNCEMENT_BYTES];
        self.all_gather(&announcement, &mut announcements)?;
        let announcements = announcements.as_chunks::<ANNOUNCEMENT_BYTES>().0;
        // Each step completes on all ranks before the next step, so that no rank waits for a rank that
        // failed.
        let others = announcements.iter().enumerate().filter(|(other, _)| *other != rank);
        let receivers = others.map(|(_, announcement)| {
            FdReceiver::new(announcement[24..].try_into().expect("the rest are the bytes of the socket"))
        });
        let receivers = receivers.collect::<io::Result<Vec<FdReceiver>>>();
        let Some(receivers) = self.all_succeeded(receivers)? else { return Ok(None) };
        if self.all_succeeded(sender.send(self.size() - 1))?.is_none() {
            return Ok(None);
        }
        let mut receivers = receivers.into_iter().peekable();
        let regions = announcements.iter().enumerate().map(|(other, announcement)| {
            let [_, at, bytes] = bytemuck::pod_read_unaligned::<[u64; 3]>(&announcement[..24]);
            let (at, bytes) = (at as usize, bytes as usize);
            let segment = match receivers.next_if(|_| other != rank) {
                Some(receiver) => Segment::adopt(receiver.receive()?, at, bytes)?,
                None => Segment::adopt(memory, at, bytes)?,
            };
            Ok(MappedRegion { segment: Arc::new(segment), range: 0..bytes.next_multiple_of(PAGE_BYTES) })
        });
        let regions = regions.collect::<io::Result<Vec<_>>>();
        let Some(regions) = self.all_succeeded(regions)? else { return Ok(None) };
        let [id, ..] = bytemuck::pod_read_unaligned::<[u64; 3]>(&announcements[0][..24]);
        let allocation = Arc::new(Allocation { id, regions, own: Arc::new(own) });
        allocations.add(&allocation);
        Ok(Some(allocation))
    }
}

impl Adopted {
    /// Returns true if the other ranks of the host can access the memory.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.allocation.is_some()
    }
}

impl fmt::Debug for Adopted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adopted").field("shared", &self.is_shared()).finish()
    }
}
