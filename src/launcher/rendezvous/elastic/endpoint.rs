//! Serves the rendezvous at the endpoint, and ends the server after this node has left its job.

use std::net::{TcpListener, ToSocketAddrs};
use std::time::{Duration, Instant};

use convoke_store::ServeError;
use nix::sys::signal::Signal;
use tokio::sync::mpsc;

use super::host_addresses;
use super::node::{Node, departure_of};
use super::server::RendezvousServer;
use crate::config::Endpoint;
use crate::membership::{AgentId, Departure};
use crate::rendezvous::{ClusterCommand, RendezvousError};

/// Longest time that the coordinator keeps running after its node leaves, so that all members learn how the
/// job ended.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_POLL: Duration = Duration::from_millis(2);
/// Interval at which the thread checks whether other jobs have ended.
const OTHER_JOBS_POLL: Duration = Duration::from_millis(50);

/// Returns listeners at the endpoint if this process is to serve it. The list is empty if another host or
/// another process of this host serves the endpoint, or if the endpoint is a registry.
pub(in super::super) fn listen(endpoint: &Endpoint) -> Result<Vec<TcpListener>, RendezvousError> {
    let Endpoint::Host { host, port, is_host } = endpoint else { return Ok(Vec::new()) };
    if *is_host == Some(false) {
        return Ok(Vec::new());
    }
    let resolved = (host.as_str(), *port).to_socket_addrs();
    let resolved: Vec<_> = resolved.map(|all| all.map(|address| address.ip()).collect()).unwrap_or_default();
    let Some(addresses) = host_addresses::listening_addresses(host, *port, &resolved) else {
        return match is_host {
            Some(_) => Err(RendezvousError::NotLocalHost { host: host.clone() }),
            None => Ok(Vec::new()),
        };
    };
    match convoke_store::listen(&addresses) {
        // Another agent of this host serves the endpoint already.
        Err(ServeError::InUse { .. }) if is_host.is_none() => Ok(Vec::new()),
        listeners => Ok(listeners?),
    }
}

/// Ends the server at a fixed endpoint, which no other node can take over, after its node `agent` has left
/// the job. Members that thereby lose their coordinator are told why. Other jobs may use the server until
/// they have ended, unless a signal stops this launcher.
pub(super) async fn shut_down(
    server: &RendezvousServer,
    agent: AgentId,
    node: &Node,
    commands: &mut mpsc::UnboundedReceiver<ClusterCommand>,
) {
    if notify_shutdown(server, agent, node.departure.take()) {
        return linger(|| server.has_no_members()).await;
    }
    linger(|| server.has_no_own_members()).await;
    server.is_closed.set(true);
    let mut is_told = false;
    loop {
        let other_jobs = server.other_jobs();
        if other_jobs == 0 {
            return;
        }
        if node.has_left.get() && !is_told {
            node.tell_left(other_jobs);
            is_told = true;
        }
        tokio::select! {
            () = tokio::time::sleep(OTHER_JOBS_POLL) => {}
            Some(ClusterCommand::Leave { proposed }) = commands.recv() => {
                node.has_left.set(true);
                if notify_shutdown(server, agent, Some(departure_of(proposed))) {
                    return linger(|| server.has_no_members()).await;
                }
            }
        }
    }
}

/// Tells the members that lose their coordinator why this node leaves. Returns true if these are the members
/// of all jobs, because a signal stops this launcher.
fn notify_shutdown(server: &RendezvousServer, agent: AgentId, departure: Option<Departure>) -> bool {
    let (why, all) = match departure {
        Some(Departure::Stopped { signal }) => {
            let name = Signal::try_from(signal).map_or("a signal", Signal::as_str);
            (format!("it was stopped by {name}"), true)
        }
        Some(Departure::Error(why)) => (why, false),
        Some(Departure::Ended) | None => return false,
    };
    server.notify_shutdown(all, agent, &why);
    all
}

/// Waits until `is_done` returns true (all members have left), for [`LINGER`] at most.
pub(super) async fn linger(is_done: impl Fn() -> bool) {
    let until = Instant::now() + LINGER;
    while !is_done() && Instant::now() < until {
        tokio::time::sleep(LINGER_POLL).await;
    }
}
