//! From a store to connected ranks.
//!
//! Each rank writes a record under the generation, and rank 0 gathers the records into one table that all
//! ranks read. That costs n writes, n reads by rank 0, and one read by each other rank. Then the ranks
//! connect. When rank 0 is connected to all, it removes the keys, so that a later process cannot read stale
//! ones.
//!
//! If no launcher gave a generation, rank 0 draws one and announces it (`generation`).
//!
//! When the ranks of an existing group form another group, they exchange their records in the existing
//! group. The store may be gone by then, since rank 0 may serve it and exit.

mod address;
mod claim;
mod cores;
mod gather;
mod generation;
mod interfaces;
mod lanes;
mod record;
mod standing;

pub(crate) use address::address;

use std::fmt;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use convoke_env::{AgentChannel, Generation};
use convoke_store::{Store, StoreError};
use nix::unistd::{Pid, getsid};

use crate::cause::{self, Cause, Report};
use crate::engine::{self, Crowd, Engine, Settings, Sharing};
use crate::error::{CommError, Loss, Ranks};
use crate::fault::moment;
use crate::flight::{Recorder, Track};
use crate::frame::VERSION;
use crate::links::hello::{Credentials, Lane};
use crate::links::tcp::{self, Listener};
use crate::options::GroupOptions;
use crate::plan::{Topology, Tuning};
use crate::room;
use claim::Claim;
use cores::Share;
use lanes::{control, lanes};
use record::Record;
pub(crate) use standing::Removal;

/// The server of a store that no launcher serves, as error messages name it.
pub(crate) const RANK_0: &str = "rank 0";
/// Interval at which a rank checks whether rank 0 has announced another generation.
const RECHECK: Duration = Duration::from_millis(250);
/// Time for which connections to a published address may be refused before that rank counts as lost.
const REFUSAL: Duration = Duration::from_millis(100);
/// Time limit for removing keys. Correctness does not depend on the removal.
const CLEAN_UP: Duration = Duration::from_secs(2);
/// Time after which missing ranks are logged; at most a third of `init_timeout`.
const NOTICE: Duration = Duration::from_secs(10);
/// Limit on the records that are looked up one by one to name the missing ranks.
const LOOKED_UP: usize = 1024;

/// Everything that a rank needs to form a group with the others.
#[derive(Debug)]
pub(crate) struct Invitation {
    pub(crate) store: Arc<dyn Store>,
    /// The meeting place as text. It is equal for threads of a process that would use the same keys.
    pub(crate) place: String,
    /// The rank whose process serves the store, if a rank does.
    pub(crate) store_rank: Option<usize>,
    pub(crate) whereabouts: Whereabouts,
    /// Removes the entry of a formed world from the store when the world is dropped.
    pub(crate) removal: Option<Arc<Removal>>,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// The ranks' ranks in the first ancestor of this group.
    pub(crate) origin: Vec<usize>,
    /// The ranks are already connected in an ancestor group, and exchange their records there.
    pub(crate) is_successor: bool,
    pub(crate) options: GroupOptions,
    pub(crate) tuning: Tuning,
    pub(crate) agent: Option<(Arc<Mutex<AgentChannel>>, Generation)>,
    /// The sharing of cores inherited from an ancestor group. It is set if ranks outside this group also
    /// run on these cores.
    pub(crate) sharing: Option<Sharing>,
}

/// Location of the store, for error messages.
#[derive(Debug, Clone, Default)]
pub(crate) struct Whereabouts {
    /// Address of the store; empty if it has none.
    pub(crate) at: String,
    /// Server of the store; empty if it is unknown.
    pub(crate) server: &'static str,
    /// The variables or arguments that direct a rank to this store; empty if a launcher sets them.
    pub(crate) given_by: String,
}

impl fmt::Display for Whereabouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, server, given_by } = self;
        if !at.is_empty() {
            write!(f, " at {at}")?;
        }
        if !server.is_empty() {
            write!(f, ", where {server} serves the store")?;
        }
        if !given_by.is_empty() {
            write!(f, "; all ranks are started with {given_by}")?;
        }
        Ok(())
    }
}

impl Whereabouts {
    /// Converts a store error, and adds who serves the store if it is lost or unreachable.
    pub(crate) fn explain(&self, group: &str, error: StoreError) -> CommError {
        match &error {
            StoreError::Lost { .. } | StoreError::Unreachable { .. } if !self.server.is_empty() => {
                let ranks = if self.server == RANK_0 { vec![0] } else { Vec::new() };
                let advice = match &error {
                    StoreError::Unreachable { .. } if !self.given_by.is_empty() => {
                        format!("; is it running, with {}?", self.given_by)
                    }
                    _ => String::new(),
                };
                let what = format!("{error}; {} serves it{advice}", self.server);
                CommError::Bootstrap { group: group.to_owned(), what, ranks }
            }
            _ => error.into(),
        }
    }
}

/// A connected group.
#[derive(Debug)]
pub(crate) struct Formed {
    pub(crate) engine: Box<Engine>,
    /// The generation that the ranks agreed on.
    pub(crate) generation: Generation,
    pub(crate) topology: Topology,
    /// All ranks share memory.
    pub(crate) in_memory: bool,
}

/// Connects the ranks, which meet in the store.
pub(crate) fn connect(invitation: &Invitation) -> Result<Formed, CommError> {
    logged(invitation, || find_together(invitation))
}

/// Connects this rank, which already listens, to the ranks with these records.
pub(crate) fn connect_to(waiting: Waiting<'_>, records: &[&[u8]]) -> Result<Formed, CommError> {
    logged(waiting.ours.invitation, || waiting.ours.meet_those(records))
}

fn logged(
    invitation: &Invitation,
    connect: impl FnOnce() -> Result<Formed, CommError>,
) -> Result<Formed, CommError> {
    let Invitation { rank, size, ref options, .. } = *invitation;
    let started = Instant::now();
    let name = &options.name;
    let outcome = connect().map_err(|error| match error {
        CommError::Store(error) => invitation.whereabouts.explain(name, error),
        error => error,
    });
    match &outcome {
        Ok(Formed { generation, .. }) => {
            cause::forget();
            let took = started.elapsed().as_millis();
            log::info!("{name}: rank {rank} of {size} connected after {took} ms, generation {generation}");
        }
        // The engine has already logged the error that ended the group.
        Err(error) if error.place().is_some() => {}
        Err(error) => log::error!("{name}: rank {rank} of {size}: {error}"),
    }
    outcome
}

fn find_together(invitation: &Invitation) -> Result<Formed, CommError> {
    let waiting = Waiting::new(invitation).map_err(|error| tell_failure(invitation, error))?;
    let ours = &waiting.ours;
    let rank = invitation.rank;
    let mut generation = ours.first_generation()?;
    loop {
        match ours.round(generation)? {
            Outcome::Connected(formed) => return Ok(*formed),
            Outcome::Stale(announced) => {
                log::info!("{}: rank {rank} leaves generation {generation} for {announced}", ours.name());
                generation = announced;
            }
        }
    }
}

/// Publishes at once that this rank has no file descriptor to listen with. The other ranks read it only if
/// the generation was given.
fn tell_failure(invitation: &Invitation, error: CommError) -> CommError {
    let Some(what) = without_descriptors(invitation, &error) else { return error };
    let Invitation { rank, ref store, ref options, .. } = *invitation;
    if let Some(generation) = options.generation {
        let (name, record) = (&options.name, record::failed(&what));
        let soon = Instant::now() + CLEAN_UP;
        let _ = store.set(format!("{name}/{generation}/rank/{rank}").as_bytes(), &record, soon);
        if rank == 0 {
            let table = serde_json::to_vec(&[String::from_utf8_lossy(&record)]).unwrap_or_default();
            let _ = store.set(format!("{name}/{generation}/table").as_bytes(), &table, soon);
        }
    }
    let (group, what) = (options.name.clone(), format!("rank {rank} {what}"));
    CommError::Bootstrap { group, what, ranks: vec![rank] }
}

/// Returns the message for an error that means a lack of descriptors; `None` for any other error.
fn without_descriptors(invitation: &Invitation, error: &CommError) -> Option<String> {
    let CommError::System { source, .. } = error else { return None };
    let told = || room::without_descriptors(source, invitation.size, invitation.size);
    room::is_without_descriptors(source).then(|| format!("has no file descriptor left: {}", told()))
}

fn listen(invitation: &Invitation) -> Result<Listener, CommError> {
    let address = address(&invitation.options.listen)?;
    tcp::listen(SocketAddr::new(address, 0)).map_err(|error| {
        let why = match error.kind() {
            ErrorKind::AddrInUse => ", where no port is free (`ss -s` counts who uses them or waits)",
            _ => "",
        };
        CommError::system(&format!("cannot listen at {address}{why}"), error)
    })
}

/// Returns the engine of a group of one, which delivers messages of a rank to itself.
pub(crate) fn alone(invitation: &Invitation, generation: Generation) -> Result<Engine, CommError> {
    let options = &invitation.options;
    let flight = Arc::new(invitation.track());
    flight.formed(generation);
    let settings = Settings {
        name: options.name.clone(),
        me: 0,
        size: 1,
        credentials: Credentials::new(options.token.as_ref(), generation, options.id),
        addresses: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
        store: Arc::clone(&invitation.store),
        abort_key: format!("{}/{generation}/abort", options.name).into_bytes(),
        store_rank: invitation.store_rank,
        agent: None,
        peer_timeout: options.peer_timeout,
        sharing: Sharing { crowd: Crowd::No, place: None },
        flight,
    };
    Engine::new(settings, None)
}

impl Invitation {
    /// Returns an invitation to a group of one, which needs no shared store.
    pub(crate) fn alone(options: GroupOptions, tuning: Tuning) -> Self {
        let store = Arc::new(convoke_store::MemoryStore::new());
        Self::new(store, "no place".to_owned(), (0, 1), options, tuning)
    }

    /// Returns the invitation of one rank of so many to a group that comes from no other one, in a store of which nothing
    /// else is known.
    pub(crate) fn new(
        store: Arc<dyn Store>,
        place: String,
        (rank, size): (usize, usize),
        options: GroupOptions,
        tuning: Tuning,
    ) -> Self {
        Self {
            store,
            place,
            store_rank: None,
            whereabouts: Whereabouts::default(),
            removal: None,
            rank,
            size,
            origin: (0..size).collect(),
            is_successor: false,
            options,
            tuning,
            agent: None,
            sharing: None,
        }
    }

    fn track(&self) -> Track {
        let Self { rank, size, origin, options, .. } = self;
        Recorder::of_process().group(&options.name, options.id, options.generation, (*rank, *size), origin)
    }

    fn record(&self, listener: &Listener) -> Result<Record, CommError> {
        let address = listener.address().map_err(|error| CommError::system("no local address", error))?;
        Ok(Record {
            version: VERSION,
            rank: self.rank,
            size: self.size,
            address,
            host: record::host_key(&self.options.part_of_host),
            cores: engine::allowed_cores().into_iter().collect(),
            pid: std::process::id(),
            tuning: self.tuning.to_string(),
            token: self.options.token.is_some(),
            memory: self.options.shared_memory,
        })
    }
}

/// A rank that listens for its peers.
pub(crate) struct Waiting<'a> {
    ours: Ours<'a>,
    _claim: Claim,
}

impl<'a> Waiting<'a> {
    pub(crate) fn new(invitation: &'a Invitation) -> Result<Self, CommError> {
        let claim = Claim::new(invitation)?;
        let deadline = Instant::now() + invitation.options.init_timeout;
        let listener = listen(invitation)?;
        let flight = Arc::new(invitation.track());
        let ours = Ours { invitation, record: invitation.record(&listener)?, listener, deadline, flight };
        let Record { rank, address, .. } = ours.record;
        log::info!("{}: rank {rank} listens at {address}", ours.name());
        Ok(Self { ours, _claim: claim })
    }

    /// Returns the encoded record, which the other ranks need to connect.
    pub(crate) fn record(&self) -> Vec<u8> {
        self.ours.encoded()
    }
}

/// Returns the encoded failure that takes the place of the record of a rank that cannot listen.
pub(crate) fn no_record(invitation: &Invitation, error: &CommError) -> Vec<u8> {
    record::failed(&without_descriptors(invitation, error).unwrap_or_else(|| error.to_string()))
}

/// This rank while its group forms.
struct Ours<'a> {
    invitation: &'a Invitation,
    record: Record,
    listener: Listener,
    deadline: Instant,
    flight: Arc<Track>,
}

enum Outcome {
    Connected(Box<Formed>),
    /// Rank 0 has announced another generation.
    Stale(Generation),
}

impl Ours<'_> {
    fn store(&self) -> &dyn Store {
        &*self.invitation.store
    }

    /// Returns the encoded record of this rank.
    fn encoded(&self) -> Vec<u8> {
        serde_json::to_vec(&self.record).unwrap_or_default()
    }

    fn name(&self) -> &str {
        &self.invitation.options.name
    }

    fn key(&self, generation: Generation, what: &str) -> Vec<u8> {
        format!("{}/{generation}/{what}", self.name()).into_bytes()
    }

    fn record_key(&self, generation: Generation, rank: usize) -> Vec<u8> {
        self.key(generation, &format!("rank/{rank}"))
    }

    fn failed(&self, what: String, mut ranks: Vec<usize>) -> CommError {
        ranks.truncate(cause::NAMED_RANKS);
        CommError::Bootstrap { group: self.name().to_owned(), what, ranks }
    }

    /// Connects to the ranks with these records, indexed by rank.
    fn meet_those(&self, records: &[&[u8]]) -> Result<Formed, CommError> {
        let table = self.checked(record::decode_all(records))?;
        let Some(generation) = self.invitation.options.generation else {
            unreachable!("a group that comes from another one has its generation")
        };
        match self.meet(generation, &table)? {
            Outcome::Connected(formed) => Ok(*formed),
            Outcome::Stale(_) => unreachable!("nobody announces a generation where all know it"),
        }
    }

    /// Connects to the ranks in `table`.
    fn meet(&self, generation: Generation, table: &[Record]) -> Result<Outcome, CommError> {
        let Invitation { rank, size, ref options, .. } = *self.invitation;
        let topology = Topology::new(table.iter().map(|record| &record.host));
        let sharing = self.invitation.sharing.unwrap_or_else(|| {
            let all: Vec<_> = topology.ranks_beside(rank).iter().map(|&rank| &table[rank].cores).collect();
            sharing(&cores::share(&all, topology.place(rank).1), table[rank].cores.count())
        });
        let settings = Settings {
            name: options.name.clone(),
            me: rank,
            size,
            credentials: Credentials::new(options.token.as_ref(), generation, options.id),
            addresses: table.iter().map(|record| record.address).collect(),
            store: Arc::clone(&self.invitation.store),
            abort_key: self.key(generation, "abort"),
            store_rank: self.invitation.store_rank,
            agent: self.invitation.agent.clone(),
            peer_timeout: options.peer_timeout,
            sharing,
            flight: Arc::clone(&self.flight),
        };
        let mut engine = Box::new(self.engine(settings)?);
        moment("meeting", 0, 0);
        match self.connect_in_steps(&mut engine, generation, &topology) {
            Ok(Ok(in_memory)) => {
                self.flight.formed(generation);
                moment("connected", 0, 0);
                Ok(Outcome::Connected(Box::new(Formed { engine, generation, topology, in_memory })))
            }
            Ok(Err(announced)) => Ok(Outcome::Stale(announced)),
            Err(error) => {
                // Sends a goodbye to connected peers; without it they would report this rank as the cause.
                engine.leave();
                Err(match error {
                    // The timeout of another rank expired before that of this rank.
                    CommError::Timeout { missing, after, .. } => self.unconnected(missing, after, ""),
                    error => error,
                })
            }
        }
    }

    /// Creates the engine. If descriptors are lacking, publishes an abort so that the other ranks stop
    /// waiting.
    fn engine(&self, settings: Settings) -> Result<Engine, CommError> {
        let (store, key) = (Arc::clone(&settings.store), settings.abort_key.clone());
        let listener =
            self.listener.try_clone().map_err(|error| CommError::system("cannot duplicate a socket", error));
        let engine = listener.and_then(|listener| Engine::new(settings, Some(listener)));
        engine.map_err(|error| {
            let rank = self.invitation.rank;
            let Some(what) = without_descriptors(self.invitation, &error) else { return error };
            let report = Report::new(rank, Cause::Aborted { reason: format!("it {what}") });
            let _ = store.compare_set(&key, b"", &report.encode(), Instant::now() + CLEAN_UP);
            self.failed(format!("rank {rank} {what}"), vec![rank])
        })
    }

    fn unconnected(&self, ranks: Vec<usize>, after: Duration, notes: &str) -> CommError {
        let what =
            format!("no connection with rank(s) {} after {} ms{notes}", Ranks(&ranks), after.as_millis());
        self.failed(what, ranks)
    }

    /// Connects to all ranks, and sets up shared memory with the ranks of this host. Returns whether all
    /// ranks share memory, or another generation that rank 0 has announced.
    fn connect_in_steps(
        &self,
        engine: &mut Engine,
        generation: Generation,
        topology: &Topology,
    ) -> Result<Result<bool, Generation>, CommError> {
        let Invitation { rank, size, ref options, .. } = *self.invitation;
        let (beside, alone) = (topology.ranks_beside(rank), topology.hosts().len() == 1);
        let mut in_memory = false;
        if options.shared_memory && beside.len() > 1 {
            // Data through shared memory needs no connection, so only control connections are opened first.
            if let Some(announced) = self.connect_all(engine, generation, &control(rank, size))? {
                return Ok(Err(announced));
            }
            match engine.share(beside, self.deadline)? {
                Ok(()) => in_memory = alone,
                // The first rank of the host logs the warning for all of them.
                Err(reason) if rank == beside[0] => log::warn!(
                    "{}: ranks {} share no memory, and use connections inside their host: {reason}",
                    self.name(),
                    Ranks(&beside[..beside.len().min(cause::NAMED_RANKS)])
                ),
                Err(reason) => log::info!("{}: rank {rank} shares no memory: {reason}", self.name()),
            }
        }
        let announced = self.connect_all(engine, generation, &lanes(rank, size))?;
        Ok(announced.map_or(Ok(in_memory), Err))
    }

    /// Opens `lanes`. Returns `None` when all are open, or another generation that rank 0 has announced.
    fn connect_all(
        &self,
        engine: &mut Engine,
        generation: Generation,
        lanes: &[(usize, Lane)],
    ) -> Result<Option<Generation>, CommError> {
        let Invitation { rank, ref options, .. } = *self.invitation;
        loop {
            match engine.connect(lanes, (Instant::now() + RECHECK).min(self.deadline)) {
                Ok(true) => return Ok(None),
                Ok(false) => {}
                Err(error) => return Err(error),
            }
            let now = Instant::now();
            let confirmed = rank == 0 || self.invitation.is_successor || engine.is_connected(0);
            if !confirmed && let Some(announced) = self.announced(generation)? {
                return Ok(Some(announced));
            }
            if let Ok(Some(report)) = self.store().try_get(&self.key(generation, "abort"), now + RECHECK) {
                return Err(engine.aborted(&report));
            }
            // The record is not left over from a crashed round, since one table contains it and ours.
            let given_up = engine.door().refusing(REFUSAL, now).next();
            if let Some(gone) = given_up {
                let how = Loss::Unreachable { what: "nobody listens where it did".to_owned() };
                return Err(engine.give_up(Report::new(rank, Cause::PeerLost { rank: gone, how })));
            }
            if now >= self.deadline {
                let mut ranks: Vec<_> = engine.unconnected(lanes).collect();
                ranks.sort_unstable();
                ranks.dedup();
                let notes = format!(" ({})", engine.door().notes().join("; "));
                let after_ms = options.init_timeout.as_millis() as u64;
                engine.give_up(Report::new(rank, Cause::Timeout { missing: ranks.clone(), after_ms }));
                return Err(self.unconnected(ranks, options.init_timeout, &notes));
            }
        }
    }
}

/// Returns how this rank shares its cores with others; `own` is the number of cores that it may use.
fn sharing(share: &Share, own: usize) -> Sharing {
    // A smaller number is a CPU-time quota, which applies on any core. It reduces spinning, but is no
    // reason to assign cores.
    let quota = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = if quota < own || own == 0 { share.cores.min(quota) } else { share.cores };
    let alone = || getsid(None) == Ok(Pid::this()) && convoke_env::autogroup_enabled(Path::new("/"));
    let crowd = match share.ranks > cores {
        false => Crowd::No,
        true if alone() => Crowd::Apart,
        true => Crowd::Cores,
    };
    Sharing { crowd, place: share.place }
}
