//! The bootstrap: the exchange by which the ranks of a host set up shared memory.
//!
//! The first rank of the host, the leader, creates the memory and passes its file descriptor over a unix
//! socket. On the authenticated control connections, the leader sends the socket's name, and a secret that
//! identifies members:
//!
//! ```text
//! member → leader   the secret, its local rank; its doorbell, its process
//! leader → member   the size; the memory, the arena, all doorbells and processes
//! member → leader   accepts: it has read the challenge in the memory and written the response
//! leader → member   accepts: all members have responded
//! ```
//!
//! If any step fails on any rank, all ranks use connections instead and know the reason. The socket has an
//! abstract name, so it leaves no file. No function of this module blocks.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::arena::Arena;
use super::layout::{Layout, MAX_RANKS, Proof};
use super::segment::{self, Segment};
use super::unavailable::Unavailable;
use crate::limits;

pub(super) const SECRET_BYTES: usize = 16;
/// The size of the longest message of the bootstrap.
const MESSAGE_BYTES: usize = 1024;
/// Maximum number of accepted connections that have not yet sent the secret and a local rank.
const MAX_UNIDENTIFIED: usize = 64;
const ACCEPT: u8 = 1;
const REFUSE: u8 = 0;
pub(super) const SOCKET: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// The ranks of a host that set up shared memory, and what one of these ranks brings to it.
#[derive(Debug)]
pub(crate) struct LocalGroup {
    /// The numbers in the group of the host's ranks, by local rank.
    pub(crate) ranks: Vec<usize>,
    /// The local rank of this rank: its index in `ranks`.
    pub(crate) me: usize,
    pub(crate) layout: Layout,
    /// The doorbell (eventfd) by which other ranks wake this rank.
    pub(crate) doorbell: OwnedFd,
    /// The descriptor of this process (pidfd); `None` if the kernel has no such descriptors.
    pub(crate) process: Option<OwnedFd>,
}

/// What a rank has after the bootstrap: the mapped memory, and the doorbells and processes of all ranks of
/// the host.
#[derive(Debug)]
pub(crate) struct SharedResources {
    pub(crate) segment: Arc<Segment>,
    /// The memory for later groups of these ranks; `None` if there is none.
    pub(crate) arena: Option<Arc<Arena>>,
    /// The eventfds that wake the ranks, by local rank.
    pub(crate) doorbells: Vec<OwnedFd>,
    /// The descriptors of the ranks' processes (pidfd), by local rank; empty if a rank's system has none.
    pub(crate) processes: Vec<OwnedFd>,
}

/// The result of the bootstrap: the shared memory, or the reason why the ranks share none.
pub(crate) type BootstrapOutcome = Result<SharedResources, Unavailable>;

/// The message of the leader on control connections: the name of the socket and the secret.
pub(crate) type LeaderMessage = Vec<u8>;

#[derive(Debug)]
pub(crate) enum HostBootstrap {
    Leader(Leader),
    Follower(Follower),
}

impl HostBootstrap {
    /// Returns the file descriptors whose readability means that [`Self::progress`] can do a step.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Self::Leader(leader) => {
                let members = leader.members.iter().flatten().map(|member| member.conn.as_fd());
                let unidentified = leader.unidentified.iter().map(AsFd::as_fd);
                members.chain(unidentified).chain([leader.listener.as_fd()]).collect()
            }
            Self::Follower(follower) => follower.conn.iter().map(AsFd::as_fd).collect(),
        }
    }

    /// Returns the ranks from which a message of the bootstrap is still missing.
    pub(crate) fn missing(&self) -> Vec<usize> {
        match self {
            Self::Leader(Leader { local_group, members, .. }) => {
                let here =
                    |local_rank: usize| members[local_rank].as_ref().is_some_and(|member| member.responded);
                let others = (0..members.len())
                    .filter(|&local_rank| local_rank != local_group.me && !here(local_rank));
                others.map(|local_rank| local_group.ranks[local_rank]).collect()
            }
            Self::Follower(follower) => vec![follower.local_group.ranks[0]],
        }
    }

    /// Does all steps that are possible without waiting. Returns the outcome once the bootstrap has ended,
    /// else `None`.
    pub(crate) fn progress(&mut self) -> Option<BootstrapOutcome> {
        match self {
            Self::Leader(leader) => leader.progress(),
            Self::Follower(follower) => follower.progress(),
        }
    }
}

/// The bootstrap as the leader does it.
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
    /// Opens the socket. Returns the message to send to the other ranks on the control connections.
    ///
    /// # Errors
    ///
    /// The reason why the ranks cannot share memory, such as a socket that cannot be opened.
    pub(crate) fn open(local_group: LocalGroup) -> Result<(Self, LeaderMessage), Unavailable> {
        if local_group.ranks.len() > MAX_RANKS {
            return Err(Unavailable::TooManyRanks { ranks: local_group.ranks.len(), max: MAX_RANKS });
        }
        let (mut name, mut secret) = ([0; SECRET_BYTES], [0; SECRET_BYTES]);
        getrandom::fill(&mut name)?;
        getrandom::fill(&mut secret)?;
        let listener = listen(&name).map_err(|source| Unavailable::Socket { what: "listen at", source })?;
        let members = local_group.ranks.iter().map(|_| None).collect();
        let message = [&[ACCEPT][..], &name, &secret].concat();
        let unidentified = Vec::new();
        Ok((
            Self { local_group, listener, secret, unidentified, members, segment: None, arena: None },
            message,
        ))
    }

    fn progress(&mut self) -> Option<BootstrapOutcome> {
        let outcome = self.advance().transpose()?;
        if let Err(reason) = &outcome {
            let refusal = refusal(&reason.to_string());
            for member in self.members.iter().flatten() {
                let _ = send(&member.conn, &refusal, &[]);
            }
        }
        Some(outcome)
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
        let (doorbells, processes) =
            self.clone_descriptors().map_err(|source| Unavailable::Descriptors { source })?;
        Ok(Some(SharedResources { segment, arena: self.arena.take(), doorbells, processes }))
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.local_group.me;
        (0..self.members.len()).filter(move |&local_rank| local_rank != me)
    }

    fn accept(&mut self) -> Result<(), Unavailable> {
        while self.unidentified.len() < MAX_UNIDENTIFIED {
            match rustix::net::accept_with(&self.listener, SOCKET) {
                Ok(conn) => self.unidentified.push(conn),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    let source = io::Error::from(error);
                    if limits::is_out_of_descriptors(&source) {
                        // A connection that cannot be accepted stays in the backlog and keeps the socket
                        // readable, so polling would never wait.
                        return Err(Unavailable::Descriptors { source });
                    }
                    break;
                }
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
        let bytes = layout.bytes();
        let failed = |source| Unavailable::Memory { bytes, source };
        let memory = segment::create(bytes).map_err(failed)?;
        segment::commit(&memory, layout.committed_by(self.local_group.me)).map_err(failed)?;
        let segment = Arc::new(Segment::map(&memory, bytes).map_err(failed)?);
        for local_rank in self.others() {
            let challenge = random_u64()?;
            segment::commit(
                &memory,
                layout.rank_range(local_rank).start..layout.rank_range(local_rank).start + 1,
            )
            .map_err(failed)?;
            proof(&segment, layout, local_rank, Proof::Challenge).store(challenge, Ordering::SeqCst);
            if let Some(member) = &mut self.members[local_rank] {
                member.challenge = challenge;
            }
        }
        let (doorbells, processes) =
            self.clone_descriptors().map_err(|source| Unavailable::Descriptors { source })?;
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
    fn clone_descriptors(&self) -> io::Result<(Vec<OwnedFd>, Vec<OwnedFd>)> {
        let LocalGroup { me, doorbell, process, .. } = &self.local_group;
        let doorbells = self.members.iter().enumerate().map(|(local_rank, member)| match member {
            Some(member) => member.doorbell.try_clone(),
            None => {
                debug_assert_eq!(local_rank, *me);
                doorbell.try_clone()
            }
        });
        let doorbells = doorbells.collect::<io::Result<_>>()?;
        let processes = self.members.iter().map(|member| {
            member.as_ref().map_or(process.as_ref(), |member| member.process.as_ref()).map(OwnedFd::try_clone)
        });
        let processes: Option<Vec<_>> = processes.collect();
        Ok((doorbells, processes.unwrap_or_default().into_iter().collect::<io::Result<_>>()?))
    }

    /// Receives the members' replies. Checks that each member has written the response to its challenge into
    /// the memory.
    fn collect_responses(&mut self) -> Result<(), Unavailable> {
        let LocalGroup { ranks, layout, .. } = &self.local_group;
        for (local_rank, member) in self.members.iter_mut().enumerate() {
            let Some(member) = member.as_mut().filter(|member| !member.responded) else { continue };
            let rank = ranks[local_rank];
            let reply = receive(&member.conn).map_err(|source| Unavailable::PeerGone { rank, source })?;
            let Some((bytes, _)) = reply else { continue };
            parse_reply(&bytes, rank)?;
            let response = self
                .segment
                .as_ref()
                .map(|segment| proof(segment, *layout, local_rank, Proof::Response).load(Ordering::SeqCst));
            if response != Some(!member.challenge) {
                return Err(Unavailable::NotShared { rank });
            }
            member.responded = true;
        }
        Ok(())
    }
}

/// The bootstrap as a rank other than the leader does it.
#[derive(Debug)]
pub(crate) struct Follower {
    local_group: LocalGroup,
    conn: Option<OwnedFd>,
    /// The memory and descriptors that the leader sent, until the leader confirms that all members have
    /// responded.
    resources: Option<SharedResources>,
}

impl Follower {
    pub(crate) fn new(local_group: LocalGroup) -> Self {
        Self { local_group, conn: None, resources: None }
    }

    /// Connects to the socket that the leader names in `message`. Sends the secret, the local rank and the
    /// descriptors of this rank.
    ///
    /// # Errors
    ///
    /// The leader refused in `message`, the message is invalid, or the socket fails.
    pub(crate) fn connect(&mut self, message: &[u8]) -> Result<(), Unavailable> {
        let leader = self.local_group.ranks[0];
        let rest = parse_reply(message, leader)?;
        let Some((name, secret)) = rest.split_first_chunk::<SECRET_BYTES>() else {
            return Err(Unavailable::InvalidMessage { rank: leader });
        };
        let failed =
            |source| Unavailable::Socket { what: "connect to the first rank of the host over", source };
        let conn = connect(name).map_err(failed)?;
        let hello = [secret, &(self.local_group.me as u32).to_le_bytes()].concat();
        let own: Vec<_> = [Some(&self.local_group.doorbell), self.local_group.process.as_ref()]
            .into_iter()
            .flatten()
            .collect();
        let own: Vec<_> = own.into_iter().map(AsFd::as_fd).collect();
        send(&conn, &hello, &own).map_err(failed)?;
        self.conn = Some(conn);
        Ok(())
    }

    fn progress(&mut self) -> Option<BootstrapOutcome> {
        let conn = self.conn.as_ref()?;
        let (bytes, descriptors) = match receive(conn) {
            Ok(reply) => reply?,
            Err(error) => {
                return Some(Err(Unavailable::PeerGone { rank: self.local_group.ranks[0], source: error }));
            }
        };
        let rest = match parse_reply(&bytes, self.local_group.ranks[0]) {
            Ok(rest) => rest,
            Err(reason) => return Some(Err(reason)),
        };
        if let Some(resources) = self.resources.take() {
            resources.segment.populate(self.local_group.layout.committed_by(self.local_group.me));
            return Some(Ok(resources));
        }
        match self.map_memory(rest, descriptors) {
            Ok(resources) => {
                self.resources = Some(resources);
                let sent = send(conn, &[ACCEPT], &[]);
                sent.err().map(|source| Err(Unavailable::Socket { what: "send to", source }))
            }
            Err(reason) => {
                let _ = send(conn, &refusal(&reason.to_string()), &[]);
                Some(Err(reason))
            }
        }
    }

    /// Maps the memory that the leader sent, and writes the response to the leader's challenge into it.
    /// `rest` is the message, without its first byte.
    fn map_memory(&self, rest: &[u8], descriptors: Vec<OwnedFd>) -> Result<SharedResources, Unavailable> {
        let LocalGroup { ranks, me, layout, .. } = &self.local_group;
        let Some((&has_arena, bytes)) = rest.split_first() else {
            return Err(Unavailable::InvalidMessage { rank: ranks[0] });
        };
        let bytes = bytes.try_into().map(u64::from_le_bytes).ok();
        if bytes != Some(layout.bytes() as u64) {
            return Err(Unavailable::InvalidMessage { rank: ranks[0] });
        }
        let (received, sent) = (descriptors.len(), 1 + usize::from(has_arena) + ranks.len());
        let mut descriptors = descriptors.into_iter();
        let Some(memory) = descriptors.next().filter(|_| received >= sent) else {
            return Err(Unavailable::DescriptorsDropped { received, sent });
        };
        let arena = new_arena(descriptors.by_ref().take(usize::from(has_arena)).next(), ranks.len())?;
        let segment = Segment::map(&memory, layout.bytes()).map_err(|source| Unavailable::Map { source })?;
        let own = layout.committed_by(*me);
        segment::commit(&memory, own.clone())
            .map_err(|source| Unavailable::Memory { bytes: own.len(), source })?;
        let challenge = proof(&segment, *layout, *me, Proof::Challenge).load(Ordering::SeqCst);
        proof(&segment, *layout, *me, Proof::Response).store(!challenge, Ordering::SeqCst);
        let doorbells = descriptors.by_ref().take(ranks.len()).collect();
        let processes: Vec<_> = descriptors.collect();
        let processes = if processes.len() == ranks.len() { processes } else { Vec::new() };
        Ok(SharedResources { segment: Arc::new(segment), arena, doorbells, processes })
    }
}

fn new_arena(memory: Option<OwnedFd>, ranks: usize) -> Result<Option<Arc<Arena>>, Unavailable> {
    let arena = memory.map(|memory| Arena::new(memory, ranks)).transpose();
    Ok(arena.map_err(|source| Unavailable::Map { source })?.map(Arc::new))
}

fn proof(segment: &Segment, layout: Layout, local_rank: usize, proof: Proof) -> &AtomicU64 {
    segment.word(layout.proof(local_rank, proof))
}

fn random_u64() -> Result<u64, getrandom::Error> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Returns a message that refuses shared memory for a reason, truncated to the size of the longest message.
pub(crate) fn refusal(reason: &str) -> Vec<u8> {
    let mut bytes = [&[REFUSE], reason.as_bytes()].concat();
    bytes.truncate(MESSAGE_BYTES);
    bytes
}

/// Returns the payload of a reply of `rank`. It is an error if the rank refused or the reply is empty.
fn parse_reply(bytes: &[u8], rank: usize) -> Result<&[u8], Unavailable> {
    match bytes.split_first() {
        Some((&ACCEPT, rest)) => Ok(rest),
        Some((_, reason)) => {
            Err(Unavailable::PeerReported { rank, what: String::from_utf8_lossy(reason).into_owned() })
        }
        None => Err(Unavailable::InvalidMessage { rank }),
    }
}

fn address(name: &[u8; SECRET_BYTES]) -> io::Result<SocketAddrUnix> {
    let name = name.iter().fold("convoke-".to_owned(), |name, byte| format!("{name}{byte:02x}"));
    Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
}

/// Opens a unix socket that keeps message boundaries.
fn socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SOCKET, None)?)
}

pub(super) fn listen(name: &[u8; SECRET_BYTES]) -> io::Result<OwnedFd> {
    let listener = socket()?;
    rustix::net::bind(&listener, &address(name)?)?;
    rustix::net::listen(&listener, MAX_RANKS as i32)?;
    Ok(listener)
}

pub(super) fn connect(name: &[u8; SECRET_BYTES]) -> io::Result<OwnedFd> {
    let conn = socket()?;
    rustix::net::connect(&conn, &address(name)?)?;
    Ok(conn)
}

pub(super) fn send(conn: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(descriptors.len()))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    rustix::net::sendmsg(conn, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Returns the next message and its file descriptors; `None` if no message has arrived yet.
pub(super) fn receive(conn: &OwnedFd) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2 * MAX_RANKS + 2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; MESSAGE_BYTES];
    let parts = &mut [IoSliceMut::new(&mut bytes)];
    let got = match rustix::net::recvmsg(conn, parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
        Ok(got) => got.bytes,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    if got == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    bytes.truncate(got);
    let descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok(Some((bytes, descriptors.flatten().collect())))
}
