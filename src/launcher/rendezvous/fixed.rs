//! `static`: node ranks are given, node 0 serves the store, and the keys are those of torchrun, so that
//! nodes under torchrun and nodes under convoke can form one job.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use convoke_env::Generation;
use convoke_store::{PrefixStore, Store, StoreError, StoreServer, TcpStore};

use super::ranks::{Ranks, RoleInfo, assign, encode};
use super::{Assignment, Rendezvous, RendezvousError};
use crate::config::Config;

/// How long nodes that are done wait for the others.
const BARRIER_TIMEOUT: Duration = Duration::from_secs(300);
/// Longest single operation on a store that answers.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(60);
/// How often to look whether the set of missing nodes has changed, for the message about it.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);

const ROLE_INFO: &str = "torchelastic/role_info/";
const ASSIGNED_RANKS: &str = "torchelastic/assigned_ranks/";
const MEMBERS: &[u8] = b"torchelastic/agent/terminal_state/num_members";
const LAST_MEMBER: &[u8] = b"torchelastic/agent/terminal_state/last_member";
/// Generation of the nth round; ours, next to torchrun's keys.
const GENERATION: &str = "convoke/generation/";

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Fixed {
    host: String,
    port: u16,
    node: usize,
    nodes: usize,
    run_id: String,
    role: String,
    workers: usize,
    timeout: Duration,
    joined: Option<Joined>,
}

/// What stays from the first round on: ranks are given, so they never change.
#[derive(Debug)]
struct Joined {
    /// Node 0 serves it as long as this agent lives.
    _server: Option<StoreServer>,
    /// The whole store, and the part of this job.
    store: Arc<dyn Store>,
    job: PrefixStore,
    assignment: Assignment,
    /// Number of the round that `assignment.generation` belongs to.
    round: u64,
}

impl Fixed {
    pub(crate) fn new(config: &Config, host: &str, port: u16, node: usize, timeout: Duration) -> Self {
        Self {
            host: host.to_owned(),
            port,
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
            return Err(RendezvousError::NodeRank { node_rank: self.node, expected: self.nodes });
        }
        let deadline = Instant::now() + self.timeout;
        let server = if self.node == 0 { Some(super::serve(&self.host, self.port)?) } else { None };
        if let Some(server) = &server {
            self.port = server.port();
        }
        let store = TcpStore::connect(&super::address(&self.host, self.port), deadline)?;
        // torch's agents count themselves here, and its node 0 waits for the sum.
        store.announce_worker(deadline)?;
        let store: Arc<dyn Store> = Arc::new(store);
        let job = PrefixStore::new(&self.run_id, Arc::clone(&store));
        let info = RoleInfo { role: self.role.clone(), rank: self.node, local_world_size: self.workers };
        let generation = (self.node == 0).then(Generation::random).transpose().map_err(no_random)?;
        if let Some(generation) = generation {
            job.set(generation_key(0).as_bytes(), generation.to_string().as_bytes(), deadline)?;
        }
        job.set(format!("{ROLE_INFO}{}", self.node).as_bytes(), encode(&info).as_bytes(), deadline)?;
        if self.node == 0 {
            self.assign_all(&job, deadline)?;
        }
        let ranks = self.read_ranks(&job, deadline)?;
        // Node 0 wrote it before the ranks; if it is not there now, node 0 is another launcher.
        let generation = match generation {
            Some(generation) => Some(generation),
            None => self.read_generation(&job, 0)?,
        };
        let assignment = Assignment {
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
        };
        Ok(Joined { _server: server, store, job, assignment, round: 0 })
    }

    /// Node 0: waits for every node's role info and answers all of them.
    fn assign_all(&self, job: &dyn Store, deadline: Instant) -> Result<(), RendezvousError> {
        let keys: Vec<String> = (0..self.nodes).map(|node| format!("{ROLE_INFO}{node}")).collect();
        let keys: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
        self.wait_for_nodes(job, &keys, deadline)?;
        let mut infos = Vec::with_capacity(self.nodes);
        for (node, text) in job.multi_get(&keys, deadline)?.into_iter().enumerate() {
            let key = format!("{ROLE_INFO}{node}");
            let malformed = |what| RendezvousError::Malformed { node, key: key.clone(), what };
            let info: RoleInfo =
                serde_json::from_slice(&text).map_err(|error| malformed(error.to_string()))?;
            if info.rank != node || info.local_world_size == 0 {
                return Err(malformed(format!("{info:?}")));
            }
            infos.push(info);
        }
        let pairs: Vec<(String, String)> = assign(&infos)
            .iter()
            .enumerate()
            .map(|(node, ranks)| (format!("{ASSIGNED_RANKS}{node}"), encode(ranks)))
            .collect();
        let pairs: Vec<(&[u8], &[u8])> =
            pairs.iter().map(|(key, value)| (key.as_bytes(), value.as_bytes())).collect();
        Ok(job.multi_set(&pairs, deadline)?)
    }

    /// Waits until all `keys` (one a node) are there, and says who is missing, once per change.
    fn wait_for_nodes(
        &self,
        job: &dyn Store,
        keys: &[&[u8]],
        deadline: Instant,
    ) -> Result<(), RendezvousError> {
        let mut told = Vec::new();
        loop {
            let until = deadline.min(Instant::now() + PROGRESS_INTERVAL);
            match job.wait(keys, until) {
                Ok(()) => return Ok(()),
                Err(StoreError::Timeout { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            let grace = Instant::now() + OPERATION_TIMEOUT;
            let mut missing = Vec::new();
            for (node, key) in keys.iter().enumerate() {
                if !job.check(&[key], grace)? {
                    missing.push(node);
                }
            }
            let now = Instant::now();
            if missing.is_empty() {
                return Ok(());
            }
            if now >= deadline {
                let after_s = self.timeout.as_secs();
                let endpoint = self.endpoint();
                return Err(RendezvousError::Missing { missing, expected: self.nodes, after_s, endpoint });
            }
            if missing != told {
                let left = deadline.saturating_duration_since(now).as_secs();
                let here = self.nodes - missing.len();
                let mut stderr = std::io::stderr().lock();
                let _ = writeln!(
                    stderr,
                    "convoke: {here} of {} nodes are here, waiting for {} ({left} s left)",
                    self.nodes,
                    super::nodes(&missing)
                );
                told = missing;
            }
        }
    }

    fn read_ranks(&self, job: &dyn Store, deadline: Instant) -> Result<Ranks, RendezvousError> {
        let key = format!("{ASSIGNED_RANKS}{}", self.node);
        let text = match job.get(key.as_bytes(), deadline) {
            Err(StoreError::Timeout { .. }) => {
                let after_s = self.timeout.as_secs();
                return Err(RendezvousError::NotAssigned { endpoint: self.endpoint(), after_s });
            }
            other => other?,
        };
        let malformed = |what: String| RendezvousError::Malformed { node: 0, key: key.clone(), what };
        let ranks: Ranks = serde_json::from_slice(&text).map_err(|error| malformed(error.to_string()))?;
        let fits = |base: usize, size: usize| base.checked_add(self.workers).is_some_and(|end| end <= size);
        if !fits(ranks.0, ranks.1) || !fits(ranks.2, ranks.3) {
            return Err(malformed(format!("{ranks:?} has no room for {} workers", self.workers)));
        }
        Ok(ranks)
    }

    fn read_generation(&self, job: &dyn Store, round: u64) -> Result<Option<Generation>, RendezvousError> {
        let key = generation_key(round);
        let text = job.try_get(key.as_bytes(), Instant::now() + OPERATION_TIMEOUT)?;
        let parse = |text: Vec<u8>| {
            let text = String::from_utf8_lossy(&text);
            text.parse().map_err(|error: convoke_env::ParseGenerationError| RendezvousError::Malformed {
                node: 0,
                key: key.clone(),
                what: error.to_string(),
            })
        };
        text.map(parse).transpose()
    }

    /// A restart is local to the node, but its generation is everyone's: the first node that restarts
    /// makes the next one, nodes that follow it join the newest.
    fn next_generation(&self, joined: &mut Joined) -> Result<(), RendezvousError> {
        if joined.assignment.generation.is_none() {
            return Ok(());
        }
        let mut newest = None;
        while let Some(generation) = self.read_generation(&joined.job, joined.round + 1)? {
            newest = Some(generation);
            joined.round += 1;
        }
        if newest.is_none() {
            let mine = Generation::random().map_err(no_random)?;
            let deadline = Instant::now() + OPERATION_TIMEOUT;
            let key = generation_key(joined.round + 1);
            let text = mine.to_string();
            let agreed = joined.job.compare_set(key.as_bytes(), b"", text.as_bytes(), deadline)?;
            joined.round += 1;
            if agreed == text.as_bytes() {
                newest = Some(mine);
                self.delete_worker_keys(joined)?;
            } else {
                newest = self.read_generation(&joined.job, joined.round)?;
            }
        }
        joined.assignment.generation = newest;
        Ok(())
    }

    /// What the workers of the last round left in the store would confuse those of the next.
    fn delete_worker_keys(&self, joined: &Joined) -> Result<(), RendezvousError> {
        let deadline = Instant::now() + OPERATION_TIMEOUT;
        let ours = [format!("{}/torchelastic/", self.run_id), format!("{}/convoke/", self.run_id)];
        for key in joined.store.list_keys(deadline)? {
            if !ours.iter().any(|prefix| key.starts_with(prefix.as_bytes())) {
                joined.store.delete(&key, deadline)?;
            }
        }
        Ok(())
    }
}

impl Rendezvous for Fixed {
    fn join(&mut self, _restarts: u32) -> Result<Assignment, RendezvousError> {
        match self.joined.take() {
            None => self.joined = Some(self.first_join()?),
            Some(mut joined) => {
                let result = self.next_generation(&mut joined);
                self.joined = Some(joined);
                result?;
            }
        }
        let assignment = self.joined.as_ref().map(|joined| joined.assignment.clone());
        assignment.ok_or(RendezvousError::NotAssigned { endpoint: self.endpoint(), after_s: 0 })
    }

    fn barrier(&mut self) -> Option<String> {
        let joined = self.joined.as_ref()?;
        if self.nodes == 1 {
            return None;
        }
        let deadline = Instant::now() + BARRIER_TIMEOUT;
        let passed = joined.job.add(MEMBERS, 1, deadline).and_then(|arrived| {
            if arrived >= i64::try_from(self.nodes).unwrap_or(i64::MAX) {
                joined.job.set(LAST_MEMBER, b"<val_ignored>", deadline)
            } else {
                joined.job.wait(&[LAST_MEMBER], deadline)
            }
        });
        let error = passed.err()?;
        Some(format!("this node is done, but whether the others are is not known: {error}"))
    }
}

fn generation_key(round: u64) -> String {
    format!("{GENERATION}{round}")
}

fn no_random(source: std::io::Error) -> RendezvousError {
    RendezvousError::System { what: "no random numbers".to_owned(), source }
}
