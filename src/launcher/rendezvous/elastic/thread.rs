//! The thread that holds a node's connection and, on the host of the endpoint, runs the rendezvous server.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use convoke_env::Token;
use convoke_store::{ServeError, StoreServer};
use nix::sys::signal::Signal;
use tokio::sync::mpsc;
use tokio::task::LocalSet;

use super::board::{Board, Over, Stopped, Told};
use super::caller::{self, Caller};
use super::desk::{Desk, Heard, Said};
use super::directory::{Directory, EtcdDirectory, FileDirectory};
use super::finder::Finder;
use super::hall::Hall;
use super::place;
use crate::config::Endpoint;
use crate::membership::{AgentId, Departure, Member, News, Phase, Profile, Rules};
use crate::rendezvous::RendezvousError;
use crate::say::say;

/// Number of heartbeats within the heartbeat timeout.
const BEATS: u32 = 6;
/// Longest time that the coordinator stays after its node leaves, so that all members learn how the job
/// ended.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_POLL: Duration = Duration::from_millis(2);
/// Interval at which the thread checks whether other jobs have ended.
const GUESTS_POLL: Duration = Duration::from_millis(50);
/// Longest time for releasing the lease in etcd.
const RELEASE: Duration = Duration::from_millis(500);

/// Settings of the thread.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) endpoint: Endpoint,
    pub(super) rules: Rules,
    pub(super) profile: Profile,
    pub(super) run_id: String,
    pub(super) token: Option<Token>,
    /// Longest time that writing the outcome of the job may take.
    pub(super) close: Duration,
}

/// Handle of the thread.
#[derive(Debug)]
pub(super) struct Thread {
    pub(super) board: Arc<Board>,
    said: mpsc::UnboundedSender<Said>,
    shared: Shared,
    /// True if the thread serves the coordinator.
    pub(super) is_host: bool,
}

impl Thread {
    /// Starts the thread. `phase` is the state of this node.
    ///
    /// # Errors
    /// This host is to serve the endpoint (`is_host=true`) and cannot.
    pub(super) fn start(mut settings: Settings, phase: Phase) -> Result<Self, RendezvousError> {
        let system = |what: &str| {
            let what = what.to_owned();
            move |source| RendezvousError::System { what, source }
        };
        let agent = caller::fresh_id().map_err(system("cannot make an id"))?;
        let listeners = listen(&settings)?;
        let picked = listeners.first().and_then(|listener| listener.local_addr().ok());
        if let (Endpoint::Host { port, .. }, Some(picked)) = (&mut settings.endpoint, picked) {
            *port = picked.port();
        }
        let (said, says) = mpsc::unbounded_channel();
        let shared = Shared::default();
        let thread = Self {
            board: Arc::clone(&shared.board),
            said,
            shared: shared.clone(),
            is_host: !listeners.is_empty(),
        };
        let body = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            match runtime {
                Ok(runtime) => {
                    let work = work(settings, agent, phase, listeners, says, shared.clone());
                    LocalSet::new().block_on(&runtime, work);
                }
                Err(error) => say(&format!("error: no event loop: {error}")),
            }
            shared.board.change(|told| told.closed = true);
        };
        let started = std::thread::Builder::new().name("convoke-rendezvous".to_owned()).spawn(body);
        started.map_err(system("no thread"))?;
        Ok(thread)
    }

    pub(super) fn enter(&self, phase: Phase) {
        // If the thread has ended, the board holds the reason.
        let _ = self.said.send(Said::Enter(phase));
    }

    /// Returns this host's address on the route to the coordinator, once there has been a connection.
    pub(super) fn towards(&self) -> Option<IpAddr> {
        *lock(&self.shared.towards)
    }

    /// Leaves, and waits until the coordinator has been told.
    pub(super) fn leave(&self, departure: Departure) {
        *lock(&self.shared.departure) = Some(departure.clone());
        let _ = self.said.send(Said::Leave(departure));
        self.board.wait(None, |_| None::<()>);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns listeners at the endpoint, if it is this host and no process listens there yet.
fn listen(settings: &Settings) -> Result<Vec<std::net::TcpListener>, RendezvousError> {
    let Endpoint::Host { host, port, is_host } = &settings.endpoint else { return Ok(Vec::new()) };
    if *is_host == Some(false) {
        return Ok(Vec::new());
    }
    let Some(addresses) = place::listening_addresses(host, *port, &resolve(host, *port)) else {
        return match is_host {
            Some(_) => Err(RendezvousError::NotHere { host: host.clone() }),
            None => Ok(Vec::new()),
        };
    };
    match convoke_store::listen(&addresses) {
        Ok(listeners) => Ok(listeners),
        // Another agent of this host serves the endpoint already.
        Err(ServeError::InUse { .. }) if is_host.is_none() => Ok(Vec::new()),
        Err(ServeError::InUse { address }) => {
            Err(RendezvousError::InUse { address, holder: super::super::holder::holder(address.port()) })
        }
        Err(source) => Err(RendezvousError::Serve { source }),
    }
}

fn resolve(host: &str, port: u16) -> Vec<IpAddr> {
    (host, port)
        .to_socket_addrs()
        .map(|found| found.map(|address| address.ip()).collect())
        .unwrap_or_default()
}

/// State that the thread shares with its callers.
#[derive(Debug, Clone, Default)]
struct Shared {
    board: Arc<Board>,
    /// Address of this host on the route to the coordinator.
    towards: Arc<Mutex<Option<IpAddr>>>,
    /// Reason for which this node leaves, once it does.
    departure: Arc<Mutex<Option<Departure>>>,
}

/// Runs the thread until the node leaves or is cut off from the others.
async fn work(
    settings: Settings,
    agent: AgentId,
    phase: Phase,
    listeners: Vec<std::net::TcpListener>,
    mut said: mpsc::UnboundedReceiver<Said>,
    shared: Shared,
) {
    let Settings { endpoint, rules, profile, run_id, token, close } = settings;
    let serves = !listeners.is_empty();
    // A peer that looks for torch's store at the endpoint finds one, but only in open mode.
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    let store = (serves && token.is_none()).then(|| StoreServer::bind(&[loopback]).ok()).flatten();
    let store_at = store.as_ref().and_then(|store| store.addresses().first().copied());
    let hall = serves.then(|| Hall::open(listeners, token.clone(), rules, store_at, &run_id, None));

    let listed = |directory| Finder::listed(directory, run_id.clone(), agent, token.clone(), rules, close);
    let mut finder = match endpoint {
        Endpoint::Host { host, port, .. } => Finder::Endpoint { host, port, token },
        Endpoint::File(path) => listed(Directory::File(FileDirectory::new(path, &run_id, rules.silence))),
        Endpoint::Etcd(config) => match EtcdDirectory::new(&config, &run_id, rules.silence) {
            Ok(directory) => listed(Directory::Etcd(directory)),
            Err(why) => return note(&shared.board, Heard::Unusable { why }),
        },
    };
    let (tell, mut heard) = mpsc::unbounded_channel();
    let mut member = Member::new(phase, rules.silence);
    let join_timeout = rules.join_timeout;
    let host = profile.host.clone();
    let caller = Caller { run_id: run_id.clone(), profile, agent };
    let desk = Desk { caller, beat: rules.silence / BEATS, join_timeout };
    let keeps = desk.run(&mut member, &mut finder, &mut said, &tell, &shared.towards);
    let writes = async {
        while let Some(heard) = heard.recv().await {
            note(&shared.board, heard);
        }
    };
    tokio::select! {
        () = keeps => {}
        () = writes => {}
    }
    while let Ok(heard) = heard.try_recv() {
        note(&shared.board, heard);
    }
    match (hall, finder.hall()) {
        (Some(hall), _) => {
            let served = Served { hall, agent, host };
            served.end(said, &shared).await;
        }
        // Another node can take over.
        (None, Some(hall)) => {
            linger(|| hall.is_left() || hall.is_dispensable()).await;
            let _ = tokio::time::timeout(RELEASE, hall.release()).await;
        }
        (None, None) => {}
    }
}

/// Server at the endpoint, if no other node can take over.
struct Served {
    hall: Rc<Hall>,
    agent: AgentId,
    host: String,
}

impl Served {
    /// Ends the service after this node has left. Members that lose their coordinator are told.
    /// Other jobs may continue until they have ended, unless a signal stops this launcher.
    async fn end(&self, mut said: mpsc::UnboundedReceiver<Said>, shared: &Shared) {
        if self.desert(shared) {
            return linger(|| self.hall.is_deserted()).await;
        }
        linger(|| self.hall.is_left()).await;
        self.hall.close();
        loop {
            let guests = self.hall.guests();
            if guests == 0 {
                return;
            }
            shared.board.change(|told| told.guests = guests);
            tokio::select! {
                () = tokio::time::sleep(GUESTS_POLL) => {}
                Some(Said::Leave(_)) = said.recv() => {
                    if self.desert(shared) {
                        return linger(|| self.hall.is_deserted()).await;
                    }
                }
            }
        }
    }

    /// Tells the affected members why this node leaves. Returns true if those are the members of all jobs.
    fn desert(&self, shared: &Shared) -> bool {
        let (why, all) = match lock(&shared.departure).take() {
            Some(Departure::Stopped { signal }) => {
                let name = Signal::try_from(signal).map_or("a signal", Signal::as_str);
                (format!("it was stopped by {name}"), true)
            }
            Some(Departure::Error(why)) => (why, false),
            Some(Departure::Ended) | None => return false,
        };
        self.hall.desert(all, self.agent, &self.host, &why);
        all
    }
}

/// Waits until all members have been told, for [`LINGER`] at most.
async fn linger(have_heard: impl Fn() -> bool) {
    let until = Instant::now() + LINGER;
    while !have_heard() && Instant::now() < until {
        tokio::time::sleep(LINGER_POLL).await;
    }
}

fn note(board: &Board, heard: Heard) {
    board.change(|told: &mut Told| match heard {
        Heard::Connected => told.trouble = None,
        Heard::Waiting { why } => told.trouble = Some(why),
        Heard::Alone { silent, last } => drop(told.over.get_or_insert(Over::Alone { silent, last })),
        Heard::News(News::Wait(muster)) => told.muster = Some(muster),
        Heard::News(News::Run(assignment)) => {
            told.run = Some(assignment);
            told.muster = None;
        }
        Heard::News(News::Stop(cause)) => stop(told, cause.to_string(), false),
        Heard::Stop { silent, last } => {
            let last = if last.is_empty() { String::new() } else { format!(" ({last})") };
            stop(told, format!("nobody was heard for {:.1} s{last}", silent.as_secs_f64()), true);
        }
        Heard::Unusable { why } => drop(told.over.get_or_insert(Over::Unusable(why))),
        Heard::News(News::End(ending)) => drop(told.over.get_or_insert(Over::End(ending))),
        Heard::News(News::Refuse(refusal)) => drop(told.over.get_or_insert(Over::Refused(refusal))),
    });
}

fn stop(told: &mut Told, cause: String, alone: bool) {
    let round = told.run.as_ref().map_or(0, |run| run.round);
    told.stopped = Some(Stopped { round, cause, alone });
}
