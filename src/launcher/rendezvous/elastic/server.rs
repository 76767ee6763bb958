//! The rendezvous server: runs the coordinator of each run id, and serves agents that prove by the token that
//! they belong to the job.
//!
//! Each connection has one task. All tasks run on one thread and need no lock: they borrow shared state only
//! between two awaits. The memory that unauthenticated peers can occupy is bounded by limits on the number of
//! their connections, and on time and bytes per connection. Above the limit, the server closes the oldest
//! unauthenticated connection.

use std::cell::{Cell, RefCell};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use convoke_env::Token;
use tokio::io::{AsyncReadExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::timeout;

use super::framing::{self, FramingError};
use super::job::Job;
use super::leadership::Leadership;
use super::record_writer::RecordWriter;
use super::wire::{self, Hello, MAGIC, Nonce, Seal, ToCoordinator, UNAUTHENTICATED_FRAME_LIMIT, Welcome};
use crate::config::is_named;
use crate::membership::{AgentId, Coordinator, Event, Profile, Record, Rules};
use crate::messages::print_message;

/// Time within which the peer of a new connection must authenticate itself.
const AUTHENTICATION_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of unauthenticated connections.
const MAX_UNAUTHENTICATED: usize = 256;
/// Maximum number of jobs at one endpoint.
const MAX_JOBS: usize = 1000;
/// Delay before the next accept if the system has no descriptor left.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(20);

/// State that the tasks of the server share.
pub(super) struct RendezvousServer {
    token: Option<Token>,
    rules: Rules,
    /// Address of the TCPStore to which the server forwards connections that use the TCPStore protocol.
    store: Option<SocketAddr>,
    jobs: RefCell<HashMap<String, Rc<Job>>>,
    unauthenticated: RefCell<VecDeque<(u64, AbortHandle)>>,
    connections: Cell<u64>,
    /// True if no more jobs may start on this server.
    is_closed: Cell<bool>,
    /// The run id of the launcher's own job.
    own: String,
    /// True if the server serves only the launcher's own job. With a registry (etcd or a shared file), each
    /// job has a coordinator and server of its own, which another node can take over.
    own_job_only: bool,
}

/// A job with a registry, which continues under a new coordinator if its coordinator is lost.
pub(super) struct ReplaceableJob {
    pub(super) term: u64,
    /// Latest record of the former coordinator.
    pub(super) record: Option<Record>,
    /// Agent that ran the former coordinator, and how long to wait for a status of that agent.
    pub(super) suspect: Option<(AgentId, Duration)>,
    /// Agent of this process, which runs the new coordinator.
    pub(super) agent: AgentId,
    pub(super) leadership: Rc<Leadership>,
    /// Longest time that writing the outcome of the job may take.
    pub(super) close_timeout: Duration,
}

impl RendezvousServer {
    /// Starts a server that serves at `listeners` until it is dropped together with its tasks. `own` is the
    /// run id of the launcher's own job. `replaceable` describes that job if it has a registry.
    pub(super) fn open(
        listeners: Vec<std::net::TcpListener>,
        token: Option<Token>,
        rules: Rules,
        store: Option<SocketAddr>,
        own: &str,
        replaceable: Option<ReplaceableJob>,
    ) -> Rc<Self> {
        let server = Rc::new(Self {
            token,
            rules,
            store,
            jobs: RefCell::default(),
            unauthenticated: RefCell::default(),
            connections: Cell::default(),
            is_closed: Cell::default(),
            own: own.to_owned(),
            own_job_only: replaceable.is_some(),
        });
        if let Some(ReplaceableJob { term, record, suspect, agent, leadership, close_timeout }) = replaceable
            && let Some(entropy) = entropy()
        {
            let coordinator = match record {
                Some(record) => Coordinator::resume(rules, term, entropy, record, suspect),
                None => Coordinator::new(rules, term, entropy),
            };
            let record_writer = RecordWriter::new(agent, leadership, close_timeout);
            server.jobs.borrow_mut().insert(own.to_owned(), Job::start(coordinator, Some(record_writer)));
        }
        let listeners = listeners.into_iter().filter_map(|listener| {
            let address = listener.local_addr();
            let watched = listener.set_nonblocking(true).and_then(|()| TcpListener::from_std(listener));
            let warn = |error: &std::io::Error| {
                let at = address.map_or_else(|_| String::new(), |address| format!(" at {address}"));
                print_message(&format!("warning: no node can reach the rendezvous{at}: {error}"));
            };
            watched.inspect_err(warn).ok()
        });
        for listener in listeners {
            let server = Rc::clone(&server);
            spawn_local(async move { server.accept(listener).await });
        }
        server
    }

    /// Tells members that the process of their coordinator, with agent `agent` on `host`, exits because of
    /// `why`. `all` selects the members of all jobs, not only of this launcher's own.
    pub(super) fn notify_shutdown(&self, all: bool, agent: AgentId, host: &str, why: &str) {
        let is_affected = |run_id: &String| all || *run_id == self.own;
        let jobs = self.jobs.borrow().clone();
        let jobs = jobs.into_iter().filter(|(run_id, _)| is_affected(run_id)).map(|(_, job)| job);
        for job in jobs {
            job.handle(Event::CoordinatorExited { agent, host: host.to_owned(), why: why.to_owned() });
        }
    }

    /// Returns true if all members of all jobs have left.
    pub(super) fn has_no_members(&self) -> bool {
        self.jobs.borrow().values().all(|job| job.has_no_members())
    }

    /// Returns true if all members of this launcher's own job have left.
    pub(super) fn has_no_own_members(&self) -> bool {
        self.jobs.borrow().get(&self.own).is_none_or(|job| job.has_no_members())
    }

    /// Returns the number of other jobs that have members.
    pub(super) fn other_jobs(&self) -> usize {
        let jobs = self.jobs.borrow();
        jobs.iter().filter(|(run_id, job)| **run_id != self.own && job.has_members()).count()
    }

    /// Refuses new jobs from now on.
    pub(super) fn close(&self) {
        self.is_closed.set(true);
    }

    /// Returns true if a node that connects with this run id would start a new job on this server.
    fn would_start_job(&self, run_id: &str) -> bool {
        self.jobs.borrow().get(run_id).is_none_or(|job| self.is_superseded(run_id, job))
    }

    /// Returns true if `job` has ended and the next node with this run id starts a new job. The launcher's
    /// own run id is excluded, because this launcher is about to exit.
    fn is_superseded(&self, run_id: &str, job: &Job) -> bool {
        run_id != self.own && job.frees_run_id(is_named(run_id))
    }

    /// Returns true if other coordinators can continue all jobs from their records.
    pub(super) fn is_replaceable(&self) -> bool {
        self.jobs.borrow().values().all(|job| job.is_replaceable())
    }

    async fn accept(self: Rc<Self>, listener: TcpListener) {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            };
            let number = self.connections.get() + 1;
            self.connections.set(number);
            let server = Rc::clone(&self);
            let task = spawn_local(async move { server.serve(number, stream).await });
            let mut unauthenticated = self.unauthenticated.borrow_mut();
            unauthenticated.push_back((number, task.abort_handle()));
            if unauthenticated.len() > MAX_UNAUTHENTICATED
                && let Some((_, oldest)) = unauthenticated.pop_front()
            {
                oldest.abort();
            }
        }
    }

    /// Removes a connection that has authenticated itself, or ended, from the list of unauthenticated
    /// connections.
    fn mark_authenticated(&self, number: u64) {
        self.unauthenticated.borrow_mut().retain(|(other, _)| *other != number);
    }

    async fn serve(self: Rc<Self>, number: u64, mut stream: TcpStream) {
        let _ = framing::set_socket_options(&stream);
        match timeout(AUTHENTICATION_TIMEOUT, self.authenticate(&mut stream)).await {
            Ok(Ok(Some((hello, profile, (theirs, ours))))) => {
                self.mark_authenticated(number);
                if let Some(job) = self.job(&hello.run_id) {
                    job.serve_member(number, stream, hello.agent, profile, theirs, ours).await;
                }
            }
            Ok(Ok(None)) => {
                self.mark_authenticated(number);
                self.serve_store(stream).await;
            }
            Ok(Err(_)) | Err(_) => self.mark_authenticated(number),
        }
    }

    /// Authenticates the peer. Returns `None` if the peer speaks the protocol of a TCPStore.
    async fn authenticate(
        &self,
        stream: &mut TcpStream,
    ) -> Result<Option<(Hello, Profile, (Seal, Seal))>, FramingError> {
        let mut first = [0; 1];
        if stream.peek(&mut first).await? == 1 && first[0] == 0 {
            return Ok(None);
        }
        let mut magic = [0; MAGIC.len()];
        stream.read_exact(&mut magic).await?;
        if magic[..7] != MAGIC[..7] {
            return Err(FramingError::NotRendezvous);
        }
        if magic != MAGIC {
            return refuse(stream, Refusal::Version { theirs: magic[7] }).await;
        }
        let (body, _) = framing::read_frame(stream, UNAUTHENTICATED_FRAME_LIMIT, false).await?;
        let hello: Hello = wire::decode(&body)?;
        if !hello.is_supported() {
            return refuse(stream, Refusal::Suite).await;
        }
        if self.is_closed.get() && self.would_start_job(&hello.run_id) {
            return refuse(stream, Refusal::JobEnded).await;
        }
        let nonce: Nonce = super::random()?;
        let (mut theirs, mut ours) = wire::seals(self.token.as_ref(), &hello, &nonce);
        let mut welcome = wire::encode(&Welcome::new(nonce));
        // The key depends on `nonce`, which the agent learns only from this frame. The frame that proves
        // knowledge of the token therefore follows it.
        welcome = wire::frame(&welcome);
        welcome.extend_from_slice(&ours.seal(&()));
        framing::write_raw(stream, &welcome).await?;
        let message: ToCoordinator = framing::read(stream, &mut theirs, UNAUTHENTICATED_FRAME_LIMIT).await?;
        let ToCoordinator::Profile(profile) = message else { return Err(FramingError::NotRendezvous) };
        if !profile.is_valid() {
            return Err(FramingError::NotRendezvous);
        }
        Ok(Some((hello, profile, (theirs, ours))))
    }

    /// Notes that the node of this process rejoins its job under a new agent id.
    pub(super) fn set_agent(&self, agent: AgentId) {
        self.jobs.borrow().values().for_each(|job| job.set_agent(agent));
    }

    /// Gives up leadership of all jobs, so that a coordinator on another node may take over at once.
    pub(super) async fn release(&self) {
        let jobs: Vec<_> = self.jobs.borrow().values().cloned().collect();
        for job in jobs {
            job.release().await;
        }
    }

    fn job(&self, run_id: &str) -> Option<Rc<Job>> {
        let mut jobs = self.jobs.borrow_mut();
        let full = self.own_job_only || jobs.len() >= MAX_JOBS;
        match jobs.entry(run_id.to_owned()) {
            Entry::Occupied(mut place) if self.is_superseded(run_id, place.get()) => {
                let coordinator = Coordinator::new(self.rules, 1, entropy()?);
                place.insert(Job::start(coordinator, None));
                Some(Rc::clone(place.get()))
            }
            Entry::Occupied(job) => Some(Rc::clone(job.get())).filter(|job| !job.has_lost_leadership()),
            Entry::Vacant(_) if full => None,
            Entry::Vacant(place) => {
                let coordinator = Coordinator::new(self.rules, 1, entropy()?);
                Some(Rc::clone(place.insert(Job::start(coordinator, None))))
            }
        }
    }

    async fn serve_store(&self, mut stream: TcpStream) {
        let Some(address) = self.store else { return };
        if let Ok(mut store) = TcpStream::connect(address).await {
            let _ = copy_bidirectional(&mut stream, &mut store).await;
        }
    }
}

fn entropy() -> Option<u128> {
    let bytes =
        super::random().inspect_err(|error| print_message(&format!("warning: cannot start a job: {error}")));
    bytes.ok().map(u128::from_le_bytes)
}

/// The reason why a node is refused before it has authenticated itself.
#[derive(Debug, Clone, Copy, thiserror::Error)]
enum Refusal {
    #[error(
        "the joining node uses version {theirs} of the rendezvous protocol, the coordinator {}: use one \
         version of convoke on all nodes",
        MAGIC[7]
    )]
    Version { theirs: u8 },
    #[error("the joining node asks for a cipher suite that the coordinator does not support")]
    Suite,
    #[error(
        "the job of the launcher that serves it has ended, and it now serves only jobs that already run: \
         use another port"
    )]
    JobEnded,
}

async fn refuse<T>(stream: &mut TcpStream, why: Refusal) -> Result<T, FramingError> {
    let why = why.to_string();
    let refusal = wire::frame(&wire::encode(&Welcome::Refused(why.clone())));
    framing::write_raw(stream, &refusal).await?;
    Err(FramingError::Refused(why))
}
