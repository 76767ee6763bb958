//! Passing of shared memory after the bootstrap. A rank that has the memory passes its file descriptor to the
//! other ranks of the host.
//!
//! The descriptor is sent over a [unix socket](super::unix_socket), as in the [bootstrap](super::bootstrap).
//! The caller runs a collective after each step, so all ranks learn whether the step succeeded, and no
//! function of this module blocks.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use super::region::PAGE_BYTES;
use super::unix_socket::{SECRET_BYTES, accept, connect, listen, receive, send};

/// The name of the socket, and the secret by which its intended receivers are recognised.
pub(crate) type SocketInfo = [u8; 2 * SECRET_BYTES];

/// The memory and the listening socket, on the rank that has the memory.
#[derive(Debug)]
pub(crate) struct FdSender {
    memory: OwnedFd,
    listener: OwnedFd,
    secret: [u8; SECRET_BYTES],
}

/// The connection of a rank that receives the memory.
#[derive(Debug)]
pub(crate) struct FdReceiver(OwnedFd);

/// Returns the byte range of each rank in the memory, for the sizes in `bytes` rounded up to whole pages, and
/// the total size. `None` if the total exceeds the address space.
pub(crate) fn regions(bytes: &[u64]) -> Option<(Vec<Range<usize>>, usize)> {
    let mut end = 0_usize;
    let regions = bytes.iter().map(|&bytes| {
        let pages = usize::try_from(bytes).ok()?.max(1).checked_next_multiple_of(PAGE_BYTES)?;
        let start = end;
        end = end.checked_add(pages).filter(|&end| isize::try_from(end).is_ok())?;
        Some(start..end)
    });
    let regions = regions.collect::<Option<_>>()?;
    Some((regions, end))
}

impl FdSender {
    /// Creates the socket to pass `memory` over.
    pub(crate) fn new(memory: OwnedFd) -> io::Result<(Self, SocketInfo)> {
        let mut socket_info = [0; 2 * SECRET_BYTES];
        getrandom::fill(&mut socket_info).map_err(io::Error::other)?;
        let [name, secret]: [[u8; SECRET_BYTES]; 2] = bytemuck::cast(socket_info);
        let sender = Self { memory, listener: listen(&name)?, secret };
        Ok((sender, socket_info))
    }

    /// Passes the memory to `receivers` ranks, all of which have connected already.
    pub(crate) fn send(&self, receivers: usize) -> io::Result<()> {
        let mut sent = 0;
        // Processes without the secret may have connected as well. The backlog of the socket bounds their
        // number.
        while sent < receivers {
            let conn = accept(&self.listener)?;
            let secret = receive(&conn).ok().flatten().map(|(bytes, _)| bytes);
            if secret.as_deref() == Some(&self.secret) {
                send(&conn, &[0], &[self.memory.as_fd()])?;
                sent += 1;
            }
        }
        Ok(())
    }

    pub(crate) fn into_memory(self) -> OwnedFd {
        self.memory
    }
}

impl FdReceiver {
    pub(crate) fn new(socket_info: &SocketInfo) -> io::Result<Self> {
        let [name, secret]: [[u8; SECRET_BYTES]; 2] = bytemuck::cast(*socket_info);
        let conn = connect(&name)?;
        send(&conn, &secret, &[])?;
        Ok(Self(conn))
    }

    /// Receives the descriptor of the memory without waiting, after [`FdSender::send`] has sent it.
    pub(crate) fn receive(self) -> io::Result<OwnedFd> {
        let descriptor = receive(&self.0)?.and_then(|(_, descriptors)| descriptors.into_iter().next());
        descriptor.ok_or_else(|| {
            io::Error::other("no file descriptor arrived (is the limit of open files reached?)")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::segment;

    #[test]
    fn descriptor_is_sent_only_to_peers_with_the_secret() {
        let (sender, socket_info) = FdSender::new(segment::create(8192).unwrap()).unwrap();
        let unauthenticated = FdReceiver::new(&{
            let mut other = socket_info;
            other[2 * SECRET_BYTES - 1] ^= 1;
            other
        })
        .unwrap();
        let receivers = [FdReceiver::new(&socket_info).unwrap(), FdReceiver::new(&socket_info).unwrap()];
        sender.send(2).unwrap();
        for receiver in receivers {
            assert_eq!(rustix::fs::fstat(receiver.receive().unwrap()).unwrap().st_size, 8192);
        }
        assert!(unauthenticated.receive().is_err());
        assert!(sender.send(1).is_err(), "nobody else has come");
    }

    #[test]
    fn regions_are_whole_pages_and_fit_the_memory() {
        assert_eq!(regions(&[1, 0, 4097]), Some((vec![0..4096, 4096..8192, 8192..16384], 16384)));
        assert_eq!(regions(&[u64::MAX]), None);
        assert_eq!(regions(&[1 << 62, 1 << 62]), None);
    }
}
