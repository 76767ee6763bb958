//! A drain: the job is about to lose its nodes, so its workers get time to stop at one step, and are not started
//! again.
//!
//! Any node may begin a drain. It announces the drain in the workers' key-value store, at which the launchers of
//! all nodes wait. Each launcher then tells its own workers, and stops those that are late.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use convoke_env::Generation;
use convoke_store::{Store, StoreError, TcpStore};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::slurm_job::time_left;
use crate::config::DrainConfig;
use crate::formatting;
use crate::messages::print_message;
use crate::rendezvous::{Assignment, start_thread, until};

/// Key in the workers' store with the announcement of a drain.
const KEY: &[u8] = b"convoke/drain";
/// Name of the file, in a log folder, by which `convoke drain` asks for a drain.
pub(crate) const REQUEST_FILE: &str = "drain-request";
/// Interval at which the launcher looks for that file.
const REQUEST_POLL: Duration = Duration::from_secs(1);
/// Longest time before the end of a drain at which workers that still run get SIGTERM. It is a third of a drain
/// that is shorter than 15 s.
const TERM_BEFORE_END: Duration = Duration::from_secs(5);
/// Longest wait for the store to publish or return an announcement.
const STORE_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait for a connection to the store of a round.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest single wait for an announcement; the launcher then waits again.
const WATCH_PERIOD: Duration = Duration::from_secs(3600);

/// The announcement of a drain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Announcement {
    /// The signal, command or flag that asked for the drain, and the node.
    pub(super) by: String,
    /// Time that the workers have from now on.
    pub(super) left_ms: u64,
}

#[derive(Debug)]
pub(super) enum DrainEvent {
    /// This node is asked for a drain.
    Requested { by: String },
    /// The drain is announced on all nodes.
    Announced(Announcement),
    /// The workers have had the time that they got.
    Late,
}

/// A drain that is in progress.
#[derive(Debug)]
pub(super) struct Draining {
    pub(super) by: String,
    pub(super) began: Instant,
    /// Time at which workers that still run get SIGTERM, and time from then to SIGKILL.
    pub(super) late_at: Instant,
    pub(super) grace: Duration,
    pub(super) is_late: bool,
}

/// The drain of this node's workers: how it is asked for, and its progress.
pub(super) struct Drain {
    config: DrainConfig,
    /// The file whose existence tells workers of the drain (CONVOKE_DRAIN_FILE).
    file: PathBuf,
    /// The file by which `convoke drain` asks for a drain; `None` without a log folder.
    request: Option<PathBuf>,
    /// Next time at which the launcher looks for that file.
    look_at: Instant,
    /// Number of drain signals that this launcher has received.
    pub(super) signals: u32,
    pub(super) state: Option<Draining>,
    begin_at: Option<Instant>,
    /// Address of the store that all nodes of the round share; `None` if this node is alone.
    store: Option<String>,
    sender: mpsc::UnboundedSender<DrainEvent>,
    receiver: mpsc::UnboundedReceiver<DrainEvent>,
}

impl Draining {
    /// Returns the progress of a drain that begins now and has this time left.
    pub(super) fn new(by: String, left: Duration) -> Self {
        let (began, grace) = (Instant::now(), TERM_BEFORE_END.min(left / 3));
        Self { by, began, late_at: began + left - grace, grace, is_late: false }
    }
}

impl Drain {
    /// `log_folder` is the log folder of this launcher, if it has one.
    ///
    /// # Errors
    /// The system provides no random numbers.
    pub(super) fn new(config: &DrainConfig, log_folder: Option<&Path>) -> Result<Self, String> {
        let (sender, receiver) = mpsc::unbounded_channel();
        // Workers may change their working directory, so the path must be absolute.
        let folder = log_folder.map(|folder| std::path::absolute(folder).unwrap_or_else(|_| folder.into()));
        let file = match &folder {
            Some(folder) => folder.join("drain"),
            None => {
                let name =
                    Generation::random().map_err(|error| format!("cannot get random numbers: {error}"))?;
                std::env::temp_dir().join(format!("convoke-drain-{name}"))
            }
        };
        Ok(Self {
            begin_at: config.after.map(|after| Instant::now() + after),
            config: config.clone(),
            file,
            request: folder.map(|folder| folder.join(REQUEST_FILE)),
            look_at: Instant::now() + REQUEST_POLL,
            signals: 0,
            state: None,
            store: None,
            sender,
            receiver,
        })
    }

    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    /// Waits for the announcements of other nodes, in the workers' store of a round that begins.
    pub(super) fn watch(&mut self, assignment: &Assignment) {
        let is_shared = assignment.group_world_size > 1 && assignment.use_agent_store;
        let address = formatting::address(&assignment.master_addr, assignment.master_port);
        let address = is_shared.then_some(address);
        // A restart of a static job keeps the store, and the thread that waits there.
        if address == self.store {
            return;
        }
        self.store = address;
        let Some(address) = self.store.clone() else { return };
        let sender = self.sender.clone();
        let watched = start_thread("drain", move || {
            if let Some(announcement) = wait_for_announcement(&address) {
                let _ = sender.send(DrainEvent::Announced(announcement));
            }
        });
        if let Err(error) = watched {
            print_message(&format!("warning: a drain on another node does not reach this one: {error}"));
        }
    }

    /// Announces a drain on all nodes. The announcement comes back as [`DrainEvent::Announced`]. It is that of
    /// another node if that was earlier.
    pub(super) fn announce(&self, by: String) {
        let (sender, address, timeout) = (self.sender.clone(), self.store.clone(), self.config.timeout);
        let job = self.config.slurm_job.clone();
        let publish = move || {
            let left = job.and_then(|job| time_left(&job)).map_or(timeout, |left| left.min(timeout));
            let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
            let mine = Announcement { by, left_ms };
            let agreed = address.and_then(|address| publish(&address, &mine));
            let _ = sender.send(DrainEvent::Announced(agreed.unwrap_or(mine)));
        };
        if let Err(error) = start_thread("drain", publish) {
            print_message(&format!("warning: the job is not drained: {error}"));
        }
    }

    /// Returns the announcement of another node that this node has not noticed yet.
    pub(super) fn read_announcement(&self) -> Option<Announcement> {
        let deadline = Instant::now() + STORE_TIMEOUT;
        let store = TcpStore::connect(self.store.as_ref()?, deadline).ok()?;
        decode(&store.try_get(KEY, deadline).ok()??)
    }

    /// Waits for the next event. Cancel safe.
    pub(super) async fn next(&mut self) -> DrainEvent {
        loop {
            let waits = self.state.is_none();
            let late_at = self.state.as_ref().filter(|state| !state.is_late);
            let late_at = late_at.map(|state| state.late_at.into());
            let begin_at = self.begin_at.filter(|_| waits).map(Into::into);
            let look_at = self.request.as_ref().filter(|_| waits).map(|_| self.look_at.into());
            tokio::select! {
                biased;
                event = self.receiver.recv() => {
                    return event.expect("this value keeps a sender, so the channel is open");
                }
                () = until(late_at) => {
                    if let Some(state) = &mut self.state {
                        state.is_late = true;
                    }
                    return DrainEvent::Late;
                }
                () = until(begin_at) => {
                    self.begin_at = None;
                    return DrainEvent::Requested { by: "--drain-after".to_owned() };
                }
                () = until(look_at) => {
                    self.look_at = Instant::now() + REQUEST_POLL;
                    // Removing the file tells `convoke drain` that the drain has begun.
                    if self.request.as_ref().is_some_and(|file| std::fs::remove_file(file).is_ok()) {
                        return DrainEvent::Requested { by: "convoke drain".to_owned() };
                    }
                }
            }
        }
    }

    /// Removes the file that tells workers of the drain. To be called when they have ended.
    pub(super) fn remove_file(&self) {
        if self.state.is_some() {
            let _ = std::fs::remove_file(&self.file);
        }
    }
}

/// Waits until a drain is announced in the store at this address. Returns `None` when the store is gone, as at
/// the end of a round.
fn wait_for_announcement(address: &str) -> Option<Announcement> {
    let store = TcpStore::connect(address, Instant::now() + CONNECT_TIMEOUT).ok()?;
    loop {
        match store.wait(&[KEY], Instant::now() + WATCH_PERIOD) {
            Ok(()) => return decode(&store.try_get(KEY, Instant::now() + STORE_TIMEOUT).ok()??),
            Err(StoreError::Timeout { .. }) => {}
            Err(_) => return None,
        }
    }
}

/// Publishes an announcement. Returns the first one, which may be another node's; `None` if the store does not
/// answer.
fn publish(address: &str, mine: &Announcement) -> Option<Announcement> {
    let text = serde_json::to_vec(mine).expect("an announcement is plain data");
    let deadline = Instant::now() + STORE_TIMEOUT;
    let store = TcpStore::connect(address, deadline).ok()?;
    decode(&store.compare_set(KEY, b"", &text, deadline).ok()?)
}

fn decode(text: &[u8]) -> Option<Announcement> {
    serde_json::from_slice(text).ok()
}
