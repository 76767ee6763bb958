//! Ordered reduction: one rank adds the contributions of all ranks in the order of the ranks.
//!
//! The adding rank receives every single contribution, not partial sums. So it can add them with more digits
//! than they have and round once. The result is that of a sequential loop over the ranks, whatever the number
//! of elements.

use std::ops::Range;

use super::{Apply, Plan, Stream};
use crate::collectives::kernels::OrderedReduceStep;

/// Maximum number of elements whose sums are incomplete at a time, if a range can be reduced in pieces.
///
/// A piece of this size fills one system call, and its sums stay in the cache until the last contribution is
/// added.
pub(super) const WINDOW: usize = 64 << 10;

/// Adds the streams that receive the other ranks' contributions to `range` and add them to this rank's own.
/// Returns the stream that completes the sum.
///
/// Contributions are added in the order of the ranks: each stream waits for the one before it. The first
/// stream waits as `start` says.
pub(super) fn push(
    plan: &mut Plan,
    rank: usize,
    world: usize,
    range: Range<usize>,
    start: Start,
) -> Option<usize> {
    let last = world.checked_sub(2)?;
    let mut dependency = match start {
        Start::Behind(stream) => (stream, 0),
        Start::Window(window) => (Some(plan.streams.len() + last), window),
    };
    plan.window = if let Start::Window(window) = start { window.min(range.len()) } else { range.len() };
    for (index, peer) in (0..world).filter(|&peer| peer != rank).enumerate() {
        // This rank's own contribution is added between those of the lower and the higher ranks. Rank 0 adds
        // its own second, since swapped operands give equal bits.
        let own = peer + 1 == rank || rank == 0 && index == 0;
        let step = OrderedReduceStep { first: index == 0, own, last: index == last };
        let stream = Stream::recv(peer, [(range.clone(), Apply::ReduceOrdered(step))]);
        dependency = (Some(plan.push(stream.after(dependency.0, dependency.1.cast_signed()))), 0);
    }
    dependency.0
}

/// The condition that the first stream of an ordered reduction waits for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Start {
    /// The first stream follows another stream, element by element, or waits for nothing.
    Behind(Option<usize>),
    /// The first stream is at most this many elements ahead of the last one, so that only so many sums are
    /// kept.
    Window(usize),
}

/// Returns the plan of `rank` of `world` for an all-reduce in one round. Every rank sends its whole buffer to
/// every other rank, and all ranks add the contributions in one order.
///
/// The result replaces the buffer that is sent. So an element is reduced only after it was sent to all other
/// ranks, to one after the other.
pub(super) fn all_reduce(rank: usize, world: usize, count: usize) -> Plan {
    let mut plan = Plan::default();
    let mut sent = None;
    for distance in 1..world {
        let stream = Stream::send((rank + distance) % world, Some(0..count));
        sent = Some(plan.push(stream.after(sent, 0)));
    }
    push(&mut plan, rank, world, 0..count, Start::Behind(sent));
    plan
}

/// Returns the plan of `rank` of `world` for a reduce in one round: every rank sends its buffer to `root`.
pub(super) fn reduce(rank: usize, world: usize, count: usize, root: usize, window: usize) -> Plan {
    let mut plan = Plan::default();
    if rank == root {
        push(&mut plan, rank, world, 0..count, Start::Window(window));
    } else {
        plan.push(Stream::send(root, Some(0..count)));
    }
    plan
}

#[cfg(test)]
mod tests {
    use crate::collectives::plan::check::{flat, reduce_is_right};

    #[test]
    fn root_combines_contributions_in_a_window_of_two_elements() {
        let window = 2;
        reduce_is_right(flat, |rank, topology, count, root| {
            super::reduce(rank, topology.world(), count, root, window)
        });
    }
}
