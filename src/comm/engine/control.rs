//! Control frames between ranks: aborts, goodbyes, and reports of the calls in which ranks wait.

use std::io::IoSlice;
use std::time::Instant;

use super::peer::WaitReport;
use super::state::Engine;
use crate::collectives::call::{Call, CallKind};
use crate::error::cause::{Cause, MAX_REPORTED_RANKS, Report};
use crate::error::{LossReason, PeerMisbehaved};
use crate::transport::frame::{CONTROL_PAYLOAD_BYTES, Frame, HEADER_BYTES, Kind};
use crate::transport::links::conn::ConnError;
use crate::transport::links::hello::ConnectionKind;

/// Most control bytes queued for one peer; further frames are dropped.
const CONTROL_QUEUE_BYTES: usize = 64 << 10;
/// Most reads of one peer's control connection before other connections are read.
const CONTROL_FILLS: u32 = 16;

impl Engine {
    pub(super) fn frame(&self, kind: Kind, seq: u64) -> Frame {
        Frame::empty(kind, self.settings.credentials.group_id(), seq)
    }

    /// Queues a control frame, and sends what the control connection takes now. Frames to a peer that is gone
    /// or whose queue is full are dropped.
    pub(super) fn send_control(&mut self, peer: usize, frame: &Frame, payload: &[u8]) {
        let out = &mut self.peers[peer].control_out;
        if !self.liveness.is_closed(peer) && out.len() < CONTROL_QUEUE_BYTES {
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
        if let Some(control) = peer.control.as_mut().filter(|_| !peer.control_out.is_empty()) {
            // A send error is ignored here: a broken connection is detected when it is read.
            let sent = control.send(&[IoSlice::new(&peer.control_out)]).unwrap_or(0);
            peer.control_out.drain(..sent);
        }
    }

    pub(super) fn flush_all_controls(&mut self) {
        (0..self.peers.len()).for_each(|peer| self.flush_control(peer));
    }

    /// Reads and handles the frames on the control connection of a peer.
    pub(super) fn read_control(&mut self, peer: usize) {
        let mut fills = 0;
        loop {
            // The connection stays in `peers` while a frame is handled: this may send to the peer.
            let is_open = !self.liveness.is_closed(peer);
            let Some(control) = self.peers[peer].control.as_mut().filter(|_| is_open) else { return };
            let frame = match control.unread().first_chunk().map(Frame::decode).transpose() {
                Ok(frame) => frame,
                Err(error) => return self.protocol_error(peer, error),
            };
            let end = HEADER_BYTES + frame.map_or(0, |frame| frame.len as usize);
            if let Some((frame, payload)) = frame.zip(control.unread().get(HEADER_BYTES..end)) {
                let payload = payload.to_vec();
                control.consume(end);
                self.driver.control_activity = true;
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
        let how = match how {
            ConnError::Failed(error) => LossReason::Unreachable { what: error.to_string() },
            ConnError::Closed => LossReason::Disconnected,
        };
        self.liveness.on_control_closed(peer, Instant::now(), how);
        // The peer will never read these bytes, so a caller must not wait until they are sent.
        self.peers[peer].control_out.clear();
        self.driver.control_activity = true;
    }

    fn protocol_error(&mut self, peer: usize, error: impl Into<PeerMisbehaved>) {
        self.fail_for(Cause::Protocol { peer, what: error.into().to_string() });
    }

    fn handle_control(&mut self, peer: usize, frame: &Frame, payload: &[u8]) {
        if frame.group_id() != self.settings.credentials.group_id() {
            return self.protocol_error(peer, PeerMisbehaved::ForeignControl { kind: frame.kind });
        }
        match frame.kind {
            Kind::Abort => match Report::decode(payload) {
                Ok(report) => self.fail(report),
                Err(what) => self.protocol_error(peer, what),
            },
            Kind::Goodbye => self.liveness.on_goodbye(peer),
            Kind::Open => match ConnectionKind::from_wire(frame.seq) {
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
                    let report = WaitReport { seq: frame.seq, call, awaits, received_at: Instant::now() };
                    self.peers[peer].wait_report = Some(report);
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
            | kind @ (Kind::Rts | Kind::Cts | Kind::Message | Kind::Credit | Kind::Close | Kind::Stream)
            | kind @ (Kind::Ready | Kind::ReadDone) => {
                self.protocol_error(peer, PeerMisbehaved::NoControlFrame { kind });
            }
        }
    }

    /// Fails the group if another rank waits in a call that differs from this rank's call of that number.
    pub(super) fn compare_with_reports(&mut self) {
        if let Some(cause) = self.collectives.mismatch(&self.peers) {
            self.fail_for(cause);
        }
    }

    /// In a monitored barrier, tells all other ranks once that this rank has arrived.
    pub(super) fn announce_arrival(&mut self) {
        if let Some(first) = self.collectives.queue.front_mut()
            && first.must_announce()
        {
            let (seq, call) = (first.seq, first.call.encode());
            let frame = Frame { call, ..self.frame(Kind::State, seq) };
            self.broadcast_control(&frame, &[]);
        }
    }

    /// Fails the group because the launcher has reported how the process of `rank` ended.
    pub(super) fn rank_exited(&mut self, rank: usize, how: LossReason) {
        if rank == self.settings.me || self.liveness.has_left(rank) {
            return;
        }
        // The control connections are read first: if the rank reported a failure before it died, that
        // failure is the cause, and its death is a consequence.
        self.read_all_controls();
        if !self.liveness.has_left(rank) {
            self.fail_for(Cause::PeerLost { rank, how });
        }
    }

    pub(super) fn read_all_controls(&mut self) {
        (0..self.peers.len()).for_each(|peer| self.read_control(peer));
    }
}
