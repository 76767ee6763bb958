//! The bootstrap in which the ranks of a host come to share memory.
//!
//! The first of them, the leader, creates the memory and passes its descriptor on a unix socket. It sends the
//! socket's name, and a secret word that identifies members, on the authenticated control connections:
//!
//! ```text
//! member → leader   the word, who it is; its doorbell, its process
//! leader → member   how much memory; that memory, everybody's doorbells and processes
//! member → leader   "I see it": it has read a number there, and written the answer
//! leader → member   "we all see it"
//! ```
//!
//! If any step fails on any rank, all ranks use connections instead and know the reason. The socket has an
//! abstract name, so it leaves no file. Nothing here blocks.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::layout::{Layout, MOST_RANKS, Proof};
use super::obstacle::Obstacle;
use super::segment::{self, Segment};
use crate::room;

pub(super) const WORD_BYTES: usize = 16;
/// The size of the longest message.
const MESSAGE_BYTES: usize = 1024;
/// Most connections whose peer is not identified yet.
const STRANGERS: usize = 64;
const YES: u8 = 1;
const NO: u8 = 0;
pub(super) const SOCKET: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// The ranks of a host that set up shared memory, as one of them sees them.
#[derive(Debug)]
pub(crate) struct Party {
    /// Their ranks in the group.
    pub(crate) ranks: Vec<usize>,
    /// The place of this rank among them.
    pub(crate) me: usize,
    pub(crate) layout: Layout,
    /// The doorbell that wakes this rank.
    pub(crate) bell: OwnedFd,
    /// The descriptor of this process, if the system has such descriptors (pidfd).
    pub(crate) process: Option<OwnedFd>,
}

/// The result of the bootstrap: the memory, and all doorbells and processes.
#[derive(Debug)]
pub(crate) struct Met {
    pub(crate) segment: Arc<Segment>,
    /// By place on the host.
    pub(crate) bells: Vec<OwnedFd>,
    /// The descriptors of the processes, by place on the host; empty if a rank's system has none.
    pub(crate) processes: Vec<OwnedFd>,
}

/// The result of the bootstrap, or the reason why the ranks share no memory.
pub(crate) type Outcome = Result<Met, Obstacle>;

/// The name of the socket and the secret word, as sent on control connections.
pub(crate) type Offer = Vec<u8>;

#[derive(Debug)]
pub(crate) enum Meeting {
    Leading(Leading),
    Joining(Joining),
}

impl Meeting {
    /// The descriptors to poll for.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Self::Leading(leading) => {
                let members = leading.members.iter().flatten().map(|member| member.conn.as_fd());
                let strangers = leading.strangers.iter().map(AsFd::as_fd);
                members.chain(strangers).chain([leading.listener.as_fd()]).collect()
            }
            Self::Joining(joining) => joining.conn.iter().map(AsFd::as_fd).collect(),
        }
    }

    /// The ranks from which a message is still missing.
    pub(crate) fn missing(&self) -> Vec<usize> {
        match self {
            Self::Leading(Leading { party, members, .. }) => {
                let here = |place: usize| members[place].as_ref().is_some_and(|member| member.answered);
                let others = (0..members.len()).filter(|&place| place != party.me && !here(place));
                others.map(|place| party.ranks[place]).collect()
            }
            Self::Joining(joining) => vec![joining.party.ranks[0]],
        }
    }

    /// Makes all progress that is possible now. Returns the outcome when there is one.
    pub(crate) fn turn(&mut self) -> Option<Outcome> {
        match self {
            Self::Leading(leading) => leading.turn(),
            Self::Joining(joining) => joining.turn(),
        }
    }
}

/// The bootstrap as the leader sees it.
#[derive(Debug)]
pub(crate) struct Leading {
    party: Party,
    listener: OwnedFd,
    word: [u8; WORD_BYTES],
    strangers: Vec<OwnedFd>,
    /// By place; the leader's own stays empty.
    members: Vec<Option<Member>>,
    segment: Option<Arc<Segment>>,
}

#[derive(Debug)]
struct Member {
    conn: OwnedFd,
    bell: OwnedFd,
    process: Option<OwnedFd>,
    question: u64,
    answered: bool,
}

impl Leading {
    /// Opens the socket. Returns the message for the others.
    ///
    /// # Errors
    ///
    /// The reason why it cannot be opened.
    pub(crate) fn open(party: Party) -> Result<(Self, Offer), Obstacle> {
        if party.ranks.len() > MOST_RANKS {
            return Err(Obstacle::Crowd { ranks: party.ranks.len(), most: MOST_RANKS });
        }
        let (mut name, mut word) = ([0; WORD_BYTES], [0; WORD_BYTES]);
        getrandom::fill(&mut name)?;
        getrandom::fill(&mut word)?;
        let listener = listen(&name).map_err(|source| Obstacle::Socket { what: "listen at", source })?;
        let members = party.ranks.iter().map(|_| None).collect();
        let offer = [&[YES][..], &name, &word].concat();
        let strangers = Vec::new();
        Ok((Self { party, listener, word, strangers, members, segment: None }, offer))
    }

    fn turn(&mut self) -> Option<Outcome> {
        let outcome = self.go_on().transpose()?;
        if let Err(reason) = &outcome {
            let refusal = no(&reason.to_string());
            for member in self.members.iter().flatten() {
                let _ = send(&member.conn, &refusal, &[]);
            }
        }
        Some(outcome)
    }

    fn go_on(&mut self) -> Result<Option<Met>, Obstacle> {
        self.accept()?;
        self.greet();
        if self.others().any(|place| self.members[place].is_none()) {
            return Ok(None);
        }
        if self.segment.is_none() {
            self.hand_over()?;
        }
        self.hear()?;
        if self.members.iter().flatten().any(|member| !member.answered) {
            return Ok(None);
        }
        for member in self.members.iter().flatten() {
            send(&member.conn, &[YES], &[]).map_err(|source| Obstacle::Socket { what: "send to", source })?;
        }
        let Some(segment) = self.segment.take() else { return Ok(None) };
        segment.populate(self.party.layout.taken_by(self.party.me));
        let (bells, processes) = self.all().map_err(|source| Obstacle::Descriptors { source })?;
        Ok(Some(Met { segment, bells, processes }))
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.party.me;
        (0..self.members.len()).filter(move |&place| place != me)
    }

    fn accept(&mut self) -> Result<(), Obstacle> {
        while self.strangers.len() < STRANGERS {
            match rustix::net::accept_with(&self.listener, SOCKET) {
                Ok(conn) => self.strangers.push(conn),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    let source = io::Error::from(error);
                    if room::is_without_descriptors(&source) {
                        // A connection that cannot be accepted stays in the backlog and keeps the socket
                        // readable for ever.
                        return Err(Obstacle::Descriptors { source });
                    }
                    break;
                }
            }
        }
        Ok(())
    }

    /// Identifies the members among those that have connected.
    fn greet(&mut self) {
        for conn in std::mem::take(&mut self.strangers) {
            match receive(&conn) {
                Ok(None) => self.strangers.push(conn),
                Ok(Some((bytes, descriptors))) => self.admit(conn, &bytes, descriptors),
                Err(_) => {}
            }
        }
    }

    fn admit(&mut self, conn: OwnedFd, bytes: &[u8], descriptors: Vec<OwnedFd>) {
        let Some((word, place)) = bytes.split_first_chunk::<WORD_BYTES>() else { return };
        let place = place.try_into().map(u32::from_le_bytes).unwrap_or(u32::MAX) as usize;
        let mut descriptors = descriptors.into_iter();
        let known = *word == self.word && place != self.party.me;
        let Some(slot) = self.members.get_mut(place).filter(|slot| known && slot.is_none()) else { return };
        if let Some(bell) = descriptors.next() {
            let process = descriptors.next();
            *slot = Some(Member { conn, bell, process, question: 0, answered: false });
        }
    }

    /// Creates the memory and sends it to all members.
    fn hand_over(&mut self) -> Result<(), Obstacle> {
        let layout = self.party.layout;
        let bytes = layout.bytes();
        let failed = |source| Obstacle::Memory { bytes, source };
        let memory = segment::create(bytes).map_err(failed)?;
        segment::commit(&memory, layout.taken_by(self.party.me)).map_err(failed)?;
        let segment = Arc::new(Segment::map(&memory, bytes).map_err(failed)?);
        for place in self.others() {
            let question = random()?;
            segment::commit(&memory, layout.of(place).start..layout.of(place).start + 1).map_err(failed)?;
            proof(&segment, layout, place, Proof::Question).store(question, Ordering::SeqCst);
            if let Some(member) = &mut self.members[place] {
                member.question = question;
            }
        }
        let (bells, processes) = self.all().map_err(|source| Obstacle::Descriptors { source })?;
        let given = [&memory].into_iter().chain(&bells).chain(&processes);
        let given: Vec<_> = given.map(AsFd::as_fd).collect();
        let welcome = [&[YES][..], &(bytes as u64).to_le_bytes()].concat();
        for member in self.members.iter().flatten() {
            let sent = send(&member.conn, &welcome, &given);
            sent.map_err(|source| Obstacle::Socket { what: "hand the memory over at", source })?;
        }
        self.segment = Some(segment);
        Ok(())
    }

    /// All doorbells, and all processes if they are known.
    fn all(&self) -> io::Result<(Vec<OwnedFd>, Vec<OwnedFd>)> {
        let Party { me, bell, process, .. } = &self.party;
        let bells = self.members.iter().enumerate().map(|(place, member)| match member {
            Some(member) => member.bell.try_clone(),
            None => {
                debug_assert_eq!(place, *me);
                bell.try_clone()
            }
        });
        let bells = bells.collect::<io::Result<_>>()?;
        let processes = self.members.iter().map(|member| {
            member.as_ref().map_or(process.as_ref(), |member| member.process.as_ref()).map(OwnedFd::try_clone)
        });
        let processes: Option<Vec<_>> = processes.collect();
        Ok((bells, processes.unwrap_or_default().into_iter().collect::<io::Result<_>>()?))
    }

    /// Receives which members see the memory, and checks their proof.
    fn hear(&mut self) -> Result<(), Obstacle> {
        let Party { ranks, layout, .. } = &self.party;
        for (place, member) in self.members.iter_mut().enumerate() {
            let Some(member) = member.as_mut().filter(|member| !member.answered) else { continue };
            let rank = ranks[place];
            let heard = receive(&member.conn).map_err(|source| Obstacle::Gone { rank, source })?;
            let Some((bytes, _)) = heard else { continue };
            agreed(&bytes, rank)?;
            let answer = self
                .segment
                .as_ref()
                .map(|segment| proof(segment, *layout, place, Proof::Answer).load(Ordering::SeqCst));
            if answer != Some(!member.question) {
                return Err(Obstacle::Apart { rank });
            }
            member.answered = true;
        }
        Ok(())
    }
}

/// The bootstrap as another rank sees it.
#[derive(Debug)]
pub(crate) struct Joining {
    party: Party,
    conn: Option<OwnedFd>,
    /// The memory and descriptors that the leader sent.
    met: Option<Met>,
}

impl Joining {
    pub(crate) fn new(party: Party) -> Self {
        Self { party, conn: None, met: None }
    }

    /// Connects to the leader.
    ///
    /// # Errors
    ///
    /// The reason why it cannot connect.
    pub(crate) fn accept(&mut self, offer: &[u8]) -> Result<(), Obstacle> {
        let leader = self.party.ranks[0];
        let rest = agreed(offer, leader)?;
        let Some((name, word)) = rest.split_first_chunk::<WORD_BYTES>() else {
            return Err(Obstacle::Nonsense { rank: leader });
        };
        let failed = |source| Obstacle::Socket { what: "reach the first rank of the host at", source };
        let conn = connect(name).map_err(failed)?;
        let hello = [word, &(self.party.me as u32).to_le_bytes()].concat();
        let own: Vec<_> =
            [Some(&self.party.bell), self.party.process.as_ref()].into_iter().flatten().collect();
        let own: Vec<_> = own.into_iter().map(AsFd::as_fd).collect();
        send(&conn, &hello, &own).map_err(failed)?;
        self.conn = Some(conn);
        Ok(())
    }

    fn turn(&mut self) -> Option<Outcome> {
        let conn = self.conn.as_ref()?;
        let (bytes, descriptors) = match receive(conn) {
            Ok(heard) => heard?,
            Err(error) => {
                return Some(Err(Obstacle::Gone { rank: self.party.ranks[0], source: error }));
            }
        };
        let rest = match agreed(&bytes, self.party.ranks[0]) {
            Ok(rest) => rest,
            Err(reason) => return Some(Err(reason)),
        };
        if let Some(met) = self.met.take() {
            met.segment.populate(self.party.layout.taken_by(self.party.me));
            return Some(Ok(met));
        }
        match self.take_over(rest, descriptors) {
            Ok(met) => {
                self.met = Some(met);
                let told = send(conn, &[YES], &[]);
                told.err().map(|source| Err(Obstacle::Socket { what: "send to", source }))
            }
            Err(reason) => {
                let _ = send(conn, &no(&reason.to_string()), &[]);
                Some(Err(reason))
            }
        }
    }

    /// Maps the memory and writes the proof that it is the leader's.
    fn take_over(&self, rest: &[u8], descriptors: Vec<OwnedFd>) -> Result<Met, Obstacle> {
        let Party { ranks, me, layout, .. } = &self.party;
        let bytes = rest.try_into().map(u64::from_le_bytes).ok();
        if bytes != Some(layout.bytes() as u64) {
            return Err(Obstacle::Nonsense { rank: ranks[0] });
        }
        let (come, given) = (descriptors.len(), 1 + ranks.len());
        let mut descriptors = descriptors.into_iter();
        let Some(memory) = descriptors.next().filter(|_| come >= given) else {
            return Err(Obstacle::Dropped { come, given });
        };
        let segment = Segment::map(&memory, layout.bytes()).map_err(|source| Obstacle::Map { source })?;
        let own = layout.taken_by(*me);
        segment::commit(&memory, own.clone())
            .map_err(|source| Obstacle::Memory { bytes: own.len(), source })?;
        let question = proof(&segment, *layout, *me, Proof::Question).load(Ordering::SeqCst);
        proof(&segment, *layout, *me, Proof::Answer).store(!question, Ordering::SeqCst);
        let bells = descriptors.by_ref().take(ranks.len()).collect();
        let processes: Vec<_> = descriptors.collect();
        let processes = if processes.len() == ranks.len() { processes } else { Vec::new() };
        Ok(Met { segment: Arc::new(segment), bells, processes })
    }
}

fn proof(segment: &Segment, layout: Layout, place: usize, proof: Proof) -> &AtomicU64 {
    segment.word(layout.proof(place, proof))
}

fn random() -> Result<u64, getrandom::Error> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// A refusal with its reason, truncated to the size of a message.
pub(crate) fn no(reason: &str) -> Vec<u8> {
    let mut bytes = [&[NO], reason.as_bytes()].concat();
    bytes.truncate(MESSAGE_BYTES);
    bytes
}

/// Returns the rest of a "yes" of `rank`. The error is the reason of a "no".
fn agreed(bytes: &[u8], rank: usize) -> Result<&[u8], Obstacle> {
    match bytes.split_first() {
        Some((&YES, rest)) => Ok(rest),
        Some((_, reason)) => {
            Err(Obstacle::Theirs { rank, what: String::from_utf8_lossy(reason).into_owned() })
        }
        None => Err(Obstacle::Nonsense { rank }),
    }
}

fn address(name: &[u8; WORD_BYTES]) -> io::Result<SocketAddrUnix> {
    let name = name.iter().fold("convoke-".to_owned(), |name, byte| format!("{name}{byte:02x}"));
    Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
}

/// A socket that keeps message boundaries.
fn socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SOCKET, None)?)
}

pub(super) fn listen(name: &[u8; WORD_BYTES]) -> io::Result<OwnedFd> {
    let listener = socket()?;
    rustix::net::bind(&listener, &address(name)?)?;
    rustix::net::listen(&listener, MOST_RANKS as i32)?;
    Ok(listener)
}

pub(super) fn connect(name: &[u8; WORD_BYTES]) -> io::Result<OwnedFd> {
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

/// The next message, if there is one.
pub(super) fn receive(conn: &OwnedFd) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2 * MOST_RANKS + 1))];
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
