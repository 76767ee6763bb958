//! The options of a group.

use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use convoke_env::{Generation, Token};

use crate::collectives::plan::Algorithms;
use crate::shm::single_copy::SingleCopy;

/// The options of a group. All ranks pass equal options, except for `listen`, `locality_domain`,
/// `thread_migration` and `single_copy`.
#[derive(Debug, Clone)]
pub struct GroupOptions {
    pub(crate) name: String,
    pub(crate) timeout: Duration,
    pub(crate) init_timeout: Duration,
    pub(crate) peer_timeout: Duration,
    pub(crate) generation: Option<Generation>,
    pub(crate) token: Option<Token>,
    pub(crate) listen: Listen,
    pub(crate) algorithms: Algorithms,
    pub(crate) locality_domain: String,
    pub(crate) shared_memory: bool,
    pub(crate) thread_migration: ThreadMigration,
    pub(crate) single_copy: SingleCopy,
    /// Distinguishes the connections of a group from those of its subgroups, which share its generation; 0
    /// except for subgroups.
    pub(crate) id: u64,
}

/// The address at which a rank accepts connections of its peers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Listen {
    /// 127.0.0.1: all ranks are on this host.
    #[default]
    Loopback,
    /// This address of this host.
    Address(IpAddr),
    /// The first address of one of these network interfaces, IPv4 before IPv6. The syntax is that of
    /// NCCL_SOCKET_IFNAME. `eth,ib0` selects the first interface that matches one of these names or
    /// prefixes; `=eth0` requires whole names; `^docker,lo` selects any other interface.
    Interface(String),
    /// The address at which other hosts are most likely to reach this host. It belongs to an interface that
    /// is up; loopback is used only if there is no other.
    Routable,
    /// The address from which this host reaches the given host, a name or an address.
    RouteTo(String),
}

/// When a rank that waits may move its thread to another core.
///
/// Linux wakes a thread on the core of the thread that wakes it, and so puts ranks on one core that would
/// better run on two. To move, a thread narrows its CPU affinity for some microseconds, and then restores it.
/// So it stays on the CPUs that it may use, and no CPU is bound afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ThreadMigration {
    /// Never: the runtime does not change the affinity of any thread.
    Never,
    /// If the ranks of the host outnumber the cores that they may use, a rank moves to its own place among
    /// these cores, at most every 10 ms.
    #[default]
    Oversubscribed,
    /// Also if each rank has a core: a rank that is about to sleep moves away from the core of the rank that
    /// it waits for, at most once a millisecond.
    Always,
}

impl FromStr for ThreadMigration {
    type Err = String;

    /// Parses `never`, `oversubscribed` or `always`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "never" => Ok(Self::Never),
            "oversubscribed" => Ok(Self::Oversubscribed),
            "always" => Ok(Self::Always),
            _ => Err(format!("{text:?} is not never, oversubscribed or always")),
        }
    }
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
            algorithms: Algorithms::new(),
            locality_domain: String::new(),
            shared_memory: true,
            thread_migration: ThreadMigration::default(),
            single_copy: SingleCopy::default(),
            id: 0,
        }
    }
}

/// Implements a method for each option, which sets it: `option(argument: Type) = value`.
macro_rules! setters {
    ($Options:ident { $($(#[$doc:meta])* $option:ident($argument:ident: $Type:ty) = $value:expr;)* }) => {
        impl $Options {
            $($(#[$doc])*
            #[must_use]
            pub fn $option(mut self, $argument: $Type) -> Self {
                self.$option = $value;
                self
            })*
        }
    };
}

#[cfg(feature = "nccl")]
pub(crate) use setters;

setters! { GroupOptions {
    /// Sets the name of the group, used in its store keys and in errors. Groups that exist at one time on
    /// one store need different names.
    name(name: impl Into<String>) = name.into();

    /// Sets the time limit of a call; a call that exceeds it fails and ends the group. 30 minutes by
    /// default.
    timeout(timeout: Duration) = timeout;

    /// Sets the time limit for forming the group; 5 minutes by default.
    init_timeout(timeout: Duration) = timeout;

    /// Sets the time limit for detecting a dead host or a broken path, in whole seconds; 10 seconds by
    /// default. Dead processes are detected at once.
    peer_timeout(timeout: Duration) = timeout;

    /// Sets the generation, the random id of one incarnation of the group, which is equal on all ranks.
    /// Without it, rank 0 draws a generation, and the other ranks read it from the store.
    generation(generation: Generation) = Some(generation);

    /// Sets the secret by which ranks authenticate each other. Without a token, connections carry only the
    /// generation, which prevents mix-ups of groups but no attack.
    token(token: Token) = Some(token);

    /// Sets the address at which this rank listens; loopback by default.
    listen(listen: Listen) = listen;

    /// Overrides the choice of algorithms, for measurements. All ranks must pass equal algorithms.
    algorithms(algorithms: Algorithms) = algorithms;

    /// Enables shared memory between the ranks of one host, where the system allows it; enabled by default.
    /// If disabled, ranks of one host use TCP connections. All ranks must pass the same value.
    shared_memory(shared: bool) = shared;

    /// Sets when a rank that waits may move its thread to another core; only if ranks outnumber cores by
    /// default. Ranks may pass different values. Groups that are made from this group inherit the value.
    thread_migration(migration: ThreadMigration) = migration;

    /// Sets when ranks of one host copy long data straight from the memory of another rank. Ranks may pass different values.
    /// Groups that are made from this group inherit the value.
    single_copy(single_copy: SingleCopy) = single_copy;

    /// Names the locality domain of this rank, a part of its host. Ranks in different domains count as ranks
    /// of different hosts. Use it if the path between domains is slow, or to test the behaviour between
    /// hosts.
    locality_domain(domain: impl Into<String>) = domain.into();
} }
