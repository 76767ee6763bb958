//! The engine of a group: its parts, each of which has methods of its own. `impl Engine` in the other files
//! of this folder connects the parts.

use std::sync::Arc;
use std::time::Instant;

use super::affinity::Affinity;
use super::collectives::Collectives;
use super::failure::Failure;
use super::lifecycle::Lifecycle;
use super::liveness::Liveness;
use super::message_watch::MessageWatch;
use super::messages::AnySourceQueue;
use super::mux::{self, Membership, Mux};
use super::operation::Task;
use super::peer::{Peer, Wait};
use super::settings::Settings;
use super::submission::SubmissionQueue;
use super::wait_policy::WaitPolicy;
use crate::error::CommError;
use crate::shm::HostMemory;
use crate::transport::links::hello::ConnectionKind;
use crate::transport::links::tcp::Listener;

#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) settings: Settings,
    pub(super) peers: Vec<Peer>,
    pub(super) liveness: Liveness,
    /// This group's part of what the groups of this process share.
    pub(super) links: Membership,
    /// The group's connections for messages.
    pub(super) watch: MessageWatch,
    pub(super) submissions: Arc<SubmissionQueue<Task, Arc<mux::Slot>>>,
    pub(super) collectives: Collectives,
    /// Receives and probes that no message has matched, from any source.
    pub(super) any_source: AnySourceQueue,
    pub(super) host: LocalPeers,
    pub(super) waits: Waits,
    pub(super) failure: Option<Failure>,
    pub(super) lifecycle: Lifecycle,
    pub(super) driver: Driver,
}

/// The other ranks of this host that share memory with this rank.
#[derive(Debug, Default)]
pub(super) struct LocalPeers {
    /// The shared memory; `None` if there is none.
    pub(super) memory: Option<HostMemory>,
    pub(super) ranks: Vec<usize>,
}

/// The reports of waits that this rank has sent and requested.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// The time since which no data has moved; `None` while data moves.
    pub(super) stalled_since: Option<Instant>,
    /// The call that this rank last reported to the other ranks as the one that it waits in.
    pub(super) reported: Option<Wait>,
    /// The time at which this rank last asked the other ranks which calls they wait in.
    pub(super) queried_at: Option<Instant>,
}

/// The state of the thread that drives the engine.
#[derive(Debug)]
pub(super) struct Driver {
    pub(super) wait_policy: WaitPolicy,
    pub(super) affinity: Affinity,
    /// A caller runs the engine and waits for an operation, not the background thread.
    pub(super) has_waiter: bool,
    /// A control frame has arrived, or a control connection has ended, since this flag was last cleared.
    pub(super) control_activity: bool,
    /// Passes of the progress loop, and inline calls, so far. The count goes on from call to call, so that
    /// many short calls also lead to polls.
    pub(super) rounds: u32,
}

impl Engine {
    /// Makes the engine of the first group of a process; the launcher reports to it through `agent`. Other
    /// ranks connect to `listener`; it is `None` if no other rank is to connect.
    pub(crate) fn new(
        settings: Settings,
        agent: Option<mux::Agent>,
        listener: Option<Listener>,
    ) -> Result<Self, CommError> {
        let Settings { me, size, ref credentials, peer_timeout, .. } = settings;
        let mux = Mux::new(credentials, size, agent, peer_timeout, listener)?;
        let links = mux.join(credentials.group, me, (0..size).collect());
        let mut engine = Self::with_links(settings, links);
        engine.handle_events(engine.links.poll_agent());
        Ok(engine)
    }

    /// Makes the engine of a group whose ranks are connected already.
    pub(crate) fn joined(settings: Settings, links: Membership) -> Self {
        let mut engine = Self::with_links(settings, links);
        for rank in (0..engine.settings.size).filter(|&rank| rank != engine.settings.me) {
            let peer = &mut engine.peers[rank];
            peer.control = Some(engine.links.channel(rank));
            peer.collective = Some(engine.links.data_link(rank, ConnectionKind::Collective));
            peer.messages.conn = Some(engine.links.data_link(rank, ConnectionKind::Message));
        }
        engine
    }

    fn with_links(settings: Settings, links: Membership) -> Self {
        let sharing = settings.sharing;
        Self {
            peers: (0..settings.size).map(|rank| Peer::new(rank, settings.credentials.group_id())).collect(),
            liveness: Liveness::new(settings.me, settings.size, settings.peer_timeout),
            submissions: Arc::new(SubmissionQueue::with_doorbell(Arc::clone(&links.slot))),
            links,
            watch: MessageWatch::default(),
            collectives: Collectives::default(),
            any_source: AnySourceQueue::default(),
            host: LocalPeers::default(),
            waits: Waits::default(),
            failure: None,
            lifecycle: Lifecycle::default(),
            driver: Driver {
                wait_policy: WaitPolicy::new(sharing.oversubscription),
                affinity: Affinity::new(sharing),
                has_waiter: false,
                control_activity: false,
                rounds: 0,
            },
            settings,
        }
    }
}
