//! Tries the connections of this node to the others.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use super::peer::{Link, LinkOutcome, Peer, PeerAddress};
use super::probe::{ProbeError, loses_large_packets, probe};

/// Most other nodes that one node tries: those that follow it in rank.
const MAX_PEERS: usize = 16;
/// Longest time to connect: one lost packet is sent again after a second.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(1500);
/// Most failed attempts that are repeated. A busy host answers the second time.
const MAX_REPEATED: usize = 16;
/// Bytes that go to the next node and back, and the longest time for them.
const NEXT_BYTES: u32 = 1 << 20;
const NEXT_TIMEOUT: Duration = Duration::from_millis(1500);
/// Longest time of [`try_all`] without throughput: two attempts to connect.
pub(super) const LINKS_TIMEOUT: Duration = Duration::from_secs(3);
/// Bytes of a measurement of throughput, and the longest time of all of them.
const THROUGHPUT_BYTES: u32 = 8 << 20;
const THROUGHPUT_EACH: Duration = Duration::from_secs(3);
pub(super) const THROUGHPUT_TIMEOUT: Duration = Duration::from_secs(12);

/// Tries the connections to the other nodes, and with `net` their throughput.
pub(super) fn try_all(me: &Peer, peers: &[Peer], net: bool) -> Vec<Link> {
    let place = peers.iter().position(|peer| peer.node == me.node).unwrap_or(0);
    let in_order: Vec<&Peer> = (1..peers.len()).map(|step| &peers[(place + step) % peers.len()]).collect();
    let mut attempts = Vec::new();
    for (step, peer) in in_order.iter().copied().take(MAX_PEERS).enumerate() {
        for address in &peer.addresses {
            let ports = if address.is_main { peer.ports.len() } else { 1 };
            for (index, &port) in peer.ports.iter().take(ports).enumerate() {
                let is_next = step == 0 && index == 0 && address.is_main;
                attempts.push(Attempt { peer, address, port, is_next });
            }
        }
    }
    let mut links = make_attempts(me, &attempts, in_order.first().copied());
    let is_failed = |attempt: &&Attempt<'_>| {
        let at = SocketAddr::new(attempt.address.ip, attempt.port);
        links.iter().any(|link| link.address == at && is_failure(&link.outcome))
    };
    // If very many fail, a repetition would only repeat the load.
    let failed: Vec<Attempt<'_>> = attempts.iter().filter(is_failed).take(MAX_REPEATED).copied().collect();
    let repeated = make_attempts(me, &failed, None);
    links.retain(|link| {
        !(is_failure(&link.outcome) && repeated.iter().any(|again| again.address == link.address))
    });
    links.extend(repeated);
    // One success for each address says enough, so results stay small in large jobs.
    let mut reached = BTreeSet::new();
    links.retain(|link| match link.outcome {
        LinkOutcome::Reached { .. } => reached.insert((link.to, link.address.ip())),
        _ => true,
    });
    if net {
        let deadline = Instant::now() + THROUGHPUT_TIMEOUT;
        links.extend(in_order.iter().filter_map(|peer| measure(me, peer, deadline)));
    }
    links
}

/// Returns the result of a thread, or panics as the thread did.
fn join<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// An attempt to reach another node.
#[derive(Clone, Copy)]
struct Attempt<'a> {
    peer: &'a Peer,
    address: &'a PeerAddress,
    port: u16,
    /// True if bytes are sent there and back as well.
    is_next: bool,
}

/// Returns true if an attempt to connect has failed.
fn is_failure(outcome: &LinkOutcome) -> bool {
    matches!(outcome, LinkOutcome::NotReached(_) | LinkOutcome::OtherAnswered)
}

/// Makes all attempts at one time. With `next`, also sends large packets to that node.
fn make_attempts(me: &Peer, attempts: &[Attempt<'_>], next: Option<&Peer>) -> Vec<Link> {
    thread::scope(|scope| {
        let mut running = Vec::new();
        for attempt in attempts {
            // Without a thread, this connection stays untried.
            running.extend(thread::Builder::new().spawn_scoped(scope, move || try_one(me, attempt)));
        }
        if let Some(next) = next {
            running.extend(thread::Builder::new().spawn_scoped(scope, move || try_large_packets(me, next)));
        }
        running.into_iter().flat_map(join).collect()
    })
}

fn link(me: &Peer, peer: &Peer, address: &PeerAddress, port: u16, outcome: LinkOutcome) -> Link {
    Link {
        from: me.node,
        to: peer.node,
        address: SocketAddr::new(address.ip, port),
        interface: address.interface.clone(),
        is_main: address.is_main,
        outcome,
    }
}

/// Connects once. If the node is the next one, also sends bytes there and back.
fn try_one(me: &Peer, attempt: &Attempt<'_>) -> Vec<Link> {
    let &Attempt { peer, address, port, is_next } = attempt;
    let at = SocketAddr::new(address.ip, port);
    let link = |outcome| link(me, peer, address, port, outcome);
    let outcome = match probe(at, &peer.id, 0, Instant::now() + CONNECT_TIMEOUT) {
        Ok(answer) => LinkOutcome::Reached { ahead_ms: answer.ahead_ms },
        Err(ProbeError::NotReached(why)) => LinkOutcome::NotReached(why),
        Err(ProbeError::OtherAnswered | ProbeError::Stalled { .. }) => LinkOutcome::OtherAnswered,
    };
    let is_reached = matches!(outcome, LinkOutcome::Reached { .. });
    let mut links = vec![link(outcome)];
    if is_next
        && is_reached
        && let Err(ProbeError::Stalled { arrived }) =
            probe(at, &peer.id, NEXT_BYTES, Instant::now() + NEXT_TIMEOUT)
    {
        links.push(link(LinkOutcome::Stalled { bytes: 2 * NEXT_BYTES as usize, arrived }));
    }
    links
}

/// Sends packets as large as this node's interface allows to the next node.
fn try_large_packets(me: &Peer, next: &Peer) -> Vec<Link> {
    let (Some(from), Some(to)) = (me.main_address(), next.main_address()) else { return Vec::new() };
    let at = SocketAddr::new(to.ip, next.datagram_port);
    let is_lost = loses_large_packets(at, &next.id, from.mtu);
    let lost = || link(me, next, to, next.datagram_port, LinkOutcome::LargePacketsLost { bytes: from.mtu });
    is_lost.then(lost).into_iter().collect()
}

fn measure(me: &Peer, peer: &Peer, deadline: Instant) -> Option<Link> {
    if Instant::now() >= deadline {
        return None;
    }
    let (address, &port) = (peer.main_address()?, peer.ports.first()?);
    let until = deadline.min(Instant::now() + THROUGHPUT_EACH);
    let answer = probe(SocketAddr::new(address.ip, port), &peer.id, THROUGHPUT_BYTES, until);
    let megabytes = 2.0 * f64::from(THROUGHPUT_BYTES) / 1e6;
    let megabytes_per_s = match answer {
        Ok(answer) => megabytes / answer.took.as_secs_f64().max(1e-6),
        #[allow(clippy::cast_precision_loss)] // a few million
        Err(ProbeError::Stalled { arrived }) => arrived as f64 / 1e6 / THROUGHPUT_EACH.as_secs_f64(),
        Err(ProbeError::NotReached(_) | ProbeError::OtherAnswered) => return None,
    };
    Some(link(me, peer, address, port, LinkOutcome::Throughput { megabytes_per_s }))
}
