//! The nodes of a static job agree on its outcome through node 0's key-value store.
//!
//! A static job ends on all nodes at once, with one cause: the first outcome written to node 0's key-value
//! store is final. Each agent registers a last will with that store: an outcome ("node 2 is lost") that the
//! store writes if the agent disappears. Each agent also watches the key of the outcome. A node that fails
//! without a remaining restart writes the outcome itself. If node 0 disappears, the watches of all other
//! nodes break. Only convoke agents do this: torchrun's store has no last wills.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use convoke_store::{KeyWatch, LastWill, Store, StoreError, TcpStore};

use crate::rendezvous::{JobOutcome, OutcomeKind, ProposedOutcome};

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
pub(super) const DEFER_POLL: Duration = Duration::from_millis(10);
/// Longest single wait for a change of the outcome; the node then waits again, which costs nothing.
const WATCH_PERIOD: Duration = Duration::from_secs(3600);

/// What one node knows about the success of a static job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Success {
    /// The workers of this node are running, or this node cannot find out whether all nodes have succeeded.
    #[default]
    Unknown,
    /// This node has succeeded and waits for the other nodes.
    Waiting,
    /// All nodes have succeeded.
    Succeeded,
}

/// Access of one node to the outcome of a static job in node 0's key-value store.
#[derive(Debug)]
pub(super) struct OutcomeStore {
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

impl OutcomeStore {
    /// Registers the last will of this node. Returns `None` if node 0 runs another launcher, whose store has
    /// no last wills.
    pub(super) fn register(
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

    /// Ends a job whose nodes cannot all come, from a node that has no part in it.
    pub(super) fn end_forming_job(job: &dyn Store, node: usize, host: &str, text: &str) {
        let outcome = JobOutcome::new(node, host, OutcomeKind::Error { text: text.to_owned() });
        let deadline = Instant::now() + OPERATION_TIMEOUT;
        // If the store is gone, so is the job.
        let _ = job.compare_set(OUTCOME_KEY.as_bytes(), b"", &encode(&outcome), deadline);
    }

    /// Returns the outcome of a job that may be started again: a node was lost or stopped, or its workers failed.
    /// `node` and `host` are those of a node that asks and has no part in the job.
    pub(super) fn failure_of(
        job: &dyn Store,
        node: usize,
        host: &str,
        deadline: Instant,
    ) -> Result<Option<JobOutcome>, StoreError> {
        let text = job.try_get(OUTCOME_KEY.as_bytes(), deadline)?;
        let outcome = text.map(|text| decode(&text, node, host));
        let has_failed = |kind: &OutcomeKind| {
            matches!(kind, OutcomeKind::Lost | OutcomeKind::Stopped { .. } | OutcomeKind::Failed { .. })
        };
        Ok(outcome.filter(|outcome| has_failed(&outcome.kind)))
    }

    /// Returns the outcome of the job if another node has already declared one that ends this node.
    pub(super) fn current_outcome(&self) -> Option<JobOutcome> {
        let received = lock(&self.received).clone();
        let read = || self.job.try_get(OUTCOME_KEY.as_bytes(), Instant::now() + OPERATION_TIMEOUT).ok()?;
        let outcome = received.or_else(|| Some(self.decode(&read()?)));
        outcome.filter(|outcome| outcome.kind != OutcomeKind::Succeeded)
    }

    /// Declares that all nodes have succeeded, so that the exit of a launcher does not count as a loss any
    /// more. Returns true if success is the final outcome.
    pub(super) fn propose_success(&self) -> bool {
        let decided = self.declare(&JobOutcome::new(self.node, &self.host, OutcomeKind::Succeeded));
        // If the store is gone, another node has declared the success, and node 0 has ended.
        decided.is_none_or(|decided| decided.kind == OutcomeKind::Succeeded)
    }

    /// Declares an outcome. Returns the final outcome, which may be another one that was declared earlier.
    /// `None` if the store is gone.
    fn declare(&self, mine: &JobOutcome) -> Option<JobOutcome> {
        let deadline = Instant::now() + OPERATION_TIMEOUT;
        let decided = self.job.compare_set(OUTCOME_KEY.as_bytes(), b"", &encode(mine), deadline);
        decided.ok().map(|decided| self.decode(&decided))
    }

    /// Records what this node knows about the success of the job, and wakes the thread in `has_succeeded`.
    pub(super) fn set_success(&self, end: Success) {
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

    fn decode(&self, text: &[u8]) -> JobOutcome {
        decode(text, self.node, &self.host)
    }

    /// Blocks until another node ends the job. Returns `None` once this node has left or all nodes have
    /// succeeded. Only one thread may call this method.
    pub(super) fn watch(&self) -> Option<JobOutcome> {
        let mut watch = lock(&self.watch).take()?;
        let outcome = loop {
            match watch.wait(Instant::now() + WATCH_PERIOD) {
                Ok(None) => {}
                Ok(Some(text)) => break self.decode(&text),
                Err(_) if self.has_succeeded() => return None,
                // `leave` takes the last will out before it withdraws it, so without a last will this node
                // has left. Otherwise the store is gone, and there is nothing to withdraw.
                Err(_) => {
                    lock(&self.last_will).take()?;
                    let outcome = JobOutcome::new(0, &self.node_0_host, OutcomeKind::Lost);
                    *lock(&self.received) = Some(outcome.clone());
                    return Some(outcome);
                }
            }
        };
        *lock(&self.received) = Some(outcome.clone());
        if outcome.kind == OutcomeKind::Succeeded {
            return None;
        }
        self.report_done();
        Some(outcome)
    }

    /// Declares the outcome, which ends this node, as that of the job. Returns the final outcome, which may
    /// be that of a node that declared one earlier. Returns `None` while the declaration is deferred and no
    /// other node has declared an outcome.
    pub(super) fn try_propose(&self, proposed: &ProposedOutcome) -> Option<JobOutcome> {
        if proposed.defer_until.is_some_and(|until| Instant::now() < until) {
            return self.current_outcome();
        }
        let mine = JobOutcome::new(self.node, &self.host, proposed.kind.clone());
        let decided = self.declare(&mine).filter(|decided| decided.kind != OutcomeKind::Succeeded);
        // If the job has succeeded, or the store is gone, the failure of this node changes nothing for other
        // nodes.
        Some(decided.unwrap_or(mine))
    }

    /// Declares the outcome as [`Self::try_propose`] does, and waits while it is deferred.
    pub(super) fn propose(&self, proposed: &ProposedOutcome) -> JobOutcome {
        loop {
            match self.try_propose(proposed) {
                Some(decided) => return decided,
                None => std::thread::sleep(DEFER_POLL),
            }
        }
    }

    /// Leaves the job, so that the exit of this process does not count as the loss of its node. Node 0 keeps
    /// its store until all other nodes have reported that they no longer need it, for [`LINGER`] at most.
    pub(super) fn leave(&self) {
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
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads the outcome that node `node` got. An invalid one counts as an error of this node.
fn decode(text: &[u8], node: usize, host: &str) -> JobOutcome {
    serde_json::from_slice(text).unwrap_or_else(|error| {
        let text = format!("the recorded outcome of the job is invalid: {error}");
        JobOutcome::new(node, host, OutcomeKind::Error { text })
    })
}

fn encode(outcome: &JobOutcome) -> Vec<u8> {
    serde_json::to_vec(outcome).expect("an outcome is plain data")
}
