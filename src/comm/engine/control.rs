//! Control frames between ranks: aborts, goodbyes, and reports of the calls in which ranks wait.

use std::collections::BTreeSet;
use std::io::IoSlice;
use std::time::{Duration, Instant};

use super::completion::Completion;
use super::progress::Engine;
use super::state::{Peer, Wait, WaitReport};
use super::teardown::Finishing;
use crate::collectives::call::{Call, CallKind};
use crate::error::cause::{Cause, MAX_REPORTED_RANKS, Report};
use crate::error::{LossReason, PeerMisbehaved};
use crate::transport::frame::{CONTROL_PAYLOAD_BYTES, Frame, HEADER_BYTES, Kind};
use crate::transport::links::conn::ConnError;
use crate::transport::links::hello::ConnectionKind;

/// Time without progress after which a rank reports to the other ranks which call it waits in. It is a
/// quarter of the call's timeout if that is less.
const REPORT_DELAY: Duration = Duration::from_millis(100);
/// Time before a call's deadline at which this rank asks the other ranks which calls they wait in. It is a
/// quarter of the call's timeout if that is less.
const QUERY_LEAD_TIME: Duration = Duration::from_millis(500);
/// Most control bytes queued for one peer; further frames are dropped.
const CONTROL_QUEUE_BYTES: usize = 64 << 10;
/// Most reads of one peer's control connection before other connections are read.
const CONTROL_FILLS: u32 = 16;
/// Longest sleep of the thread that drives the engine. Correctness does not depend on it.
const LONGEST_SLEEP: Duration = Duration::from_secs(30);

impl Engine {
    pub(super) fn frame(&self, kind: Kind, seq: u64) -> Frame {
        let ours = &self.settings.credentials;
        Frame { kind, generation: ours.generation, group: ours.group, seq, call: [0; 16], len: 0 }
    }

    /// Queues a control frame, and sends what the control connection takes now. Frames to a peer that is gone
    /// or whose queue is full are dropped.
    pub(super) fn send_control(&mut self, peer: usize, frame: &Frame, payload: &[u8]) {
        let Peer { control_out: out, control_closed, .. } = &mut self.peers[peer];
        if control_closed.is_none() && out.len() < CONTROL_QUEUE_BYTES {
            out.extend_from_slice(&Frame { len: payload.len() as u64, ..*frame }.encode());
            out.extend_from_slice(payload);
            self.flush_control(peer);
        }
    }

    pub(super) fn broadcast_control(&mut self, frame: &Frame, payload: &[u8]) {
        for peer in 0..self.peers.len() {
            if self.peers[peer].control.is_some() {
                self.send_control(peer, frame, payload);
            }
        }
    }

    pub(super) fn flush_control(&mut self, peer: usize) {
        let peer = &mut self.peers[peer];
        if peer.control_out.is_empty() {
            return;
        }
        if let Some(control) = &mut peer.control {
            // A send error is ignored here: a broken connection is detected when it is read.
            let sent = control.send(&[IoSlice::new(&peer.control_out)]).unwrap_or(0);
            peer.control_out.drain(..sent);
        }
    }

    /// Reads and handles the frames on the control connection of a peer.
    pub(super) fn read_control(&mut self, peer: usize) {
        let mut fills = 0;
        loop {
            // The connection stays in `peers` while a frame is handled, because handling it may send to the
            // peer.
            let place = &mut self.peers[peer];
            let Some(control) = place.control.as_mut().filter(|_| place.control_closed.is_none()) else {
                return;
            };
            let frame = match control.unread().first_chunk::<HEADER_BYTES>().map(Frame::decode) {
                Some(Ok(frame)) => Some(frame),
                Some(Err(error)) => return self.protocol_error(peer, error),
                None => None,
            };
            let end = HEADER_BYTES + frame.map_or(0, |frame| frame.len as usize);
            if let Some((frame, payload)) = frame.zip(control.unread().get(HEADER_BYTES..end)) {
                let payload = payload.to_vec();
                control.consume(end);
                self.control_activity = true;
                self.handle_control(peer, &frame, &payload);
                continue;
            }
            if fills == CONTROL_FILLS {
                // The next poll reads the rest.
                return self.links.announce(peer);
            }
            match control.fill(HEADER_BYTES + CONTROL_PAYLOAD_BYTES) {
                Ok(0) => return,
                Ok(_) => fills += 1,
                Err(broken) => return self.on_control_closed(peer, broken),
            }
        }
    }

    /// Records that the control connection of `peer` has ended; `how` says whether it was closed or failed.
    pub(super) fn on_control_closed(&mut self, peer: usize, how: ConnError) {
        let place = &mut self.peers[peer];
        place.control_closed = Some((Instant::now(), how));
        // The peer will never read these bytes. A caller that waits until its frames are sent would wait in
        // vain.
        place.control_out.clear();
        self.control_activity = true;
    }

    fn protocol_error(&mut self, peer: usize, error: impl Into<PeerMisbehaved>) {
        let what = error.into().to_string();
        self.fail(Report::new(self.settings.me, Cause::Protocol { peer, what }));
    }

    fn handle_control(&mut self, peer: usize, frame: &Frame, payload: &[u8]) {
        let ours = &self.settings.credentials;
        if (frame.generation, frame.group) != (ours.generation, ours.group) {
            return self.protocol_error(peer, PeerMisbehaved::ForeignControl { kind: frame.kind });
        }
        match frame.kind {
            Kind::Abort => match Report::decode(payload) {
                Ok(report) => self.fail(report),
                Err(what) => self.protocol_error(peer, what),
            },
            Kind::Goodbye => self.peers[peer].left = true,
            Kind::Open => match u8::try_from(frame.seq).ok().and_then(ConnectionKind::from_wire) {
                Some(conn_kind) if self.settings.me > peer => self.open_connection(peer, conn_kind),
                // The peer is about to connect, or has already done so.
                Some(conn_kind) => self.peers[peer].requested[conn_kind as usize] = true,
                None => self.protocol_error(peer, PeerMisbehaved::ConnectionKind { number: frame.seq }),
            },
            Kind::State => match Call::decode(frame.call) {
                Ok(call) => {
                    let words = payload.as_chunks::<4>().0.iter().take(MAX_REPORTED_RANKS);
                    let awaits = words.map(|&word| u32::from_le_bytes(word) as usize);
                    let awaits = awaits.filter(|&rank| rank < self.settings.size).collect();
                    if call.kind == CallKind::MonitoredBarrier {
                        self.peers[peer].last_barrier = Some(frame.seq);
                    }
                    let received_at = Instant::now();
                    self.peers[peer].wait_report =
                        Some(WaitReport { seq: frame.seq, call, awaits, received_at });
                    self.compare_with_reports();
                }
                Err(what) => self.protocol_error(peer, what),
            },
            Kind::Share => self.peers[peer].offer = Some(payload.to_vec()),
            Kind::StateQuery => {
                if let Some(wait) = self.reportable_wait(frame.seq == 0) {
                    let (frame, payload) = self.wait_report(&wait);
                    self.send_control(peer, &frame, &payload);
                }
            }
            kind @ (Kind::Hello | Kind::Welcome | Kind::Proof | Kind::Refuse | Kind::Data | Kind::Eager)
            | kind @ (Kind::Rts | Kind::Cts | Kind::Message | Kind::Credit | Kind::Close | Kind::Stream) => {
                self.protocol_error(peer, PeerMisbehaved::NoControlFrame { kind });
            }
        }
    }

    /// Compares the calls that other ranks report to wait in with this rank's calls of the same sequence
    /// numbers, and fails the group if two differ. This finds different calls even if the two ranks exchange
    /// no data.
    pub(super) fn compare_with_reports(&mut self) {
        let differs = |seq: u64, call: &Call| {
            self.history
                .iter()
                .find(|(ours_seq, ours)| *ours_seq == seq && ours != call)
                .map(|(_, ours)| *ours)
        };
        let found = self.peers.iter().enumerate().find_map(|(rank, peer)| {
            let WaitReport { seq, call, .. } = peer.wait_report.as_ref()?;
            if call.kind == CallKind::PointToPoint {
                return None;
            }
            Some((rank, *seq, *call, differs(*seq, call)?))
        });
        if let Some((rank, seq, theirs, ours)) = found {
            let cause = Cause::Mismatch { rank, theirs, theirs_seq: seq, ours, ours_seq: seq };
            self.fail(Report::new(self.settings.me, cause));
        }
    }

    /// Returns the call that this rank waits in, and for which ranks: its first collective, else its
    /// messages. `None` if nothing is pending.
    fn current_wait(&self) -> Option<Wait> {
        if let Some(first) = self.collectives.front() {
            let awaits = first.awaited(self.settings.me, &self.peers).take(MAX_REPORTED_RANKS).collect();
            return Some((first.execution.seq(), first.execution.call(), awaits));
        }
        let (_, call, _) = self.message_waits().next()?;
        let awaits: BTreeSet<usize> = self.message_waits().flat_map(|(.., awaits)| awaits).collect();
        Some((0, call, awaits.into_iter().take(MAX_REPORTED_RANKS).collect()))
    }

    /// Returns the wait that this rank reports to another rank, which waits in a collective (`in_collective`)
    /// or for messages.
    ///
    /// If no caller waits for a pending operation, the program computes, and the other rank may wait for its
    /// next call: nothing is reported. But a pending collective is always reported to a rank that waits in a
    /// collective.
    fn reportable_wait(&self, in_collective: bool) -> Option<Wait> {
        let has_waiter =
            || self.has_waiter || self.message_waits().any(|(completion, ..)| completion.is_awaited());
        let is_reportable = |kind| in_collective && kind != CallKind::PointToPoint || has_waiter();
        self.current_wait().filter(|(_, call, _)| is_reportable(call.kind))
    }

    fn wait_report(&self, (seq, call, awaits): &Wait) -> (Frame, Vec<u8>) {
        let payload = awaits.iter().flat_map(|&rank| (rank as u32).to_le_bytes()).collect();
        (Frame { call: call.encode(), ..self.frame(Kind::State, *seq) }, payload)
    }

    /// Reports to all ranks which call this rank waits in, if it has waited for [`REPORT_DELAY`] and has not
    /// reported the same wait before.
    fn report_wait(&mut self, now: Instant) {
        if self.report_wait_at().is_none_or(|at| now < at) {
            return;
        }
        let wait = self.reportable_wait(true).filter(|wait| self.reported_wait.as_ref() != Some(wait));
        let Some(wait) = wait else { return };
        let (frame, payload) = self.wait_report(&wait);
        self.reported_wait = Some(wait);
        self.broadcast_control(&frame, &payload);
    }

    /// Returns the time at which this rank reports its wait to the other ranks; `None` if data moves or
    /// nothing is pending.
    fn report_wait_at(&self) -> Option<Instant> {
        Some(self.stalled_since? + REPORT_DELAY.min(self.deadline_bounds()?.shortest / 4))
    }

    /// Shortly before the deadline of a call, asks all ranks which calls they wait in. Their earlier reports
    /// may be out of date, and a rank that does not answer waits for no other rank.
    fn query_waits(&mut self, now: Instant) {
        if self.deadline_bounds().is_none_or(|bounds| now < bounds.query_at) {
            return;
        }
        let due = |completion: &Completion| {
            now >= query_at(completion) && self.queried_at.is_none_or(|at| at < query_at(completion))
        };
        if self.completions().any(due) {
            self.queried_at = Some(now);
            let query = self.wait_query();
            self.broadcast_control(&query, &[]);
        }
    }

    /// Returns the frame that asks a rank which call it waits in.
    pub(super) fn wait_query(&self) -> Frame {
        self.frame(Kind::StateQuery, u64::from(self.collectives.is_empty()))
    }

    /// Returns when a call times out: at its deadline, or later if this rank asked the other ranks late, so
    /// that they have time to answer.
    pub(super) fn times_out_at(&self, completion: &Completion) -> Instant {
        let answered =
            self.queried_at.map_or(completion.deadline, |asked| asked + query_lead_time(completion));
        answered.clamp(completion.deadline, completion.deadline + QUERY_LEAD_TIME)
    }

    /// Reads the launcher's reports of processes that ended.
    pub(super) fn poll_agent(&mut self) {
        let events = self.links.poll_agent();
        self.handle_events(events);
    }

    /// Fails the group because the launcher has reported how the process of `rank` ended.
    pub(super) fn rank_exited(&mut self, rank: usize, how: LossReason) {
        if rank == self.settings.me || self.peers[rank].left {
            return;
        }
        // The control connections are read first: if the rank reported a failure before it died, that
        // failure is the cause, and its death is a consequence.
        self.read_all_controls();
        if !self.peers[rank].left {
            self.fail(Report::new(self.settings.me, Cause::PeerLost { rank, how }));
        }
    }

    pub(super) fn read_all_controls(&mut self) {
        for peer in 0..self.peers.len() {
            self.read_control(peer);
        }
    }

    /// Returns the time at which the timers must be checked again, even if no descriptor is ready.
    pub(super) fn wake_at(&self, now: Instant) -> Instant {
        let tell = self.report_wait_at().filter(|&at| at > now);
        // The completions are scanned one by one only after the earliest time to ask other ranks.
        let bounds = self.deadline_bounds().map(|bounds| bounds.query_at);
        let late = || bounds.is_some_and(|at| now >= at).then(|| self.completions()).into_iter().flatten();
        let asks = late().map(query_at).filter(|&at| self.queried_at.is_none_or(|asked| asked < at));
        let suspects = self.peers.iter().filter_map(|peer| peer.suspect.as_ref().map(|(until, _)| *until));
        let deadlines = late().map(|completion| self.times_out_at(completion));
        let first = bounds.filter(|&at| now < at);
        let finishing = self.finishing.as_ref().map(Finishing::wake_at);
        let times = deadlines.chain(asks).chain(first).chain(suspects).chain(tell).chain(finishing);
        let times = times.chain(self.links.wake_at());
        times.min().unwrap_or(now + LONGEST_SLEEP).min(now + LONGEST_SLEEP)
    }

    pub(super) fn check_timers(&mut self, now: Instant) {
        self.report_wait(now);
        self.query_waits(now);
        self.check_deadlines(now);
    }
}

fn query_lead_time(completion: &Completion) -> Duration {
    QUERY_LEAD_TIME.min(completion.timeout / 4)
}

/// Returns when to ask the other ranks which calls they wait in, if this call is still pending then.
pub(super) fn query_at(completion: &Completion) -> Instant {
    completion.deadline - query_lead_time(completion)
}
