//! Rendezvous of a single node: each round gets a new, empty key-value store for its workers on this host.

use std::net::{IpAddr, Ipv4Addr, TcpListener};

use convoke_env::Generation;
use convoke_store::StoreServer;

use super::cluster::EventSender;
use super::{Assignment, ClusterCommand, ClusterEvent, FailureProtocol, RendezvousError};
use crate::config::Config;

/// The rendezvous of a job with one node.
#[derive(Debug)]
pub(super) struct StandaloneRendezvous {
    /// Value of MASTER_ADDR.
    host: String,
    workers: usize,
    share_store: bool,
    /// Server of the key-value store for the current round's workers. `None` if worker rank 0 serves that
    /// store.
    server: Option<StoreServer>,
}

impl StandaloneRendezvous {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            host: config.local_addr.clone().unwrap_or_else(|| "localhost".to_owned()),
            workers: config.nproc_per_node,
            share_store: config.share_store,
            server: None,
        }
    }

    pub(super) fn execute(&mut self, command: ClusterCommand, events: &EventSender) {
        match command {
            ClusterCommand::Join { restarts } => events.send(ClusterEvent::Joined(self.join(restarts))),
            ClusterCommand::Barrier => events.send(ClusterEvent::Barrier { warning: None }),
            ClusterCommand::Close => self.server = None,
            ClusterCommand::Leave { .. } => events.send(ClusterEvent::Left { outcome: None, other_jobs: 0 }),
            // There is no other node.
            ClusterCommand::ReportFailure { .. } | ClusterCommand::ReportSignal(_) => {}
        }
    }

    fn join(&mut self, restarts: u32) -> Result<Assignment, RendezvousError> {
        if restarts == 0 {
            super::check_loopback(false)?;
            super::warn_if_own_address_unreachable(&self.host);
        }
        // The store of the previous round closes first, so that workers of this round do not read its keys.
        self.server = None;
        let port = if self.share_store {
            let server = super::serve(&self.host, 0)?;
            let port = server.port();
            self.server = Some(server);
            port
        } else {
            // Worker rank 0 will listen at this port. That another process takes the port before is possible
            // but unlikely.
            let any = TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), 0))
                .map_err(RendezvousError::system("no free port"))?;
            any.local_addr().map_err(RendezvousError::system("no free port"))?.port()
        };
        Ok(Assignment {
            round: 0,
            restarts: None,
            protocol: FailureProtocol::None,
            group_rank: 0,
            group_world_size: 1,
            base_rank: 0,
            world_size: self.workers,
            base_role_rank: 0,
            role_world_size: self.workers,
            master_addr: self.host.clone(),
            master_port: port,
            use_agent_store: self.share_store,
            generation: Some(Generation::random().map_err(RendezvousError::system("no random numbers"))?),
        })
    }
}
