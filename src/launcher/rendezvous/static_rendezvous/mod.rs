//! The static rendezvous: the user assigns node ranks, and node 0 serves a key-value store. The keys are
//! those of torchrun, so that nodes under torchrun and nodes under convoke can form one job.

mod commands;
mod completion;
mod generation;
mod outcome_store;
mod token;

use std::sync::Arc;
use std::time::{Duration, Instant};

use convoke_env::{Generation, Token};
use convoke_store::{PrefixStore, Store, StoreError, StoreServer, TcpStore};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::connect::connect_to_node_0;
use super::node_0_search::{find_node_0, own_address, serve_at_free_port};
use super::ranks::{Ranks, RoleInfo, assign};
use super::{Assignment, FailureProtocol, JobOutcome, OutcomeKind, RendezvousError};
use crate::config::Config;
use crate::formatting::{self, python_json};
use crate::host_name::full_host_name;
use crate::messages::{Progress, print_message};
use crate::scheduler::NodeSearch;
use generation::{generation_key, read_generation};
use outcome_store::OutcomeStore;

/// Timeout of a single operation on the key-value store once this node has connected to it.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval at which nodes that wait for their ranks check whether the job has already ended. Node 0 serves
/// its store for longer than that, so that each node can read the outcome.
const OUTCOME_POLL: Duration = Duration::from_millis(100);
/// Interval at which a node that is back looks whether node 0 still ends the job that failed.
const ENDED_POLL: Duration = Duration::from_millis(250);
/// Extra time that other nodes wait for their ranks, beyond node 0's own timeout, so that node 0 can report
/// missing nodes first.
const RANKS_GRACE: Duration = Duration::from_secs(5);

const ROLE_INFO: &str = "torchelastic/role_info/";
const ASSIGNED_RANKS: &str = "torchelastic/assigned_ranks/";
/// Prefix of the keys that hold the [`Registration`] of each node rank's agent. Only convoke uses these keys.
const NODE: &str = "convoke/node/";
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Description that a convoke agent publishes of itself, for other nodes to check.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Registration {
    version: String,
    host: String,
    pid: u32,
    nodes: usize,
    /// Random: in pods each launcher has pid 1, and one that comes back has the host name of the one before.
    #[serde(default)]
    id: String,
}

/// The static rendezvous of one node.
#[derive(Debug)]
pub(super) struct StaticRendezvous {
    host: String,
    port: u16,
    /// The search for node 0 if the user gave no address. `host` and `port` are then known after the first
    /// join.
    search: Option<NodeSearch>,
    node: usize,
    nodes: usize,
    run_id: String,
    role: String,
    workers: usize,
    timeout: Duration,
    joined: Option<Joined>,
}

/// The join of the first round: the part of the store for this job, and the time by which all nodes must
/// join.
struct FirstJoin {
    job: Arc<dyn Store>,
    outcomes: Option<Arc<OutcomeStore>>,
    deadline: Instant,
}

/// The store of node 0, and its access to the outcome of the job: `None` if node 0 runs another launcher.
type Registered = (Arc<dyn Store>, Option<OutcomeStore>);

/// State of a node from its first round on. The user assigns the node ranks, so they never change.
#[derive(Debug)]
struct Joined {
    /// Server of the key-value store, on node 0 only. It runs as long as this agent.
    _server: Option<StoreServer>,
    /// The whole key-value store. `job` is the part of it below this job's run id.
    store: Arc<dyn Store>,
    job: Arc<dyn Store>,
    outcomes: Option<Arc<OutcomeStore>>,
    assignment: Assignment,
    /// Number of the round that `assignment.generation` belongs to.
    round: u64,
}

impl StaticRendezvous {
    /// `place` is host and port of node 0, and how to find it if the user did not give them.
    pub(super) fn new(
        config: &Config,
        place: (&str, u16, Option<&NodeSearch>),
        node: usize,
        timeout: Duration,
    ) -> Self {
        let (host, port, search) = place;
        Self {
            host: host.to_owned(),
            port,
            search: search.cloned(),
            node,
            nodes: config.nodes.max,
            run_id: config.run_id.clone(),
            role: config.role.clone(),
            workers: config.nproc_per_node,
            timeout,
            joined: None,
        }
    }

    fn endpoint(&self) -> String {
        format!("{}:{} (static, run id \"{}\")", self.host, self.port, self.run_id)
    }

    fn first_join(&mut self) -> Result<Joined, RendezvousError> {
        if self.node >= self.nodes {
            return Err(RendezvousError::NodeRankOutOfRange { node_rank: self.node, expected: self.nodes });
        }
        super::check_loopback(self.nodes > 1)?;
        if self.nodes == 1 {
            super::warn_if_own_address_unreachable(&self.host);
        }
        let deadline = Instant::now() + self.timeout;
        let server = if self.node == 0 { Some(self.serve()?) } else { None };
        let (store, outcomes) = match &server {
            // A job with one node needs no connection: it uses the store within this process.
            Some(server) if self.nodes == 1 => (server.store(), None),
            _ => self.connect_and_register(deadline)?,
        };
        let job = self.job_store(&store);
        let join = FirstJoin { job, outcomes: outcomes.map(Arc::new), deadline };
        let assignment = self.exchange_ranks(&join);
        let FirstJoin { job, outcomes, .. } = join;
        if let (Err(error), Some(outcomes)) = (&assignment, &outcomes) {
            leave_with(outcomes, error);
        }
        Ok(Joined { _server: server, store, job, outcomes, assignment: assignment?, round: 0 })
    }

    /// On node 0: serves the store.
    fn serve(&mut self) -> Result<StoreServer, RendezvousError> {
        let Some(search) = &self.search else {
            let server = super::serve(&self.host, self.port)?;
            self.port = server.port();
            return Ok(server);
        };
        let server = serve_at_free_port(search)?;
        self.port = server.port();
        self.host = own_address(search);
        let place = formatting::address(&search.name, self.port);
        print_message(&format!("{}: {} nodes, node 0 is {place}", search.job, self.nodes));
        Ok(server)
    }

    /// Connects to the store of node 0 and registers this node there. A node that is back before the others have ended
    /// finds the store of the job that failed, and waits for that of the next start.
    fn connect_and_register(&mut self, deadline: Instant) -> Result<Registered, RendezvousError> {
        let mut progress = Progress::new(deadline);
        let mut failed: Option<JobOutcome> = None;
        loop {
            let outcome = match (self.try_register(deadline), &failed) {
                (Err(RendezvousError::JobEnded(outcome)), _) => outcome,
                // The store of the failed job ends.
                (Err(RendezvousError::Store(StoreError::Lost { .. })), Some(outcome)) => outcome.clone(),
                (other, _) => return other,
            };
            if Instant::now() + ENDED_POLL > deadline {
                return Err(RendezvousError::JobEnded(outcome));
            }
            let node_0 = formatting::address(&self.host, self.port);
            progress.show(&format!("waiting for node 0 at {node_0}: it still ends a job in which {outcome}"));
            failed = Some(outcome);
            std::thread::sleep(ENDED_POLL);
        }
    }

    /// Makes one attempt to register this node with node 0.
    ///
    /// # Errors
    /// [`RendezvousError::JobEnded`] if the store is that of a job that has this node and has failed.
    fn try_register(&mut self, deadline: Instant) -> Result<Registered, RendezvousError> {
        let tcp = Arc::new(self.connect(deadline)?);
        // Agents of torchrun count themselves in the store here, and a node 0 under torchrun waits until all are
        // counted.
        tcp.announce_worker(deadline)?;
        let store = Arc::clone(&tcp) as Arc<dyn Store>;
        let outcomes = self.register(&tcp, &self.job_store(&store), deadline)?;
        Ok((store, outcomes))
    }

    /// Returns the part of the store for this job.
    fn job_store(&self, store: &Arc<dyn Store>) -> Arc<dyn Store> {
        Arc::new(PrefixStore::new(&self.run_id, Arc::clone(store)))
    }

    /// Connects to the store of node 0.
    fn connect(&mut self, deadline: Instant) -> Result<TcpStore, RendezvousError> {
        match &self.search {
            Some(search) if self.node != 0 => {
                let key = format!("{}/{NODE}0", self.run_id);
                let found = find_node_0(search, key.as_bytes(), deadline)?;
                (self.host, self.port) = (found.host, found.port);
                Ok(found.store)
            }
            // The store listens at all addresses, and its name may not be known here.
            Some(_) => Ok(TcpStore::connect(&format!("127.0.0.1:{}", self.port), deadline)?),
            None => connect_to_node_0(&self.host, self.port, self.node == 0, deadline),
        }
    }

    /// Exchanges ranks and the generation with the other nodes of the job through the store.
    fn exchange_ranks(&self, join: &FirstJoin) -> Result<Assignment, RendezvousError> {
        let (job, deadline) = (join.job.as_ref(), join.deadline);
        let info = RoleInfo { role: self.role.clone(), rank: self.node, local_world_size: self.workers };
        let generation = (self.node == 0)
            .then(Generation::random)
            .transpose()
            .map_err(RendezvousError::system("cannot get random numbers"))?;
        if let Some(generation) = generation {
            job.set(generation_key(0).as_bytes(), generation.to_string().as_bytes(), deadline)?;
        }
        job.set(format!("{ROLE_INFO}{}", self.node).as_bytes(), python_json(&info).as_bytes(), deadline)?;
        let drawn_token = if self.node == 0 { self.assign_all(join)? } else { None };
        let ranks = self.read_ranks(join)?;
        let token = if self.node == 0 { drawn_token } else { self.read_token(job)? };
        // Node 0 wrote the generation before the ranks. If the generation is missing now, node 0 runs another
        // launcher.
        let generation = match generation {
            Some(generation) => Some(generation),
            None => read_generation(job, 0)?,
        };
        Ok(Assignment {
            round: 0,
            restarts: None,
            group_rank: self.node,
            group_world_size: self.nodes,
            base_rank: ranks.0,
            world_size: ranks.1,
            base_role_rank: ranks.2,
            role_world_size: ranks.3,
            master_addr: self.host.clone(),
            master_port: self.port,
            use_agent_store: true,
            generation,
            protocol: join.outcomes.as_ref().map_or(FailureProtocol::None, |_| FailureProtocol::FirstIsFinal),
            token,
        })
    }

    /// Registers this node and compares its settings with those of node 0. Returns `None` if node 0 runs
    /// another launcher.
    fn register(
        &self,
        tcp: &TcpStore,
        job: &Arc<dyn Store>,
        deadline: Instant,
    ) -> Result<Option<OutcomeStore>, RendezvousError> {
        let host = full_host_name();
        let id = Generation::random().map_err(RendezvousError::system("cannot get random numbers"))?;
        let (version, id) = (VERSION.to_owned(), id.to_string());
        let me = Registration { version, host, pid: std::process::id(), nodes: self.nodes, id };
        let mine = python_json(&me);
        let key = format!("{NODE}{}", self.node);
        let there = job.compare_set(key.as_bytes(), b"", mine.as_bytes(), deadline)?;
        if there != mine.as_bytes() {
            if let Some(outcome) = OutcomeStore::failure_of(job.as_ref(), self.node, &me.host, deadline)? {
                return Err(RendezvousError::JobEnded(outcome));
            }
            let other = parse::<Registration>(self.node, &key, &there)?;
            let other = format!("pid {} on {}", other.pid, other.host);
            let in_slurm = std::env::var_os("SLURM_JOB_ID").is_some();
            let error = RendezvousError::RankTaken { node: self.node, nodes: self.nodes, other, in_slurm };
            // Slurm starts each node once. So a duplicate there means that a rank is missing, for which the other
            // nodes would wait in vain.
            if in_slurm && !job.check(&[format!("{ASSIGNED_RANKS}0").as_bytes()], deadline)? {
                OutcomeStore::end_forming_job(job.as_ref(), self.node, &me.host, &error.to_string());
            }
            return Err(error);
        }
        let (position, hosts) = ((self.node, self.nodes), (me.host, self.host.clone()));
        let outcomes = OutcomeStore::register(tcp, Arc::clone(job), &self.run_id, position, hosts, deadline)?;
        let Some(outcomes) = outcomes else { return Ok(None) };
        let key = format!("{NODE}0");
        let first: Registration = parse(self.node, &key, &job.get(key.as_bytes(), deadline)?)?;
        if first.nodes != self.nodes {
            let (node, mine, theirs) = (self.node, self.nodes, first.nodes);
            let error = RendezvousError::NodeCountMismatch { node, mine, theirs, host: first.host };
            leave_with(&outcomes, &error);
            return Err(error);
        }
        if first.version != VERSION {
            print_message(&format!(
                "warning: this node runs convoke {VERSION}, but {} runs on node 0 ({})",
                first.version, first.host
            ));
        }
        Ok(Some(outcomes))
    }

    /// On node 0: waits for the role info of every node, then publishes the ranks of all nodes. Returns
    /// the token that it has drawn for the job.
    fn assign_all(&self, join: &FirstJoin) -> Result<Option<Token>, RendezvousError> {
        let (job, deadline) = (join.job.as_ref(), join.deadline);
        let keys: Vec<String> = (0..self.nodes).map(|node| format!("{ROLE_INFO}{node}")).collect();
        let keys: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
        self.wait_for_nodes(join, &keys)?;
        let mut infos = Vec::with_capacity(self.nodes);
        for (node, text) in job.multi_get(&keys, deadline)?.into_iter().enumerate() {
            let key = format!("{ROLE_INFO}{node}");
            let info: RoleInfo = parse(node, &key, &text)?;
            if info.rank != node || info.local_world_size == 0 {
                return Err(malformed(node, key, format!("{info:?}")));
            }
            infos.push(info);
        }
        let pairs: Vec<(String, String)> = assign(&infos)
            .iter()
            .enumerate()
            .map(|(node, ranks)| (format!("{ASSIGNED_RANKS}{node}"), python_json(ranks)))
            .collect();
        let pairs: Vec<(&[u8], &[u8])> =
            pairs.iter().map(|(key, value)| (key.as_bytes(), value.as_bytes())).collect();
        // The other nodes read the token when they know their ranks.
        let token = self.publish_token(job)?;
        job.multi_set(&pairs, deadline)?;
        Ok(token)
    }

    /// Waits until all `keys` (one per node) exist, and prints which nodes are missing.
    fn wait_for_nodes(&self, join: &FirstJoin, keys: &[&[u8]]) -> Result<(), RendezvousError> {
        let (job, deadline) = (join.job.as_ref(), join.deadline);
        let mut progress = Progress::new(deadline);
        loop {
            let until = deadline.min(Instant::now() + Progress::INTERVAL);
            match job.wait(keys, until) {
                Ok(()) => return Ok(()),
                Err(StoreError::Timeout { .. }) => join.check_not_ended()?,
                Err(error) => return Err(error.into()),
            }
            let mut missing = Vec::new();
            for (node, key) in keys.iter().enumerate() {
                if !job.check(&[key], soon())? {
                    missing.push(node);
                }
            }
            if missing.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let (expected, after_s, endpoint) = (self.nodes, self.timeout.as_secs(), self.endpoint());
                let by_scheduler = self.search.is_some();
                return Err(RendezvousError::MissingNodes {
                    missing,
                    expected,
                    after_s,
                    endpoint,
                    by_scheduler,
                });
            }
            let here = self.nodes - missing.len();
            let missing = super::nodes(&missing);
            progress.show(&format!("{here} of {} nodes have joined, waiting for {missing}", self.nodes));
        }
    }

    /// Waits for the ranks that node 0 assigns to this node.
    fn read_ranks(&self, join: &FirstJoin) -> Result<Ranks, RendezvousError> {
        let key = format!("{ASSIGNED_RANKS}{}", self.node);
        // Only node 0 knows which nodes are missing. The extra time lets node 0 report them first.
        let deadline = join.deadline + RANKS_GRACE;
        let mut progress = Progress::new(join.deadline);
        let mut show_at = Instant::now() + Progress::INTERVAL;
        let text = loop {
            match join.job.get(key.as_bytes(), deadline.min(Instant::now() + OUTCOME_POLL)) {
                Ok(text) => break text,
                Err(StoreError::Timeout { .. }) if Instant::now() < deadline => {
                    join.check_not_ended()?;
                    if Instant::now() >= show_at {
                        progress.show("node 0 has joined, waiting for other nodes");
                        show_at += Progress::INTERVAL;
                    }
                }
                Err(StoreError::Timeout { .. }) => {
                    let after_s = self.timeout.as_secs();
                    return Err(RendezvousError::NotAssigned { endpoint: self.endpoint(), after_s });
                }
                Err(error) => return Err(error.into()),
            }
        };
        let ranks: Ranks = parse(0, &key, &text)?;
        let fits = |base: usize, size: usize| base.checked_add(self.workers).is_some_and(|end| end <= size);
        if !fits(ranks.0, ranks.1) || !fits(ranks.2, ranks.3) {
            return Err(malformed(0, key, format!("{ranks:?} has no room for {} workers", self.workers)));
        }
        Ok(ranks)
    }

    fn join(&mut self) -> Result<Assignment, RendezvousError> {
        if let Some(joined) = &mut self.joined {
            joined.next_generation(&self.run_id)?;
            return Ok(joined.assignment.clone());
        }
        let joined = self.first_join()?;
        Ok(self.joined.insert(joined).assignment.clone())
    }
}

/// Returns the deadline of a single operation that begins now.
fn soon() -> Instant {
    Instant::now() + OPERATION_TIMEOUT
}

/// Parses what a node has published under `key`.
fn parse<T: DeserializeOwned>(node: usize, key: &str, text: &[u8]) -> Result<T, RendezvousError> {
    serde_json::from_slice(text).map_err(|error| malformed(node, key, error))
}

fn malformed(node: usize, key: impl Into<String>, what: impl ToString) -> RendezvousError {
    RendezvousError::Malformed { node, key: key.into(), what: what.to_string() }
}

/// Leaves the job because this node cannot take part in it.
fn leave_with(outcomes: &OutcomeStore, error: &RendezvousError) {
    outcomes.propose(&OutcomeKind::Error { text: error.to_string() }.into());
    outcomes.leave();
}

impl FirstJoin {
    /// Returns an error if another node has already ended the job.
    fn check_not_ended(&self) -> Result<(), RendezvousError> {
        match self.outcomes.as_ref().and_then(|outcomes| outcomes.current_outcome()) {
            Some(outcome) => Err(RendezvousError::JobEnded(outcome)),
            None => Ok(()),
        }
    }
}
