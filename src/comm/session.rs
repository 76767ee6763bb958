//! From the environment of a launcher to the world.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use convoke_env::{AgentChannel, Generation, ToWorker, Token, WorkerEnv, vars};
use convoke_store::{PrefixStore, Store, StoreServer, TcpStore};

use crate::bootstrap::Invitation;
use crate::error::CommError;
use crate::group::Group;
use crate::options::{GroupOptions, Listen};
use crate::plan::Tuning;

/// How long the launcher may take for the first message on the agent channel: it is there before us.
const HELLO: Duration = Duration::from_secs(10);

/// Joins the job that the environment describes, and connects to all its ranks.
///
/// The same as [`Session::join`] and [`Session::world`]. Without the variables of a launcher it is
/// a world of one, so a program runs alone without change.
///
/// # Errors
/// As those two.
pub fn init() -> Result<World, CommError> {
    Session::join()?.world()
}

/// A process's place in a job, from which worlds are made, one for each round.
///
/// A launcher that restarts workers starts new processes, whose first world is the new round. A process
/// that lives on after a failure, together with all others, goes on with [`Self::next_round`].
#[derive(Debug)]
pub struct Session {
    place: Option<Place>,
    options: GroupOptions,
    round: u32,
}

/// What a launcher said.
#[derive(Debug)]
struct Place {
    env: WorkerEnv,
    agent: Option<(Arc<Mutex<AgentChannel>>, Generation)>,
    store: Option<Arc<dyn Store>>,
    /// Set on rank 0 if the launcher serves no store.
    server: Option<Arc<StoreServer>>,
}

impl Session {
    /// Reads what the launcher says: the variables of torchrun, and the agent channel of convoke.
    ///
    /// Also honoured: CONVOKE_TOKEN or CONVOKE_TOKEN_FILE (secret of the job, if the channel brings
    /// none), CONVOKE_SOCKET_IFNAME (interface to listen on; else that of the route to MASTER_ADDR),
    /// CONVOKE_ALGO (see [`GroupOptions::algorithms`]).
    ///
    /// # Errors
    /// [`CommError::Env`] if variables are missing or malformed, [`CommError::Channel`] if the agent
    /// channel is broken, [`CommError::System`] if the token's file cannot be read.
    pub fn join() -> Result<Self, CommError> {
        let Some(env) = WorkerEnv::from_process()? else {
            return Ok(Self { place: None, options: GroupOptions::default().name("world"), round: 0 });
        };
        let hello = inherited_hello()?;
        let mut options = GroupOptions::default()
            .name("world")
            .listen(listen(&env))
            .algorithms(std::env::var("CONVOKE_ALGO").unwrap_or_default());
        options.generation = env.generation.or(hello.as_ref().map(|hello| hello.generation));
        options.token = match hello.as_ref().and_then(|hello| hello.token.clone()) {
            Some(token) => Some(token),
            None => token()?,
        };
        let agent = hello.and_then(|hello| Some((hello.channel?, hello.generation)));
        Ok(Self { place: Some(Place { env, agent, store: None, server: None }), options, round: 0 })
    }

    /// Changes how worlds are made, such as their timeouts. Name, generation, token and address come
    /// from the launcher unless `change` replaces them.
    #[must_use]
    pub fn with_options(mut self, change: impl FnOnce(GroupOptions) -> GroupOptions) -> Self {
        self.options = change(self.options);
        self
    }

    /// Connects to all ranks of the job.
    ///
    /// # Errors
    /// As [`Group::new`]; [`CommError::Store`] if no store answers at MASTER_ADDR:MASTER_PORT.
    pub fn world(&mut self) -> Result<World, CommError> {
        let options = self.options.clone();
        let tuning = Tuning::parse(&options.algorithms)
            .map_err(|what| CommError::InvalidArgument(format!("CONVOKE_ALGO: {what}")))?;
        let round = self.round;
        let Some(place) = &mut self.place else { return World::alone(options) };
        let env = place.env.clone();
        if env.world_size == 1 {
            return World::of(Group::join(Invitation::alone(options, tuning), None)?, env);
        }
        let store = place.store(options.init_timeout)?;
        let prefix = match round {
            0 => format!("convoke/{}", env.run_id),
            round => format!("convoke/{}/round-{round}", env.run_id),
        };
        let invitation = Invitation {
            store: Arc::new(PrefixStore::new(prefix, store)),
            store_rank: (!env.use_agent_store).then_some(0),
            rank: env.rank,
            size: env.world_size,
            origin: (0..env.world_size).collect(),
            // Only the first round has the launcher's generation.
            options: GroupOptions { generation: options.generation.filter(|_| round == 0), ..options },
            tuning,
            agent: place.agent.clone(),
        };
        let keep = place.server.clone().map(|server| Box::new(server) as Box<_>);
        World::of(Group::join(invitation, keep)?, env)
    }

    /// Connects to all ranks again, in the same processes, after the world before was dropped or has
    /// failed. All ranks must do so.
    ///
    /// # Errors
    /// As [`Self::world`].
    pub fn next_round(&mut self) -> Result<World, CommError> {
        self.round += 1;
        self.world()
    }
}

impl Place {
    /// The store of the job: served by the launcher, else by rank 0.
    fn store(&mut self, timeout: Duration) -> Result<Arc<dyn Store>, CommError> {
        if let Some(store) = &self.store {
            return Ok(Arc::clone(store));
        }
        let WorkerEnv { master_addr: host, master_port: port, .. } = &self.env;
        let store: Arc<dyn Store> = if !self.env.use_agent_store && self.env.rank == 0 {
            let server = Arc::new(serve(host, *port)?);
            let store = server.store();
            self.server = Some(server);
            store
        } else {
            let address =
                if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
            Arc::new(TcpStore::connect(&address, Instant::now() + timeout)?)
        };
        self.store = Some(Arc::clone(&store));
        Ok(store)
    }
}

/// Serves the store at the address that the others were told, or at any if that is not ours (it may
/// be translated on the way).
fn serve(host: &str, port: u16) -> Result<StoreServer, CommError> {
    let wrong = |source| CommError::system(&format!("cannot serve the store at {host}:{port}"), source);
    let named: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(wrong)?.collect();
    let any = SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, port));
    let first = match StoreServer::bind(&named) {
        Ok(server) => return Ok(server),
        Err(error) => error,
    };
    StoreServer::bind(&[any]).map_err(|_| wrong(std::io::Error::other(first)))
}

fn listen(env: &WorkerEnv) -> Listen {
    match std::env::var("CONVOKE_SOCKET_IFNAME") {
        Ok(names) if !names.trim().is_empty() => Listen::Interface(names),
        Ok(_) | Err(_) => Listen::RouteTo(env.master_addr.clone()),
    }
}

fn token() -> Result<Option<Token>, CommError> {
    if let Some(token) = std::env::var_os(vars::TOKEN).filter(|token| !token.is_empty()) {
        return Ok(Some(Token::new(token.into_encoded_bytes())));
    }
    let Some(path) = std::env::var_os(vars::TOKEN_FILE).filter(|path| !path.is_empty()) else {
        return Ok(None);
    };
    let bytes = std::fs::read(&path).map_err(|error| {
        CommError::system(&format!("cannot read CONVOKE_TOKEN_FILE={}", path.display()), error)
    })?;
    let bytes = bytes.trim_ascii();
    if bytes.is_empty() {
        return Err(CommError::InvalidArgument(format!("CONVOKE_TOKEN_FILE={} is empty", path.display())));
    }
    Ok(Some(Token::new(bytes.to_vec())))
}

/// What the agent channel said first.
#[derive(Debug, Clone)]
struct Hello {
    generation: Generation,
    token: Option<Token>,
    channel: Option<Arc<Mutex<AgentChannel>>>,
}

/// The first message on the inherited channel; `None` without a channel.
///
/// All duplicates of the descriptor share one stream, and its first message can be read only once. So
/// what it said is kept for later sessions of this process, as the environment is; the channel itself
/// is shared by the sessions that are alive and closed with the last.
fn inherited_hello() -> Result<Option<Hello>, CommError> {
    static SAID: Mutex<Option<(Hello, Weak<Mutex<AgentChannel>>)>> = Mutex::new(None);
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((hello, channel)) = &mut *said {
        let open = match channel.upgrade() {
            Some(open) => Some(open),
            None => AgentChannel::inherited()?.map(|channel| Arc::new(Mutex::new(channel))),
        };
        *channel = open.as_ref().map_or_else(Weak::new, Arc::downgrade);
        return Ok(Some(Hello { channel: open, ..hello.clone() }));
    }
    let Some(mut channel) = AgentChannel::inherited()? else { return Ok(None) };
    loop {
        if let ToWorker::Hello { generation, token } = channel.receive(HELLO)? {
            let channel = Arc::new(Mutex::new(channel));
            let hello = Hello { generation, token, channel: None };
            *said = Some((hello.clone(), Arc::downgrade(&channel)));
            return Ok(Some(Hello { channel: Some(channel), ..hello }));
        }
    }
}

impl Invitation {
    /// To a group of one, which needs no store.
    fn alone(options: GroupOptions, tuning: Tuning) -> Self {
        let store = Arc::new(convoke_store::MemoryStore::new());
        Self { store, store_rank: None, rank: 0, size: 1, origin: vec![0], options, tuning, agent: None }
    }
}

/// All ranks of a job, in one round.
///
/// Is a [`Group`], and knows more about where this process stands.
pub struct World {
    group: Group,
    local_rank: usize,
    local_world_size: usize,
    restart_count: u32,
}

impl World {
    fn of(group: Group, env: WorkerEnv) -> Result<Self, CommError> {
        let WorkerEnv { local_rank, local_world_size, restart_count, .. } = env;
        Ok(Self { group, local_rank, local_world_size, restart_count })
    }

    fn alone(options: GroupOptions) -> Result<Self, CommError> {
        let group = Group::join(Invitation::alone(options, Tuning::default()), None)?;
        Ok(Self { group, local_rank: 0, local_world_size: 1, restart_count: 0 })
    }

    /// Index of this process among those of its node.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Number of processes on this node.
    #[must_use]
    pub fn local_world_size(&self) -> usize {
        self.local_world_size
    }

    /// How often this node's launcher has restarted its workers.
    #[must_use]
    pub fn restart_count(&self) -> u32 {
        self.restart_count
    }

    /// The group of all ranks, as a handle of its own.
    #[must_use]
    pub fn group(&self) -> Group {
        self.group.clone()
    }
}

impl Deref for World {
    type Target = Group;

    fn deref(&self) -> &Group {
        &self.group
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World")
            .field("group", &self.group)
            .field("local_rank", &self.local_rank)
            .field("local_world_size", &self.local_world_size)
            .field("restart_count", &self.restart_count)
            .finish()
    }
}
