//! How nodes learn of each other what ends a round or the job, and tell it.
//!
//! A static job ends on all nodes at once, with one cause: the first verdict in the store stands.
//! Each agent leaves a will with node 0's store ("node 2 is lost") and watches the verdict. Who fails for
//! good declares it; who vanishes is declared by its will; if node 0 itself vanishes, all others see
//! their watch break. Only between convoke agents: torchrun's store knows no wills.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use convoke_store::{KeyWatch, LastWill, Store, StoreError, TcpStore};
use serde::{Deserialize, Serialize};

use crate::words;

/// Where the verdict stands, below the run id.
const VERDICT: &str = "convoke/verdict";
/// Counts nodes other than 0 that need the store no longer.
const DONE: &[u8] = b"convoke/done";
/// Longest wait for an operation of the court.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(2);
/// How long node 0 serves on so that the others can read the verdict.
const LINGER: Duration = Duration::from_millis(500);
const LINGER_POLL: Duration = Duration::from_millis(2);
/// Between two looks at what others have said.
const OTHERS_POLL: Duration = Duration::from_millis(10);
/// A watch is renewed this often; it costs nothing.
const WATCH_PERIOD: Duration = Duration::from_secs(3600);

/// Why the job ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Verdict {
    version: u32,
    /// The node that it is about.
    pub(crate) node: usize,
    /// Its host name.
    pub(crate) host: String,
    pub(crate) what: What,
}

/// What became of the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum What {
    /// A worker failed and no restart is left.
    Failed {
        /// One line: which rank, how.
        summary: String,
        /// The report on that failure, as JSON, so that all nodes can print it.
        report: String,
    },
    /// Its launcher could not go on.
    Error {
        /// Why.
        text: String,
    },
    /// A signal ended its launcher.
    Stopped {
        /// Its number.
        signal: i32,
    },
    /// Its launcher is gone without a word, or its host.
    Lost,
    /// All nodes have: nobody's end is a loss from then on.
    Succeeded,
    /// This node hears nobody any more, or was left behind: what happened.
    Alone {
        /// One line.
        text: String,
    },
}

/// What other nodes have to say while this one runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FromOthers {
    /// The job is over.
    Verdict(Verdict),
    /// This round is over, for this reason. All begin anew; or, if this node is `alone`, it does when it hears the others.
    NewRound { round: u64, cause: String, alone: bool },
}

/// Waits for the verdict that ends the job; `None` if it goes on.
pub(crate) type Verdicts = Box<dyn FnOnce() -> Option<Verdict> + Send>;

/// Where a node of a job hears of the others, and tells them of itself. Calls may block, and end by their own deadlines.
pub(crate) trait Court: Send + Sync + fmt::Debug {
    /// Blocks until others have something to say; `None` once this node has left in peace. To be called by one thread.
    fn hear(&self) -> Option<FromOthers>;

    /// A worker of this node has failed, and there is a restart for it or not: says so at once, or, if it may only be the
    /// consequence of what happened on another node, when `others_first` has passed and no other node has spoken. What
    /// it returns, if anything, waits for the verdict.
    fn failed(self: Arc<Self>, what: What, restarts: bool, others_first: Option<Instant>)
    -> Option<Verdicts>;

    /// Declares what ends this node; the verdict that stands, which may be an earlier one. Other nodes have until
    /// `others_first` to speak before.
    fn declare(&self, what: What, others_first: Option<Instant>) -> Verdict;

    /// A signal stops this node: says so while its workers are being stopped.
    fn stops(&self, signal: i32);

    /// Leaves: the end of this process is no news any more.
    fn leave(&self);

    /// Whether `verdict` is about this node.
    fn is_mine(&self, verdict: &Verdict) -> bool;

    /// Whether a failure without a restart is final only when the others have been heard.
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

/// What a node knows of the good end of a static job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum End {
    /// Its own workers run.
    #[default]
    Open,
    /// It has succeeded, and waits for the others.
    Waiting,
    /// All have succeeded.
    All,
    /// It cannot know.
    Unknown,
}

/// One node's seat in the court of a static job.
#[derive(Debug)]
pub(crate) struct StoreCourt {
    job: Arc<dyn Store>,
    node: usize,
    host: String,
    nodes: usize,
    master_host: String,
    will: Mutex<Option<LastWill>>,
    watch: Mutex<Option<KeyWatch>>,
    /// What was heard: node 0 and its store may be gone since.
    heard: Mutex<Option<Verdict>>,
    end: Mutex<End>,
    end_known: Condvar,
    told_done: AtomicBool,
}

impl StoreCourt {
    /// Leaves this node's will; `None` if node 0 is another launcher.
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

    /// The verdict that ends this node, if there is one already.
    pub(crate) fn standing(&self) -> Option<Verdict> {
        let ends = |verdict: &Verdict| verdict.what != What::Succeeded;
        if let Some(heard) = lock(&self.heard).clone() {
            return Some(heard).filter(ends);
        }
        let text = self.job.try_get(VERDICT.as_bytes(), Instant::now() + OPERATION_TIMEOUT).ok()??;
        Some(self.decode(&text)).filter(ends)
    }

    /// All nodes have succeeded: says so, so that no end of a launcher is a loss any more; whether that is how the job ends.
    pub(crate) fn succeed(&self) -> bool {
        let mine = encode(&Verdict::new(self.node, &self.host, What::Succeeded));
        let deadline = Instant::now() + OPERATION_TIMEOUT;
        let standing = self.job.compare_set(VERDICT.as_bytes(), b"", &mine, deadline);
        // If the store is gone, another node has said it, and node 0 has ended.
        standing.map_or(true, |standing| self.decode(&standing).what == What::Succeeded)
    }

    /// This node has succeeded, or knows now whether all have.
    pub(crate) fn note_end(&self, end: End) {
        *lock(&self.end) = end;
        self.end_known.notify_all();
    }

    /// Whether the job has ended well, now that the store is gone. A node that waits for that is about to know.
    fn has_ended_well(&self) -> bool {
        let waits = |end: &mut End| *end == End::Waiting;
        let end = self.end_known.wait_timeout_while(lock(&self.end), OPERATION_TIMEOUT, waits);
        *end.unwrap_or_else(PoisonError::into_inner).0 == End::All
    }

    /// Tells node 0, once, that it need not stay for this node.
    fn done(&self) {
        if self.node != 0 && !self.told_done.swap(true, Ordering::Relaxed) {
            // If the store is gone there is nobody to wait for us.
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
                // Who withdraws the will takes it out before. Else the store is gone, and leaving it is no use.
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
            // The job has ended well: this node's own end changes nothing for the others.
            Ok(Verdict { what: What::Succeeded, .. }) | Err(_) => mine,
            Ok(standing) => standing,
        }
    }

    fn stops(&self, signal: i32) {
        self.declare(What::Stopped { signal }, None);
    }

    /// Node 0 stays for a moment as long as others may still need its store.
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
