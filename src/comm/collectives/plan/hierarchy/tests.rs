use super::*;
use crate::collectives::plan::Direction;
use crate::collectives::plan::check::on_hosts;

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
