//! Nodes report failures to each other and agree on the outcome of the job.
//!
//! A static job ends on all nodes at once, with one cause: the first outcome written to node 0's key-value
//! store is final. Each agent registers a last will with that store: an outcome ("node 2 is lost") that the
//! store writes if the agent disappears. Each agent also watches the key of the outcome. A node that fails
//! without a remaining restart writes the outcome itself. If node 0 disappears, the watches of all other
//! nodes break. Only convoke agents do this: torchrun's store has no last wills.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use convoke_store::{KeyWatch, LastWill, Store, StoreError, TcpStore};
use serde::{Deserialize, Serialize};

use crate::formatting;

/// Key of the job's outcome in the store. The run id is its prefix.
const OUTCOME_KEY: &str = "convoke/verdict";
/// Key of the counter of nodes other than 0 that no longer need the store.
const DONE: &[u8] = b"convoke/done";
/// Longest wait for a store operation of this module.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest time that node 0 keeps its store open at its end, so that the other nodes can read the outcome.
const LINGER: Duration = Duration::from_millis(500);
const LINGER_POLL: Duration = Duration::from_millis(2);
/// Interval at which a node reads the outcome while it gives other nodes time to report their failure first.
const GRACE_POLL: Duration = Duration::from_millis(10);
/// Longest single wait for a change of the outcome; the node then waits again, which costs nothing.
const WATCH_PERIOD: Duration = Duration::from_secs(3600);

/// Outcome of the job, and the node that caused it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JobOutcome {
    version: u32,
    /// Group rank of the node that the outcome is about.
    pub(crate) node: usize,
    /// Host name of the node that the outcome is about.
    pub(crate) host: String,
    #[serde(rename = "what")]
    pub(crate) kind: OutcomeKind,
}

/// What happened on the node that a [`JobOutcome`] names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OutcomeKind {
    /// A worker failed and no restart is left.
    Failed {
        /// One line: the rank, and how it failed.
        summary: String,
        /// Failure report as JSON, so that all nodes can print it.
        report: String,
    },
    /// The launcher of the node could not continue.
    Error {
        /// The reason.
        text: String,
    },
    /// A signal ended the launcher of the node.
    Stopped {
        /// Number of the signal.
        signal: i32,
    },
    /// The launcher or the host of the node disappeared.
    Lost,
    /// All nodes have succeeded. From now on, the exit of a node does not count as its loss.
    Succeeded,
    /// This node receives no answers from the rendezvous any more, or the other nodes continued without it.
    #[serde(rename = "alone")]
    Partitioned {
        /// One line: what happened.
        text: String,
    },
}

/// Event caused by other nodes while this node runs its workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RemoteEvent {
    /// The job is over, with this outcome.
    JobEnded(JobOutcome),
    /// The round with number `round` is over because of `cause`, and all nodes restart their workers. If
    /// `partitioned`, this node is cut off: it restarts when it reaches the rendezvous again.
    NewRound { round: u64, cause: String, partitioned: bool },
}

/// A function that waits for the outcome that ends the job. It returns `None` if the job continues with
/// another round.
pub(crate) type OutcomeWaiter = Box<dyn FnOnce() -> Option<JobOutcome> + Send>;

/// Channel by which the nodes of a job report failures to each other. Its methods may block, but all except
/// [`Self::recv`] have their own deadlines.
pub(crate) trait TerminationChannel: Send + Sync + fmt::Debug {
    /// Blocks until an event of another node ends the job or the rendezvous round. Returns `None` once this
    /// node has left or all nodes have succeeded. Only one thread may call this method.
    fn recv(&self) -> Option<RemoteEvent>;

    /// Reports to the other nodes that a worker of this node has failed. `restarts` is true if this node has
    /// a restart left. `grace_until` is set if the failure of another node may have caused this failure. The
    /// report then waits until that time, unless another node reports a failure before. The returned function
    /// waits for the outcome of the job; it is `None` if this node restarts.
    fn report_failure(
        self: Arc<Self>,
        kind: OutcomeKind,
        restarts: bool,
        grace_until: Option<Instant>,
    ) -> Option<OutcomeWaiter>;

    /// Declares `kind`, which ends this node, as the outcome of the job. Returns the final outcome, which may
    /// be that of a node that declared one earlier. Until `grace_until`, this node lets other nodes declare
    /// theirs first.
    fn propose_outcome(&self, kind: OutcomeKind, grace_until: Option<Instant>) -> JobOutcome;

    /// Reports to the other nodes that a signal stops this node. The caller stops the workers of this node at
    /// the same time.
    fn report_signal(&self, signal: i32);

    /// Leaves the job, so that the exit of this process does not count as the loss of its node.
    fn leave(&self);

    /// Returns true if `outcome` is about this node.
    fn is_own(&self, outcome: &JobOutcome) -> bool;

    /// Returns true if a failure without a remaining restart becomes final only after the other nodes have
    /// confirmed that they are alive.
    fn defers_final_failure(&self) -> bool;
}

impl JobOutcome {
    pub(super) fn new(node: usize, host: &str, kind: OutcomeKind) -> Self {
        Self { version: 1, node, host: host.to_owned(), kind }
    }
}

impl fmt::Display for JobOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let OutcomeKind::Partitioned { text } = &self.kind {
            return f.write_str(text);
        }
        write!(f, "node {} ({}) ", self.node, self.host)?;
        match &self.kind {
            OutcomeKind::Partitioned { text } => f.write_str(text),
            OutcomeKind::Failed { summary, .. } => write!(f, "failed: {summary}"),
            OutcomeKind::Error { text } => write!(f, "could not continue: {text}"),
            OutcomeKind::Stopped { signal } => write!(f, "was stopped by {}", formatting::signal(*signal)),
            OutcomeKind::Lost => {
                f.write_str("is lost: its launcher was killed, or its host or the network is down")
            }
            OutcomeKind::Succeeded => f.write_str("has succeeded, as have all other nodes"),
        }
    }
}

/// What one node knows about the success of a static job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Success {
    /// The workers of this node are running.
    #[default]
    Running,
    /// This node has succeeded and waits for the other nodes.
    Waiting,
    /// All nodes have succeeded.
    Succeeded,
    /// This node cannot find out whether all nodes have succeeded.
    Unknown,
}

/// Termination channel of one node of a static job. It reads and writes the outcome in node 0's key-value
/// store.
#[derive(Debug)]
pub(crate) struct StoreTerminationChannel {
    job: Arc<dyn Store>,
    node: usize,
    host: String,
    nodes: usize,
    node_0_host: String,
    last_will: Mutex<Option<LastWill>>,
    watch: Mutex<Option<KeyWatch>>,
    /// The outcome that this node received. It is kept because node 0 may have exited since, and its store
    /// with it.
    received: Mutex<Option<JobOutcome>>,
    success: Mutex<Success>,
    success_changed: Condvar,
    done_reported: AtomicBool,
}

impl StoreTerminationChannel {
    /// Registers the last will of this node. Returns `None` if node 0 runs another launcher, whose store has
    /// no last wills.
    pub(crate) fn register(
        store: &TcpStore,
        job: Arc<dyn Store>,
        run_id: &str,
        (node, nodes): (usize, usize),
        (host, node_0_host): (String, String),
        deadline: Instant,
    ) -> Result<Option<Self>, StoreError> {
        let lost = encode(&JobOutcome::new(node, &host, OutcomeKind::Lost));
        match store.set_last_will(format!("{run_id}/{OUTCOME_KEY}").as_bytes(), &lost, deadline) {
            Ok((last_will, watch)) => Ok(Some(Self {
                job,
                node,
                host,
                nodes,
                node_0_host,
                last_will: Mutex::new(Some(last_will)),
                watch: Mutex::new(Some(watch)),
                received: Mutex::new(None),
                success: Mutex::default(),
                success_changed: Condvar::new(),
                done_reported: AtomicBool::new(false),
            })),
            Err(StoreError::Lost { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the outcome of the job if another node has already declared one that ends this node.
    pub(crate) fn current_outcome(&self) -> Option<JobOutcome> {
        let ends_job = |outcome: &JobOutcome| outcome.kind != OutcomeKind::Succeeded;
        if let Some(received) = lock(&self.received).clone() {
            return Some(received).filter(ends_job);
        }
        let text = self.job.try_get(OUTCOME_KEY.as_bytes(), Instant::now() + OPERATION_TIMEOUT).ok()??;
        Some(self.decode(&text)).filter(ends_job)
    }

    /// Declares that all nodes have succeeded, so that the exit of a launcher does not count as a loss any
    /// more. Returns true if success is the final outcome.
    pub(crate) fn propose_success(&self) -> bool {
        let mine = encode(&JobOutcome::new(self.node, &self.host, OutcomeKind::Succeeded));
        let deadline = Instant::now() + OPERATION_TIMEOUT;
        let decided = self.job.compare_set(OUTCOME_KEY.as_bytes(), b"", &mine, deadline);
        // If the store is gone, another node has declared the success, and node 0 has ended.
        decided.map_or(true, |decided| self.decode(&decided).kind == OutcomeKind::Succeeded)
    }

    /// Records what this node knows about the success of the job, and wakes the thread in `has_succeeded`.
    pub(crate) fn set_success(&self, end: Success) {
        *lock(&self.success) = end;
        self.success_changed.notify_all();
    }

    /// Returns true if all nodes have succeeded. The caller asks when the store is gone. In
    /// [`Success::Waiting`], this first waits, for [`OPERATION_TIMEOUT`] at most, until the thread in the
    /// barrier knows the result.
    fn has_succeeded(&self) -> bool {
        let waits = |end: &mut Success| *end == Success::Waiting;
        let success = self.success_changed.wait_timeout_while(lock(&self.success), OPERATION_TIMEOUT, waits);
        *success.unwrap_or_else(PoisonError::into_inner).0 == Success::Succeeded
    }

    /// Tells node 0, once, that this node no longer needs the store.
    fn report_done(&self) {
        if self.node != 0 && !self.done_reported.swap(true, Ordering::Relaxed) {
            // If the store is gone, no node waits for this report.
            let _ = self.job.add(DONE, 1, Instant::now() + OPERATION_TIMEOUT);
        }
    }

    fn node_0_lost(&self) -> JobOutcome {
        JobOutcome::new(0, &self.node_0_host, OutcomeKind::Lost)
    }

    fn decode(&self, text: &[u8]) -> JobOutcome {
        serde_json::from_slice(text).unwrap_or_else(|error| {
            let text = format!("the recorded outcome of the job is invalid: {error}");
            JobOutcome::new(self.node, &self.host, OutcomeKind::Error { text })
        })
    }
}

impl TerminationChannel for StoreTerminationChannel {
    fn recv(&self) -> Option<RemoteEvent> {
        let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        loop {
            match watch.wait(Instant::now() + WATCH_PERIOD) {
                Ok(None) => {}
                Ok(Some(text)) => {
                    let outcome = self.decode(&text);
                    *lock(&self.received) = Some(outcome.clone());
                    if outcome.kind == OutcomeKind::Succeeded {
                        return None;
                    }
                    self.report_done();
                    return Some(RemoteEvent::JobEnded(outcome));
                }
                // `leave` takes the last will out before it withdraws it, so without a last will this node
                // has left. Otherwise the store is gone, and there is nothing to withdraw.
                Err(_) => {
                    if self.has_succeeded() {
                        return None;
                    }
                    let outcome = lock(&self.last_will).take().map(|_| self.node_0_lost())?;
                    *lock(&self.received) = Some(outcome.clone());
                    return Some(RemoteEvent::JobEnded(outcome));
                }
            }
        }
    }

    fn report_failure(
        self: Arc<Self>,
        kind: OutcomeKind,
        restarts: bool,
        grace_until: Option<Instant>,
    ) -> Option<OutcomeWaiter> {
        // In a static job, a node restarts its own workers only, so other nodes need no report.
        if restarts {
            return None;
        }
        Some(Box::new(move || Some(self.propose_outcome(kind, grace_until))))
    }

    fn propose_outcome(&self, kind: OutcomeKind, grace_until: Option<Instant>) -> JobOutcome {
        while grace_until.is_some_and(|until| Instant::now() < until) {
            if let Some(decided) = self.current_outcome() {
                return decided;
            }
            std::thread::sleep(GRACE_POLL);
        }
        let mine = JobOutcome::new(self.node, &self.host, kind);
        let deadline = Instant::now() + OPERATION_TIMEOUT;
        let decided = self.job.compare_set(OUTCOME_KEY.as_bytes(), b"", &encode(&mine), deadline);
        match decided.map(|decided| self.decode(&decided)) {
            // The job has succeeded, or the store is gone: the failure of this node changes nothing for other
            // nodes.
            Ok(JobOutcome { kind: OutcomeKind::Succeeded, .. }) | Err(_) => mine,
            Ok(decided) => decided,
        }
    }

    fn report_signal(&self, signal: i32) {
        self.propose_outcome(OutcomeKind::Stopped { signal }, None);
    }

    /// Node 0 keeps its store until all other nodes have reported that they no longer need it, for [`LINGER`]
    /// at most.
    fn leave(&self) {
        let Some(last_will) = lock(&self.last_will).take() else { return };
        last_will.withdraw();
        if self.node != 0 {
            self.report_done();
            return;
        }
        let until = Instant::now() + LINGER;
        let others = i64::try_from(self.nodes - 1).unwrap_or(i64::MAX);
        while Instant::now() < until {
            let count = self.job.add(DONE, 0, until).unwrap_or(others);
            if count >= others {
                return;
            }
            std::thread::sleep(LINGER_POLL);
        }
    }

    fn is_own(&self, outcome: &JobOutcome) -> bool {
        outcome.node == self.node && !matches!(outcome.kind, OutcomeKind::Partitioned { .. })
    }

    fn defers_final_failure(&self) -> bool {
        false
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn encode(outcome: &JobOutcome) -> Vec<u8> {
    serde_json::to_vec(outcome).expect("an outcome is plain data")
}
