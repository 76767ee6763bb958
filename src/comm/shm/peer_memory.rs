//! Reads the memory of other processes of the host by `process_vm_readv` (cross memory attach).
//!
//! The kernel takes the number of a process. In another pid namespace this is the number of another process, and after the
//! process has ended another one may get it. So each read also reads a nonce from the memory of the process.

use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use super::layout::{Identity, Layout};
use super::segment::Segment;

/// The processes of a host, each of which is a rank of the first group.
#[derive(Debug)]
pub(crate) struct PeerMemory {
    segment: Arc<Segment>,
    layout: Layout,
    me: usize,
}

/// The values of [`Identity::CanRead`].
const CAN_READ: u64 = 1;
const CANNOT_READ: u64 = 2;

/// Publishes the data by which other processes can read the memory of this process, which is rank `me`.
pub(super) fn publish_identity(segment: &Segment, layout: Layout, me: usize) -> Result<(), getrandom::Error> {
    let nonce = segment.word(layout.identity(me, Identity::Nonce));
    nonce.store(getrandom::u64()?, Ordering::Relaxed);
    let words = [
        (Identity::Process, u64::from(std::process::id())),
        (Identity::NonceAddress, std::ptr::from_ref(nonce) as u64),
    ];
    for (word, value) in words {
        segment.word(layout.identity(me, word)).store(value, Ordering::Relaxed);
    }
    Ok(())
}

impl PeerMemory {
    /// Makes the access of this process, which is rank `me`, to the memory of all processes. They have
    /// [published](publish_identity) their identities. If `reads` is set, it tries to read the memory of each, and tells
    /// them the result.
    pub(super) fn new(segment: Arc<Segment>, layout: Layout, me: usize, reads: bool) -> Self {
        let memory = Self { segment, layout, me };
        let can_read = reads && memory.can_read_all();
        let value = if can_read { CAN_READ } else { CANNOT_READ };
        memory.word(me, Identity::CanRead).store(value, Ordering::Release);
        memory
    }

    /// Tries to read the memory of all processes. Returns whether the kernel lets this process do so.
    fn can_read_all(&self) -> bool {
        for process in 0..self.layout.ranks {
            if let Err(error) = self.read(process, 0, &mut []) {
                log::debug!(
                    "this rank does not read long data in the memory of the other ranks of its host: the kernel does not \
                     let it read that of local rank {process}: {error}"
                );
                return false;
            }
        }
        log::debug!("this rank reads long data in the memory of the other ranks of its host");
        true
    }

    /// Returns whether `process` has found that it can read the memory of all processes.
    pub(super) fn can_read(&self, process: usize) -> bool {
        self.word(process, Identity::CanRead).load(Ordering::Acquire) == CAN_READ
    }

    /// Returns whether other processes can read the `bytes` bytes at `address` of this process. They cannot read memory of
    /// devices, for instance. Only the ends of the range are tried, which takes two system calls.
    pub(super) fn is_readable(&self, address: usize, bytes: usize) -> bool {
        let last = address + bytes.saturating_sub(1);
        [address, last].into_iter().all(|at| self.read(self.me, at as u64, &mut [0]).is_ok())
    }

    /// Copies bytes at `address` in the memory of `process` to `into`. Fails with `ESRCH` if the process has ended, and with
    /// `EFAULT` if it has no readable memory there.
    pub(super) fn read(&self, process: usize, address: u64, into: &mut [u8]) -> io::Result<()> {
        let word = |word| self.word(process, word).load(Ordering::Relaxed);
        let (bytes, mut nonce) = (into.len(), [0; size_of::<u64>()]);
        let remote = [(word(Identity::NonceAddress), nonce.len()), (address, bytes)];
        let remote = remote.map(|(base, len)| RemoteIoVec { base: base as usize, len });
        let pid = Pid::from_raw(word(Identity::Process) as i32);
        let mut local = [IoSliceMut::new(&mut nonce), IoSliceMut::new(into)];
        let read = match process_vm_readv(pid, &mut local, &remote) {
            // The nonce is the first to be read.
            Err(Errno::EFAULT) => 0,
            read => read?,
        };
        let is_process = read >= nonce.len() && u64::from_ne_bytes(nonce) == word(Identity::Nonce);
        match read.checked_sub(nonce.len()) {
            Some(read) if is_process && read == bytes => Ok(()),
            Some(_) if is_process => Err(Errno::EFAULT.into()),
            _ => Err(Errno::ESRCH.into()),
        }
    }

    fn word(&self, process: usize, word: Identity) -> &AtomicU64 {
        self.segment.word(self.layout.identity(process, word))
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::shm::segment::create;

    /// Returns the access to the memory of two processes, both of which are this one.
    fn memory() -> PeerMemory {
        let layout = Layout::dense(2);
        let segment = Arc::new(Segment::map(create(layout.bytes).unwrap(), layout.bytes).unwrap());
        (0..2).for_each(|rank| publish_identity(&segment, layout, rank).unwrap());
        PeerMemory::new(segment, layout, 0, true)
    }

    fn error_of(memory: &PeerMemory, address: u64) -> Option<Errno> {
        let read = memory.read(1, address, &mut [0; 3]);
        read.err().and_then(|error| error.raw_os_error()).map(Errno::from_raw)
    }

    #[test]
    fn process_that_published_its_identity_is_read() {
        let (memory, data) = (memory(), [1_u8, 2, 3, 4]);
        let mut got = [0; 3];
        memory.read(1, data[1..].as_ptr().addr() as u64, &mut got).unwrap();
        assert_eq!(got, [2, 3, 4]);
        assert!(memory.can_read(0) && !memory.can_read(1), "the second has not tried");
        assert!(memory.is_readable(data.as_ptr().addr(), data.len()));
    }

    #[test]
    fn process_that_may_not_read_says_that_it_cannot() {
        let PeerMemory { segment, layout, .. } = memory();
        assert!(!PeerMemory::new(segment, layout, 1, false).can_read(1));
    }

    #[test]
    fn memory_that_is_not_mapped_is_no_readable_memory() {
        let memory = memory();
        assert_eq!(error_of(&memory, 8), Some(Errno::EFAULT));
        assert!(!memory.is_readable(8, 100));
    }

    /// The kernel maps the page with its clock for each process, and lets no process read it by a system call.
    #[test]
    fn memory_of_the_kernel_is_no_readable_memory() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let clock = maps.lines().find(|line| line.ends_with("[vvar]")).expect("x86-64 and aarch64 have it");
        let start = usize::from_str_radix(clock.split('-').next().unwrap(), 16).unwrap();
        assert!(!memory().is_readable(start, 8));
    }

    #[test]
    fn process_with_the_number_of_a_rank_is_not_taken_for_it() {
        let memory = memory();
        let mut other = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let data = [1_u8, 2, 3];
        for pid in [other.id(), i32::MAX as u32] {
            memory.word(1, Identity::Process).store(pid.into(), Ordering::Relaxed);
            assert_eq!(error_of(&memory, data.as_ptr().addr() as u64), Some(Errno::ESRCH), "{pid}");
        }
        drop(other.stdin.take());
        other.wait().unwrap();
        memory.word(1, Identity::Process).store(std::process::id().into(), Ordering::Relaxed);
        assert_eq!(error_of(&memory, data.as_ptr().addr() as u64), None);
        // Another process may have readable memory at the address of the nonce.
        let other = 0_u64;
        let address = std::ptr::from_ref(&other).addr() as u64;
        memory.word(1, Identity::NonceAddress).store(address, Ordering::Relaxed);
        assert_eq!(error_of(&memory, data.as_ptr().addr() as u64), Some(Errno::ESRCH));
    }
}
