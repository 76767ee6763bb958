//! Runs the plan of a collective over connections, without a clock: [`Streams::progress`] never waits.

mod flow;
mod header;
mod short_exchange;

use std::io::IoSlice;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use super::execution::{Execution, Paths, PeerConnections};
use crate::buffer::{BorrowedBuffer, Fragment, PlanBuffer};
use crate::collectives::call::Call;
use crate::collectives::kernels::Kernel;
use crate::collectives::plan::{Algorithm, Apply, BufferPart, Direction, Plan};
use crate::error::ExecutionError;
use crate::fault::fault_point;
use crate::transport::frame::HEADER_BYTES;
use crate::transport::links::conn::{Conn, MAX_WRITE_BYTES};
use crate::transport::links::hello::Credentials;
use crate::transport::links::read_ahead::MAX_READ_AHEAD_BYTES;
use flow::Flow;
use header::{DataHeader, SHORT_BYTES};
pub(crate) use short_exchange::{QueuedExchange, Shape, ShortExchange};

/// Pieces of at least this size are received straight into the operation's buffer, not read ahead.
const DIRECT_BYTES: usize = 4 << 10;
/// A rank that has sent everything, and gets at most this many bytes from each peer, waits for one peer after
/// the other. It then holds up no sender.
const SEQUENTIAL_BYTES: usize = 64 << 10;
/// Most bytes that one send system call takes if this rank also receives, and sends more than [`MAX_WRITE_BYTES`] to a
/// peer. Long calls would hold up the receives: 16 MiB to and from one rank take 0.9 times as long in short calls.
const MAX_SHORT_WRITE_BYTES: usize = 256 << 10;
/// Most pieces of elements that one send system call takes.
const MAX_PARTS: usize = 8;

/// A collective in progress over connections.
#[derive(Debug)]
pub(crate) struct Streams {
    header: DataHeader,
    plan: Arc<Plan>,
    buffer: PlanBuffer<'static>,
    rank: usize,
    /// Bytes that each stream of the plan has sent or received; in whole elements if it reduces.
    moved: SmallVec<[usize; 6]>,
    /// One for each peer and direction. Calls with few peers allocate nothing for them.
    flows: SmallVec<[Flow; 4]>,
    unfinished: usize,
    /// Number of flows to peers that are not finished.
    unsent: usize,
    /// No peer sends more than [`SEQUENTIAL_BYTES`] to this rank.
    short: bool,
    /// Most bytes that one send system call takes.
    most_written: usize,
}

impl Streams {
    /// Prepares the collective `call` with number `seq`, which runs `plan`; `kernel` is `Some` if the plan
    /// reduces. `buffer` holds the elements of the plan.
    #[inline(always)]
    pub(crate) fn new(
        credentials: &Credentials,
        call: Call,
        seq: u64,
        plan: Arc<Plan>,
        buffer: BorrowedBuffer<'static>,
        kernel: Option<Kernel>,
        rank: usize,
    ) -> Self {
        let buffer = PlanBuffer::new(buffer, kernel, call.dtype.size_bytes(), &plan);
        let mut flows: SmallVec<[Flow; 4]> = SmallVec::new();
        for (index, stream) in plan.streams.iter().enumerate() {
            let bytes = stream.len() * buffer.element_bytes;
            let same = |flow: &&mut Flow| flow.peer == stream.peer && flow.direction == stream.direction;
            if let Some(flow) = flows.iter_mut().find(same) {
                flow.streams.push(index);
                flow.total += bytes;
            } else {
                flows.push(Flow::new(stream.peer, stream.direction, index, bytes));
            }
        }
        let header = DataHeader::new(credentials, call, seq);
        let (moved, unfinished) = (smallvec![0; plan.streams.len()], flows.len());
        let unsent = flows.iter().filter(|flow| flow.direction == Direction::Send).count();
        let long = |flow: &Flow| flow.direction == Direction::Recv && flow.total > SEQUENTIAL_BYTES;
        let short = !flows.iter().any(long);
        let is_two_way = unsent > 0 && unsent < flows.len();
        let writes_long = |flow: &Flow| flow.direction == Direction::Send && flow.total > MAX_WRITE_BYTES;
        let most_written =
            if is_two_way && flows.iter().any(writes_long) { MAX_SHORT_WRITE_BYTES } else { MAX_WRITE_BYTES };
        Self { header, plan, buffer, rank, moved, flows, unfinished, unsent, short, most_written }
    }

    /// Returns the peers with which this collective exchanges data.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + '_ {
        self.flows.iter().map(|flow| flow.peer)
    }

    /// Returns whether this rank may wait for one peer after the other: no peer waits for this rank, and this
    /// rank needs the data of all peers that are left.
    fn waits_sequentially(&self) -> bool {
        self.short && self.unsent == 0
    }

    /// Sends and receives what can move without waiting. Returns whether anything moved.
    pub(crate) fn progress(&mut self, connections: &mut dyn PeerConnections) -> Result<bool, ExecutionError> {
        self.buffer.begin();
        let mut any = false;
        for index in 0..self.flows.len() {
            let flow = &self.flows[index];
            if flow.finished || flow.broken {
                continue;
            }
            let direction = flow.direction;
            let Some(conn) = connections.connection(flow.peer) else { continue };
            self.flows[index].blocked = false;
            let moved = match direction {
                Direction::Send => self.send(index, conn),
                Direction::Recv => self.recv(index, conn),
            };
            let moved = moved.inspect_err(|error| {
                // A reduction function may have reduced some elements already. They must not be reduced
                // again.
                let broken = matches!(error, ExecutionError::Broken { .. } | ExecutionError::Function(_));
                self.flows[index].broken = broken;
            })?;
            any |= moved;
            let flow = &mut self.flows[index];
            fault_point(
                if direction == Direction::Send { "sent" } else { "received" },
                self.header.seq,
                flow.done,
            );
            if flow.header == HEADER_BYTES && flow.done == flow.total {
                flow.finished = true;
                self.unfinished -= 1;
                self.unsent -= usize::from(direction == Direction::Send);
            }
            if !moved && self.flows[index].blocked && self.waits_sequentially() {
                break;
            }
        }
        if self.unfinished == 0 {
            self.buffer.finish();
        } else if !any {
            any = self.buffer.copy_some();
        }
        Ok(any)
    }

    /// Returns how many bytes the flow's current stream may move now. If the stream depends on another, its
    /// bytes may exceed those moved by the other by at most the dependency's lead.
    fn allowance(&self, flow: &Flow) -> usize {
        let Some(&index) = flow.streams.get(flow.current) else { return 0 };
        let dependency = self.plan.streams[index].dependency;
        dependency.map_or(usize::MAX, |dependency| {
            let lead = dependency.lead.saturating_mul(self.buffer.element_bytes.cast_signed());
            self.moved[dependency.stream].saturating_add_signed(lead).saturating_sub(self.moved[index])
        })
    }

    fn is_open(&self, flow: &Flow) -> bool {
        flow.done == flow.total || self.allowance(flow) > 0
    }

    /// Returns the rest of the flow's current part, as a byte range of the buffer, and how to apply received
    /// bytes. Skips parts that are done; `None` at the end of the flow.
    fn current_range(&mut self, index: usize) -> Option<(std::ops::Range<usize>, Apply)> {
        let flow = &mut self.flows[index];
        loop {
            let stream = &self.plan.streams[*flow.streams.get(flow.current)?];
            let Some(BufferPart { range, apply }) = stream.parts.get(flow.segment) else {
                (flow.current, flow.segment, flow.offset) = (flow.current + 1, 0, 0);
                continue;
            };
            let start = range.start * self.buffer.element_bytes + flow.offset;
            let end = range.end * self.buffer.element_bytes;
            if start < end {
                return Some((start..end, *apply));
            }
            (flow.segment, flow.offset) = (flow.segment + 1, 0);
        }
    }

    /// Notes that `bytes` more of the flow's current part have been sent or received.
    fn advance(&mut self, index: usize, bytes: usize) {
        let flow = &mut self.flows[index];
        flow.offset += bytes;
        flow.done += bytes;
        if let Some(&stream) = flow.streams.get(flow.current) {
            self.moved[stream] += bytes;
        }
    }

    fn send(&mut self, index: usize, conn: &mut Conn) -> Result<bool, ExecutionError> {
        self.current_range(index);
        let flow = &self.flows[index];
        let peer = flow.peer;
        let allowance = self.allowance(flow).min(self.most_written);
        let body = flow.done < flow.total;
        if body && allowance == 0 {
            return Ok(false);
        }
        let header = self.header.of(flow.total);
        let mut parts = [IoSlice::new(&header[flow.header..]); 1 + MAX_PARTS];
        let used = 1 + self.gather(flow, allowance, &mut parts[1..]);
        let mut sent = conn.send(&parts[..used]).map_err(|why| ExecutionError::Broken { peer, why })?;
        let any = sent > 0;
        let flow = &mut self.flows[index];
        flow.blocked = !any;
        let of_header = sent.min(HEADER_BYTES - flow.header);
        flow.header += of_header;
        sent -= of_header;
        while sent > 0
            && let Some((range, _)) = self.current_range(index)
        {
            let step = sent.min(range.len());
            self.advance(index, step);
            sent -= step;
        }
        Ok(any)
    }

    /// Lists the memory of the next `most` bytes of the flow's current stream in `parts`. Returns how many of
    /// `parts` it has set.
    fn gather<'a>(&'a self, flow: &Flow, most: usize, parts: &mut [IoSlice<'a>]) -> usize {
        let Some(&stream) = flow.streams.get(flow.current) else { return 0 };
        let (mut used, mut left, mut skip) = (0, most, flow.offset);
        for segment in &self.plan.streams[stream].parts[flow.segment..] {
            let mut start = segment.range.start * self.buffer.element_bytes + skip;
            let end = (segment.range.end * self.buffer.element_bytes).min(start.saturating_add(left));
            skip = 0;
            while start < end && used < parts.len() {
                // The slice ends with the part of the buffer in which it begins.
                let bytes = self.buffer.bytes(start..end);
                if bytes.is_empty() {
                    return used;
                }
                parts[used] = IoSlice::new(bytes);
                used += 1;
                left -= bytes.len();
                start += bytes.len();
            }
            if left == 0 || used == parts.len() {
                break;
            }
        }
        used
    }

    fn recv(&mut self, index: usize, conn: &mut Conn) -> Result<bool, ExecutionError> {
        let peer = self.flows[index].peer;
        let broken = |why| ExecutionError::Broken { peer, why };
        let mut any = self.flows[index].header < HEADER_BYTES && self.recv_header(index, conn)?;
        if self.flows[index].header < HEADER_BYTES {
            return Ok(any);
        }
        // Each call of this function makes at most one system call, so that this rank also sends in between.
        let mut asked = any;
        while self.flows[index].done < self.flows[index].total {
            let Some((range, apply)) = self.current_range(index) else { break };
            let mut allowance = self.allowance(&self.flows[index]);
            if apply != Apply::Copy {
                allowance -= allowance % self.buffer.element_bytes;
            }
            if allowance == 0 {
                return Ok(any);
            }
            let flow = &self.flows[index];
            let moved = flow.streams.get(flow.current).map_or(0, |&stream| self.moved[stream]);
            let before = moved / self.buffer.element_bytes;
            let most = self.buffer.max_bytes(apply, before).min(MAX_READ_AHEAD_BYTES);
            let most = range.len().min(allowance).min(most);
            let range = range.start..range.start + most;
            let bytes = &conn.unread()[..most.min(conn.unread().len())];
            let is_first = peer < self.rank;
            let fragment = Fragment { bytes, apply, at: range.start, before, is_first };
            let used = self.buffer.apply(&fragment).map_err(ExecutionError::Function)?;
            conn.consume(used);
            if used > 0 {
                self.advance(index, used);
                any = true;
                continue;
            }
            if asked {
                return Ok(any);
            }
            asked = true;
            let got = if apply == Apply::Copy && most >= DIRECT_BYTES && conn.unread().is_empty() {
                let got = conn.recv(&mut self.buffer.bytes_mut(range)).map_err(broken)?;
                self.advance(index, got);
                got
            } else {
                conn.fill(most).map_err(broken)?
            };
            self.flows[index].blocked = got == 0;
            any |= got > 0;
        }
        Ok(any)
    }

    /// Reads the header of a flow and compares it with this rank's call, before any received element is used. The same
    /// system call reads elements behind the header into the buffer, if they need no reduction. Returns whether anything
    /// moved.
    fn recv_header(&mut self, index: usize, conn: &mut Conn) -> Result<bool, ExecutionError> {
        let Flow { peer, total, .. } = self.flows[index];
        let (mut any, mut done) = (false, 0);
        let before = conn.unread().len();
        if before < HEADER_BYTES {
            let next = if total > SHORT_BYTES { self.current_range(index) } else { None };
            let filled = match next {
                Some((range, Apply::Copy)) => {
                    let allowance = self.allowance(&self.flows[index]);
                    let range = range.start..range.end.min(range.start.saturating_add(allowance));
                    conn.fill_header(HEADER_BYTES, &mut self.buffer.bytes_mut(range))
                }
                _ => conn.fill(HEADER_BYTES + total).map(|_| 0),
            };
            done = filled.map_err(|why| ExecutionError::Broken { peer, why })?;
            any = conn.unread().len() > before;
            self.flows[index].blocked = !any;
        }
        let Some(bytes) = conn.unread().first_chunk::<HEADER_BYTES>() else { return Ok(any) };
        self.header.check(peer, bytes, total)?;
        conn.consume(HEADER_BYTES);
        self.flows[index].header = HEADER_BYTES;
        self.advance(index, done);
        Ok(true)
    }
}

impl Execution for Streams {
    fn poll(&mut self, paths: Paths<'_>) -> Result<bool, ExecutionError> {
        self.progress(paths.connections)
    }

    fn is_finished(&self) -> bool {
        self.unfinished == 0
    }

    fn bytes(&self, direction: Direction) -> (u64, u64) {
        let flows = self.flows.iter().filter(|flow| flow.direction == direction);
        flows.fold((0, 0), |(done, total), flow| (done + flow.done as u64, total + flow.total as u64))
    }

    fn algorithm(&self) -> Option<Algorithm> {
        self.plan.algorithm
    }

    /// Returns the peers that must send data, or accept data from this rank.
    fn awaited(&self) -> Vec<usize> {
        self.flows.iter().filter(|flow| !flow.finished && self.is_open(flow)).map(|flow| flow.peer).collect()
    }

    fn blocked(&self) -> Vec<(usize, Direction)> {
        let waiting = self.flows.iter().filter(|flow| flow.blocked && !flow.finished && !flow.broken);
        let most = if self.waits_sequentially() { 1 } else { usize::MAX };
        waiting.map(|flow| (flow.peer, flow.direction)).take(most).collect()
    }
}

#[cfg(test)]
mod tests;
