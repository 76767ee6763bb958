//! The thread that holds a node's connection and, on the endpoint's host, the place where all meet.

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

/// Statuses in the time after which a silent node is lost.
const BEATS: u32 = 6;
/// How long the coordinator stays when its node goes, so that all hear how the job ended.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_POLL: Duration = Duration::from_millis(2);
/// Between two looks whether other jobs have ended.
const GUESTS_POLL: Duration = Duration::from_millis(50);
/// Longest time for telling etcd that it goes.
const RELEASE: Duration = Duration::from_millis(500);

/// What the thread needs to know.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) endpoint: Endpoint,
    pub(super) rules: Rules,
    pub(super) profile: Profile,
    pub(super) run_id: String,
    pub(super) token: Option<Token>,
    /// How long the end of the job may take to be written down.
    pub(super) close: Duration,
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct Thread {
    pub(super) board: Arc<Board>,
    said: mpsc::UnboundedSender<Said>,
    shared: Shared,
    /// It serves the coordinator.
    pub(super) is_host: bool,
}

impl Thread {
    /// Starts it; this node is in `phase`.
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
        // If it has ended, the board says why.
        let _ = self.said.send(Said::Enter(phase));
    }

    /// This host's address on the way to the coordinator, once there is a connection.
    pub(super) fn towards(&self) -> Option<IpAddr> {
        *lock(&self.shared.towards)
    }

    /// Leaves, and waits until that is said.
    pub(super) fn leave(&self, departure: Departure) {
        *lock(&self.shared.departure) = Some(departure.clone());
        let _ = self.said.send(Said::Leave(departure));
        self.board.wait(None, |_| None::<()>);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sockets at the endpoint, if it is this host and nobody listens there yet.
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
        // Another agent of this host was first.
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

/// What the thread shares with those that ask it.
#[derive(Debug, Clone, Default)]
struct Shared {
    board: Arc<Board>,
    /// This host's address on the way to the coordinator.
    towards: Arc<Mutex<Option<IpAddr>>>,
    /// Why this node goes, once it does.
    departure: Arc<Mutex<Option<Departure>>>,
}

/// What the thread does until the node leaves or is alone.
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
    // Who looks for torch's store here finds one, if anybody may look.
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

/// What this node serves at the endpoint, where nobody can take over.
struct Served {
    hall: Rc<Hall>,
    agent: AgentId,
    host: String,
}

impl Served {
    /// This node goes: those whom it leaves without their coordinator are told. Other jobs may go on until they have ended,
    /// unless a signal stops this launcher.
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

    /// Tells those who need to know why this node goes; whether those are all.
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

/// Stays until all have heard, for a while at most.
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
