//! Tests of the judgement on connections.

use std::net::{IpAddr, SocketAddr};

use super::links::{judge, throughput_summary};
use super::peer::{Link, LinkOutcome, Peer, PeerAddress};
use super::problem::Problem;

fn ip(node: usize) -> IpAddr {
    IpAddr::from([10, 0, 0, u8::try_from(node + 1).unwrap()])
}

fn peers(count: usize) -> Vec<Peer> {
    let peer = |node: usize| Peer {
        node,
        host: format!("h{}", node + 1),
        pid: 1,
        id: [0; 16],
        addresses: vec![PeerAddress { ip: ip(node), interface: "eth0".to_owned(), mtu: 1500, is_main: true }],
        ports: vec![7000],
        datagram_port: 7001,
    };
    (0..count).map(peer).collect()
}

fn link(from: usize, to: usize, outcome: LinkOutcome) -> Link {
    let (address, interface) = (SocketAddr::new(ip(to), 7000), "eth0".to_owned());
    Link { from, to, address, interface, is_main: true, outcome }
}

/// Judges `count` hosts, each of which reaches each other, except for `changed` connections.
fn judged(count: usize, changed: impl Fn(usize, usize) -> LinkOutcome) -> Vec<String> {
    let pairs =
        (0..count).flat_map(|from| (0..count).map(move |to| (from, to))).filter(|(from, to)| from != to);
    let links: Vec<Link> = pairs.map(|(from, to)| link(from, to, changed(from, to))).collect();
    judge(&peers(count), &links)
        .iter()
        .map(|problem| problem.lines().lines().next().unwrap().to_owned())
        .collect()
}

fn reached() -> LinkOutcome {
    LinkOutcome::Reached { ahead_ms: 0 }
}

fn no_answer() -> LinkOutcome {
    LinkOutcome::NotReached("no answer in 1.5 s".to_owned())
}

#[test]
fn working_connections_give_no_problem() {
    assert_eq!(judged(4, |_, _| reached()), [""; 0]);
}

#[test]
fn one_way_cut_names_the_host_that_is_not_reached() {
    let found = judged(3, |from, to| if (from, to) == (0, 2) { no_answer() } else { reached() });
    assert_eq!(found, ["FAIL h3: h1 cannot reach 10.0.0.3:7000 (no answer in 1.5 s; h3 reaches h1)"]);
}

#[test]
fn host_that_nobody_reaches_is_named_once() {
    let found = judged(4, |_, to| if to == 2 { no_answer() } else { reached() });
    assert_eq!(found, ["FAIL h3: no other host reaches 10.0.0.3:7000 (no answer in 1.5 s; h3 reaches h1)"]);
}

#[test]
fn host_that_reaches_nobody_is_named_instead_of_all_others() {
    let found = judged(4, |from, _| if from == 1 { no_answer() } else { reached() });
    assert_eq!(found, ["FAIL h2: reaches no other host"]);
}

#[test]
fn address_that_another_host_has_too_is_named() {
    let found = judged(3, |_, to| if to == 1 { LinkOutcome::OtherAnswered } else { reached() });
    assert_eq!(
        found,
        [
            "FAIL h2: no other host reaches 10.0.0.2:7000 (another host or program answers there; h2 reaches h1)"
        ]
    );
}

#[test]
fn clock_that_differs_is_named_also_if_it_is_that_of_node_0() {
    // Node 0 is an hour behind: all others are ahead of it.
    let found = judged(4, |from, to| LinkOutcome::Reached {
        ahead_ms: match (from, to) {
            (0, _) => 3_600_000,
            (_, 0) => -3_600_000,
            _ => 0,
        },
    });
    assert_eq!(found, ["WARN h1: its clock is 3600 s behind that of the others"]);
    let small = judged(4, |_, to| LinkOutcome::Reached { ahead_ms: if to == 0 { 20_000 } else { 0 } });
    assert_eq!(small, [""; 0]);
}

#[test]
fn interface_that_only_nccl_would_use_is_a_warning() {
    let mut links = vec![link(0, 1, reached()), link(1, 0, reached()), link(0, 1, no_answer())];
    links[2].is_main = false;
    links[2].interface = "eth1".to_owned();
    let found = judge(&peers(2), &links);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].text, "h1 does not reach its interface eth1 (10.0.0.2), which NCCL uses too");
    assert_eq!(found[0].remedy, "export NCCL_SOCKET_IFNAME=eth0 on all nodes");
}

#[test]
fn slow_host_is_found_by_its_median_pair() {
    let speed = |from: usize, to: usize| LinkOutcome::Throughput {
        megabytes_per_s: if from == 3 || to == 3 { 90.0 } else { 1000.0 },
    };
    assert_eq!(
        judged(5, speed),
        ["WARN h4: its connections carry 90 MB/s, those of the other hosts 1000 MB/s"]
    );
    // One slow pair is no slow host.
    let pair = |from: usize, to: usize| LinkOutcome::Throughput {
        megabytes_per_s: if (from, to) == (0, 1) { 90.0 } else { 1000.0 },
    };
    assert_eq!(judged(5, pair), [""; 0]);
    let links = vec![link(0, 1, speed(0, 1)), link(0, 3, speed(0, 3))];
    assert_eq!(throughput_summary(&links), Some((2, 1000.0, 90.0)));
    assert_eq!(throughput_summary(&[link(0, 1, reached())]), None);
}

#[test]
fn hosts_with_one_address_are_named_together_unless_all_are_reached() {
    let mut peers = peers(3);
    peers[2].addresses[0].ip = ip(1);
    let links = |outcome: LinkOutcome| vec![link(0, 1, reached()), link(0, 2, outcome)];
    let found: Vec<_> =
        judge(&peers, &links(LinkOutcome::OtherAnswered)).iter().map(Problem::lines).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    let begin = "FAIL h2, h3: have one address, 10.0.0.2, so others reach only one of them by it\n     try: give each host";
    assert!(found[0].starts_with(begin), "{found:?}");
    // Containers with the network of their host.
    assert_eq!(judge(&peers, &links(reached())), []);
}
