//! Memory that the ranks of a host create after the bootstrap: the first rank creates it and passes it to the
//! others.
//!
//! The descriptor travels on a unix socket with an abstract name, as in a [meeting](super::meeting). Each
//! step ends with a collective, so nobody waits here and all ranks learn the result.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use super::meeting::{WORD_BYTES, connect, listen, receive, send};
use super::part::PAGE_BYTES;
use super::segment;

/// The name of the socket, and the secret word by which its intended receivers are recognised.
pub(crate) type Invitation = [u8; 2 * WORD_BYTES];

/// The memory, on the rank that created it.
#[derive(Debug)]
pub(crate) struct Giver {
    memory: OwnedFd,
    listener: OwnedFd,
    word: [u8; WORD_BYTES],
}

/// The connection of a rank that receives the memory.
#[derive(Debug)]
pub(crate) struct Taker(OwnedFd);

/// Returns the range of each rank, in whole pages, and the total size. `None` if the total exceeds the
/// address space.
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

impl Giver {
    /// Creates `bytes` bytes of memory, which takes no pages yet.
    pub(crate) fn new(bytes: usize) -> io::Result<(Self, Invitation)> {
        let mut invitation = [0; 2 * WORD_BYTES];
        getrandom::fill(&mut invitation).map_err(|error| io::Error::other(error.to_string()))?;
        let (name, word) = halves(&invitation);
        let giver = Self { memory: segment::create(bytes)?, listener: listen(&name)?, word };
        Ok((giver, invitation))
    }

    /// Passes the memory to `takers` ranks, all of which have connected.
    pub(crate) fn give(&self, takers: usize) -> io::Result<()> {
        let mut given = 0;
        // Other processes may have connected as well, but not more than the backlog holds.
        while given < takers {
            let conn = rustix::net::accept_with(&self.listener, super::meeting::SOCKET)?;
            let word = receive(&conn).ok().flatten().map(|(bytes, _)| bytes);
            if word.as_deref() == Some(&self.word) {
                send(&conn, &[0], &[self.memory.as_fd()])?;
                given += 1;
            }
        }
        Ok(())
    }

    pub(crate) fn into_memory(self) -> OwnedFd {
        self.memory
    }
}

impl Taker {
    pub(crate) fn new(invitation: &Invitation) -> io::Result<Self> {
        let (name, word) = halves(invitation);
        let conn = connect(&name)?;
        send(&conn, &word, &[])?;
        Ok(Self(conn))
    }

    /// Receives the descriptor of the memory, which was sent already.
    pub(crate) fn take(self) -> io::Result<OwnedFd> {
        let given = receive(&self.0)?.and_then(|(_, descriptors)| descriptors.into_iter().next());
        given.ok_or_else(|| io::Error::other("no descriptor came (is this the limit of open files?)"))
    }
}

fn halves(invitation: &Invitation) -> ([u8; WORD_BYTES], [u8; WORD_BYTES]) {
    let (mut name, mut word) = ([0; WORD_BYTES], [0; WORD_BYTES]);
    name.copy_from_slice(&invitation[..WORD_BYTES]);
    word.copy_from_slice(&invitation[WORD_BYTES..]);
    (name, word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_is_sent_only_to_peers_with_the_secret() {
        let (giver, invitation) = Giver::new(8192).unwrap();
        let stranger = Taker::new(&{
            let mut other = invitation;
            other[2 * WORD_BYTES - 1] ^= 1;
            other
        })
        .unwrap();
        let takers = [Taker::new(&invitation).unwrap(), Taker::new(&invitation).unwrap()];
        giver.give(2).unwrap();
        for taker in takers {
            assert_eq!(rustix::fs::fstat(taker.take().unwrap()).unwrap().st_size, 8192);
        }
        assert!(stranger.take().is_err());
        assert!(giver.give(1).is_err(), "nobody else has come");
    }

    #[test]
    fn regions_are_whole_pages_and_fit_the_memory() {
        assert_eq!(regions(&[1, 0, 4097]), Some((vec![0..4096, 4096..8192, 8192..16384], 16384)));
        assert_eq!(regions(&[u64::MAX]), None);
        assert_eq!(regions(&[1 << 62, 1 << 62]), None);
    }
}
