//! Forms a group from ranks of an existing group, over the connections and the memory that their processes
//! have already.
//!
//! Each rank joins the multiplexer of its process and maps its part of the shared memory, before the ranks
//! tell each other through the existing group whether they have succeeded ([`Joining::succeeded`]). So no
//! frame of the new group arrives at a process that does not know the group.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::{BootstrapConfig, ConnectedGroup, log_outcome, record};
use crate::collectives::plan::Topology;
use crate::engine::mux::Membership;
use crate::engine::{Engine, ParentLinks};
use crate::error::cause::MAX_REPORTED_RANKS;
use crate::error::{CommError, Ranks};
use crate::fault::fault_point;
use crate::flight::GroupRecorder;
use crate::shm::HostMemory;

/// A rank that has joined a new group and waits for the other ranks to do so.
pub(crate) struct Joining<'a> {
    config: &'a BootstrapConfig,
    topology: Topology,
    parent: &'a ParentLinks,
    /// For each rank of the new group, its rank in the existing group.
    ranks: &'a [usize],
    links: Membership,
    /// The memory of the ranks of this host; `None` if there is no arena or nobody to share it with.
    memory: Option<io::Result<HostMemory>>,
    flight: Arc<GroupRecorder>,
}

impl<'a> Joining<'a> {
    /// Joins the group `config` of the ranks `ranks` of an existing group, whose topology is `hosts`. `part`
    /// returns the number of the part of the arena that a rank of the existing group has reserved.
    pub(crate) fn new(
        config: &'a BootstrapConfig,
        parent: &'a ParentLinks,
        ranks: &'a [usize],
        hosts: &Topology,
        part: impl Fn(usize) -> Option<u64>,
    ) -> Self {
        let flight = Arc::new(config.group_recorder());
        let topology = Topology::new(ranks.iter().map(|&rank| hosts.host_and_index(rank).0));
        let processes = ranks.iter().map(|&rank| parent.processes[rank]).collect();
        let links = parent.mux.join(config.options.id, config.rank, processes);
        // The part of the arena that the first of the group's ranks on this host has reserved.
        let map_memory = || {
            let local_ranks = topology.local_ranks(config.rank);
            let (on_host, share) = parent.host.as_ref().filter(|_| config.wants_memory(local_ranks))?;
            let index = |&rank: &usize| on_host.iter().position(|&other| other == ranks[rank]);
            let chosen: Vec<usize> = local_ranks.iter().map(index).collect::<Option<_>>()?;
            let number = part(ranks[local_ranks[0]])?;
            let me = topology.host_and_index(config.rank).1;
            let policy = config.single_copy(config.sharing?);
            Some(HostMemory::of_part(&share.of(&chosen), number, local_ranks.to_vec(), me, policy))
        };
        let memory = map_memory();
        Self { config, topology, parent, ranks, links, memory, flight }
    }

    /// Returns whether this rank has all that the group needs.
    pub(crate) fn succeeded(&self) -> bool {
        !matches!(self.memory, Some(Err(_)))
    }

    /// Completes the group when all ranks have joined; `succeeded` says which of them have succeeded.
    /// `tunings` are the choices of algorithms of all ranks, if some differ.
    pub(crate) fn finish(
        self,
        succeeded: &[bool],
        tunings: Option<&[String]>,
    ) -> Result<ConnectedGroup, CommError> {
        log_outcome(self.config, || self.connect(succeeded, tunings))
    }

    fn connect(self, succeeded: &[bool], tunings: Option<&[String]>) -> Result<ConnectedGroup, CommError> {
        let Self { config, topology, parent, ranks, links, memory, flight } = self;
        let name = &config.options.name;
        if let Some(Err(error)) = tunings.map(record::compare_tunings) {
            let (what, ranks) = (error.to_string(), error.ranks());
            return Err(CommError::Bootstrap { group: name.clone(), what, ranks });
        }
        let (Some(generation), Some(sharing)) = (config.options.generation, config.sharing) else {
            unreachable!("a group that comes from another one has its generation and its sharing of cores")
        };
        let addresses = ranks.iter().map(|&rank| parent.addresses[rank]).collect();
        fault_point("meeting", 0, 0);
        let settings = config.settings(generation, addresses, sharing, Arc::clone(&flight));
        let mut engine = Box::new(Engine::joined(settings, links));
        let local_ranks = topology.local_ranks(config.rank);
        let wanted = config.wants_memory(local_ranks);
        let unavailable = match memory {
            None if wanted => {
                let deadline = Instant::now() + config.options.init_timeout;
                let shared = engine.share_memory(local_ranks, deadline).inspect_err(|_| engine.leave())?;
                shared.err().map(|reason| reason.to_string())
            }
            None => None,
            Some(Err(error)) => Some(error.to_string()),
            Some(Ok(memory)) => match local_ranks.iter().find(|&&rank| !succeeded[rank]) {
                Some(rank) => Some(format!("rank {rank} cannot map it")),
                None => {
                    engine.install_shared_memory(memory);
                    None
                }
            },
        };
        if let Some(reason) = &unavailable {
            let local_ranks = Ranks(&local_ranks[..local_ranks.len().min(MAX_REPORTED_RANKS)]);
            log::warn!(
                "{name}: rank {}: ranks {local_ranks} cannot use shared memory, and use connections inside their \
                 host: {reason}",
                config.rank
            );
        }
        let in_memory = wanted && unavailable.is_none() && topology.hosts().len() == 1;
        flight.formed(generation);
        fault_point("connected", 0, 0);
        Ok(ConnectedGroup { engine, generation, topology, in_memory })
    }
}
