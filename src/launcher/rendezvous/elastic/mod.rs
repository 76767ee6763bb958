//! The elastic rendezvous (`c10d`): nodes may join and leave while the job runs. A coordinator on one node,
//! at the endpoint, decides for all.
//!
//! [`crate::membership`] makes all decisions. This module carries its messages between nodes: one thread of
//! each agent keeps the connection to the coordinator ([`session`]). If the endpoint is on this host and no
//! process serves it yet, the thread also runs the coordinator ([`server`]).

mod backoff;
mod connector;
mod discovery;
mod framing;
mod host_addresses;
mod job;
mod leadership;
mod membership_view;
mod other_jobs;
mod record_writer;
mod registry;
mod server;
mod session;
mod termination;
mod thread;
mod wire;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use convoke_env::Token;
use convoke_store::{ServeError, StoreServer};

use super::{Assignment, BarrierResult, Rendezvous, RendezvousError, TerminationChannel};
use crate::config::{Config, ElasticSettings, Endpoint, is_loopback};
use crate::formatting;
use crate::membership::{self, Departure, JobResult, JoinStatus, Phase, Profile, Refusal, Rules};
use crate::messages::{Progress, print_message};
use crate::report::full_host_name;
use membership_view::EndReason;
pub(crate) use other_jobs::OtherJobs;
use termination::ElasticTerminationChannel;
use thread::{RendezvousThread, Settings};

/// The elastic rendezvous of one node.
#[derive(Debug)]
pub(crate) struct ElasticRendezvous {
    settings: Settings,
    local_addr: Option<String>,
    share_store: bool,
    thread: Option<Arc<RendezvousThread>>,
    other_jobs: OtherJobs,
    /// Listener for the key-value store of the next round's workers, in case this node has to serve that
    /// store.
    listener: Option<TcpListener>,
    /// Server of the key-value store for the current round's workers, if this node serves that store.
    server: Option<StoreServer>,
    /// Number of the last round that this node was in.
    round: u64,
    channel: Option<Arc<ElasticTerminationChannel>>,
}

impl ElasticRendezvous {
    pub(crate) fn new(
        config: &Config,
        endpoint: Endpoint,
        settings: ElasticSettings,
        token: Option<Token>,
    ) -> Self {
        let profile = Profile {
            host: full_host_name(),
            pid: std::process::id(),
            min: config.nodes.min,
            max: config.nodes.max,
            workers: config.nproc_per_node,
            role: config.role.clone(),
        };
        let rules = Rules {
            last_call: settings.last_call,
            join_timeout: settings.join_timeout,
            heartbeat_timeout: settings.heartbeat_timeout,
            reconnect_timeout: Duration::from_millis(200),
            stop_timeout: Duration::from_secs(90),
            stop_spread: Duration::from_secs(1),
            job_budget: settings.job_budget.then_some(config.max_restarts),
        };
        let (run_id, close_timeout) = (config.run_id.clone(), settings.close_timeout);
        let settings = Settings { endpoint, rules, profile, run_id, token, close_timeout };
        let other_jobs = OtherJobs::new(describe_endpoint(&settings.endpoint));
        Self {
            settings,
            other_jobs,
            local_addr: config.local_addr.clone(),
            share_store: config.share_store,
            thread: None,
            listener: None,
            server: None,
            round: 0,
            channel: None,
        }
    }

    fn thread(&mut self, phase: Phase) -> Result<Arc<RendezvousThread>, RendezvousError> {
        if let Some(thread) = &self.thread {
            thread.enter(phase);
            return Ok(Arc::clone(thread));
        }
        let thread = Arc::new(RendezvousThread::start(self.settings.clone(), phase)?);
        self.thread = Some(Arc::clone(&thread));
        self.other_jobs.set_thread(Arc::clone(&thread));
        Ok(thread)
    }
}

impl Rendezvous for ElasticRendezvous {
    fn join(&mut self, restarts: u32) -> Result<Assignment, RendezvousError> {
        self.server = None;
        let joined = loop {
            let run = match self.wait_for_round(restarts) {
                Ok(run) => run,
                Err(error) => break Err(error),
            };
            let round = run.round;
            match self.enter_round(run) {
                // The coordinator ended the round before this node had entered it.
                Err(_) if self.is_round_over(round) => {}
                entered => break entered,
            }
        };
        if let Err(error) = &joined
            && let Some(thread) = self.thread.take()
        {
            let departure = match error {
                RendezvousError::AlreadySucceeded => Departure::Ended,
                error => Departure::Error(error.to_string()),
            };
            thread.leave(departure);
        }
        joined
    }

    fn barrier(&mut self) -> BarrierResult {
        let Some(thread) = &self.thread else { return BarrierResult::Passed };
        thread.enter(Phase::Succeeded { round: self.round });
        let round = self.round;
        let state = thread.view.wait(None, |state| match (&state.end_reason, &state.stopped) {
            (Some(EndReason::JobEnded(JobResult::Succeeded)), _) => Some(BarrierResult::Passed),
            (Some(_), _) => Some(BarrierResult::Interrupted),
            (None, Some(stopped)) if stopped.round >= round => Some(BarrierResult::Interrupted),
            (None, _) => None,
        });
        state.unwrap_or(BarrierResult::Interrupted)
    }

    fn close(&mut self) {
        self.server = None;
    }

    fn other_jobs(&self) -> OtherJobs {
        self.other_jobs.clone()
    }

    fn termination_channel(&self) -> Option<Arc<dyn TerminationChannel>> {
        Some(Arc::clone(self.channel.as_ref()?) as Arc<dyn TerminationChannel>)
    }
}

impl ElasticRendezvous {
    /// Waits until the coordinator assigns this node to a rendezvous round.
    fn wait_for_round(&mut self, restarts: u32) -> Result<membership::Assignment, RendezvousError> {
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
        let route_address = self.thread.as_ref().and_then(|thread| thread.route_address());
        let own = self.local_addr.clone().or_else(|| self.is_on_loopback().then(|| "127.0.0.1".to_owned()));
        let store = host_addresses::store_addresses(own.as_deref(), route_address, port);
        let after = self.round;
        let thread = self.thread.as_ref().map(Arc::clone);
        let partitioned = thread.is_some_and(|thread| {
            thread.view.lock().stopped.as_ref().is_some_and(|last| last.round == after && last.partitioned)
        });
        let thread = self.thread(Phase::Ready { after, restarts, store, partitioned })?;
        let mut progress = Progress::new(deadline);
        loop {
            let until = Instant::now() + Progress::INTERVAL;
            let update =
                thread.view.wait(Some(until), |state| match (&state.end_reason, &state.assignment) {
                    (Some(reason), _) => Some(Err(reason.clone())),
                    (None, Some(run)) if run.round > after => Some(Ok(run.clone())),
                    (None, _) => None,
                });
            match update {
                Some(Ok(assignment)) => return Ok(assignment),
                Some(Err(EndReason::JobEnded(JobResult::Succeeded))) => {
                    return Err(RendezvousError::AlreadySucceeded);
                }
                Some(Err(reason)) => {
                    let text = self.describe_end(&reason);
                    return Err(match reason {
                        EndReason::Refused(Refusal::Timeout { .. }) => RendezvousError::JoinTimeout(text),
                        _ => RendezvousError::Refused(text),
                    });
                }
                None => {}
            }
            let state = thread.view.lock();
            let is_standby = state.join_status.as_ref().is_some_and(|join_status| join_status.standby);
            let (line, error) = match (&state.connection_error, &state.join_status) {
                (Some(error), _) => {
                    let endpoint = self.endpoint();
                    let same = error.strip_prefix(&endpoint).and_then(|rest| rest.strip_prefix(": "));
                    (format!("waiting for the rendezvous at {endpoint}: {}", same.unwrap_or(error)), true)
                }
                (None, Some(join_status)) => (describe_join_status(join_status), false),
                (None, None) => continue,
            };
            drop(state);
            if is_standby && !error {
                progress.show_endless(&line)
            } else {
                progress.show(&line)
            }
            // The coordinator enforces the join timeout of a connected node, so only a node without
            // connection checks it here.
            if error && Instant::now() >= deadline {
                let after_s = self.settings.rules.join_timeout.as_secs();
                let rest = line.strip_prefix("waiting for ").unwrap_or(&line);
                let advice = "is convoke running on the endpoint's host, with the same --rdzv-endpoint? may this host \
                              reach its port?";
                return Err(RendezvousError::JoinTimeout(format!(
                    "no answer within {after_s} s from {rest}\n  try: {advice}"
                )));
            }
        }
    }

    /// Enters the rendezvous round `run`: serves the workers' key-value store if this node has group rank 0,
    /// and finds an address at which the store answers.
    fn enter_round(&mut self, run: membership::Assignment) -> Result<Assignment, RendezvousError> {
        let generation = run.generation();
        let thread = self.thread(Phase::Running { round: run.round })?;
        self.round = run.round;
        let listener = self.listener.take();
        if run.group_rank == 0 && self.share_store {
            let server = StoreServer::serve(listener.into_iter().collect())
                .map_err(|source| RendezvousError::Serve { source })?;
            let deadline = Instant::now() + Duration::from_secs(10);
            server.store().set(
                host_addresses::GENERATION_KEY,
                generation.to_string().as_bytes(),
                deadline,
            )?;
            self.server = Some(server);
        }
        let (master_addr, master_port) = if self.share_store {
            host_addresses::find_store(&run.store, generation, || self.is_round_over(run.round))
                .map_err(RendezvousError::Refused)?
        } else {
            host_addresses::first_address(&run.store).map_err(RendezvousError::Refused)?
        };
        let node = run.group_rank;
        match &self.channel {
            Some(channel) => channel.set_round(node, run.round),
            None => {
                let host = self.settings.profile.host.clone();
                let job = (self.endpoint(), self.settings.run_id.clone());
                let channel =
                    ElasticTerminationChannel::new(Arc::clone(&thread), (node, host), job, run.round);
                self.channel = Some(Arc::new(channel));
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

    /// Prints a warning if no token or registry protects the job, so that any process that can reach the
    /// endpoint can take part.
    fn warn_if_open(&self) {
        let is_open = match &self.settings.endpoint {
            Endpoint::Host { host, .. } => !is_loopback(host),
            // The file or etcd holds a key, and only nodes that can read the key can take part.
            Endpoint::File(_) => false,
            Endpoint::Etcd(cluster) => {
                cluster.is_open() && !cluster.endpoints.iter().all(|(host, _)| is_loopback(host))
            }
        };
        if is_open && self.settings.token.is_none() {
            let endpoint = self.endpoint();
            print_message(&format!(
                "warning: whoever can reach {endpoint} can join or stop this job; set CONVOKE_TOKEN, the same on all nodes"
            ));
        }
    }

    /// Returns true if other nodes have ended this round and the job continues.
    fn is_round_over(&self, round: u64) -> bool {
        self.thread.as_ref().is_some_and(|thread| {
            let state = thread.view.lock();
            state.end_reason.is_none() && state.stopped.as_ref().is_some_and(|stopped| stopped.round == round)
        })
    }

    /// Returns true if the endpoint is a loopback address, so that all nodes are on this host.
    fn is_on_loopback(&self) -> bool {
        let Endpoint::Host { host, .. } = &self.settings.endpoint else { return false };
        is_loopback(host)
    }

    /// Listens at a free port for the workers' key-value store: at the address that the user gave, at
    /// loopback if all nodes are on this host, or at all addresses.
    fn listen_for_workers(&self) -> Result<Vec<TcpListener>, ServeError> {
        let given = self.local_addr.as_deref().and_then(|own| own.parse::<IpAddr>().ok());
        let only = given.or_else(|| {
            (self.local_addr.is_none() && self.is_on_loopback()).then_some(Ipv4Addr::LOCALHOST.into())
        });
        match only.map(|ip| convoke_store::listen(&[SocketAddr::new(ip, 0)])) {
            Some(Ok(listeners)) => Ok(listeners),
            // The address does not belong to this host, but other hosts may still reach this host by that
            // address.
            Some(Err(_)) | None => host_addresses::listen_anywhere(),
        }
    }

    fn endpoint(&self) -> String {
        describe_endpoint(&self.settings.endpoint)
    }

    /// Describes the reason for which this node cannot take part in the job.
    fn describe_end(&self, reason: &EndReason) -> String {
        termination::describe_end(reason, &self.endpoint(), &self.settings.run_id)
    }
}

fn describe_endpoint(endpoint: &Endpoint) -> String {
    match endpoint {
        Endpoint::Host { host, port, .. } => formatting::address(host, *port),
        Endpoint::File(path) => path.display().to_string(),
        Endpoint::Etcd(cluster) => cluster.to_string(),
    }
}

fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let filled = getrandom::fill(&mut bytes);
    filled.map_err(|error| std::io::Error::other(format!("cannot get random numbers: {error}")))?;
    Ok(bytes)
}

/// Describes, for a line of progress, which nodes have joined and which are missing.
fn describe_join_status(join_status: &JoinStatus) -> String {
    let JoinStatus { joined, min, max, names, stopping, standby, cause, starts_in_ms } = join_status;
    if *standby {
        return format!("a round of {max} nodes is running; this one waits as a standby node");
    }
    let wanted = if min == max { min.to_string() } else { format!("{min} to {max}") };
    let mut line = format!("{joined} of {wanted} nodes have joined: {}", names.join(", "));
    if joined < min {
        line.push_str(&format!("; at least {} more must join", min - joined));
    }
    if !stopping.is_empty() {
        line.push_str(&format!("; waiting until workers have stopped on {}", stopping.join(", ")));
    }
    if let Some(ms) = starts_in_ms.filter(|_| stopping.is_empty() && joined >= min) {
        line.push_str(&format!(
            "; the job starts in {} s, or as soon as {max} have joined",
            ms.div_ceil(1000)
        ));
    }
    if let Some(cause) = cause {
        line.push_str(&format!(" ({cause})"));
    }
    line
}
