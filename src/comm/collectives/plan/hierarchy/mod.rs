//! Hierarchical algorithms: the ranks of a host reduce among themselves first, and the network carries only
//! sums.
//!
//! Rail i is the rank with index i on each host; there are as many rails as the smallest host has ranks. Rail
//! i owns the i-th part of the buffer. The table shows the sums in the buffers of two hosts, with the ranks
//! 0, 1 and 2, 3, after each stage. (`01` = summed over the ranks 0 and 1, one column for each rail's part.)
//!
//! ```text
//!          start   add inside   add and gather across   gather inside
//! rank 0   0 0     01  1        0123 1                  0123 0123
//! rank 1   1 1     0  01        0 0123                  0123 0123
//! rank 2   2 2     23  3        0123 3                  0123 0123
//! rank 3   3 3     2  23        2 0123                  0123 0123
//! ```
//!
//! Across the hosts each rail is a ring of its own, for which its part is cut in one block for each host. Two
//! hosts exchange the whole part instead. All rails use the network at once. For a buffer of S bytes,
//! 2·S·(H−1)/H bytes leave each of H hosts. With a ring over all P ranks it is 2·S·(P−1)/P. A reduce-scatter
//! has only the stages that add, an all-gather only those that gather.
//!
//! Each stage processes the bytes that the stage before has completed. The connections inside a host carry
//! the first stage and the last one. So the buffer is processed in chunks: while one chunk is on the network,
//! the next ones are added inside the hosts.

use std::ops::Range;

use super::{Apply, Blocks, Dependency, Plan, Stream, Topology, block, subrange};

/// The number of further chunks that are added before the sums of a chunk are gathered. They hide the latency
/// of the network.
const CHUNKS_AHEAD: usize = 2;

/// The phases of an all-reduce that a plan has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phases {
    Reduce,
    Gather,
    Both,
}

/// Returns the plan of `rank` for an all-reduce of `count` elements, in chunks of about `chunk` elements.
pub(super) fn all_reduce(rank: usize, topology: &Topology, count: usize, chunk: usize) -> Plan {
    let (hosts, rails) = (topology.hosts().len(), topology.rails());
    let chunks = count.div_ceil(chunk.max(1)).max(1);
    let blocks_per_part = if hosts == 2 { 1 } else { hosts };
    stages(rank, topology, Phases::Both, (chunks, blocks_per_part), |index, host, rail| {
        let chunk = block(index, chunks, count);
        let number = rail * blocks_per_part + host % blocks_per_part;
        subrange(&chunk, &block(number, rails * blocks_per_part, chunk.len()))
    })
}

/// Returns the plan of `rank` for a reduce-scatter in place over hosts of equal size: in the end the rank's
/// own block is summed over all ranks.
pub(super) fn reduce_scatter(rank: usize, topology: &Topology, blocks: &Blocks, chunk: usize) -> Plan {
    block_stages(rank, topology, Phases::Reduce, blocks, chunk)
}

/// Returns the plan of `rank` for an all-gather over hosts of equal size.
pub(super) fn all_gather(rank: usize, topology: &Topology, blocks: &Blocks, chunk: usize) -> Plan {
    block_stages(rank, topology, Phases::Gather, blocks, chunk)
}

fn block_stages(rank: usize, topology: &Topology, phases: Phases, blocks: &Blocks, chunk: usize) -> Plan {
    debug_assert!(topology.is_even());
    let chunks = blocks.end().div_ceil(chunk.max(1)).max(1);
    stages(rank, topology, phases, (chunks, topology.hosts().len()), |index, host, rail| {
        let whole = blocks.range(topology.hosts()[host][rail]);
        subrange(&whole, &block(index, chunks, whole.len()))
    })
}

/// Returns the plan of `rank` over `chunks` chunks. `block(chunk, host, rail)` is the range of the buffer
/// that the rank of this rail on this host owns. `blocks_per_part` is the number of blocks of a rail's part:
/// one for each host, or one if two hosts exchange whole parts.
fn stages(
    rank: usize,
    topology: &Topology,
    phases: Phases,
    (chunks, blocks_per_part): (usize, usize),
    block: impl Fn(usize, usize, usize) -> Range<usize>,
) -> Plan {
    let mut plan = Plan::default();
    let (host, local_rank) = topology.host_and_index(rank);
    let position = Position { topology, host, local_rank, blocks_per_part, block: &block };
    let mut summed = vec![None; chunks];
    for step in 0..chunks + CHUNKS_AHEAD {
        if step < chunks && phases != Phases::Gather {
            let inside = position.reduce_scatter_in_host(&mut plan, step);
            summed[step] = if position.is_pair() {
                position.exchange_pair(&mut plan, step, inside)
            } else {
                position.reduce_scatter_across_hosts(&mut plan, step, inside)
            };
        }
        if let Some(chunk) = step.checked_sub(CHUNKS_AHEAD).filter(|_| phases != Phases::Reduce) {
            let copies = position.all_gather_across_hosts(&mut plan, chunk, summed[chunk]);
            position.all_gather_in_host(&mut plan, chunk, summed[chunk], copies);
        }
    }
    plan
}

/// The position of a rank: its host, and its index there.
#[derive(Clone, Copy)]
struct Position<'a> {
    topology: &'a Topology,
    host: usize,
    /// The index of the rank on its host. It is also the rank's rail, if it is less than the number of rails.
    local_rank: usize,
    blocks_per_part: usize,
    /// `block(chunk, host, rail)` of [`stages`].
    block: &'a dyn Fn(usize, usize, usize) -> Range<usize>,
}

impl Position<'_> {
    /// Adds the reduce-scatter inside the host: the rank of each rail adds up its part from all ranks of the
    /// host, in a fixed order. Returns the stream that completes this rank's part.
    ///
    /// The blocks of a part are sent in the order in which the ring across the hosts needs them: the block of
    /// the previous host first, the block of this host last.
    fn reduce_scatter_in_host(self, plan: &mut Plan, chunk: usize) -> Option<usize> {
        let part = |rail: usize| (1..=self.blocks_per_part).map(move |back| self.block(chunk, back, rail));
        for (peer, rail) in self.local_peers().filter(|&(_, local_rank)| self.is_inter_host(local_rank)) {
            plan.push(Stream::send(peer, part(rail)));
        }
        let mut sum = None;
        let mut left = self.local_peers().count();
        for (peer, _) in self.local_peers().filter(|_| self.is_inter_host(self.local_rank)) {
            left -= 1;
            let apply = if left == 0 && self.hosts() == 1 { Apply::ReduceLast } else { Apply::Reduce };
            let part = part(self.local_rank).map(|range| (range, apply));
            sum = Some(plan.push(Stream::recv(peer, part).after(sum, 0)));
        }
        sum
    }

    /// Adds the reduce-scatter of this rail's part in a ring across the hosts, after the stream `inside` has
    /// summed the part over this host. Returns the dependency for a stream that sends the block of this host,
    /// which is then summed over all ranks.
    fn reduce_scatter_across_hosts(
        self,
        plan: &mut Plan,
        chunk: usize,
        inside: Option<usize>,
    ) -> Option<Dependency> {
        let Some((next, before)) = self.neighbours() else {
            return inside.map(|stream| Dependency { stream, lead: 0 });
        };
        let hosts = self.hosts();
        let block = |back: usize| self.block(chunk, back, self.local_rank);
        let apply = |back: usize| if back == hosts { Apply::ReduceLast } else { Apply::Reduce };
        plan.push(Stream::send(next, [block(1)]).after(inside, 0));
        let behind = -block(1).len().cast_signed();
        let sums = Stream::recv(before, (2..=hosts).map(|back| (block(back), apply(back))));
        let sums = plan.push(sums.after(inside, behind));
        plan.push(Stream::send(next, (2..hosts).map(block)).after(Some(sums), 0));
        let others: usize = (2..hosts).map(|back| block(back).len()).sum();
        Some(Dependency { stream: sums, lead: -others.cast_signed() })
    }

    /// Adds the all-reduce of this rail's part between two hosts, after the stream `inside` has summed the
    /// part over this host. Both ranks add the same two numbers, and swapped operands give equal bits. The
    /// part is sent from the memory that the other rank's part is received into, so each element is sent
    /// before it is received.
    fn exchange_pair(self, plan: &mut Plan, chunk: usize, inside: Option<usize>) -> Option<Dependency> {
        let (other, _) = self.neighbours()?;
        let part = self.block(chunk, 0, self.local_rank);
        let sent = plan.push(Stream::send(other, [part.clone()]).after(inside, 0));
        let stream = plan.push(Stream::recv(other, [(part, Apply::ReduceLast)]).after(Some(sent), 0));
        Some(Dependency { stream, lead: 0 })
    }

    /// Adds the all-gather of this rail's part in a ring across the hosts. The block of this host is sent
    /// when the dependency `own` allows it. Returns the stream that receives the blocks of the other hosts.
    fn all_gather_across_hosts(
        self,
        plan: &mut Plan,
        chunk: usize,
        own: Option<Dependency>,
    ) -> Option<usize> {
        let (next, before) = self.neighbours().filter(|_| !self.is_pair())?;
        let hosts = self.hosts();
        let block = |back: usize| self.block(chunk, back, self.local_rank);
        plan.push(Stream { dependency: own, ..Stream::send(next, [block(0)]) });
        let copies = plan.push(Stream::recv(before, (1..hosts).map(|back| (block(back), Apply::Copy))));
        plan.push(Stream::send(next, (1..hosts - 1).map(block)).after(Some(copies), 0));
        Some(copies)
    }

    /// Adds the all-gather inside the host: the rank of each rail sends its part to all other ranks of the
    /// host. It sends the block of this host when the dependency `own` allows it, and the blocks of other
    /// hosts as the stream `copies` receives them.
    fn all_gather_in_host(
        self,
        plan: &mut Plan,
        chunk: usize,
        own: Option<Dependency>,
        copies: Option<usize>,
    ) {
        for (peer, _) in self.local_peers().filter(|_| self.is_inter_host(self.local_rank)) {
            let block = |back: usize| self.block(chunk, back, self.local_rank);
            plan.push(Stream { dependency: own, ..Stream::send(peer, [block(0)]) });
            if copies.is_some() {
                plan.push(Stream::send(peer, (1..self.blocks_per_part).map(block)).after(copies, 0));
            }
        }
        for (peer, rail) in self.local_peers().filter(|&(_, local_rank)| self.is_inter_host(local_rank)) {
            let part = (0..self.blocks_per_part).map(|back| (self.block(chunk, back, rail), Apply::Copy));
            plan.push(Stream::recv(peer, part));
        }
    }

    /// Returns the range of a chunk that the rank of `rail` owns on the host `back` places before this one.
    fn block(self, chunk: usize, back: usize, rail: usize) -> Range<usize> {
        (self.block)(chunk, self.host_before(back), rail)
    }

    fn hosts(self) -> usize {
        self.topology.hosts().len()
    }

    /// Returns whether there are two hosts that exchange whole parts, instead of a ring of hosts.
    fn is_pair(self) -> bool {
        self.blocks_per_part < self.hosts()
    }

    fn is_inter_host(self, local_rank: usize) -> bool {
        local_rank < self.topology.rails()
    }

    /// Returns the host `places` places before this one on the ring.
    fn host_before(self, places: usize) -> usize {
        (self.host + self.hosts() - places % self.hosts()) % self.hosts()
    }

    /// Returns the other ranks of the host with their indices. The list begins with the next rank, so that
    /// not all ranks begin with the same peer.
    fn local_peers(self) -> impl Iterator<Item = (usize, usize)> {
        let here = &self.topology.hosts()[self.host];
        (1..here.len()).map(move |distance| {
            let local_rank = (self.local_rank + distance) % here.len();
            (here[local_rank], local_rank)
        })
    }

    /// Returns the ranks of this rail on the next host and on the previous one. It returns `None` if this
    /// rank is on no rail or there is one host.
    fn neighbours(self) -> Option<(usize, usize)> {
        let there = |host: usize| self.topology.hosts()[host][self.local_rank];
        let ring = self.is_inter_host(self.local_rank) && self.hosts() > 1;
        ring.then(|| (there((self.host + 1) % self.hosts()), there(self.host_before(1))))
    }
}

#[cfg(test)]
mod tests;
