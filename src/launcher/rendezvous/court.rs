//! Exchange of failures between nodes, and agreement on the outcome of the job.
//!
//! A static job ends on all nodes at once, with one cause: the first verdict in the store is final.
//! Each agent registers a last will with the store of node 0 ("node 2 is lost") and watches the verdict.
//! A node that fails without a remaining restart declares the verdict. The last will declares it for a node
//! that disappears.
//! If node 0 disappears, the watches of all other nodes break.
//! Only convoke agents do this: torchrun's store has no last wills.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use convoke_store::{KeyWatch, LastWill, Store, StoreError, TcpStore};
use serde::{Deserialize, Serialize};

use crate::words;

/// Key of the verdict, below the run id.
const VERDICT: &str = "convoke/verdict";
/// Key of the counter of nodes other than 0 that no longer need the store.
const DONE: &[u8] = b"convoke/done";
/// Longest wait for a store operation of this module.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest time that node 0 keeps serving so that the other nodes can read the verdict.
const LINGER: Duration = Duration::from_millis(500);
const LINGER_POLL: Duration = Duration::from_millis(2);
/// Interval at which a node reads the verdict while it waits for others to speak first.
const OTHERS_POLL: Duration = Duration::from_millis(10);
/// Interval at which the watch is renewed. A renewal costs nothing.
const WATCH_PERIOD: Duration = Duration::from_secs(3600);

/// Outcome of the job, and the node that caused it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Verdict {
    version: u32,
    /// Rank of the node that the verdict is about.
    pub(crate) node: usize,
    /// Host name of that node.
    pub(crate) host: String,
    pub(crate) what: What,
}

/// Outcome on that node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum What {
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
    Alone {
        /// One line: what happened.
        text: String,
    },
}

/// News from other nodes while this one runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FromOthers {
    /// The job is over.
    Verdict(Verdict),
    /// The round is over because of `cause`. All nodes restart. A node that is `alone` restarts when it
    /// reaches the others again.
    NewRound { round: u64, cause: String, alone: bool },
}

/// A function that waits for the verdict that ends the job. It returns `None` if the job continues.
pub(crate) type Verdicts = Box<dyn FnOnce() -> Option<Verdict> + Send>;

/// Channel by which the nodes of a job tell each other of failures. Calls may block, but have their own
/// deadlines.
pub(crate) trait Court: Send + Sync + fmt::Debug {
    /// Blocks until other nodes have news. Returns `None` once this node has left cleanly. Only one thread
    /// may call this.
    fn hear(&self) -> Option<FromOthers>;

    /// Reports that a worker of this node has failed. `restarts` is true if this node has a restart for it.
    /// If the failure may be the consequence of one elsewhere, `others_first` is set. The report then waits
    /// until that time, unless another node reports a failure before.
    /// The returned function, if any, waits for the verdict.
    fn failed(self: Arc<Self>, what: What, restarts: bool, others_first: Option<Instant>)
    -> Option<Verdicts>;

    /// Declares what ends this node. Returns the final verdict, which may be an earlier one.
    /// Other nodes may declare theirs first until `others_first`.
    fn declare(&self, what: What, others_first: Option<Instant>) -> Verdict;

    /// Reports that a signal stops this node. The caller stops its workers at the same time.
    fn stops(&self, signal: i32);

    /// Leaves: the exit of this process is no longer news.
    fn leave(&self);

    /// Returns true if `verdict` is about this node.
    fn is_mine(&self, verdict: &Verdict) -> bool;

    /// Returns true if a failure without a remaining restart is final only after the other nodes have been
    /// heard.
    fn has_last_word(&self) -> bool;
}

impl Verdict {
    pub(super) fn new(node: usize, host: &str, what: What) -> Self {
        Self { version: 1, node, host: host.to_owned(), what }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let What::Alone { text } = &self.what {
            return f.write_str(text);
        }
        write!(f, "node {} ({}) ", self.node, self.host)?;
        match &self.what {
            What::Alone { text } => f.write_str(text),
            What::Failed { summary, .. } => write!(f, "failed: {summary}"),
            What::Error { text } => write!(f, "could not go on: {text}"),
            What::Stopped { signal } => write!(f, "was stopped by {}", words::signal(*signal)),
            What::Lost => f.write_str("is lost: its launcher was killed, or its host or the network is down"),
            What::Succeeded => f.write_str("has ended well, as all others have"),
        }
    }
}

/// State of a static job's success, as one node knows it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum End {
    /// The workers of this node are running.
    #[default]
    Open,
    /// This node has succeeded and waits for the others.
    Waiting,
    /// All nodes have succeeded.
    All,
    /// This node cannot find out whether all have succeeded.
    Unknown,
}

/// Connection of one node to the verdict of a static job.
#[derive(Debug)]
pub(crate) struct StoreCourt {
    job: Arc<dyn Store>,
    node: usize,
    host: String,
    nodes: usize,
    master_host: String,
    will: Mutex<Option<LastWill>>,
    watch: Mutex<Option<KeyWatch>>,
    /// The verdict that was received. It is kept because node 0 and its store may have gone since.
    heard: Mutex<Option<Verdict>>,
    end: Mutex<End>,
    end_known: Condvar,
    told_done: AtomicBool,
}

impl StoreCourt {
    /// Registers the last will of this node. Returns `None` if node 0 is not convoke: its store has no last
    /// wills.
    pub(crate) fn enter(
        store: &TcpStore,
        job: Arc<dyn Store>,
        run_id: &str,
        (node, nodes): (usize, usize),
        (host, master_host): (String, String),
        deadline: Instant,
    ) -> Result<Option<Self>, StoreError> {
        let lost = encode(&Verdict::new(node, &host, What::Lost));
        match store.set_last_will(format!("{run_id}/{VERDICT}").as_bytes(), &lost, deadline) {
            Ok((will, watch)) => Ok(Some(Self {
                job,
                node,
                host,
                nodes,
                master_host,
                will: Mutex::new(Some(will)),
                watch: Mutex::new(Some(watch)),
                heard: Mutex::new(None),
                end: Mutex::default(),
                end_known: Condvar::new(),
                told_done: AtomicBool::new(false),
            })),
            Err(StoreError::Lost { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the verdict that ends this node, if there is one already.
    pub(crate) fn standing(&self) -> Option<Verdict> {
        let ends = |verdict: &Verdict| verdict.what != What::Succeeded;
        if let Some(heard) = lock(&self.heard).clone() {
            return Some(heard).filter(ends);
        }
        let text = self.job.try_get(VERDICT.as_bytes(), Instant::now() + OPERATION_TIMEOUT).ok()??;
        Some(self.decode(&text)).filter(ends)
    }

    /// Declares that all nodes have succeeded, so that the exit of a launcher is no loss any more. Returns
    /// true if that is the final verdict.
    pub(crate) fn succeed(&self) -> bool {
        let mine = encode(&Verdict::new(self.node, &self.host, What::Succeeded));
        let deadline = Instant::now() + OPERATION_TIMEOUT;
        let standing = self.job.compare_set(VERDICT.as_bytes(), b"", &mine, deadline);
        // If the store is gone, another node has declared the success, and node 0 has ended.
        standing.map_or(true, |standing| self.decode(&standing).what == What::Succeeded)
    }

    /// Records that this node has succeeded, or whether all nodes have.
    pub(crate) fn note_end(&self, end: End) {
        *lock(&self.end) = end;
        self.end_known.notify_all();
    }

    /// Returns true if the job ended successfully, although the store is gone. A node in [`End::Waiting`]
    /// waits a moment for the answer.
    fn has_ended_well(&self) -> bool {
        let waits = |end: &mut End| *end == End::Waiting;
        let end = self.end_known.wait_timeout_while(lock(&self.end), OPERATION_TIMEOUT, waits);
        *end.unwrap_or_else(PoisonError::into_inner).0 == End::All
    }

    /// Tells node 0, once, that this node no longer needs the store.
    fn done(&self) {
        if self.node != 0 && !self.told_done.swap(true, Ordering::Relaxed) {
            // If the store is gone, no node waits for this one.
            let _ = self.job.add(DONE, 1, Instant::now() + OPERATION_TIMEOUT);
        }
    }

    fn master_lost(&self) -> Verdict {
        Verdict::new(0, &self.master_host, What::Lost)
    }

    fn decode(&self, text: &[u8]) -> Verdict {
        serde_json::from_slice(text).unwrap_or_else(|error| {
            let text = format!("a verdict that makes no sense: {error}");
            Verdict::new(self.node, &self.host, What::Error { text })
        })
    }
}

impl Court for StoreCourt {
    fn hear(&self) -> Option<FromOthers> {
        let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        loop {
            match watch.wait(Instant::now() + WATCH_PERIOD) {
                Ok(None) => {}
                Ok(Some(text)) => {
                    let verdict = self.decode(&text);
                    *lock(&self.heard) = Some(verdict.clone());
                    if verdict.what == What::Succeeded {
                        return None;
                    }
                    self.done();
                    return Some(FromOthers::Verdict(verdict));
                }
                // A node that withdraws its will takes it out first. Otherwise the store is gone, and a
                // withdrawal is useless.
                Err(_) => {
                    if self.has_ended_well() {
                        return None;
                    }
                    let verdict = lock(&self.will).take().map(|_| self.master_lost())?;
                    *lock(&self.heard) = Some(verdict.clone());
                    return Some(FromOthers::Verdict(verdict));
                }
            }
        }
    }

    fn failed(
        self: Arc<Self>,
        what: What,
        restarts: bool,
        others_first: Option<Instant>,
    ) -> Option<Verdicts> {
        // A restart is local to the node.
        if restarts {
            return None;
        }
        Some(Box::new(move || Some(self.declare(what, others_first))))
    }

    fn declare(&self, what: What, others_first: Option<Instant>) -> Verdict {
        while others_first.is_some_and(|until| Instant::now() < until) {
            if let Some(standing) = self.standing() {
                return standing;
            }
            std::thread::sleep(OTHERS_POLL);
        }
        let mine = Verdict::new(self.node, &self.host, what);
        let deadline = Instant::now() + OPERATION_TIMEOUT;
        let standing = self.job.compare_set(VERDICT.as_bytes(), b"", &encode(&mine), deadline);
        match standing.map(|standing| self.decode(&standing)) {
            // The job has succeeded: the end of this node changes nothing for the others.
            Ok(Verdict { what: What::Succeeded, .. }) | Err(_) => mine,
            Ok(standing) => standing,
        }
    }

    fn stops(&self, signal: i32) {
        self.declare(What::Stopped { signal }, None);
    }

    /// Node 0 stays until all others have reported that they no longer need its store, for [`LINGER`] at
    /// most.
    fn leave(&self) {
        let Some(will) = lock(&self.will).take() else { return };
        will.withdraw();
        if self.node != 0 {
            self.done();
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

    fn is_mine(&self, verdict: &Verdict) -> bool {
        verdict.node == self.node && !matches!(verdict.what, What::Alone { .. })
    }

    fn has_last_word(&self) -> bool {
        false
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn encode(verdict: &Verdict) -> Vec<u8> {
    serde_json::to_vec(verdict).unwrap_or_default()
}
