//! How a group is made.

use std::net::IpAddr;
use std::time::Duration;

use convoke_env::{Generation, Token};

/// How a group is made; all ranks pass the same, but for where they are and listen.
#[derive(Debug, Clone)]
pub struct GroupOptions {
    pub(crate) name: String,
    pub(crate) timeout: Duration,
    pub(crate) init_timeout: Duration,
    pub(crate) peer_timeout: Duration,
    pub(crate) generation: Option<Generation>,
    pub(crate) token: Option<Token>,
    pub(crate) listen: Listen,
    pub(crate) algorithms: String,
    pub(crate) part_of_host: String,
    pub(crate) shared_memory: bool,
    /// Tells the connections of groups of one generation apart; 0 but for subgroups.
    pub(crate) id: u64,
}

/// At which address a rank accepts the connections of others.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Listen {
    /// 127.0.0.1: all ranks are on this host.
    #[default]
    Loopback,
    /// At this address of this host.
    Address(IpAddr),
    /// At the first address of one of these network interfaces, IPv4 before IPv6. The syntax is that of
    /// NCCL_SOCKET_IFNAME: `eth,ib0` takes the first that exists of these names or beginnings of names,
    /// `=eth0` whole names only, `^docker,lo` any other interface.
    Interface(String),
    /// Where other hosts are most likely to reach this one: at the first interface that is up and has an
    /// address; at loopback only if there is no other.
    Outward,
    /// At the address from which this host reaches that one: a name or an address.
    RouteTo(String),
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            name: "default".to_owned(),
            timeout: Duration::from_secs(30 * 60),
            init_timeout: Duration::from_secs(5 * 60),
            peer_timeout: Duration::from_secs(10),
            generation: None,
            token: None,
            listen: Listen::default(),
            algorithms: String::new(),
            part_of_host: String::new(),
            shared_memory: true,
            id: 0,
        }
    }
}

impl GroupOptions {
    /// Name of the group, in its store keys and in errors. Groups that exist at the same time on the
    /// same store need different names.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// How long a call may take before it fails and ends the group; 30 minutes by default.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long the ranks may take to find together; 5 minutes by default.
    #[must_use]
    pub fn init_timeout(mut self, timeout: Duration) -> Self {
        self.init_timeout = timeout;
        self
    }

    /// Bound for noticing a dead host or a broken path, to whole seconds; 10 seconds by default. Dead
    /// processes are noticed at once.
    #[must_use]
    pub fn peer_timeout(mut self, timeout: Duration) -> Self {
        self.peer_timeout = timeout;
        self
    }

    /// Which incarnation of the group this is. Without one, rank 0 draws it and the others read it
    /// from the store.
    #[must_use]
    pub fn generation(mut self, generation: Generation) -> Self {
        self.generation = Some(generation);
        self
    }

    /// Secret by which the ranks know each other. Without one the group is open: connections are bound
    /// to the generation, which guards against accidents and not against people.
    #[must_use]
    pub fn token(mut self, token: Token) -> Self {
        self.token = Some(token);
        self
    }

    /// Where this rank listens; on loopback by default.
    #[must_use]
    pub fn listen(mut self, listen: Listen) -> Self {
        self.listen = listen;
        self
    }

    /// Overrides of the choice of algorithms, for people who measure: `all_reduce:ring` with `ring`,
    /// `direct`, `doubling`, `hierarchy`; `all_gather:` and `reduce_scatter:` with `direct`, `ring`, `hierarchy`;
    /// `broadcast:` and `reduce:` with `binomial`, `chain`; several with commas.
    #[must_use]
    pub fn algorithms(mut self, algorithms: impl Into<String>) -> Self {
        self.algorithms = algorithms.into();
        self
    }

    /// Whether ranks of one host talk through memory that they share, where they can; they do by default. Without, they
    /// use connections there as well. The same on all ranks.
    #[must_use]
    pub fn shared_memory(mut self, shared: bool) -> Self {
        self.shared_memory = shared;
        self
    }

    /// Name of the part of its host where this rank is. Ranks in different parts count as ranks of different hosts:
    /// for who knows that the way between these is slow, or wants to see what happens between hosts.
    #[must_use]
    pub fn part_of_host(mut self, part: impl Into<String>) -> Self {
        self.part_of_host = part.into();
        self
    }
}
