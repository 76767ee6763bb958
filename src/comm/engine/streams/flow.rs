//! One direction of a collective's data between this rank and one peer.

use smallvec::{SmallVec, smallvec};

use crate::collectives::plan::Direction;

/// All streams of the plan in one direction between this rank and one peer. They share one header.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) peer: usize,
    pub(super) direction: Direction,
    /// Indices of the flow's streams in the plan; `streams[current]` is being moved.
    pub(super) streams: SmallVec<[usize; 2]>,
    pub(super) current: usize,
    /// The position within the current stream: the index of its part, and (`offset`) the bytes of that part
    /// that are done.
    pub(super) segment: usize,
    pub(super) offset: usize,
    /// Bytes of all streams of the flow, and (`done`) how many of them have been sent or received.
    pub(super) total: usize,
    pub(super) done: usize,
    /// Bytes of the header that have been sent or received.
    pub(super) header: usize,
    pub(super) finished: bool,
    /// The connection moved nothing at the last attempt: the flow waits for it, not for another stream.
    pub(super) blocked: bool,
    /// The connection has ended or the reduction function failed. The flow moves nothing more.
    pub(super) broken: bool,
}

impl Flow {
    pub(super) fn new(peer: usize, direction: Direction, stream: usize, total: usize) -> Self {
        Self {
            peer,
            direction,
            streams: smallvec![stream],
            current: 0,
            segment: 0,
            offset: 0,
            total,
            done: 0,
            header: 0,
            finished: false,
            blocked: false,
            broken: false,
        }
    }
}
