//! What ranks tell each other beside the data: aborts, farewells, what they wait in.

use std::io::IoSlice;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use convoke_env::{ExitCause, ToWorker};

use super::core::Engine;
use super::state::PeerState;
use crate::call::Call;
use crate::cause::{Cause, NAMED_RANKS, Report};
use crate::error::Loss;
use crate::frame::{CONTROL_PAYLOAD_BYTES, Frame, HEADER_BYTES, Kind};
use crate::links::hello::Lane;

/// How long a collective stands still before its ranks tell each other what they wait in; a quarter
/// of its timeout if that is less.
const STILL: Duration = Duration::from_millis(100);
/// Most control bytes that wait for one peer; more are not worth keeping.
const CONTROL_QUEUE_BYTES: usize = 64 << 10;
/// Longest sleep: nothing depends on it.
const LONGEST_SLEEP: Duration = Duration::from_secs(30);

impl Engine {
    pub(super) fn frame(&self, kind: Kind, seq: u64) -> Frame {
        let ours = &self.settings.credentials;
        Frame { kind, generation: ours.generation, group: ours.group, seq, call: [0; 16], len: 0 }
    }

    /// Sends a control frame, as soon as there is a connection with room.
    pub(super) fn tell(&mut self, peer: usize, frame: &Frame, payload: &[u8]) {
        let out = &mut self.peers[peer].control_out;
        if out.len() < CONTROL_QUEUE_BYTES {
            out.extend_from_slice(&Frame { len: payload.len() as u64, ..*frame }.encode());
            out.extend_from_slice(payload);
            self.flush_control(peer);
        }
    }

    pub(super) fn tell_all(&mut self, frame: &Frame, payload: &[u8]) {
        for peer in 0..self.peers.len() {
            if self.peers[peer].control.is_some() {
                self.tell(peer, frame, payload);
            }
        }
    }

    pub(super) fn flush_control(&mut self, peer: usize) {
        let peer = &mut self.peers[peer];
        if peer.control_out.is_empty() {
            return;
        }
        if let Some(control) = &mut peer.control {
            // That the connection is gone is found when reading.
            let sent = control.send(&[IoSlice::new(&peer.control_out)]).unwrap_or(0);
            peer.control_out.drain(..sent);
        }
    }

    /// Reads and obeys what a peer says on its control connection.
    pub(super) fn read_control(&mut self, peer: usize) {
        loop {
            // The connection stays in its place while a frame is obeyed: the peer may have to be told.
            let place = &mut self.peers[peer];
            let Some(control) = place.control.as_mut().filter(|_| place.silent.is_none()) else { return };
            let frame = match control.unread().first_chunk::<HEADER_BYTES>().map(Frame::decode) {
                Some(Ok(frame)) => Some(frame),
                Some(Err(error)) => return self.fail_by(peer, error.to_string()),
                None => None,
            };
            let end = HEADER_BYTES + frame.map_or(0, |frame| frame.len as usize);
            if let Some((frame, payload)) = frame.zip(control.unread().get(HEADER_BYTES..end)) {
                let payload = payload.to_vec();
                control.consume(end);
                self.obey(peer, &frame, &payload);
                continue;
            }
            match control.fill(HEADER_BYTES + CONTROL_PAYLOAD_BYTES) {
                Ok(0) => return,
                Ok(_) => {}
                Err(broken) => {
                    if let Some(fd) = control.pollable() {
                        self.poller.remove(fd);
                    }
                    place.silent = Some((Instant::now(), broken));
                    return;
                }
            }
        }
    }

    fn fail_by(&mut self, peer: usize, what: String) {
        self.fail(Report::new(self.settings.me, Cause::Protocol { peer, what }));
    }

    fn obey(&mut self, peer: usize, frame: &Frame, payload: &[u8]) {
        let ours = &self.settings.credentials;
        if (frame.generation, frame.group) != (ours.generation, ours.group) {
            let what = format!("a {:?} frame of another generation or group", frame.kind);
            return self.fail_by(peer, what);
        }
        match frame.kind {
            Kind::Abort => match Report::decode(payload) {
                Ok(report) => self.fail(report),
                Err(what) => self.fail_by(peer, what),
            },
            Kind::Goodbye => self.peers[peer].left = true,
            Kind::Open => match u8::try_from(frame.seq).ok().and_then(Lane::from_wire) {
                Some(lane) if self.settings.me > peer => self.need(peer, lane),
                _ => self.fail_by(peer, format!("it asks for lane {}", frame.seq)),
            },
            Kind::State => match Call::decode(frame.call) {
                Ok(call) => {
                    let words = payload.as_chunks::<4>().0.iter().take(NAMED_RANKS);
                    let awaits = words.map(|&word| u32::from_le_bytes(word) as usize);
                    let awaits = awaits.filter(|&rank| rank < self.settings.size).collect();
                    self.peers[peer].state = Some(PeerState { seq: frame.seq, call, awaits });
                    self.compare_with_states();
                }
                Err(what) => self.fail_by(peer, what),
            },
            kind @ (Kind::Hello | Kind::Welcome | Kind::Proof | Kind::Refuse | Kind::Data | Kind::Eager)
            | kind @ (Kind::Rts | Kind::Cts | Kind::Message | Kind::Credit) => {
                self.fail_by(peer, format!("a {kind:?} frame on the control connection"));
            }
        }
    }

    /// Compares what others say they wait in with what was called here: it finds different calls
    /// also where no data flows between the ranks that differ.
    pub(super) fn compare_with_states(&mut self) {
        let differs = |seq: u64, call: &Call| {
            self.history
                .iter()
                .find(|(ours_seq, ours)| *ours_seq == seq && ours != call)
                .map(|(_, ours)| *ours)
        };
        let found = self.peers.iter().enumerate().find_map(|(rank, peer)| {
            let PeerState { seq, call, .. } = peer.state.as_ref()?;
            Some((rank, *seq, *call, differs(*seq, call)?))
        });
        if let Some((rank, seq, theirs, ours)) = found {
            let cause = Cause::Mismatch { rank, theirs, theirs_seq: seq, ours, ours_seq: seq };
            self.fail(Report::new(self.settings.me, cause));
        }
    }

    /// Tells all ranks what this one waits in, if it has been long enough and they do not know.
    fn tell_state(&mut self, now: Instant) {
        let Some(since) = self.still_since else { return };
        let Some(first) = self.collectives.front_mut() else { return };
        if now < since + still(first.ticket.timeout) {
            return;
        }
        let awaits: Vec<usize> = first.run.awaited().take(NAMED_RANKS).collect();
        if first.told.as_ref() == Some(&awaits) {
            return;
        }
        let (seq, call) = (first.run.seq, first.run.call.encode());
        let payload: Vec<u8> = awaits.iter().flat_map(|&rank| (rank as u32).to_le_bytes()).collect();
        first.told = Some(awaits);
        let frame = Frame { call, ..self.frame(Kind::State, seq) };
        self.tell_all(&frame, &payload);
    }

    /// Reads what the launcher says about the deaths of others.
    pub(super) fn look_at_agent(&mut self) {
        let Some((agent, generation)) = self.settings.agent.clone() else { return };
        let mut agent = agent.lock().unwrap_or_else(PoisonError::into_inner);
        let mut deaths = Vec::new();
        // Bounded: a launcher that talks without end must not stop the data.
        for _ in 0..64 {
            match agent.receive(Duration::ZERO) {
                Ok(ToWorker::PeerExit { generation: g, rank, cause }) if g == generation => {
                    deaths.push((rank, cause));
                }
                Ok(_) => {}
                Err(convoke_env::ChannelError::Timeout { .. }) => break,
                Err(_) => {
                    drop(agent);
                    self.unregister_agent();
                    self.settings.agent = None;
                    break;
                }
            }
        }
        for (rank, cause) in deaths {
            let how = match cause {
                ExitCause::Code(0) => continue,
                ended => Loss::from(ended),
            };
            if rank >= self.settings.size || rank == self.settings.me || self.peers[rank].left {
                continue;
            }
            // If it told why before it went, that is the cause, and its death a consequence.
            self.read_all_controls();
            if !self.peers[rank].left {
                self.fail(Report::new(self.settings.me, Cause::PeerLost { rank, how }));
            }
        }
    }

    pub(super) fn read_all_controls(&mut self) {
        for peer in 0..self.peers.len() {
            self.read_control(peer);
        }
    }

    /// When to look at the clock again though nothing is ready.
    pub(super) fn wake_at(&self, now: Instant) -> Instant {
        let first = self.collectives.front().zip(self.still_since);
        let tell = first.filter(|(first, _)| first.told.is_none());
        let tell = tell.map(|(first, since)| since + still(first.ticket.timeout));
        let suspects = self.peers.iter().filter_map(|peer| peer.suspect.as_ref().map(|(until, _)| *until));
        let deadlines = self.tickets().map(|ticket| ticket.deadline);
        let times = deadlines.chain(suspects).chain(tell).chain(self.door.wake_at());
        times.min().unwrap_or(now + LONGEST_SLEEP).min(now + LONGEST_SLEEP)
    }

    pub(super) fn look_at_clock(&mut self, now: Instant) {
        self.tell_state(now);
        self.look_for_overdue(now);
    }
}

fn still(timeout: Duration) -> Duration {
    STILL.min(timeout / 4)
}
