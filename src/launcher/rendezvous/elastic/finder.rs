//! Coordinator discovery: finds the coordinator of a job, or becomes the coordinator.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use convoke_env::Token;

use super::claim::Claim;
use super::directory::{Directory, Entry, Seen, Trouble};
use super::hall::{Backing, Hall};
use super::place;
use crate::config::is_named;
use crate::membership::{AgentId, Ending, Record, Rules, mandate};

/// Number of refused connections after which the coordinator counts as dead.
const ATTEMPTS: u32 = 3;

/// Longest time for a connection to a coordinator that should exist, including authentication.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Reason for which there is no coordinator to connect to.
#[derive(Debug)]
pub(super) enum Nowhere {
    Because(Trouble),
    /// The job has ended. This node took part, or the run id is not used again.
    Closed(Ending),
    /// The job that this node took part in has ended, and another one has started under its run id.
    Replaced,
}

impl From<Trouble> for Nowhere {
    fn from(trouble: Trouble) -> Self {
        Self::Because(trouble)
    }
}

/// Result of the last attempt to reach the coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    /// There was no attempt, or it succeeded.
    Fine,
    /// The host answers, but no process listens at the port.
    Refused,
    /// There was no answer, or another error occurred.
    Failed,
    /// The process of the coordinator refuses this one for good.
    Never,
}

/// Addresses of a possible coordinator, and the token by which this node authenticates itself.
#[derive(Debug, Clone)]
pub(super) struct Found {
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) token: Option<Token>,
    /// Longest time for a connection, including authentication.
    pub(super) patience: Duration,
}

/// Source of the coordinator's address.
pub(super) enum Finder {
    /// The endpoint on the command line.
    Endpoint { host: String, port: u16, token: Option<Token> },
    /// A registry (etcd or a shared file).
    Listed(Box<Listed>),
}

/// Discovery by a registry. See [`super::directory`].
pub(super) struct Listed {
    directory: Directory,
    run_id: String,
    agent: AgentId,
    token: Option<Token>,
    rules: Rules,
    /// Longest time that writing the outcome of the job may take.
    close: Duration,
    /// Term of the coordinator that was last tried, and how often its connections were refused.
    tried: (u64, u32),
    /// Entry last read from the registry.
    seen: RefCell<Seen>,
    /// Key of the job that was found. Another job under the same run id has another key.
    job: Option<[u8; 32]>,
    /// Rendezvous server of this process, if this node is or was the coordinator.
    hall: Option<Rc<Hall>>,
}

impl Finder {
    pub(super) fn listed(
        directory: Directory,
        run_id: String,
        agent: AgentId,
        token: Option<Token>,
        rules: Rules,
        close: Duration,
    ) -> Self {
        let (tried, seen, job, hall) = ((0, 0), RefCell::default(), None, None);
        let listed = Listed { directory, run_id, agent, token, rules, close, tried, seen, job, hall };
        Self::Listed(Box::new(listed))
    }

    /// Returns addresses at which the coordinator may be. `last` is the result of the attempt at the
    /// addresses returned before.
    /// `takes_part` is true if a coordinator has heard this node.
    pub(super) async fn find(&mut self, last: Attempt, takes_part: bool) -> Result<Found, Nowhere> {
        match self {
            Self::Endpoint { host, port, token } => {
                let found = tokio::net::lookup_host((host.as_str(), *port)).await;
                let found = found.map_err(|error| Trouble::Passing(format!("look up {host}: {error}")))?;
                let mut addresses: Vec<SocketAddr> = found.collect();
                addresses.dedup();
                Ok(Found { addresses, token: token.clone(), patience: CONNECT_TIMEOUT })
            }
            Self::Listed(listed) => listed.find(last, takes_part).await,
        }
    }

    /// Completes when discovery must run again.
    pub(super) async fn moved(&self) {
        match self {
            Self::Endpoint { .. } => std::future::pending().await,
            Self::Listed(listed) => listed.moved().await,
        }
    }

    /// Probes the coordinator in the background. Regular calls shorten the time until its loss is noticed.
    pub(super) fn look(&self) {
        if let Self::Listed(listed) = self {
            listed.directory.look();
        }
    }

    /// Notes that this node rejoins as another agent.
    pub(super) fn comes_anew(&self, agent: AgentId) {
        if let Some(hall) = self.hall() {
            hall.comes_anew(agent);
        }
    }

    /// Returns true if the coordinator that was found is still registered.
    pub(super) async fn stands(&self) -> bool {
        match self {
            Self::Endpoint { .. } => true,
            Self::Listed(listed) => {
                let term = listed.seen.borrow().term();
                listed.directory.read().await.is_ok_and(|now| now.held && now.term() == term)
            }
        }
    }

    /// Returns true if the coordinator has a fixed address and cannot be replaced.
    pub(super) fn is_fixed(&self) -> bool {
        matches!(self, Self::Endpoint { .. })
    }

    /// Returns true if the coordinator that was found belongs to this process and another one may replace it.
    pub(super) fn is_own(&self) -> bool {
        match self {
            Self::Endpoint { .. } => false,
            Self::Listed(listed) => {
                listed.seen.borrow().entry.as_ref().is_some_and(|entry| entry.agent == listed.agent)
            }
        }
    }

    /// Returns the rendezvous server of this process, if it has become the coordinator.
    pub(super) fn hall(&self) -> Option<Rc<Hall>> {
        match self {
            Self::Endpoint { .. } => None,
            Self::Listed(listed) => listed.hall.clone(),
        }
    }
}

impl Listed {
    async fn find(&mut self, last: Attempt, takes_part: bool) -> Result<Found, Nowhere> {
        let mut seen = self.directory.read().await?;
        let term = seen.term();
        // The coordinator of another term has not been tried yet.
        let last = if self.tried.0 == term { last } else { Attempt::Fine };
        let times = if self.tried.0 == term { self.tried.1 } else { 0 };
        self.tried = (term, times + u32::from(last == Attempt::Refused));
        let refused = self.tried.1 >= ATTEMPTS;
        let key = |seen: &Seen| seen.entry.as_ref().map(|entry| entry.key);
        if takes_part && term > 0 && self.job != key(&seen) {
            return Err(Nowhere::Replaced);
        }
        let is_gone = term == 0 || refused || !seen.held && last != Attempt::Fine;
        let before = match ending(&seen).filter(|_| refused || !seen.held) {
            Some(ending) if takes_part || !ending.frees_run_id(is_named(&self.run_id)) => {
                return Err(Nowhere::Closed(ending));
            }
            Some(_) => Some(Before::Ended),
            None if is_gone => Some(Before::Gone { refused }),
            None => None,
        };
        if let Some(before) = before {
            seen = self.take_over(seen, term + 1, before).await?;
            self.tried = (seen.term(), 0);
        }
        self.job = key(&seen);
        // While the registry holds its lease, a slow coordinator does not count as lost.
        let patience = if seen.held { CONNECT_TIMEOUT } else { self.rules.silence / 2 };
        let (addresses, token) = match &seen.entry {
            Some(Entry { addresses, key, .. }) => (addresses.clone(), Some(self.token(key))),
            None => (Vec::new(), None),
        };
        let found = Found { addresses, token, patience };
        self.seen.replace(seen);
        Ok(found)
    }

    /// Returns the user's token, or one made of the key that only readers of the registry know.
    fn token(&self, key: &[u8]) -> Token {
        self.token.clone().unwrap_or_else(|| Token::new(key.to_vec()))
    }

    async fn moved(&self) {
        loop {
            let seen = self.seen.borrow().clone();
            if self.directory.changed(&seen).await.is_err() {
                // The next attempt to connect reads the registry again.
                return std::future::pending().await;
            }
            let Ok(now) = self.directory.read().await else { return std::future::pending().await };
            if seen.held && !now.held || now.term() != seen.term() {
                return;
            }
            self.seen.replace(now);
        }
    }

    /// Makes this node the coordinator, unless another node is faster.
    async fn take_over(&mut self, seen: Seen, term: u64, before: Before) -> Result<Seen, Trouble> {
        let passing = |error: String| Trouble::Passing(error);
        let listeners = place::listen_anywhere().map_err(|error| passing(error.to_string()))?;
        let port =
            listeners.first().and_then(|listener| listener.local_addr().ok()).map_or(0, |at| at.port());
        let addresses = place::own_addresses().into_iter().map(|ip| SocketAddr::new(ip, port)).collect();
        let (entry, record) = match before {
            Before::Gone { .. } => (seen.entry.as_ref(), self.directory.record(&seen).await?),
            // No coordinator may continue from the record of a job that has ended.
            Before::Ended => (None, Some(Record::of_nothing())),
        };
        // Nodes that took part in a job know its key even if the registry has been emptied.
        let known = match before {
            Before::Gone { .. } => self.job,
            Before::Ended => None,
        };
        let key = match entry.map(|entry| entry.key).or(known) {
            Some(key) => key,
            None => super::random().map_err(|error| passing(error.to_string()))?,
        };
        let mine = Entry::new(term, addresses, self.agent, key, entry.and_then(|entry| entry.ending.clone()));
        let claim = Claim::stake(&self.directory, &seen, &mine, record.as_ref());
        let claim = match claim.await? {
            Ok(claim) => Rc::new(claim),
            Err(now) => return Ok(now),
        };
        let silence = self.rules.silence_of(record.as_ref().map_or(0, Record::crowd));
        let wait = match before {
            Before::Gone { refused: true } => self.rules.reconnect,
            Before::Gone { refused: false } | Before::Ended => mandate::patience(silence, claim.ttl()),
        };
        let suspect = entry.map(|entry| (entry.agent, wait));
        let now = claim.seen();
        let run_id = self.run_id.clone();
        let (agent, close) = (self.agent, self.close);
        let backing = Backing { run_id, term, record, suspect, agent, claim, close };
        let token = Some(self.token(&key));
        self.hall = Some(Hall::open(listeners, token, self.rules, None, &self.run_id, Some(backing)));
        Ok(now)
    }
}

/// State of the previous coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Before {
    /// There is no coordinator any more, or never was one. `refused` is true if its host answers but no
    /// process listens there.
    Gone { refused: bool },
    /// Its job has ended, and another one starts under the run id.
    Ended,
}

fn ending(seen: &Seen) -> Option<Ending> {
    seen.entry.as_ref()?.ending.clone()
}
