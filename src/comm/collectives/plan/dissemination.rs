//! Barrier by dissemination or recursive doubling, first inside the hosts and then between them.

use super::{Apply, Plan, Stream, Topology};

/// Most elements in the buffer of a barrier, of any number of ranks and hosts.
pub(crate) const MOST_BARRIER_ELEMENTS: usize = 2 * usize::BITS as usize;

/// Returns the number of elements in the buffer of a barrier, one for each round: log2 of the ranks of the
/// largest host and log2 of the hosts, each rounded up.
pub(crate) fn barrier_elements(topology: &Topology) -> usize {
    rounds_among(topology.largest_host()) + rounds_among(topology.hosts().len())
}

fn rounds_among(parties: usize) -> usize {
    parties.next_power_of_two().ilog2() as usize
}

/// Returns the party to which party `index` of `parties` sends in a round, and the one from which it receives.
///
/// Both are one party if the number of parties is a power of two (recursive doubling). Then each byte also acknowledges
/// the byte that came the other way. Over TCP, a byte to a party that never answers takes up to 1.6 times as long.
fn partners(index: usize, parties: usize, round: usize) -> (usize, usize) {
    let distance = 1 << round;
    if parties.is_power_of_two() {
        return (index ^ distance, index ^ distance);
    }
    ((index + distance) % parties, (index + parties - distance) % parties)
}

/// Returns the plan of `rank` for a barrier, over a buffer of [`barrier_elements`] one-byte elements.
///
/// In round k a rank sends one byte to a [partner](partners) on its host; the value does not matter. The byte says that
/// the sender, and all ranks of whose arrival it knows, have arrived. Once every rank knows this of all ranks of its
/// host, the hosts do the same among each other, where each rank sends to its counterpart. So only log2(H) rounds use
/// the network. The streams of a round wait for the round before, because what the byte says is true only then.
///
/// Hensgen, Finkel & Manber 1988, doi:10.1007/BF01379320.
pub(crate) fn barrier(rank: usize, topology: &Topology) -> Plan {
    let (mut plan, mut last_recv) = (Plan::default(), None);
    let hosts = topology.hosts();
    let (host, local_rank) = topology.host_and_index(rank);
    let here = &hosts[host];
    for round in 0..rounds_among(here.len()) {
        let (to, from) = partners(local_rank, here.len(), round);
        last_recv = push_round(&mut plan, round, [here[to]], here[from], last_recv);
    }
    for round in 0..rounds_among(hosts.len()) {
        let (to, from) = partners(host, hosts.len(), round);
        let (to, from) = (&hosts[to], &hosts[from]);
        // If the next host has more ranks than this one, a rank sends to several counterparts there.
        let counterparts = to.iter().copied().skip(local_rank).step_by(here.len());
        let number = rounds_among(topology.largest_host()) + round;
        last_recv = push_round(&mut plan, number, counterparts, from[local_rank % from.len()], last_recv);
    }
    plan
}

/// Adds the streams of one barrier round, which wait for `last_recv`, the receiving stream of the round
/// before. Returns the receiving stream of this round.
fn push_round(
    plan: &mut Plan,
    round: usize,
    to: impl IntoIterator<Item = usize>,
    from: usize,
    last_recv: Option<usize>,
) -> Option<usize> {
    for peer in to {
        plan.push(Stream::send(peer, Some(round..round + 1)).after(last_recv, 0));
    }
    Some(plan.push(Stream::recv(from, [(round..round + 1, Apply::Copy)]).after(last_recv, 0)))
}

#[cfg(test)]
mod tests {
    #[test]
    fn barrier_completes_only_after_all_ranks_enter() {
        crate::collectives::plan::check::barrier_is_right(super::barrier_elements, super::barrier);
    }
}
