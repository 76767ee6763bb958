//! The course of a check on one node: joins the others, tries the connections to them, exchanges results.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use convoke_env::host::{Interface, Reach, interfaces};
use convoke_store::StoreError;
use serde::de::DeserializeOwned;

use super::connections;
use super::host::HostChecks;
use super::options::Options;
use super::peer::{Link, NodeResult, Peer, PeerAddress};
use super::probe::{ProbePorts, answer_probes};
use super::problem::Problem;
use super::report::{CheckedNode, Report};
use super::{compare, links};
use crate::config::{Config, Rendezvous};
use crate::formatting;
use crate::messages::Progress;
use crate::rendezvous::{CheckStore, RendezvousError, open_check_store};

/// Longest time of an operation on the store.
const OPERATION: Duration = Duration::from_secs(5);
/// Time after the last node has come for more nodes of an elastic job.
const LAST_CALL: Duration = Duration::from_secs(2);
/// Time beyond that of the connections that nodes have on a busy machine.
const BUSY_MARGIN: Duration = Duration::from_secs(10);
/// Time for a result or report after its mark has arrived. A network that loses large packets delivers the mark
/// alone.
const TRANSFER: Duration = Duration::from_millis(700);
/// Longest time for which node 0 keeps the report for the others.
const LINGER: Duration = Duration::from_millis(1000);
const POLL: Duration = Duration::from_millis(5);
/// Most addresses that a node publishes.
const MAX_ADDRESSES: usize = 4;

const MEMBERS: &[u8] = b"members";
const REPORT: &[u8] = b"report";
/// Mark that the report is there.
const REPORTED: &[u8] = b"reported";
const READ: &[u8] = b"read";
/// Problems of nodes that cannot take part, as JSON arrays, one a line.
const REFUSED: &[u8] = b"refused";

/// The end of a check on this node.
pub(super) struct Outcome {
    pub(super) report: Report,
    /// True if the report is about all nodes. False if this node did not get so far.
    pub(super) is_complete: bool,
    pub(super) is_node_0: bool,
}

/// The knowledge of a node after it has tried the connections.
struct Exchanged {
    /// The nodes that take part; empty if there is only one.
    peers: Vec<Peer>,
    /// The connections of this node.
    links: Vec<Link>,
    /// Problems about nodes that did not come.
    missing: Vec<Problem>,
    /// When the nodes began to try the connections.
    begun: Instant,
}

/// One node's part in a check.
pub(super) struct Session<'a> {
    pub(super) config: &'a Config,
    pub(super) options: &'a Options,
    pub(super) host: String,
    pub(super) start: Instant,
}

impl Session<'_> {
    /// Runs the check. `checks` are those of this host, which have begun.
    pub(super) fn run(&self, checks: HostChecks) -> Outcome {
        let wait = self.options.wait(self.config);
        let store = match open_check_store(self.config, wait, self.options.is_pod) {
            Ok(store) => store,
            Err(error) => return self.alone(checks, &error, self.config.is_first_node()),
        };
        let is_node_0 = store.is_server();
        match self.exchange(&store, wait) {
            Ok(exchanged) => self.conclude(&store, checks, exchanged),
            Err(error) => {
                if !is_node_0 {
                    let problem = serde_json::to_string(&[problem_of(&error, &self.host)]);
                    let line = problem.expect("a problem is plain data") + "\n";
                    // Node 0 then reports it too. This node prints it in any case.
                    let _ = store.store().append(REFUSED, line.as_bytes(), soon());
                }
                self.alone(checks, &error, is_node_0)
            }
        }
    }

    /// Returns the outcome of a node that did not reach the others.
    fn alone(&self, checks: HostChecks, error: &RendezvousError, is_node_0: bool) -> Outcome {
        let mut result = checks.finish();
        result.problems.insert(0, problem_of(error, &self.host));
        result.not_checked.push("all that concerns other nodes".to_owned());
        let report = self.report(vec![self.checked(self.config.node_rank())], result, None);
        Outcome { report, is_complete: false, is_node_0 }
    }

    /// Meets the others and tries the connections to them.
    fn exchange(&self, store: &CheckStore, wait: Duration) -> Result<Exchanged, RendezvousError> {
        if self.config.nodes.max == 1 {
            let begun = Instant::now();
            return Ok(Exchanged { peers: Vec::new(), links: Vec::new(), missing: Vec::new(), begun });
        }
        let me = self.publish(store)?;
        let deadline = self.start + wait;
        let missing = if store.is_server() { self.gather(store, deadline)? } else { Vec::new() };
        let members: Vec<usize> = parse(
            0,
            "members",
            &store.store().get(MEMBERS, deadline + BUSY_MARGIN).map_err(|error| late(error, store))?,
        )?;
        if !members.contains(&me.node) {
            return Err(RendezvousError::Refused(format!(
                "node {} came when the check of the others had begun, or is one more than node 0 expects\n  try: start all \
                 nodes within --wait, with the same --nnodes",
                me.node
            )));
        }
        let mut peers = Vec::with_capacity(members.len());
        for node in members {
            let text = store.store().get(key("node", node).as_bytes(), soon())?;
            peers.push(parse::<Peer>(node, "node", &text)?);
        }
        let begun = Instant::now();
        let links = connections::try_all(&me, &peers, self.options.net);
        Ok(Exchanged { peers, links, missing, begun })
    }

    /// Starts to answer the others, and publishes where.
    fn publish(&self, store: &CheckStore) -> Result<Peer, RendezvousError> {
        let system = |what: &str, source| RendezvousError::System { what: what.to_owned(), source };
        let mut id = [0; 16];
        getrandom::fill(&mut id)
            .map_err(|error| system("cannot get random numbers", std::io::Error::other(error)))?;
        let ProbePorts { tcp, udp } =
            answer_probes(id).map_err(|error| system("cannot listen for the other nodes", error))?;
        let me = Peer {
            node: store.node,
            host: self.host.clone(),
            pid: std::process::id(),
            id,
            addresses: addresses(store.address, self.config.local_addr.as_deref()),
            ports: tcp,
            datagram_port: udp,
        };
        let mine = serde_json::to_vec(&me).expect("a node is plain data");
        let there = store.store().compare_set(key("node", me.node).as_bytes(), b"", &mine, soon())?;
        if there != mine {
            let other: Peer = parse(me.node, "node", &there)?;
            return Err(RendezvousError::RankTaken {
                node: me.node,
                nodes: self.config.nodes.max,
                other: format!("pid {} on {}", other.pid, other.host),
                in_slurm: self.config.scheduled.as_ref().is_some_and(|job| job.is_slurm),
            });
        }
        Ok(me)
    }

    /// On node 0: waits for the others, and publishes which of them take part. Returns problems about missing nodes.
    fn gather(&self, store: &CheckStore, deadline: Instant) -> Result<Vec<Problem>, RendezvousError> {
        let nodes = self.config.nodes;
        let mut progress = Progress::new(deadline);
        let (mut show_at, mut came_at) = (Instant::now() + Progress::INTERVAL, Instant::now());
        let mut present: Vec<usize> = Vec::new();
        loop {
            for node in 0..nodes.max {
                if !present.contains(&node) && store.store().check(&[key("node", node).as_bytes()], soon())? {
                    present.push(node);
                    came_at = Instant::now();
                }
            }
            let now = Instant::now();
            let is_enough = nodes.min < nodes.max && present.len() >= nodes.min && now > came_at + LAST_CALL;
            if present.len() == nodes.max || is_enough || now >= deadline {
                break;
            }
            if now >= show_at {
                let here = present.len();
                progress.show(&format!("{here} of {} nodes have come to the check", nodes.max));
                show_at = now + Progress::INTERVAL;
            }
            std::thread::sleep(POLL);
        }
        drop(progress);
        present.sort_unstable();
        let members = serde_json::to_vec(&present).expect("numbers are plain data");
        store.store().set(MEMBERS, &members, soon())?;
        Ok(if present.len() >= nodes.min { Vec::new() } else { self.missing(&present, store) })
    }

    fn missing(&self, present: &[usize], store: &CheckStore) -> Vec<Problem> {
        let after = self.start.elapsed().as_secs_f64();
        let names = self.config.scheduled.as_ref().map(|job| job.hosts.as_slice());
        let has_ranks = matches!(self.config.rendezvous, Rendezvous::Static { .. });
        let expected = if has_ranks { self.config.nodes.max } else { self.config.nodes.min };
        let absent = (0..expected).filter(|node| !present.contains(node));
        let problem = |node: usize| {
            let name = names.and_then(|names| names.get(node)).cloned();
            let text = format!("did not come to the check within {after:.0} s");
            let remedy = format!(
                "see what convoke check prints on that node; is it started there, and may it reach {}? --wait gives it more time",
                store.place
            );
            Problem::fail("nodes", &name.unwrap_or_else(|| format!("node {node}")), text, remedy)
        };
        absent.map(problem).collect()
    }

    /// Exchanges the results of all nodes, and returns the report on them.
    fn conclude(&self, store: &CheckStore, checks: HostChecks, exchanged: Exchanged) -> Outcome {
        let Exchanged { peers, links, missing, begun } = exchanged;
        let mut result = checks.finish();
        result.links = links;
        let net = if self.options.net { connections::THROUGHPUT_TIMEOUT } else { Duration::ZERO };
        let deadline = begun + connections::LINKS_TIMEOUT + net + BUSY_MARGIN;
        let is_node_0 = store.is_server();
        let given = if is_node_0 {
            self.combine(store, &peers, result.clone(), missing, deadline)
        } else {
            self.hand_in(store, &result, deadline + TRANSFER)
        };
        match given {
            Ok(report) => Outcome { report, is_complete: true, is_node_0 },
            Err(error) => {
                result.problems.insert(0, problem_of(&error, &self.host));
                let report = self.report(vec![self.checked(store.node)], result, None);
                Outcome { report, is_complete: false, is_node_0 }
            }
        }
    }

    /// On other nodes: gives the result to node 0, and returns the report.
    fn hand_in(
        &self,
        store: &CheckStore,
        result: &NodeResult,
        deadline: Instant,
    ) -> Result<Report, RendezvousError> {
        let text = serde_json::to_vec(result).expect("a result is plain data");
        let exchange = || {
            store.store().set(key("finished", store.node).as_bytes(), b"1", soon())?;
            store.store().set(key("result", store.node).as_bytes(), &text, Instant::now() + 2 * TRANSFER)?;
            store.store().wait(&[REPORTED], deadline)?;
            let report = store.store().get(REPORT, Instant::now() + TRANSFER)?;
            store.store().add(READ, 1, soon())?;
            Ok::<_, StoreError>(report)
        };
        parse(0, "report", &exchange().map_err(|error| late(error, store))?)
    }

    /// On node 0: waits for the results, and publishes the report.
    fn combine(
        &self,
        store: &CheckStore,
        peers: &[Peer],
        own: NodeResult,
        missing: Vec<Problem>,
        deadline: Instant,
    ) -> Result<Report, RendezvousError> {
        let mut all = NodeResult { problems: missing, ..NodeResult::default() };
        let mut facts = vec![(self.host.clone(), own.facts.clone())];
        let take = |all: &mut NodeResult, result: NodeResult| {
            all.problems.extend(result.problems);
            all.links.extend(result.links);
            all.not_checked.extend(result.not_checked);
        };
        take(&mut all, own);
        for peer in peers.iter().filter(|peer| peer.node != store.node) {
            let finished = store.store().wait(&[key("finished", peer.node).as_bytes()], deadline);
            let result = key("result", peer.node);
            match finished.and_then(|()| store.store().get(result.as_bytes(), Instant::now() + TRANSFER)) {
                Ok(text) => {
                    let result: NodeResult = parse(peer.node, "result", &text)?;
                    facts.push((peer.host.clone(), result.facts.clone()));
                    take(&mut all, result);
                }
                Err(StoreError::Timeout { .. }) => {
                    let text = "gave no result in time";
                    let remedy =
                        "see what convoke check prints on that node; is it overloaded, or was it killed?";
                    all.problems.push(Problem::fail("nodes", &peer.host, text, remedy));
                }
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(text) = store.store().try_get(REFUSED, soon())? {
            for line in String::from_utf8_lossy(&text).lines() {
                all.problems.extend(parse::<Vec<Problem>>(0, "refused", line.as_bytes())?);
            }
        }
        let of_host: Vec<_> = facts.iter().map(|(host, facts)| (host.as_str(), facts)).collect();
        all.problems.extend(compare::compare(&of_host));
        all.problems.extend(links::judge(peers, &all.links));
        let mut nodes: Vec<CheckedNode> =
            peers.iter().map(|peer| CheckedNode { node: peer.node, host: peer.host.clone() }).collect();
        if nodes.is_empty() {
            nodes.push(self.checked(store.node));
        }
        let throughput = links::throughput_summary(&all.links);
        let report = self.report(nodes, all, throughput);
        store.store().set(REPORT, report.json().as_bytes(), soon())?;
        store.store().set(REPORTED, b"1", soon())?;
        let until = Instant::now() + LINGER;
        let others = peers.len().saturating_sub(1);
        let has_read =
            || store.store().add(READ, 0, soon()).is_ok_and(|count| usize::try_from(count) == Ok(others));
        while others > 0 && !has_read() && Instant::now() < until {
            std::thread::sleep(POLL);
        }
        Ok(report)
    }

    fn checked(&self, node: usize) -> CheckedNode {
        CheckedNode { node, host: self.host.clone() }
    }

    fn report(
        &self,
        nodes: Vec<CheckedNode>,
        result: NodeResult,
        throughput: Option<(usize, f64, f64)>,
    ) -> Report {
        let NodeResult { problems, not_checked, .. } = result;
        Report::new(nodes, problems, not_checked, throughput, self.start.elapsed().as_secs_f64())
    }
}

/// Returns the addresses to publish: the one on the way to node 0 first, then those of other interfaces that may
/// reach other hosts.
fn addresses(on_the_way: Option<IpAddr>, given: Option<&str>) -> Vec<PeerAddress> {
    let all: Vec<Interface> = interfaces().unwrap_or_else(|_| Vec::new());
    let main = given.and_then(|given| given.parse().ok()).or(on_the_way);
    let mut found: Vec<PeerAddress> = Vec::new();
    for interface in all.iter().filter(|interface| interface.is_up) {
        let mtu = std::fs::read_to_string(format!("/sys/class/net/{}/mtu", interface.name));
        let mtu = mtu.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(1500);
        let reaches = matches!(interface.reach(), Reach::DefaultRoute | Reach::Network);
        let own = interface.usable_address().filter(|_| reaches);
        let here = interface.addresses.iter().copied().find(|ip| Some(*ip) == main);
        if let Some(ip) = here.or(own) {
            found.push(PeerAddress { ip, interface: interface.name.clone(), mtu, is_main: Some(ip) == main });
        }
    }
    found.sort_by_key(|address| !address.is_main);
    found.truncate(MAX_ADDRESSES);
    found
}

fn key(what: &str, node: usize) -> String {
    format!("{what}/{node}")
}

fn soon() -> Instant {
    Instant::now() + OPERATION
}

/// Returns the problem about an error that kept this node from the others.
fn problem_of(error: &RendezvousError, host: &str) -> Problem {
    let text = error.to_string();
    let (text, remedy) = text.split_once("\n  try: ").unwrap_or((&text, ""));
    Problem::fail("rendezvous", host, text.replace("\n  ", "; "), remedy)
}

/// Describes the loss of node 0.
fn late(error: StoreError, store: &CheckStore) -> RendezvousError {
    match error {
        StoreError::Timeout { .. } | StoreError::Lost { .. } => RendezvousError::Refused(format!(
            "node 0 ({}) gave no report: {error}\n  try: see what convoke check prints on node 0",
            formatting::cut_text(&store.place, 200)
        )),
        error => error.into(),
    }
}

fn parse<T: DeserializeOwned>(node: usize, key: &str, text: &[u8]) -> Result<T, RendezvousError> {
    serde_json::from_slice(text).map_err(|error| RendezvousError::Malformed {
        node,
        key: key.to_owned(),
        what: error.to_string(),
    })
}
