//! `c10d`: the elastic rendezvous. Nodes join and leave; one of them, at the endpoint, coordinates.
//!
//! [`crate::membership`] makes all decisions. This module transports them: a thread holds this node's
//! connection ([`desk`]).
//! If this host is the endpoint and no process serves it yet, the thread also runs the coordinator
//! ([`hall`]).

mod archive;
mod backoff;
mod board;
mod caller;
mod claim;
mod court;
mod desk;
mod directory;
mod finder;
mod guests;
mod hall;
mod job;
mod link;
mod place;
mod thread;
mod wire;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use convoke_env::Token;
use convoke_store::{ServeError, StoreServer};

use super::{Assignment, Barrier, Court, Rendezvous, RendezvousError};
use crate::config::{Config, Endpoint, Terms, is_loopback};
use crate::membership::{self, Departure, Ending, Muster, Phase, Profile, Refusal, Rules};
use crate::report::full_host_name;
use crate::say::{Progress, say};
use board::Over;
use court::ElasticCourt;
pub(crate) use guests::Guests;
use thread::{Settings, Thread};

/// The elastic rendezvous of one node.
#[derive(Debug)]
pub(crate) struct Elastic {
    settings: Settings,
    local_addr: Option<String>,
    share_store: bool,
    thread: Option<Arc<Thread>>,
    guests: Guests,
    /// Listener for the store of the next round's workers, in case this node serves it.
    listener: Option<TcpListener>,
    /// Store for the workers of this round, if this node serves it.
    server: Option<StoreServer>,
    /// Number of the last round that this node was in.
    round: u64,
    court: Option<Arc<ElasticCourt>>,
}

impl Elastic {
    pub(crate) fn new(config: &Config, endpoint: Endpoint, terms: Terms, token: Option<Token>) -> Self {
        let profile = Profile {
            host: full_host_name(),
            pid: std::process::id(),
            min: config.nodes.min,
            max: config.nodes.max,
            workers: config.nproc_per_node,
            role: config.role.clone(),
        };
        let rules = Rules {
            last_call: terms.last_call,
            join_timeout: terms.join_timeout,
            silence: terms.silence,
            reconnect: Duration::from_millis(200),
            stop_timeout: Duration::from_secs(90),
            stop_spread: Duration::from_secs(1),
            job_budget: terms.job_budget.then_some(config.max_restarts),
        };
        let (run_id, close) = (config.run_id.clone(), terms.close);
        let settings = Settings { endpoint, rules, profile, run_id, token, close };
        let guests = Guests::at(describe_endpoint(&settings.endpoint));
        Self {
            settings,
            guests,
            local_addr: config.local_addr.clone(),
            share_store: config.share_store,
            thread: None,
            listener: None,
            server: None,
            round: 0,
            court: None,
        }
    }

    fn thread(&mut self, phase: Phase) -> Result<Arc<Thread>, RendezvousError> {
        if let Some(thread) = &self.thread {
            thread.enter(phase);
            return Ok(Arc::clone(thread));
        }
        let thread = Arc::new(Thread::start(self.settings.clone(), phase)?);
        self.thread = Some(Arc::clone(&thread));
        self.guests.meet_through(Arc::clone(&thread));
        Ok(thread)
    }
}

impl Rendezvous for Elastic {
    fn join(&mut self, restarts: u32) -> Result<Assignment, RendezvousError> {
        self.server = None;
        let joined = loop {
            let run = match self.meet(restarts) {
                Ok(run) => run,
                Err(error) => break Err(error),
            };
            let round = run.round;
            match self.enter(run) {
                // The round ended before it began on this node.
                Err(_) if self.is_over(round) => {}
                entered => break entered,
            }
        };
        if let Err(error) = &joined
            && let Some(thread) = self.thread.take()
        {
            let departure = match error {
                RendezvousError::NotNeeded => Departure::Ended,
                error => Departure::Error(error.to_string()),
            };
            thread.leave(departure);
        }
        joined
    }

    fn barrier(&mut self) -> Barrier {
        let Some(thread) = &self.thread else { return Barrier::Passed };
        thread.enter(Phase::Succeeded { round: self.round });
        let round = self.round;
        let told = thread.board.wait(None, |told| match (&told.over, &told.stopped) {
            (Some(Over::End(Ending::Succeeded)), _) => Some(Barrier::Passed),
            (Some(_), _) => Some(Barrier::Interrupted),
            (None, Some(stopped)) if stopped.round >= round => Some(Barrier::Interrupted),
            (None, _) => None,
        });
        told.unwrap_or(Barrier::Interrupted)
    }

    fn close(&mut self) {
        self.server = None;
    }

    fn guests(&self) -> Guests {
        self.guests.clone()
    }

    fn court(&self) -> Option<Arc<dyn Court>> {
        Some(Arc::clone(self.court.as_ref()?) as Arc<dyn Court>)
    }
}

impl Elastic {
    /// Waits for a round.
    fn meet(&mut self, restarts: u32) -> Result<membership::Assignment, RendezvousError> {
        if self.thread.is_none() {
            super::check_loopback(true)?;
            self.warn_if_open();
        }
        let deadline = Instant::now() + self.settings.rules.join_timeout;
        let listeners = self.listen_for_workers().map_err(|source| RendezvousError::Serve { source })?;
        let port = listeners
            .first()
            .and_then(|listener| listener.local_addr().ok())
            .map_or(0, |address| address.port());
        self.listener = listeners.into_iter().next();
        let towards = self.thread.as_ref().and_then(|thread| thread.towards());
        let own = self.local_addr.clone().or_else(|| self.is_on_loopback().then(|| "127.0.0.1".to_owned()));
        let store = place::offers(own.as_deref(), towards, port);
        let after = self.round;
        let thread = self.thread.as_ref().map(Arc::clone);
        let alone = thread.is_some_and(|thread| {
            thread.board.lock().stopped.as_ref().is_some_and(|last| last.round == after && last.alone)
        });
        let thread = self.thread(Phase::Ready { after, restarts, store, alone })?;
        let mut progress = Progress::new(deadline);
        loop {
            let until = Instant::now() + Progress::INTERVAL;
            let news = thread.board.wait(Some(until), |told| match (&told.over, &told.run) {
                (Some(over), _) => Some(Err(over.clone())),
                (None, Some(run)) if run.round > after => Some(Ok(run.clone())),
                (None, _) => None,
            });
            match news {
                Some(Ok(assignment)) => return Ok(assignment),
                Some(Err(Over::End(Ending::Succeeded))) => return Err(RendezvousError::NotNeeded),
                Some(Err(over)) => {
                    let text = self.tell(&over);
                    return Err(match over {
                        Over::Refused(Refusal::Timeout { .. }) => RendezvousError::NotMet(text),
                        _ => RendezvousError::Refused(text),
                    });
                }
                None => {}
            }
            let told = thread.board.lock();
            let is_spare = told.muster.as_ref().is_some_and(|muster| muster.spare);
            let (line, trouble) = match (&told.trouble, &told.muster) {
                (Some(trouble), _) => {
                    let endpoint = self.endpoint();
                    let same = trouble.strip_prefix(&endpoint).and_then(|rest| rest.strip_prefix(": "));
                    (format!("waiting for the rendezvous at {endpoint}: {}", same.unwrap_or(trouble)), true)
                }
                (None, Some(muster)) => (describe(muster), false),
                (None, None) => continue,
            };
            drop(told);
            if is_spare && !trouble {
                progress.show_endless(&line)
            } else {
                progress.show(&line)
            }
            // The coordinator enforces the timeout of a connected node.
            if trouble && Instant::now() >= deadline {
                let after_s = self.settings.rules.join_timeout.as_secs();
                let rest = line.strip_prefix("waiting for ").unwrap_or(&line);
                let advice = "is convoke running on the endpoint's host, with the same --rdzv-endpoint? may this host \
                              reach its port?";
                return Err(RendezvousError::NotMet(format!(
                    "no word within {after_s} s from {rest}\n  try: {advice}"
                )));
            }
        }
    }

    /// Enters a round: serves the store of its workers, or finds that store.
    fn enter(&mut self, run: membership::Assignment) -> Result<Assignment, RendezvousError> {
        let generation = run.generation();
        let thread = self.thread(Phase::Running { round: run.round })?;
        self.round = run.round;
        let listener = self.listener.take();
        if run.group_rank == 0 && self.share_store {
            let server = StoreServer::serve(listener.into_iter().collect())
                .map_err(|source| RendezvousError::Serve { source })?;
            let deadline = Instant::now() + Duration::from_secs(10);
            server.store().set(place::GENERATION_KEY, generation.to_string().as_bytes(), deadline)?;
            self.server = Some(server);
        }
        let (master_addr, master_port) = if self.share_store {
            place::reach(&run.store, generation, || self.is_over(run.round))
                .map_err(RendezvousError::Refused)?
        } else {
            place::first(&run.store).map_err(RendezvousError::Refused)?
        };
        let node = run.group_rank;
        match &self.court {
            Some(court) => court.move_to(node, run.round),
            None => {
                let host = self.settings.profile.host.clone();
                let meeting = (self.endpoint(), self.settings.run_id.clone());
                let court = ElasticCourt::new(Arc::clone(&thread), (node, host), meeting, run.round);
                self.court = Some(Arc::new(court));
            }
        }
        Ok(Assignment {
            round: run.round,
            group_rank: run.group_rank,
            group_world_size: run.group_world_size,
            base_rank: run.base_rank,
            world_size: run.world_size,
            base_role_rank: run.base_role_rank,
            role_world_size: run.role_world_size,
            master_addr,
            master_port,
            use_agent_store: self.share_store,
            generation: Some(generation),
            restarts: run.restarts,
        })
    }

    /// Warns once if any process that can reach the endpoint can take part.
    fn warn_if_open(&self) {
        let is_open = match &self.settings.endpoint {
            Endpoint::Host { host, .. } => !is_loopback(host),
            // A node that can read the file or etcd finds a key there.
            Endpoint::File(_) => false,
            Endpoint::Etcd(cluster) => {
                cluster.is_open() && !cluster.endpoints.iter().all(|(host, _)| is_loopback(host))
            }
        };
        if is_open && self.settings.token.is_none() {
            let endpoint = self.endpoint();
            say(&format!(
                "warning: whoever can reach {endpoint} can join or stop this job; set CONVOKE_TOKEN, the same on all nodes"
            ));
        }
    }

    /// Returns true if other nodes have ended this round and the job continues.
    fn is_over(&self, round: u64) -> bool {
        self.thread.as_ref().is_some_and(|thread| {
            let told = thread.board.lock();
            told.over.is_none() && told.stopped.as_ref().is_some_and(|stopped| stopped.round == round)
        })
    }

    /// Returns true if all nodes are on this host.
    fn is_on_loopback(&self) -> bool {
        let Endpoint::Host { host, .. } = &self.settings.endpoint else { return false };
        is_loopback(host)
    }

    /// Listens for a round's worker store: at the address that the user gave, or at all addresses.
    fn listen_for_workers(&self) -> Result<Vec<TcpListener>, ServeError> {
        let given = self.local_addr.as_deref().and_then(|own| own.parse::<IpAddr>().ok());
        let only = given.or_else(|| {
            (self.local_addr.is_none() && self.is_on_loopback()).then_some(Ipv4Addr::LOCALHOST.into())
        });
        match only.map(|ip| convoke_store::listen(&[SocketAddr::new(ip, 0)])) {
            Some(Ok(listeners)) => Ok(listeners),
            // The address does not belong to this host, but other hosts may still reach this one by it.
            Some(Err(_)) | None => place::listen_anywhere(),
        }
    }

    fn endpoint(&self) -> String {
        describe_endpoint(&self.settings.endpoint)
    }

    /// Returns the reason for which this node cannot take part.
    fn tell(&self, over: &Over) -> String {
        court::describe(over, &self.endpoint(), &self.settings.run_id)
    }
}

fn describe_endpoint(endpoint: &Endpoint) -> String {
    match endpoint {
        Endpoint::Host { host, port, .. } => super::address(host, *port),
        Endpoint::File(path) => path.display().to_string(),
        Endpoint::Etcd(cluster) => cluster.to_string(),
    }
}

fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let filled = getrandom::fill(&mut bytes);
    filled.map_err(|error| std::io::Error::other(format!("no random numbers: {error}")))?;
    Ok(bytes)
}

/// Describes the join status: the nodes that have joined and those that are missing.
fn describe(muster: &Muster) -> String {
    let Muster { here, min, max, names, stopping, spare, cause, begins_ms } = muster;
    if *spare {
        return format!("a round of {max} nodes runs; this one waits as a spare");
    }
    let wanted = if min == max { min.to_string() } else { format!("{min} to {max}") };
    let mut line = format!("{here} of {wanted} nodes are here: {}", names.join(", "));
    if here < min {
        line.push_str(&format!("; at least {} more must come", min - here));
    }
    if !stopping.is_empty() {
        line.push_str(&format!("; waiting until workers have stopped on {}", stopping.join(", ")));
    }
    if let Some(ms) = begins_ms.filter(|_| stopping.is_empty() && here >= min) {
        line.push_str(&format!("; the job begins in {} s, or with {max}", ms.div_ceil(1000)));
    }
    if let Some(cause) = cause {
        line.push_str(&format!(" ({cause})"));
    }
    line
}
