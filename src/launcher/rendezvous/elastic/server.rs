//! The rendezvous server: runs the coordinator of each run id, and serves agents that prove by the token that
//! they belong to the job.
//!
//! Each connection has one task. All tasks run on one thread and need no lock: they borrow shared state only
//! between two awaits. The memory that unauthenticated peers can occupy is bounded by limits on the number of
//! their connections, and on time and bytes per connection. Above the limit, the server closes the oldest
//! unauthenticated connection.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use convoke_env::Token;
use tokio::io::{AsyncReadExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::timeout;

use super::Settings;
use super::framing::{self, FramingError};
use super::job::Job;
use super::wire::{
    self, Hello, MAGIC, Nonce, SUITE, Seal, ToCoordinator, UNAUTHENTICATED_FRAME_LIMIT, Welcome,
};
use crate::config::is_named;
use crate::membership::{AgentId, Coordinator, Event, Profile};
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
    /// Settings of the launcher's own job.
    settings: Rc<Settings>,
    token: Option<Token>,
    /// The token as a MUNGE credential, for agents whose user has not set it.
    credential: Option<String>,
    /// Address of the TCPStore to which the server forwards connections that use the TCPStore protocol.
    store: Option<SocketAddr>,
    /// The jobs by run id.
    jobs: RefCell<HashMap<String, Rc<Job>>>,
    /// Tasks of unauthenticated connections, oldest first.
    unauthenticated: RefCell<VecDeque<AbortHandle>>,
    /// True if no more jobs may start on this server.
    pub(super) is_closed: Cell<bool>,
    /// True if the server serves only the launcher's own job. With a registry (etcd or a shared file), each
    /// job has a coordinator and server of its own, which another node can take over.
    own_job_only: bool,
}

impl RendezvousServer {
    /// Starts a server that serves at `listeners` until it is dropped together with its tasks. `own_job` is
    /// the launcher's own job if the job has a registry.
    pub(super) fn open(
        listeners: Vec<std::net::TcpListener>,
        settings: Rc<Settings>,
        token: Option<Token>,
        credential: Option<String>,
        store: Option<SocketAddr>,
        own_job: Option<Rc<Job>>,
    ) -> Rc<Self> {
        let own_job_only = own_job.is_some();
        let jobs = own_job.into_iter().map(|job| (settings.run_id.clone(), job)).collect();
        let server = Rc::new(Self {
            settings,
            token,
            credential,
            store,
            jobs: RefCell::new(jobs),
            unauthenticated: RefCell::default(),
            is_closed: Cell::default(),
            own_job_only,
        });
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

    /// Tells members that the process of their coordinator, with agent `agent`, exits because of `why`. `all`
    /// selects the members of all jobs, not only of this launcher's own.
    pub(super) fn notify_shutdown(&self, all: bool, agent: AgentId, why: &str) {
        let jobs = self.jobs.borrow().clone();
        for (_, job) in jobs.into_iter().filter(|(run_id, _)| all || *run_id == self.settings.run_id) {
            let host = self.settings.profile.host.clone();
            job.handle(Event::CoordinatorExited { agent, host, why: why.to_owned() });
        }
    }

    /// Returns true if all members of all jobs have left.
    pub(super) fn has_no_members(&self) -> bool {
        self.jobs.borrow().values().all(|job| job.has_no_members())
    }

    /// Returns true if all members of this launcher's own job have left.
    pub(super) fn has_no_own_members(&self) -> bool {
        self.jobs.borrow().get(&self.settings.run_id).is_none_or(|job| job.has_no_members())
    }

    /// Returns the number of other jobs that have members.
    pub(super) fn other_jobs(&self) -> usize {
        let jobs = self.jobs.borrow();
        jobs.iter().filter(|(run_id, job)| **run_id != self.settings.run_id && job.has_members()).count()
    }

    /// Returns true if `job` has ended and the next node with this run id starts a new job. The launcher's
    /// own run id is excluded, because this launcher is about to exit.
    fn is_superseded(&self, run_id: &str, job: &Job) -> bool {
        run_id != self.settings.run_id && job.frees_run_id(is_named(run_id))
    }

    async fn accept(self: Rc<Self>, listener: TcpListener) {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            };
            let server = Rc::clone(&self);
            let task = spawn_local(async move { server.serve(stream).await });
            let mut unauthenticated = self.unauthenticated.borrow_mut();
            unauthenticated.push_back(task.abort_handle());
            if unauthenticated.len() > MAX_UNAUTHENTICATED
                && let Some(oldest) = unauthenticated.pop_front()
            {
                oldest.abort();
            }
        }
    }

    async fn serve(self: Rc<Self>, mut stream: TcpStream) {
        let _ = framing::set_socket_options(&stream);
        let authenticated = timeout(AUTHENTICATION_TIMEOUT, self.authenticate(&mut stream)).await;
        self.unauthenticated.borrow_mut().retain(|task| task.id() != tokio::task::id());
        match authenticated {
            Ok(Ok(Some((hello, profile, (theirs, ours))))) => {
                if let Some(job) = self.job(&hello.run_id) {
                    job.serve_member(stream, hello.agent, profile, theirs, ours).await;
                }
            }
            Ok(Ok(None)) => self.serve_store(stream).await,
            Ok(Err(_)) | Err(_) => {}
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
            let why = format!(
                "the joining node uses version {} of the rendezvous protocol, the coordinator {}: use one \
                 version of convoke on all nodes",
                magic[7], MAGIC[7]
            );
            return refuse(stream, why).await;
        }
        let body = framing::read_body(stream, UNAUTHENTICATED_FRAME_LIMIT).await?;
        let hello: Hello = wire::decode(&body)?;
        if hello.suite != SUITE {
            let why = "the joining node asks for a cipher suite that the coordinator does not support";
            return refuse(stream, why.to_owned()).await;
        }
        let is_free = |job: &Rc<Job>| self.is_superseded(&hello.run_id, job);
        if self.is_closed.get() && self.jobs.borrow().get(&hello.run_id).is_none_or(is_free) {
            let why = "the job of the launcher that serves it has ended, and it now serves only jobs that already \
                       run: use another port";
            return refuse(stream, why.to_owned()).await;
        }
        let nonce: Nonce = super::random()?;
        let (mut theirs, mut ours) = wire::seals(self.token.as_ref(), &hello, &nonce);
        let mut welcome = wire::frame(&wire::encode(&Welcome::Welcome {
            suite: SUITE,
            nonce,
            credential: self.credential.clone(),
        }));
        // The key depends on `nonce`, which the agent learns only from this frame. The frame that proves
        // knowledge of the token therefore follows it.
        welcome.extend_from_slice(&ours.seal(&()));
        framing::write_raw(stream, &welcome).await?;
        let message: ToCoordinator = framing::read(stream, &mut theirs, UNAUTHENTICATED_FRAME_LIMIT).await?;
        let ToCoordinator::Profile(profile) = message else { return Err(FramingError::NotRendezvous) };
        if !profile.is_valid() {
            return Err(FramingError::NotRendezvous);
        }
        Ok(Some((hello, profile, (theirs, ours))))
    }

    /// Returns the job with this run id, and starts it if the run id is free.
    fn job(&self, run_id: &str) -> Option<Rc<Job>> {
        let mut jobs = self.jobs.borrow_mut();
        match jobs.get(run_id) {
            Some(job) if self.is_superseded(run_id, job) => drop(jobs.remove(run_id)),
            Some(job) => return Some(Rc::clone(job)).filter(|job| !job.has_lost_leadership()),
            None => {}
        }
        if self.own_job_only || jobs.len() >= MAX_JOBS {
            return None;
        }
        let warn = |error: &std::io::Error| print_message(&format!("warning: cannot start a job: {error}"));
        let entropy = u128::from_le_bytes(super::random().inspect_err(warn).ok()?);
        let coordinator = Coordinator::new(self.settings.rules, 1, entropy);
        let job = Job::start(coordinator, None);
        jobs.insert(run_id.to_owned(), Rc::clone(&job));
        Some(job)
    }

    async fn serve_store(&self, mut stream: TcpStream) {
        let Some(address) = self.store else { return };
        if let Ok(mut store) = TcpStream::connect(address).await {
            let _ = copy_bidirectional(&mut stream, &mut store).await;
        }
    }
}

/// Refuses a node before it has authenticated itself.
async fn refuse<T>(stream: &mut TcpStream, why: String) -> Result<T, FramingError> {
    let refusal = wire::frame(&wire::encode(&Welcome::Refused(why.clone())));
    framing::write_raw(stream, &refusal).await?;
    Err(FramingError::Refused(why))
}
