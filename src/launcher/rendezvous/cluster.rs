//! The agent's link to the other nodes of its job: one channel of commands out, one of events in.

use std::time::Instant;

use convoke_env::Token;
use tokio::sync::mpsc;

use super::{
    Assignment, JobOutcome, OutcomeKind, RendezvousError, StandaloneRendezvous, StaticRendezvous, elastic,
};
use crate::config::{Config, Rendezvous as Choice};

/// What the agent asks of the other nodes, in the order in which it sends the commands.
#[derive(Debug)]
pub(crate) enum ClusterCommand {
    /// Join the other nodes for the next round. `restarts` is the number of restarts that this node has used
    /// up. The answer is [`ClusterEvent::Joined`].
    Join { restarts: u32 },
    /// Wait until all nodes have succeeded. The answer is [`ClusterEvent::Barrier`], unless an event of
    /// another node comes first. `drained` is true if the workers have stopped because the job is drained.
    Barrier { drained: bool },
    /// Close the workers' key-value store: they have ended, and none will be started again.
    Close,
    /// Tell the other nodes that a worker of this node has failed. `restarts` is true if this node has a
    /// restart left. Until `defer_until`, the failure of another node may turn out to be the cause, and is
    /// then the only one that is reported.
    ReportFailure { summary: String, report: String, restarts: bool, defer_until: Option<Instant> },
    /// Tell the other nodes that this signal stops this node, which stops its workers at the same time.
    ReportSignal(i32),
    /// Leave the job, so that the exit of this process does not count as the loss of its node. `proposed` is
    /// the outcome that this node declares before. The answer is [`ClusterEvent::Left`].
    Leave { proposed: Option<ProposedOutcome> },
}

/// An outcome of the job that this node declares.
#[derive(Debug, Clone)]
pub(crate) struct ProposedOutcome {
    pub(crate) kind: OutcomeKind,
    /// The declaration takes effect at this time, unless another node names the root cause before. Set if the
    /// workers that failed here only lost a peer or timed out waiting for one.
    pub(crate) defer_until: Option<Instant>,
}

impl From<OutcomeKind> for ProposedOutcome {
    fn from(kind: OutcomeKind) -> Self {
        Self { kind, defer_until: None }
    }
}

/// What the agent learns about the other nodes.
#[derive(Debug)]
pub(crate) enum ClusterEvent {
    /// This node has joined a round, or cannot join one.
    Joined(Result<Assignment, RendezvousError>),
    /// All nodes have succeeded. With a `warning`, it is unknown whether they have.
    Barrier { warning: Option<String> },
    /// The job is over, with this outcome.
    JobEnded(JobOutcome),
    /// The round with number `round` is over because of `cause`, and all nodes restart their workers. If
    /// `partitioned`, this node is cut off: it restarts when it reaches the rendezvous again.
    NewRound { round: u64, cause: String, partitioned: bool },
    /// This node has left the job. `outcome` is the one that the nodes agreed on, if this node proposed one.
    /// If `other_jobs` use the rendezvous server of this launcher, the event is repeated when they have
    /// ended.
    Left { outcome: Option<JobOutcome>, other_jobs: usize },
}

/// How the nodes of a job react to a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailureProtocol {
    /// This node reports failures to no other node: it is alone, or node 0 runs another launcher.
    None,
    /// The first failure without a remaining restart ends the job.
    FirstIsFinal,
    /// A failure ends the job only after the other nodes have confirmed that they are alive.
    Confirmed,
}

/// Sends events to the agent. If the launcher is just ending, nobody receives them.
#[derive(Debug, Clone)]
pub(crate) struct EventSender(mpsc::UnboundedSender<ClusterEvent>);

impl EventSender {
    pub(super) fn send(&self, event: ClusterEvent) {
        drop(self.0.send(event));
    }
}

/// The link to the other nodes.
pub(crate) struct Cluster {
    execute: Box<dyn FnMut(ClusterCommand)>,
    events: mpsc::UnboundedReceiver<ClusterEvent>,
    /// The reaction of the nodes to a failure, as far as this node knows.
    pub(crate) protocol: FailureProtocol,
    /// Group rank of this node, once it has joined a round.
    node: Option<usize>,
}

impl Cluster {
    /// Returns the link that `config` asks for. If this node may have to wait for others, a thread carries
    /// out the commands. Otherwise each command takes less time than the start of a thread, and is carried
    /// out when it is sent.
    pub(crate) fn new(config: &Config) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        let events = EventSender(sender);
        let mut protocol = FailureProtocol::None;
        let mut started = Ok(());
        let sender = events.clone();
        let execute: Box<dyn FnMut(ClusterCommand)> = match &config.rendezvous {
            Choice::Standalone => {
                let mut node = StandaloneRendezvous::new(config);
                Box::new(move |command| node.execute(command, &events))
            }
            Choice::Static { host, port, node_rank, search, timeout } => {
                let place = (host.as_str(), *port, search.as_ref());
                let mut node = StaticRendezvous::new(config, place, *node_rank, *timeout);
                if config.nodes.max == 1 {
                    Box::new(move |command| node.execute(command, &events))
                } else {
                    let (commands, receiver) = std::sync::mpsc::channel();
                    started = start_thread("rendezvous", move || node.run(&receiver, &events));
                    Box::new(move |command| drop(commands.send(command)))
                }
            }
            Choice::Elastic { endpoint, settings } => {
                protocol = FailureProtocol::Confirmed;
                // The token that the user gave. The launcher may create a token for its own workers, but
                // other nodes do not know that token.
                let token = Token::from_process().ok().flatten();
                let settings = elastic::Settings::new(config, endpoint.clone(), *settings, token);
                let (commands, receiver) = mpsc::unbounded_channel();
                started = start_thread("rendezvous", move || elastic::run(settings, receiver, events));
                Box::new(move |command| drop(commands.send(command)))
            }
        };
        if let Err(error) = started {
            sender.send(ClusterEvent::Joined(Err(error)));
        }
        Self { execute, events: receiver, protocol, node: None }
    }

    pub(crate) fn send(&mut self, command: ClusterCommand) {
        (self.execute)(command);
    }

    /// Waits for the next event. Cancel safe.
    pub(crate) async fn receive(&mut self) -> ClusterEvent {
        match self.events.recv().await {
            Some(event) => event,
            // The thread has ended, so no event follows.
            None => std::future::pending().await,
        }
    }

    /// Waits until this node has left the job, and drops other events. Returns the outcome that the nodes
    /// agreed on, if this node proposed one, and the number of other jobs that still use the rendezvous
    /// server of this launcher. Cancel safe.
    pub(crate) async fn left(&mut self) -> (Option<JobOutcome>, usize) {
        loop {
            if let ClusterEvent::Left { outcome, other_jobs } = self.receive().await {
                return (outcome, other_jobs);
            }
        }
    }

    /// Notes the round that this node has joined.
    pub(crate) fn note_joined(&mut self, assignment: &Assignment) {
        (self.protocol, self.node) = (assignment.protocol, Some(assignment.group_rank));
    }

    /// Returns true if `outcome` is about this node.
    pub(crate) fn is_own(&self, outcome: &JobOutcome) -> bool {
        self.node.is_some_and(|node| outcome.is_about(node))
    }
}

/// Starts a detached thread for blocking calls.
pub(crate) fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), RendezvousError> {
    let name = format!("convoke-{name}");
    let failed = RendezvousError::system(format!("cannot start the thread {name}"));
    std::thread::Builder::new().name(name).spawn(work).map(drop).map_err(failed)
}
