//! Memory that the ranks of a host make together later on: the first of them makes it and hands it to the others.
//!
//! As in a [meeting](super::meeting), on a unix socket with an abstract name; but each step ends with a collective, so
//! that nobody waits here and all know how it went.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use super::meeting::{WORD_BYTES, connect, listen, receive, send};
use super::part::PAGE_BYTES;
use super::segment;

/// Where the memory is handed out, and the word by which those are known that it is for.
pub(crate) type Invitation = [u8; 2 * WORD_BYTES];

/// The memory, at who made it.
#[derive(Debug)]
pub(crate) struct Giver {
    memory: OwnedFd,
    listener: OwnedFd,
    word: [u8; WORD_BYTES],
}

/// Who has come for it.
#[derive(Debug)]
pub(crate) struct Taker(OwnedFd);

/// What of the memory is whose, and how much it is in all; each has whole pages. `None` if that is more than there can be.
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
    /// Makes `bytes` bytes of memory, which takes no pages yet.
    pub(crate) fn new(bytes: usize) -> io::Result<(Self, Invitation)> {
        let mut invitation = [0; 2 * WORD_BYTES];
        getrandom::fill(&mut invitation).map_err(|error| io::Error::other(error.to_string()))?;
        let (name, word) = halves(&invitation);
        let giver = Self { memory: segment::create(bytes)?, listener: listen(&name)?, word };
        Ok((giver, invitation))
    }

    /// Gives it to `takers` ranks, all of which have come.
    pub(crate) fn give(&self, takers: usize) -> io::Result<()> {
        let mut given = 0;
        // Others may have come as well, but not more than can queue.
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

    /// Takes the memory, which was given.
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
    fn who_knows_the_word_gets_the_memory() {
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
    fn regions_are_whole_pages_and_must_fit() {
        assert_eq!(regions(&[1, 0, 4097]), Some((vec![0..4096, 4096..8192, 8192..16384], 16384)));
        assert_eq!(regions(&[u64::MAX]), None);
        assert_eq!(regions(&[1 << 62, 1 << 62]), None);
    }
}
