//! The watchdog thread of a group's device backend: it reaps finished operations, enforces timeouts, and
//! checks the group.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::core::{Core, Failure};
use super::driver::bind;
use super::pending::{CHECK_INTERVAL, Search};
use crate::error::LossReason;
use crate::error::cause::Cause;

/// The interval of checks while no operation is in progress. A rank whose group has ended must abort NCCL,
/// since the other ranks of its host wait for that abort.
const IDLE: Duration = Duration::from_secs(1);
/// The time that operations with a rank may take after it left the group: its own part was done when it left.
const LEFT_RANK_GRACE: Duration = Duration::from_secs(1);

impl Core {
    /// The loop of the watchdog until the backend is closed.
    pub(super) fn run_watchdog(self: &Arc<Self>) {
        let _running = self.watchdog.enter();
        // If binding fails, queries of events fail too and report the error.
        let _ = bind(&self.context);
        let (mut last_check, mut absent) = (Instant::now(), BTreeMap::new());
        loop {
            let closing = self.wait_for_work();
            // First the checks that do not call the driver, since driver calls may block.
            if last_check.elapsed() >= CHECK_INTERVAL && !closing {
                self.check_health();
                last_check = Instant::now();
                for rank in self.group.absent_ranks() {
                    let since = *absent.entry(rank).or_insert(last_check);
                    if last_check - since >= LEFT_RANK_GRACE
                        && self.pending().any(|operation| operation.needs(rank))
                    {
                        self.fail(Failure::Own(Cause::PeerLost { rank, how: LossReason::Left }));
                    }
                }
            }
            if !self.has_failed() {
                self.reap(Search::Exact);
                self.check_timeouts();
            }
            if self.has_failed() {
                self.abort_all();
            }
            // Callbacks, wakers, and drops of buffers without a handle run the program's code. If it panics,
            // the group ends.
            if !self.callback_queue.run() {
                self.group.abort("a callback panicked");
            }
            self.release_group();
            if closing {
                return;
            }
        }
    }

    /// Sleeps until there is something to check. Returns whether the backend is being closed.
    fn wait_for_work(&self) -> bool {
        let mut pending = self.pending();
        let closing = || self.watchdog.closing.load(Ordering::SeqCst);
        let abort_started = self.abort.started.load(Ordering::SeqCst);
        if closing() || self.callback_queue.has_queued() || (self.has_failed() && !abort_started) {
            return closing();
        }
        pending.watchdog_sleeps();
        let time = pending.next_check_in(Instant::now()).or_else(|| (!abort_started).then_some(IDLE));
        // Without a time the backend has ended and all operations are completed: only its close is left.
        self.watchdog.sleep(pending, time);
        closing()
    }
}
