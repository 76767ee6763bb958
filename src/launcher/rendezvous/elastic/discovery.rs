//! Coordinator discovery: finds the coordinator of a job, or becomes the coordinator.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use convoke_env::Token;

use super::job::Job;
use super::leadership::Leadership;
use super::registry::{Entry, EntrySnapshot, Registry, RegistryError};
use super::server::RendezvousServer;
use super::{Settings, host_addresses};
use crate::config::is_named;
use crate::membership::{AgentId, Coordinator, JobResult, RECONNECT_TIMEOUT, Record, leader_lease};
use crate::rendezvous::interfaces;

/// Number of refused connections after which a node treats the registered coordinator as dead.
const MAX_REFUSED: u32 = 3;

/// Longest time to connect to a coordinator that is expected to be alive, including authentication.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Reason for which an attempt to connect to the coordinator failed.
pub(super) enum ConnectFailure {
    /// No coordinator has answered because of the error `why`.
    Unreachable { why: String, how: LastAttempt },
    /// The registry names another coordinator, or the current one has lost its lease.
    Moved,
    /// A connection is impossible, for example because the coordinator refuses this node. The text is the
    /// reason.
    Unusable(String),
    /// The job has ended with this outcome. This node took part in the job, or the outcome does not free the
    /// run id.
    Closed(JobResult),
    /// The job that this node took part in has ended, and another job has started under the same run id.
    Replaced,
}

impl From<RegistryError> for ConnectFailure {
    fn from(error: RegistryError) -> Self {
        match error {
            RegistryError::Transient(why) => Self::Unreachable { why, how: LastAttempt::NoFailure },
            RegistryError::Permanent(why) => Self::Unusable(why),
        }
    }
}

/// Result of the last attempt to reach the coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LastAttempt {
    /// There was no attempt, or it succeeded.
    NoFailure,
    /// The coordinator's host answers, but no process listens at the port.
    Refused,
    /// The coordinator did not answer, or another error occurred.
    Failed,
}

/// Addresses of a possible coordinator, and the token by which this node authenticates itself.
#[derive(Debug, Clone)]
pub(super) struct CoordinatorAddresses {
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) token: Option<Token>,
    /// Longest time to connect, including authentication.
    pub(super) timeout: Duration,
}

/// Source of the coordinator's address.
pub(super) enum Discovery {
    /// The endpoint on the command line.
    Endpoint { host: String, port: u16, token: Option<Token> },
    /// A registry (etcd or a shared file).
    Registry(Box<RegistryDiscovery>),
}

/// Finds the coordinator by the job's entry in a registry. See [`super::registry`].
pub(super) struct RegistryDiscovery {
    registry: Registry,
    settings: Rc<Settings>,
    agent: AgentId,
    /// Term of the coordinator that was last tried, and how often it refused connections.
    tried: (u64, u32),
    /// Entry of the job that was last read from the registry.
    seen: RefCell<EntrySnapshot>,
    /// Key of the job that was last found. Another job under the same run id has another key.
    key: Option<[u8; 32]>,
    /// The job with its coordinator in this process, if this node is or was the coordinator.
    job: Option<Rc<Job>>,
}

impl Discovery {
    pub(super) fn with_registry(registry: Registry, settings: Rc<Settings>, agent: AgentId) -> Self {
        let (tried, seen) = ((0, 0), RefCell::default());
        Self::Registry(Box::new(RegistryDiscovery {
            registry,
            settings,
            agent,
            tried,
            seen,
            key: None,
            job: None,
        }))
    }

    fn by_registry(&self) -> Option<&RegistryDiscovery> {
        match self {
            Self::Endpoint { .. } => None,
            Self::Registry(by_registry) => Some(by_registry),
        }
    }

    /// Returns addresses at which the coordinator may be. `last` is the result of the attempt to connect to
    /// the addresses that this method returned before. `takes_part` is true if a coordinator has answered
    /// this node.
    pub(super) async fn find(
        &mut self,
        last: LastAttempt,
        takes_part: bool,
    ) -> Result<CoordinatorAddresses, ConnectFailure> {
        match self {
            Self::Endpoint { host, port, token } => {
                let found = tokio::net::lookup_host((host.as_str(), *port)).await;
                let found = found.map_err(|error| transient(format!("look up {host}: {error}")))?;
                let mut addresses: Vec<SocketAddr> = found.collect();
                addresses.dedup();
                Ok(CoordinatorAddresses { addresses, token: token.clone(), timeout: CONNECT_TIMEOUT })
            }
            Self::Registry(by_registry) => by_registry.find(last, takes_part).await,
        }
    }

    /// Completes when the registry names another coordinator or the current coordinator has lost its lease,
    /// so that [`Self::find`] must run again.
    pub(super) async fn changed(&self) {
        match self.by_registry() {
            Some(by_registry) => by_registry.changed().await,
            None => std::future::pending().await,
        }
    }

    /// Checks in the background whether the coordinator's lease is alive. If this is called regularly, a lost
    /// coordinator is noticed sooner.
    pub(super) fn check_in_background(&self) {
        if let Some(by_registry) = self.by_registry() {
            by_registry.registry.check_in_background();
        }
    }

    /// Returns true if the coordinator that was found is still registered and holds its lease. Always true
    /// for a fixed endpoint.
    pub(super) async fn is_current(&self) -> bool {
        let Some(by_registry) = self.by_registry() else { return true };
        let term = by_registry.seen.borrow().term();
        by_registry.registry.read().await.is_ok_and(|now| now.is_leased && now.term() == term)
    }

    /// Returns true if the coordinator has a fixed address and cannot be replaced.
    pub(super) fn is_static(&self) -> bool {
        self.by_registry().is_none()
    }

    /// Returns true if the coordinator that was found belongs to this process and a coordinator on another
    /// node may replace it.
    pub(super) fn is_own(&self) -> bool {
        self.by_registry().is_some_and(|by_registry| {
            by_registry.seen.borrow().entry.as_ref().is_some_and(|entry| entry.agent == by_registry.agent)
        })
    }

    /// Returns the job with its coordinator in this process, if this node is or was the coordinator and a
    /// coordinator on another node may replace it.
    pub(super) fn own_job(&self) -> Option<&Rc<Job>> {
        self.by_registry()?.job.as_ref()
    }
}

impl RegistryDiscovery {
    async fn find(
        &mut self,
        last: LastAttempt,
        takes_part: bool,
    ) -> Result<CoordinatorAddresses, ConnectFailure> {
        let mut seen = self.registry.read().await?;
        let term = seen.term();
        // If the entry has another term, its coordinator has not been tried yet.
        let last = if self.tried.0 == term { last } else { LastAttempt::NoFailure };
        let times = if self.tried.0 == term { self.tried.1 } else { 0 };
        self.tried = (term, times + u32::from(last == LastAttempt::Refused));
        let refused = self.tried.1 >= MAX_REFUSED;
        let key = |seen: &EntrySnapshot| seen.entry.as_ref().map(|entry| entry.key);
        if takes_part && term > 0 && self.key != key(&seen) {
            return Err(ConnectFailure::Replaced);
        }
        let is_gone = term == 0 || refused || !seen.is_leased && last != LastAttempt::NoFailure;
        let result = seen.entry.as_ref().and_then(|entry| entry.result.clone());
        let predecessor = match result.filter(|_| refused || !seen.is_leased) {
            Some(result) if takes_part || !result.frees_run_id(is_named(&self.settings.run_id)) => {
                return Err(ConnectFailure::Closed(result));
            }
            Some(_) => Some(Predecessor::Ended),
            None if is_gone => Some(Predecessor::Gone { refused }),
            None => None,
        };
        if let Some(predecessor) = predecessor {
            seen = self.take_over(seen, term + 1, predecessor).await?;
            self.tried = (seen.term(), 0);
        }
        self.key = key(&seen);
        // While its lease in the registry is alive, a slow coordinator does not count as lost and gets a long
        // timeout.
        let timeout =
            if seen.is_leased { CONNECT_TIMEOUT } else { self.settings.rules.heartbeat_timeout / 2 };
        let (addresses, token) = match &seen.entry {
            Some(Entry { addresses, key, .. }) => (addresses.clone(), Some(self.token(key))),
            None => (Vec::new(), None),
        };
        let found = CoordinatorAddresses { addresses, token, timeout };
        self.seen.replace(seen);
        Ok(found)
    }

    /// Returns the user's token, or a token made of `key`, which only nodes that can read the registry know.
    fn token(&self, key: &[u8]) -> Token {
        self.settings.token.clone().unwrap_or_else(|| Token::new(key.to_vec()))
    }

    async fn changed(&self) {
        loop {
            let seen = self.seen.borrow().clone();
            if self.registry.changed(&seen).await.is_err() {
                // This future then never completes: the next attempt to connect reads the registry again.
                return std::future::pending().await;
            }
            let Ok(now) = self.registry.read().await else { return std::future::pending().await };
            if seen.is_leased && !now.is_leased || now.term() != seen.term() {
                return;
            }
            self.seen.replace(now);
        }
    }

    /// Makes this node the coordinator of term `term` if the registry still holds `seen`. Returns the entry
    /// that the registry holds then, which is that of another node if that node was faster.
    async fn take_over(
        &mut self,
        seen: EntrySnapshot,
        term: u64,
        predecessor: Predecessor,
    ) -> Result<EntrySnapshot, RegistryError> {
        let Settings { rules, close_timeout, .. } = &*self.settings;
        let listeners = host_addresses::listen_anywhere().map_err(transient)?;
        let first = listeners.first().expect("`listen_anywhere` returns at least one listener");
        let port = first.local_addr().map_err(transient)?.port();
        let addresses = interfaces::own_addresses().into_iter().map(|ip| SocketAddr::new(ip, port)).collect();
        let entropy = super::random().map_err(transient)?;
        // A new job must not continue from the record of the job that has ended, so it starts with an empty
        // record. Nodes that took part in a job know its key even if the registry has been emptied, and the
        // new entry keeps that key.
        let (entry, record, known_key) = match predecessor {
            Predecessor::Gone { .. } => (seen.entry.as_ref(), self.registry.record(&seen).await?, self.key),
            Predecessor::Ended => (None, Some(Record::empty()), None),
        };
        let key = match entry.map(|entry| entry.key).or(known_key) {
            Some(key) => key,
            None => super::random().map_err(transient)?,
        };
        let mine = Entry::new(term, addresses, self.agent, key, entry.and_then(|entry| entry.result.clone()));
        let leadership = Leadership::acquire(&self.registry, &seen, &mine, record.as_ref(), *close_timeout);
        let leadership = match leadership.await? {
            Ok(leadership) => leadership,
            Err(now) => return Ok(now),
        };
        let record = record.unwrap_or_else(Record::empty);
        let wait = match predecessor {
            Predecessor::Gone { refused: true } => RECONNECT_TIMEOUT,
            Predecessor::Gone { refused: false } | Predecessor::Ended => {
                let heartbeat_timeout = rules.heartbeat_timeout_for(record.max_nodes_on_host());
                leader_lease::takeover_delay(heartbeat_timeout, leadership.ttl.get())
            }
        };
        let suspect = entry.map(|entry| (entry.agent, wait));
        let now = leadership.seen();
        let coordinator = Coordinator::resume(*rules, term, u128::from_le_bytes(entropy), record, suspect);
        let job = Job::start(coordinator, Some(leadership));
        let (settings, token) = (Rc::clone(&self.settings), Some(self.token(&key)));
        RendezvousServer::open(listeners, settings, token, None, None, Some(Rc::clone(&job)));
        self.job = Some(job);
        Ok(now)
    }
}

fn transient(error: impl std::fmt::Display) -> RegistryError {
    RegistryError::Transient(error.to_string())
}

/// State of the previous coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Predecessor {
    /// There is no coordinator any more, or never was one. `refused` is true if its host answers but no
    /// process listens at its port.
    Gone { refused: bool },
    /// The job of the previous coordinator has ended, and this node starts a new job under the same run id.
    Ended,
}
