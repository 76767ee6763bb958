//! The bootstrap as the first rank of the host does it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{ACCEPT, LocalGroup, SharedResources, new_arena, parse_reply, proof, refusal};
use crate::limits;
use crate::shm::arena::Arena;
use crate::shm::layout::{MAX_RANKS, Proof};
use crate::shm::peer_memory::publish_identity;
use crate::shm::segment::{self, Segment};
use crate::shm::unavailable::Unavailable;
use crate::shm::unix_socket::{SECRET_BYTES, accept, listen, receive, send};

/// Maximum number of accepted connections that have not yet sent the secret and a local rank.
const MAX_UNIDENTIFIED: usize = 64;

#[derive(Debug)]
pub(crate) struct Leader {
    local_group: LocalGroup,
    listener: OwnedFd,
    secret: [u8; SECRET_BYTES],
    unidentified: Vec<OwnedFd>,
    /// The members that were identified, by local rank; the leader's own entry stays `None`.
    members: Vec<Option<Member>>,
    segment: Option<Arc<Segment>>,
    arena: Option<Arc<Arena>>,
}

#[derive(Debug)]
struct Member {
    conn: OwnedFd,
    doorbell: OwnedFd,
    process: Option<OwnedFd>,
    challenge: u64,
    responded: bool,
}

impl Leader {
    /// Opens the socket. Returns the message to send to the other ranks on the control connections: the name
    /// of the socket and the secret.
    pub(crate) fn open(local_group: LocalGroup) -> Result<(Self, Vec<u8>), Unavailable> {
        if local_group.ranks.len() > MAX_RANKS {
            return Err(Unavailable::TooManyRanks { ranks: local_group.ranks.len(), max: MAX_RANKS });
        }
        let (mut name, mut secret) = ([0; SECRET_BYTES], [0; SECRET_BYTES]);
        getrandom::fill(&mut name)?;
        getrandom::fill(&mut secret)?;
        let listener = listen(&name).map_err(|source| Unavailable::Socket { what: "listen at", source })?;
        let members = local_group.ranks.iter().map(|_| None).collect();
        let message = [&[ACCEPT][..], &name, &secret].concat();
        let (unidentified, segment, arena) = (Vec::new(), None, None);
        Ok((Self { local_group, listener, secret, unidentified, members, segment, arena }, message))
    }

    pub(super) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let members = self.members.iter().flatten().map(|member| member.conn.as_fd());
        members.chain(self.unidentified.iter().map(AsFd::as_fd)).chain([self.listener.as_fd()]).collect()
    }

    /// Returns the ranks that have not responded yet.
    pub(super) fn missing(&self) -> Vec<usize> {
        let responded =
            |local_rank: usize| self.members[local_rank].as_ref().is_some_and(|member| member.responded);
        let missing = self.others().filter(|&local_rank| !responded(local_rank));
        missing.map(|local_rank| self.local_group.ranks[local_rank]).collect()
    }

    pub(super) fn progress(&mut self) -> Result<Option<SharedResources>, Unavailable> {
        let outcome = self.advance();
        if let Err(reason) = &outcome {
            let refusal = refusal(&reason.to_string());
            for member in self.members.iter().flatten() {
                let _ = send(&member.conn, &refusal, &[]);
            }
        }
        outcome
    }

    fn advance(&mut self) -> Result<Option<SharedResources>, Unavailable> {
        self.accept()?;
        self.identify_members();
        if self.others().any(|local_rank| self.members[local_rank].is_none()) {
            return Ok(None);
        }
        if self.segment.is_none() {
            self.send_memory()?;
        }
        self.collect_responses()?;
        if self.members.iter().flatten().any(|member| !member.responded) {
            return Ok(None);
        }
        for member in self.members.iter().flatten() {
            send(&member.conn, &[ACCEPT], &[])
                .map_err(|source| Unavailable::Socket { what: "send to", source })?;
        }
        let Some(segment) = self.segment.take() else { return Ok(None) };
        segment.populate(self.local_group.layout.committed_by(self.local_group.me));
        let (doorbells, processes) = self.clone_descriptors()?;
        Ok(Some(SharedResources { segment, arena: self.arena.take(), doorbells, processes }))
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.local_group.me;
        (0..self.members.len()).filter(move |&local_rank| local_rank != me)
    }

    fn accept(&mut self) -> Result<(), Unavailable> {
        while self.unidentified.len() < MAX_UNIDENTIFIED {
            match accept(&self.listener) {
                Ok(conn) => self.unidentified.push(conn),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A connection that cannot be accepted stays in the backlog and keeps the socket readable, so
                // polling would never wait.
                Err(source) if limits::is_out_of_descriptors(&source) => {
                    return Err(Unavailable::Descriptors { source });
                }
                Err(_) => break,
            }
        }
        Ok(())
    }

    /// Reads the first message of each new connection. Admits those with the right secret and local rank as
    /// members, and closes those with others.
    fn identify_members(&mut self) {
        for conn in std::mem::take(&mut self.unidentified) {
            match receive(&conn) {
                Ok(None) => self.unidentified.push(conn),
                Ok(Some((bytes, descriptors))) => self.admit(conn, &bytes, descriptors),
                Err(_) => {}
            }
        }
    }

    fn admit(&mut self, conn: OwnedFd, bytes: &[u8], descriptors: Vec<OwnedFd>) {
        let Some((secret, local_rank)) = bytes.split_first_chunk::<SECRET_BYTES>() else { return };
        let Ok(local_rank) = local_rank.try_into().map(u32::from_le_bytes) else { return };
        let local_rank = local_rank as usize;
        let mut descriptors = descriptors.into_iter();
        let known = *secret == self.secret && local_rank != self.local_group.me;
        let Some(slot) = self.members.get_mut(local_rank).filter(|slot| known && slot.is_none()) else {
            return;
        };
        if let Some(doorbell) = descriptors.next() {
            let process = descriptors.next();
            *slot = Some(Member { conn, doorbell, process, challenge: 0, responded: false });
        }
    }

    /// Creates the memory, writes a challenge for each member into it, and sends its file descriptor to all
    /// members.
    fn send_memory(&mut self) -> Result<(), Unavailable> {
        let layout = self.local_group.layout;
        let bytes = layout.bytes;
        let failed = |source| Unavailable::Memory { bytes, source };
        let memory = segment::create(bytes).map_err(failed)?;
        segment::commit(&memory, layout.committed_by(self.local_group.me)).map_err(failed)?;
        let segment = Arc::new(Segment::map(&memory, bytes).map_err(failed)?);
        publish_identity(&segment, layout, self.local_group.me)?;
        for local_rank in self.others() {
            let challenge = getrandom::u64()?;
            let start = layout.rank_range(local_rank).start;
            segment::commit(&memory, start..start + 1).map_err(failed)?;
            proof(&segment, layout, local_rank, Proof::Challenge).store(challenge, Ordering::SeqCst);
            if let Some(member) = &mut self.members[local_rank] {
                member.challenge = challenge;
            }
        }
        let (doorbells, processes) = self.clone_descriptors()?;
        // Without an arena, later groups set up memory of their own.
        let arena = Arena::create().ok();
        let descriptors = [&memory].into_iter().chain(&arena).chain(&doorbells).chain(&processes);
        let descriptors: Vec<_> = descriptors.map(AsFd::as_fd).collect();
        let has_arena = u8::from(arena.is_some());
        let welcome = [&[ACCEPT, has_arena][..], &(bytes as u64).to_le_bytes()].concat();
        for member in self.members.iter().flatten() {
            let sent = send(&member.conn, &welcome, &descriptors);
            sent.map_err(|source| Unavailable::Socket { what: "pass the shared memory over", source })?;
        }
        self.arena = new_arena(arena, self.members.len())?;
        self.segment = Some(segment);
        Ok(())
    }

    /// Returns duplicates of the descriptors of all ranks' doorbells, and of all processes if every rank has
    /// sent its own.
    fn clone_descriptors(&self) -> Result<(Vec<OwnedFd>, Vec<OwnedFd>), Unavailable> {
        let LocalGroup { doorbell, process, .. } = &self.local_group;
        let of_ranks = self.members.iter().map(|member| match member {
            Some(member) => (&member.doorbell, member.process.as_ref()),
            None => (doorbell, process.as_ref()),
        });
        let (doorbells, processes): (Vec<_>, Vec<_>) = of_ranks.unzip();
        let processes: Option<Vec<_>> = processes.into_iter().collect();
        let clones = |descriptors: Vec<&OwnedFd>| {
            let clones = descriptors.into_iter().map(OwnedFd::try_clone);
            clones.collect::<Result<Vec<_>, _>>().map_err(|source| Unavailable::Descriptors { source })
        };
        Ok((clones(doorbells)?, clones(processes.unwrap_or_default())?))
    }

    /// Receives the members' replies. Checks that each member has written the response to its challenge into
    /// the memory.
    fn collect_responses(&mut self) -> Result<(), Unavailable> {
        let LocalGroup { ranks, layout, .. } = &self.local_group;
        let Some(segment) = &self.segment else { unreachable!("responses come after the memory was sent") };
        for (local_rank, member) in self.members.iter_mut().enumerate() {
            let Some(member) = member.as_mut().filter(|member| !member.responded) else { continue };
            let rank = ranks[local_rank];
            let reply = receive(&member.conn).map_err(|source| Unavailable::PeerGone { rank, source })?;
            let Some((bytes, _)) = reply else { continue };
            parse_reply(&bytes, rank)?;
            let response = proof(segment, *layout, local_rank, Proof::Response).load(Ordering::SeqCst);
            if response != !member.challenge {
                return Err(Unavailable::NotShared { rank });
            }
            member.responded = true;
        }
        Ok(())
    }
}
