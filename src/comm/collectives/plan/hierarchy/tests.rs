use super::*;
use crate::collectives::plan::Direction;
use crate::collectives::plan::check::{
    all_gather_is_right, all_reduce_is_right, on_even_hosts, on_hosts, reduce_scatter_is_right,
};

/// Chunk sizes: one element for small worlds, `world + 1` elements for larger ones; and one chunk of
/// everything.
const CHUNKS: [fn(usize) -> usize; 2] = [|world| if world < 7 { 1 } else { world + 1 }, |_| usize::MAX];

#[test]
fn result_includes_every_rank_exactly_once_on_any_hosts() {
    for chunk in CHUNKS {
        all_reduce_is_right(on_hosts, |rank, topology, count| {
            all_reduce(rank, topology, count, chunk(topology.world()))
        });
    }
}

#[test]
fn reduce_scatter_and_all_gather_halves_are_correct() {
    for chunk in CHUNKS {
        all_gather_is_right(on_even_hosts, |rank, topology, blocks| {
            all_gather(rank, topology, blocks, chunk(topology.world()))
        });
        reduce_scatter_is_right(on_even_hosts, |rank, topology, blocks| {
            reduce_scatter(rank, topology, blocks, chunk(topology.world()))
        });
    }
}

/// Returns the number of elements that leave each host.
fn leaving(topology: &Topology, plan: impl Fn(usize) -> Plan) -> Vec<usize> {
    let leaves = |host: usize, stream: &Stream| {
        stream.direction == Direction::Send && topology.host_and_index(stream.peer).0 != host
    };
    let of = |host: usize| {
        let streams = topology.hosts()[host].iter().flat_map(|&rank| plan(rank).streams);
        streams.filter(|stream| leaves(host, stream)).map(|stream| stream.len()).sum()
    };
    (0..topology.hosts().len()).map(of).collect()
}

#[test]
fn hierarchy_sends_the_minimum_between_hosts() {
    for hosts in 1..=5 {
        for ranks in 1..=5 {
            let topology = Topology::new((0..hosts * ranks).map(|rank| rank / ranks));
            let count = 60 * hosts * ranks;
            let sent = leaving(&topology, |rank| all_reduce(rank, &topology, count, 20 * hosts * ranks));
            assert_eq!(sent, vec![2 * count * (hosts - 1) / hosts; hosts], "{topology:?}");
            let blocks = Blocks::uniform(hosts * ranks, 60);
            let want = vec![ranks * 60 * (hosts - 1); hosts];
            assert_eq!(leaving(&topology, |rank| all_gather(rank, &topology, &blocks, 100)), want);
            assert_eq!(leaving(&topology, |rank| reduce_scatter(rank, &topology, &blocks, 100)), want);
        }
    }
    // For all hosts and counts, the total is 2·S·(H−1).
    for topology in (2..=12).flat_map(on_hosts) {
        let sent: usize = leaving(&topology, |rank| all_reduce(rank, &topology, 1001, 100)).iter().sum();
        assert_eq!(sent, 2 * 1001 * (topology.hosts().len() - 1), "{topology:?}");
    }
}
