//! Judges which host is to blame for connections that do not work. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::peer::{Link, LinkOutcome, Peer};
use super::problem::{Problem, host_list};

const CHECK: &str = "network";
/// Difference of clocks that is reported.
const CLOCK_TOLERANCE_MS: i64 = 30_000;
/// A host is slow if the throughput of its median pair is below this part of the usual one.
const SLOW: f64 = 0.25;

/// Returns problems about connections between `peers`.
pub(super) fn judge(peers: &[Peer], links: &[Link]) -> Vec<Problem> {
    let mut problems = unreachable(peers, links);
    problems.extend(packets(peers, links));
    problems.extend(clocks(peers, links));
    problems.extend(throughput(peers, links));
    problems
}

fn host_of(peers: &[Peer], node: usize) -> &str {
    peers.iter().find(|peer| peer.node == node).map_or("?", |peer| &peer.host)
}

/// Which nodes reach which others at the addresses that the job uses.
struct Reachability<'a> {
    /// Pairs of nodes of which the first reaches the second, at one port at least.
    reached: BTreeSet<(usize, usize)>,
    /// The failed attempts, by the node that was to be reached.
    failed: BTreeMap<usize, Vec<&'a Link>>,
    /// Nodes that have tried others, and reach none of several.
    isolated: BTreeSet<usize>,
}

impl<'a> Reachability<'a> {
    fn new(peers: &[Peer], links: &'a [Link]) -> Self {
        let (mut reached, mut failed) = (BTreeSet::new(), BTreeMap::<usize, Vec<&Link>>::new());
        for link in links.iter().filter(|link| link.is_main) {
            match link.outcome {
                LinkOutcome::Reached { .. } => drop(reached.insert((link.from, link.to))),
                LinkOutcome::NotReached(_) | LinkOutcome::OtherAnswered => {
                    failed.entry(link.to).or_default().push(link);
                }
                _ => {}
            }
        }
        let reaching: BTreeSet<usize> = reached.iter().map(|(from, _)| *from).collect();
        let tried = failed.values().flatten().map(|link| link.from);
        let isolated = tried.filter(|from| peers.len() > 2 && !reaching.contains(from)).collect();
        Self { reached, failed, isolated }
    }
}

/// Returns problems about nodes that others do not reach. O(links + peers), with a logarithm.
fn unreachable(peers: &[Peer], links: &[Link]) -> Vec<Problem> {
    let reachability = Reachability::new(peers, links);
    let mut problems = Vec::new();
    let doubled = doubled_addresses(peers, &reachability);
    let is_doubled = |peer: &Peer| doubled.values().flatten().any(|other| other.node == peer.node);
    for peer in peers.iter().filter(|peer| !is_doubled(peer)) {
        let Some(failed) = reachability.failed.get(&peer.node) else { continue };
        problems.extend(not_reached(peers, peer, failed, &reachability));
    }
    problems.extend(doubled.into_iter().map(|(ip, same)| {
        let text = format!("have one address, {ip}, so others reach only one of them by it");
        let remedy = "give each host an address of its own, and containers the network of their host (--network=host); or name an \
                      address that others reach in --local-addr";
        let hosts = same.into_iter().map(|peer| peer.host.clone()).collect();
        Problem { hosts, ..Problem::fail("addresses", "", text, remedy) }
    }));
    for peer in peers.iter().filter(|peer| reachability.isolated.contains(&peer.node)) {
        let text = "reaches no other host";
        let remedy = "look at its outgoing firewall rules, routes and cable: ip route, nft list ruleset";
        problems.push(Problem::fail(CHECK, &peer.host, text, remedy));
    }
    problems.extend(other_interfaces(peers, links));
    problems
}

/// Returns the addresses that several hosts have, with these hosts. Containers that share the network of their host
/// reach each other there, so they are not among them.
fn doubled_addresses<'a>(peers: &'a [Peer], all: &Reachability<'_>) -> BTreeMap<String, Vec<&'a Peer>> {
    let mut by_address = BTreeMap::<String, Vec<&Peer>>::new();
    for peer in peers {
        if let Some(address) = peer.main_address() {
            by_address.entry(address.ip.to_string()).or_default().push(peer);
        }
    }
    by_address.retain(|_, same| {
        same.iter().any(|peer| peer.host != same[0].host)
            && same.iter().any(|peer| all.failed.contains_key(&peer.node))
    });
    by_address
}

/// Returns the problem that others do not reach `peer`. `None` if only nodes that reach nobody do not: these are
/// named themselves.
fn not_reached(peers: &[Peer], peer: &Peer, failed: &[&Link], all: &Reachability<'_>) -> Option<Problem> {
    let from: BTreeSet<usize> =
        failed.iter().map(|link| link.from).filter(|from| !all.isolated.contains(from)).collect();
    let one = *from.first()?;
    let first = failed.iter().find(|link| link.from == one)?;
    let (host, address) = (&peer.host, first.address);
    let is_other = first.outcome == LinkOutcome::OtherAnswered;
    let why = match &first.outcome {
        LinkOutcome::NotReached(why) => why,
        _ => "another host or program answers there",
    };
    let others = peers.len() - 1;
    let who = if from.len() == others && others > 1 {
        "no other host reaches".to_owned()
    } else {
        let names: Vec<String> = from.iter().map(|&from| host_of(peers, from).to_owned()).collect();
        format!("{} cannot reach", host_list(&names))
    };
    let is_mutual = all.reached.contains(&(peer.node, one));
    let back = if is_mutual { format!("; {host} reaches {}", host_of(peers, one)) } else { String::new() };
    let is_partial = from.iter().any(|&from| all.reached.contains(&(from, peer.node)));
    let more = if is_partial { "; other ports of it are open" } else { "" };
    let remedy = if is_other {
        format!("give {host} an address of its own, or name the right interface in --local-addr")
    } else {
        format!(
            "open the TCP ports between the hosts in the firewall of {host}; is {address} its right address?"
        )
    };
    Some(Problem::fail(CHECK, host, format!("{who} {address} ({why}{back}{more})"), remedy))
}

/// Returns warnings about interfaces that NCCL uses by default and that do not connect the hosts.
fn other_interfaces(peers: &[Peer], links: &[Link]) -> Vec<Problem> {
    let mut by_interface: BTreeMap<(usize, &str), Vec<&Link>> = BTreeMap::new();
    for link in links.iter().filter(|link| !link.is_main) {
        by_interface.entry((link.to, &link.interface)).or_default().push(link);
    }
    let mut problems = Vec::new();
    for ((node, interface), links) in by_interface {
        let works = |link: &&&Link| matches!(link.outcome, LinkOutcome::Reached { .. });
        if let Some(link) = links.iter().find(|link| !works(link)) {
            let main = peers.iter().find(|peer| peer.node == node).and_then(Peer::main_address);
            let main = main.map_or("DEVICE", |address| &address.interface);
            let text = format!(
                "{} does not reach its interface {interface} ({}), which NCCL uses too",
                host_of(peers, link.from),
                link.address.ip()
            );
            let remedy = format!("export NCCL_SOCKET_IFNAME={main} on all nodes");
            problems.push(Problem::warning(CHECK, host_of(peers, node), text, remedy));
        }
    }
    problems
}

/// Returns problems about large packets that are lost.
fn packets(peers: &[Peer], links: &[Link]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for link in links {
        let (from, to) = (host_of(peers, link.from), host_of(peers, link.to));
        let mtu = |node: usize| {
            let address = peers.iter().find(|peer| peer.node == node).and_then(Peer::main_address);
            address.map_or_else(String::new, |address| {
                format!("{} of {} has MTU {}", address.interface, host_of(peers, node), address.mtu)
            })
        };
        let remedy =
            "set one MTU on all hosts, and at least that on the switches between: ip link set DEVICE mtu N";
        match link.outcome {
            LinkOutcome::LargePacketsLost { bytes } => {
                let text = format!(
                    "packets of {bytes} bytes from {from} do not arrive, small ones do ({}, {})",
                    mtu(link.from),
                    mtu(link.to)
                );
                problems.push(Problem::fail("MTU", to, text, remedy));
            }
            LinkOutcome::Stalled { bytes, arrived } => {
                let text = format!(
                    "{from} connects, but {} KiB did not get through in time ({} KiB did; {}, {})",
                    bytes / 1024,
                    arrived / 1024,
                    mtu(link.from),
                    mtu(link.to)
                );
                let remedy = format!("{remedy}; or the network is very slow or loses packets");
                problems.push(Problem::fail("MTU", to, text, remedy));
            }
            _ => {}
        }
    }
    problems
}

/// Returns a warning for each host whose clock differs from the others'.
fn clocks(peers: &[Peer], links: &[Link]) -> Vec<Problem> {
    let Some(first) = peers.iter().map(|peer| peer.node).min() else { return Vec::new() };
    // The milliseconds by which each clock is ahead of that of the first node.
    let mut ahead: BTreeMap<usize, i64> = BTreeMap::from([(first, 0)]);
    for link in links {
        match (&link.outcome, link.to == first, link.from == first) {
            (LinkOutcome::Reached { ahead_ms }, true, _) => drop(ahead.insert(link.from, -ahead_ms)),
            (LinkOutcome::Reached { ahead_ms }, _, true) => drop(ahead.entry(link.to).or_insert(*ahead_ms)),
            _ => {}
        }
    }
    let mut sorted: Vec<i64> = ahead.values().copied().collect();
    sorted.sort_unstable();
    let median = sorted[sorted.len() / 2];
    let text = |off: i64| {
        let way = if off > 0 { "ahead of" } else { "behind" };
        format!("its clock is {} s {way} that of the others", off.abs() / 1000)
    };
    let off = ahead
        .iter()
        .map(|(node, ahead)| (node, ahead - median))
        .filter(|(_, off)| off.abs() > CLOCK_TOLERANCE_MS);
    off.map(|(node, off)| {
        let remedy = "run a time service on all hosts (chrony, systemd-timesyncd); certificates, logs and caches rely on it";
        Problem::warning("clock", host_of(peers, *node), text(off), remedy)
    })
    .collect()
}

/// Returns a warning for each host that is much slower than the others.
fn throughput(peers: &[Peer], links: &[Link]) -> Vec<Problem> {
    let mut of_node: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for link in links {
        if let LinkOutcome::Throughput { megabytes_per_s } = link.outcome {
            of_node.entry(link.from).or_default().push(megabytes_per_s);
            of_node.entry(link.to).or_default().push(megabytes_per_s);
        }
    }
    let median = |values: &[f64]| {
        let mut values = values.to_vec();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let medians: Vec<(usize, f64)> = of_node.iter().map(|(node, values)| (*node, median(values))).collect();
    if medians.len() < 3 {
        return Vec::new();
    }
    let usual = median(&medians.iter().map(|(_, value)| *value).collect::<Vec<_>>());
    let slow = medians.iter().filter(|(_, value)| *value < SLOW * usual);
    slow.map(|(node, value)| {
        let text = format!("its connections carry {value:.0} MB/s, those of the other hosts {usual:.0} MB/s");
        let remedy = "compare link speed and errors with another host: ethtool DEVICE, ip -s link";
        Problem::warning("throughput", host_of(peers, *node), text, remedy)
    })
    .collect()
}

/// Returns the median and the least throughput of a pair, in MB/s, and the number of pairs.
pub(super) fn throughput_summary(links: &[Link]) -> Option<(usize, f64, f64)> {
    let mut values: Vec<f64> = links
        .iter()
        .filter_map(|link| match link.outcome {
            LinkOutcome::Throughput { megabytes_per_s } => Some(megabytes_per_s),
            _ => None,
        })
        .collect();
    values.sort_by(f64::total_cmp);
    let least = *values.first()?;
    Some((values.len(), values[values.len() / 2], least))
}
