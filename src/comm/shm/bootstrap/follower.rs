//! The bootstrap as a rank other than the leader does it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{ACCEPT, LocalGroup, SharedResources, new_arena, parse_reply, proof, refusal};
use crate::shm::layout::Proof;
use crate::shm::peer_memory::publish_identity;
use crate::shm::segment::{self, Segment};
use crate::shm::unavailable::Unavailable;
use crate::shm::unix_socket::{SECRET_BYTES, connect, receive, send};

#[derive(Debug)]
pub(crate) struct Follower {
    local_group: LocalGroup,
    pub(super) conn: Option<OwnedFd>,
    /// The memory and descriptors that the leader sent, until the leader confirms that all members have
    /// responded.
    resources: Option<SharedResources>,
}

impl Follower {
    pub(crate) fn new(local_group: LocalGroup) -> Self {
        Self { local_group, conn: None, resources: None }
    }

    /// Connects to the socket that the leader names in `message`. Sends the secret, the local rank and the
    /// descriptors of this rank. Fails if the leader refused in `message`, the message is invalid, or the
    /// socket fails.
    pub(crate) fn connect(&mut self, message: &[u8]) -> Result<(), Unavailable> {
        let leader = self.leader();
        let rest = parse_reply(message, leader)?;
        let Some((name, secret)) = rest.split_first_chunk::<SECRET_BYTES>() else {
            return Err(Unavailable::InvalidMessage { rank: leader });
        };
        let failed =
            |source| Unavailable::Socket { what: "connect to the first rank of the host over", source };
        let conn = connect(name).map_err(failed)?;
        let hello = [secret, &(self.local_group.me as u32).to_le_bytes()].concat();
        let LocalGroup { doorbell, process, .. } = &self.local_group;
        let own: Vec<_> = [doorbell].into_iter().chain(process).map(AsFd::as_fd).collect();
        send(&conn, &hello, &own).map_err(failed)?;
        self.conn = Some(conn);
        Ok(())
    }

    /// Returns the number of the leader in the group.
    pub(super) fn leader(&self) -> usize {
        self.local_group.ranks[0]
    }

    pub(super) fn progress(&mut self) -> Result<Option<SharedResources>, Unavailable> {
        let (Some(conn), rank) = (&self.conn, self.leader()) else { return Ok(None) };
        let reply = receive(conn).map_err(|source| Unavailable::PeerGone { rank, source })?;
        let Some((bytes, descriptors)) = reply else { return Ok(None) };
        let rest = parse_reply(&bytes, rank)?;
        if let Some(resources) = self.resources.take() {
            resources.segment.populate(self.local_group.layout.committed_by(self.local_group.me));
            return Ok(Some(resources));
        }
        let mapped = self.map_memory(rest, descriptors).inspect_err(|reason| {
            let _ = send(conn, &refusal(&reason.to_string()), &[]);
        })?;
        let sent = send(conn, &[ACCEPT], &[]);
        self.resources = Some(mapped);
        sent.map(|()| None).map_err(|source| Unavailable::Socket { what: "send to", source })
    }

    /// Maps the memory that the leader sent, and writes the response to the leader's challenge into it.
    /// `rest` is the message, without its first byte.
    fn map_memory(&self, rest: &[u8], descriptors: Vec<OwnedFd>) -> Result<SharedResources, Unavailable> {
        let LocalGroup { ranks, me, layout, .. } = &self.local_group;
        let has_arena = match rest.split_first() {
            Some((&has_arena, bytes)) if bytes == (layout.bytes as u64).to_le_bytes() => has_arena,
            _ => return Err(Unavailable::InvalidMessage { rank: self.leader() }),
        };
        let (received, sent) = (descriptors.len(), 1 + usize::from(has_arena) + ranks.len());
        let mut descriptors = descriptors.into_iter();
        let Some(memory) = descriptors.next().filter(|_| received >= sent) else {
            return Err(Unavailable::DescriptorsDropped { received, sent });
        };
        let arena = new_arena(descriptors.by_ref().take(usize::from(has_arena)).next(), ranks.len())?;
        let segment = Segment::map(&memory, layout.bytes).map_err(|source| Unavailable::Map { source })?;
        let own = layout.committed_by(*me);
        segment::commit(&memory, own.clone())
            .map_err(|source| Unavailable::Memory { bytes: own.len(), source })?;
        publish_identity(&segment, *layout, *me)?;
        let challenge = proof(&segment, *layout, *me, Proof::Challenge).load(Ordering::SeqCst);
        proof(&segment, *layout, *me, Proof::Response).store(!challenge, Ordering::SeqCst);
        let doorbells = descriptors.by_ref().take(ranks.len()).collect();
        let processes: Vec<_> = descriptors.collect();
        let processes = if processes.len() == ranks.len() { processes } else { Vec::new() };
        Ok(SharedResources { segment: Arc::new(segment), arena, doorbells, processes })
    }
}
