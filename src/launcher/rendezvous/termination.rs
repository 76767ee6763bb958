//! Exchange of failures between nodes, and agreement on the outcome of the job.
//!
//! A static job ends on all nodes at once, with one cause: the first outcome in the store is final.
//! Each agent registers a last will with the store of node 0 ("node 2 is lost") and watches the outcome.
//! A node that fails without a remaining restart declares the outcome. The last will declares it for a node
//! that disappears.
//! If node 0 disappears, the watches of all other nodes break.
//! Only convoke agents do this: torchrun's store has no last wills.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use convoke_store::{KeyWatch, LastWill, Store, StoreError, TcpStore};
use serde::{Deserialize, Serialize};

use crate::formatting;

/// Key of the outcome, below the run id.
const OUTCOME_KEY: &str = "convoke/verdict";
/// Key of the counter of nodes other than 0 that no longer need the store.
const DONE: &[u8] = b"convoke/done";
/// Longest wait for a store operation of this module.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest time that node 0 keeps serving so that the other nodes can read the outcome.
const LINGER: Duration = Duration::from_millis(500);
const LINGER_POLL: Duration = Duration::from_millis(2);
/// Interval at which a node reads the outcome while it waits for others to speak first.
const GRACE_POLL: Duration = Duration::from_millis(10);
/// Interval at which the watch is renewed. A renewal costs nothing.
const WATCH_PERIOD: Duration = Duration::from_secs(3600);

/// Outcome of the job, and the node that caused it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JobOutcome {
    version: u32,
    /// Rank of the node that the outcome is about.
    pub(crate) node: usize,
    /// Host name of that node.
    pub(crate) host: String,
    #[serde(rename = "what")]
    pub(crate) kind: OutcomeKind,
}

/// Outcome on that node.
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
    /// All nodes have succeeded. The exit of a node is no loss from now on.
    Succeeded,
    /// This node receives no answers any more, or the others continued without it.
    #[serde(rename = "alone")]
    Partitioned {
        /// One line: what happened.
        text: String,
    },
}

/// Event from the other nodes while this one runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RemoteEvent {
    /// The job is over.
    JobEnded(JobOutcome),
    /// The round is over because of `cause`. All nodes restart. A node that is `partitioned` restarts when it
    /// reaches the others again.
    NewRound { round: u64, cause: String, partitioned: bool },
}

/// A function that waits for the outcome that ends the job. It returns `None` if the job continues.
pub(crate) type OutcomeWaiter = Box<dyn FnOnce() -> Option<JobOutcome> + Send>;

/// Channel by which the nodes of a job tell each other of failures. Calls may block, but have their own
/// deadlines.
pub(crate) trait TerminationChannel: Send + Sync + fmt::Debug {
    /// Blocks until other nodes send an event. Returns `None` once this node has left cleanly.
    /// Only one thread may call this.
    fn recv(&self) -> Option<RemoteEvent>;

    /// Reports that a worker of this node has failed. `restarts` is true if this node has a restart for it.
    /// If the failure may be the consequence of one elsewhere, `grace_until` is set. The report then waits
    /// until that time, unless another node reports a failure before.
    /// The returned function, if any, waits for the outcome.
    fn report_failure(
        self: Arc<Self>,
        kind: OutcomeKind,
        restarts: bool,
        grace_until: Option<Instant>,
    ) -> Option<OutcomeWaiter>;

    /// Declares what ends this node. Returns the final outcome, which may be an earlier one.
    /// Other nodes may declare theirs first until `grace_until`.
    fn propose_outcome(&self, kind: OutcomeKind, grace_until: Option<Instant>) -> JobOutcome;

    /// Reports that a signal stops this node. The caller stops its workers at the same time.
    fn report_signal(&self, signal: i32);

    /// Leaves: the exit of this process is no longer an event.
    fn leave(&self);

    /// Returns true if `outcome` is about this node.
    fn is_own(&self, outcome: &JobOutcome) -> bool;

    /// Returns true if a failure without a remaining restart is final only after the other nodes have been
    /// heard.
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

/// State of a static job's success, as one node knows it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Success {
    /// The workers of this node are running.
    #[default]
    Running,
    /// This node has succeeded and waits for the others.
    Waiting,
    /// All nodes have succeeded.
    Succeeded,
    /// This node cannot find out whether all have succeeded.
    Unknown,
}

/// Connection of one node to the outcome of a static job.
#[derive(Debug)]
pub(crate) struct StoreTerminationChannel {
    job: Arc<dyn Store>,
    node: usize,
    host: String,
    nodes: usize,
    node_0_host: String,
    last_will: Mutex<Option<LastWill>>,
    watch: Mutex<Option<KeyWatch>>,
    /// The outcome that was received. It is kept because node 0 and its store may have gone since.
    received: Mutex<Option<JobOutcome>>,
    success: Mutex<Success>,
    success_changed: Condvar,
    done_reported: AtomicBool,
}

impl StoreTerminationChannel {
    /// Registers the last will of this node. Returns `None` if node 0 is not convoke: its store has no last
    /// wills.
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

    /// Returns the outcome that ends this node, if there is one already.
    pub(crate) fn current_outcome(&self) -> Option<JobOutcome> {
        let ends_job = |outcome: &JobOutcome| outcome.kind != OutcomeKind::Succeeded;
        if let Some(received) = lock(&self.received).clone() {
            return Some(received).filter(ends_job);
        }
        let text = self.job.try_get(OUTCOME_KEY.as_bytes(), Instant::now() + OPERATION_TIMEOUT).ok()??;
        Some(self.decode(&text)).filter(ends_job)
    }

    /// Declares that all nodes have succeeded, so that the exit of a launcher is no loss any more. Returns
    /// true if that is the final outcome.
    pub(crate) fn propose_success(&self) -> bool {
        let mine = encode(&JobOutcome::new(self.node, &self.host, OutcomeKind::Succeeded));
        let deadline = Instant::now() + OPERATION_TIMEOUT;
        let decided = self.job.compare_set(OUTCOME_KEY.as_bytes(), b"", &mine, deadline);
        // If the store is gone, another node has declared the success, and node 0 has ended.
        decided.map_or(true, |decided| self.decode(&decided).kind == OutcomeKind::Succeeded)
    }

    /// Records that this node has succeeded, or whether all nodes have.
    pub(crate) fn set_success(&self, end: Success) {
        *lock(&self.success) = end;
        self.success_changed.notify_all();
    }

    /// Returns true if the job ended successfully, although the store is gone. A node in [`Success::Waiting`]
    /// waits a moment for the answer.
    fn has_succeeded(&self) -> bool {
        let waits = |end: &mut Success| *end == Success::Waiting;
        let success = self.success_changed.wait_timeout_while(lock(&self.success), OPERATION_TIMEOUT, waits);
        *success.unwrap_or_else(PoisonError::into_inner).0 == Success::Succeeded
    }

    /// Tells node 0, once, that this node no longer needs the store.
    fn report_done(&self) {
        if self.node != 0 && !self.done_reported.swap(true, Ordering::Relaxed) {
            // If the store is gone, no node waits for this one.
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
                // A node that withdraws its will takes it out first. Otherwise the store is gone, and a
                // withdrawal is useless.
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
        // A restart is local to the node.
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
            // The job has succeeded: the end of this node changes nothing for the others.
            Ok(JobOutcome { kind: OutcomeKind::Succeeded, .. }) | Err(_) => mine,
            Ok(decided) => decided,
        }
    }

    fn report_signal(&self, signal: i32) {
        self.propose_outcome(OutcomeKind::Stopped { signal }, None);
    }

    /// Node 0 stays until all others have reported that they no longer need its store, for [`LINGER`] at
    /// most.
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
