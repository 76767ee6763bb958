//! Hierarchical algorithms: the ranks of a host reduce among themselves first, and the network carries only
//! sums.
//!
//! Lane i is rank i of each host; there are as many lanes as the smallest host has ranks. A lane owns the
//! i-th part of the buffer. The table shows which shares are summed on two hosts with the ranks 0, 1 and 2,
//! 3. (`01` = summed over the ranks 0 and 1, one column for each lane's part.)
//!
//! ```text
//!          start   add inside   add and gather across   gather inside
//! rank 0   0 0     01  1        0123 1                  0123 0123
//! rank 1   1 1     0  01        0 0123                  0123 0123
//! rank 2   2 2     23  3        0123 3                  0123 0123
//! rank 3   3 3     2  23        2 0123                  0123 0123
//! ```
//!
//! Across the hosts each lane is a ring of its own, for which its part is cut in one block for each host. Two
//! hosts exchange the whole part instead. All lanes use the network at once, and 2·S·(H−1)/H bytes leave each
//! of H hosts. With a ring over all P ranks it is 2·S·(P−1)/P. A reduce-scatter is the first half of this, an
//! all-gather the second half.
//!
//! Each stage follows the one before byte for byte. The connections inside a host carry the first stage and
//! the last one. So the buffer is processed in chunks: while one chunk is on the network, the next ones are
//! added.

use std::ops::Range;

use super::{Apply, Blocks, Gate, Plan, Stream, Topology, block};

/// Chunks that are added before the sums of the first are gathered. They hide the latency of the network.
const AHEAD: usize = 2;

/// The halves of an all-reduce that a plan does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Halves {
    Reduce,
    Gather,
    Both,
}

/// All-reduce, as `rank` sees it, in chunks of about `chunk` elements.
pub(super) fn all_reduce(rank: usize, topology: &Topology, count: usize, chunk: usize) -> Plan {
    let (hosts, lanes) = (topology.hosts().len(), topology.lanes());
    let chunks = count.div_ceil(chunk.max(1)).max(1);
    let cuts = if hosts == 2 { 1 } else { hosts };
    stages(rank, topology, Halves::Both, (chunks, cuts), |index, host, lane| {
        let chunk = block(index, chunks, count);
        within(&chunk, &block(lane * cuts + host % cuts, lanes * cuts, chunk.len()))
    })
}

/// Reduce-scatter in place over hosts of equal size: in the end the rank's own block is summed over all
/// ranks.
pub(super) fn reduce_scatter(rank: usize, topology: &Topology, blocks: &Blocks, chunk: usize) -> Plan {
    of_blocks(rank, topology, Halves::Reduce, blocks, chunk)
}

/// All-gather over hosts of equal size.
pub(super) fn all_gather(rank: usize, topology: &Topology, blocks: &Blocks, chunk: usize) -> Plan {
    of_blocks(rank, topology, Halves::Gather, blocks, chunk)
}

fn of_blocks(rank: usize, topology: &Topology, halves: Halves, blocks: &Blocks, chunk: usize) -> Plan {
    debug_assert!(topology.is_even());
    let chunks = blocks.end().div_ceil(chunk.max(1)).max(1);
    stages(rank, topology, halves, (chunks, topology.hosts().len()), |index, host, lane| {
        let whole = blocks.of(topology.hosts()[host][lane]);
        within(&whole, &block(index, chunks, whole.len()))
    })
}

/// Returns `inner`, which counts from the beginning of `outer`, as a range of the buffer.
fn within(outer: &Range<usize>, inner: &Range<usize>) -> Range<usize> {
    outer.start + inner.start..outer.start + inner.end
}

/// Returns the plan over `chunks`; `block(chunk, host, lane)` is the range that this lane of this host owns.
/// `cuts` is the number of blocks of a part: one for each host, or one if two hosts exchange all of it.
fn stages(
    rank: usize,
    topology: &Topology,
    halves: Halves,
    (chunks, cuts): (usize, usize),
    block: impl Fn(usize, usize, usize) -> Range<usize>,
) -> Plan {
    let mut plan = Plan::default();
    let (host, place) = topology.place(rank);
    let place = Place { topology, host, place, cuts };
    let mut summed = vec![None; chunks];
    for step in 0..chunks + AHEAD {
        if step < chunks && halves != Halves::Gather {
            let block = |host, lane| block(step, host, lane);
            let inside = place.add_inside(&mut plan, block);
            summed[step] = if place.is_pair() {
                place.exchange(&mut plan, inside, block)
            } else {
                place.add_across(&mut plan, inside, block)
            };
        }
        if let Some(chunk) = step.checked_sub(AHEAD).filter(|_| halves != Halves::Reduce) {
            let block = |host, lane| block(chunk, host, lane);
            let copies = place.gather_across(&mut plan, summed[chunk], block);
            place.gather_inside(&mut plan, (summed[chunk], copies), block);
        }
    }
    plan
}

/// The position of a rank: its host, and its index there.
#[derive(Debug, Clone, Copy)]
struct Place<'a> {
    topology: &'a Topology,
    host: usize,
    /// The index of the rank on its host. It is the rank's lane, if there are so many.
    place: usize,
    cuts: usize,
}

impl Place<'_> {
    /// Reduce-scatter inside the host: each lane gets its part from all others, in a fixed order. Returns the
    /// stream that completes this rank's part.
    ///
    /// The blocks of a part come in the order in which the ring uses them: that of the previous host first,
    /// the own one last.
    fn add_inside(self, plan: &mut Plan, block: impl Fn(usize, usize) -> Range<usize>) -> Option<usize> {
        let part = |lane: usize| (1..=self.cuts).map(|back| block(self.back(back), lane)).collect::<Vec<_>>();
        for (peer, lane) in self.others().filter(|&(_, place)| self.is_lane(place)) {
            plan.push(Stream::send(peer, part(lane)));
        }
        let mut sum = None;
        let mut left = self.others().count();
        for (peer, _) in self.others().filter(|_| self.is_lane(self.place)) {
            left -= 1;
            let apply = if left == 0 && self.hosts() == 1 { Apply::ReduceLast } else { Apply::Reduce };
            let part = part(self.place).into_iter().map(|range| (range, apply));
            sum = Some(plan.push(Stream::recv(peer, part).after(sum, 0)));
        }
        sum
    }

    /// Reduce-scatter of this lane's part around the hosts, after `inside` has it. Returns the stream that
    /// the block of this host, which is complete in the end, has to wait for.
    fn add_across(
        self,
        plan: &mut Plan,
        inside: Option<usize>,
        block: impl Fn(usize, usize) -> Range<usize>,
    ) -> Option<Gate> {
        let Some((next, before)) = self.neighbours() else {
            return inside.map(|stream| Gate { stream, lead: 0 });
        };
        let hosts = self.hosts();
        let block = |back: usize| block(self.back(back), self.place);
        let apply = |back: usize| if back == hosts { Apply::ReduceLast } else { Apply::Reduce };
        plan.push(Stream::send(next, [block(1)]).after(inside, 0));
        let behind = -lead(block(1).len());
        let sums = Stream::recv(before, (2..=hosts).map(|back| (block(back), apply(back))));
        let sums = plan.push(sums.after(inside, behind));
        plan.push(Stream::send(next, (2..hosts).map(block)).after(Some(sums), 0));
        let others: usize = (2..hosts).map(|back| block(back).len()).sum();
        Some(Gate { stream: sums, lead: -lead(others) })
    }

    /// All-reduce of this lane's part between two hosts, after `inside` has it. Both add the same two
    /// numbers, and addition commutes to the last bit. The part is sent from the memory that it is received
    /// into, so nothing is received that was not sent before.
    fn exchange(
        self,
        plan: &mut Plan,
        inside: Option<usize>,
        block: impl Fn(usize, usize) -> Range<usize>,
    ) -> Option<Gate> {
        let (other, _) = self.neighbours()?;
        let part = block(self.host, self.place);
        let sent = plan.push(Stream::send(other, [part.clone()]).after(inside, 0));
        let stream = plan.push(Stream::recv(other, [(part, Apply::ReduceLast)]).after(Some(sent), 0));
        Some(Gate { stream, lead: 0 })
    }

    /// All-gather of this lane's part around the hosts. The gate `own` opens for the block of this host.
    /// Returns the stream of the others' blocks.
    fn gather_across(
        self,
        plan: &mut Plan,
        own: Option<Gate>,
        block: impl Fn(usize, usize) -> Range<usize>,
    ) -> Option<usize> {
        let (next, before) = self.neighbours().filter(|_| !self.is_pair())?;
        let hosts = self.hosts();
        let block = |back: usize| block(self.back(back), self.place);
        plan.push(Stream { gate: own, ..Stream::send(next, [block(0)]) });
        let copies = plan.push(Stream::recv(before, (1..hosts).map(|back| (block(back), Apply::Copy))));
        plan.push(Stream::send(next, (1..hosts - 1).map(block)).after(Some(copies), 0));
        Some(copies)
    }

    /// All-gather inside the host: each lane sends its part to all others. It sends the block of this host as
    /// its gate opens, and then the others' as they come.
    fn gather_inside(
        self,
        plan: &mut Plan,
        (own, copies): (Option<Gate>, Option<usize>),
        block: impl Fn(usize, usize) -> Range<usize>,
    ) {
        for (peer, _) in self.others().filter(|_| self.is_lane(self.place)) {
            let block = |back: usize| block(self.back(back), self.place);
            plan.push(Stream { gate: own, ..Stream::send(peer, [block(0)]) });
            if copies.is_some() {
                plan.push(Stream::send(peer, (1..self.cuts).map(block)).after(copies, 0));
            }
        }
        for (peer, lane) in self.others().filter(|&(_, place)| self.is_lane(place)) {
            let part = (0..self.cuts).map(|back| (block(self.back(back), lane), Apply::Copy));
            plan.push(Stream::recv(peer, part));
        }
    }

    fn hosts(self) -> usize {
        self.topology.hosts().len()
    }

    /// Returns whether two hosts exchange whole parts.
    fn is_pair(self) -> bool {
        self.cuts < self.hosts()
    }

    fn is_lane(self, place: usize) -> bool {
        place < self.topology.lanes()
    }

    /// Returns the host `places` places before this one on the ring.
    fn back(self, places: usize) -> usize {
        (self.host + self.hosts() - places % self.hosts()) % self.hosts()
    }

    /// Returns the other ranks of the host with their indices. The list begins with the next rank, so that
    /// not all ranks begin with the same peer.
    fn others(self) -> impl Iterator<Item = (usize, usize)> {
        let here = &self.topology.hosts()[self.host];
        (1..here.len()).map(move |distance| {
            let place = (self.place + distance) % here.len();
            (here[place], place)
        })
    }

    /// Returns the ranks of this lane on the next host and on the previous one. It returns `None` if this
    /// rank is no lane or there is one host.
    fn neighbours(self) -> Option<(usize, usize)> {
        let there = |host: usize| self.topology.hosts()[host][self.place];
        let ring = self.is_lane(self.place) && self.hosts() > 1;
        ring.then(|| (there((self.host + 1) % self.hosts()), there(self.back(1))))
    }
}

fn lead(elements: usize) -> isize {
    elements.cast_signed()
}

#[cfg(test)]
mod tests;
