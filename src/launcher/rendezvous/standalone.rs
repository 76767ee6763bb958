//! Rendezvous of a single node: each round gets a new, empty key-value store for its workers on this host.

use std::net::{Ipv4Addr, TcpListener};

use convoke_env::Generation;
use convoke_store::StoreServer;

use super::cluster::EventSender;
use super::{Assignment, ClusterCommand, ClusterEvent, RendezvousError};
use crate::config::Config;

/// The rendezvous of a job with one node.
#[derive(Debug)]
pub(super) struct StandaloneRendezvous {
    /// The assignment of each round, without the port of its store and its generation.
    assignment: Assignment,
    /// Server of the key-value store for the current round's workers. `None` if worker rank 0 serves that
    /// store.
    server: Option<StoreServer>,
}

impl StandaloneRendezvous {
    pub(super) fn new(config: &Config) -> Self {
        let host = config.local_addr.clone().unwrap_or_else(|| "localhost".to_owned());
        Self { assignment: Assignment::of_equal_nodes(config, 0, host, 0), server: None }
    }

    pub(super) fn execute(&mut self, command: ClusterCommand, events: &EventSender) {
        match command {
            ClusterCommand::Join { restarts } => events.send(ClusterEvent::Joined(self.join(restarts))),
            ClusterCommand::Barrier { .. } => events.send(ClusterEvent::Barrier { warning: None }),
            ClusterCommand::Close => self.server = None,
            ClusterCommand::Leave { .. } => events.send(ClusterEvent::Left { outcome: None, other_jobs: 0 }),
            // There is no other node.
            ClusterCommand::ReportFailure { .. } | ClusterCommand::ReportSignal(_) => {}
        }
    }

    fn join(&mut self, restarts: u32) -> Result<Assignment, RendezvousError> {
        let host = &self.assignment.master_addr;
        if restarts == 0 {
            super::check_loopback(false)?;
            super::warn_if_own_address_unreachable(host);
        }
        // The store of the previous round closes first, so that workers of this round do not read its keys.
        self.server = None;
        let master_port = if self.assignment.use_agent_store {
            self.server.insert(super::serve(host, 0)?).port()
        } else {
            // Worker rank 0 will listen at this port. That another process takes the port before is possible
            // but unlikely.
            let any = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|any| any.local_addr());
            any.map_err(RendezvousError::system("no free port"))?.port()
        };
        let generation = Generation::random().map_err(RendezvousError::system("no random numbers"))?;
        Ok(Assignment { master_port, generation: Some(generation), ..self.assignment.clone() })
    }
}
