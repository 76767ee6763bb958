//! Successful end of a static job: each node waits until all have succeeded.

use std::time::{Duration, Instant};

use convoke_store::{Store, StoreError};

use super::{Fixed, Joined, NODE, OPERATION_TIMEOUT};
use crate::rendezvous::court::{End, StoreCourt};
use crate::say::Progress;

/// Longest time that finished nodes wait for those under torchrun, whose loss no watch reports.
const TORCHRUN_TIMEOUT: Duration =
    if cfg!(test) { Duration::from_millis(200) } else { Duration::from_secs(300) };
/// Interval at which a node counts the finished nodes.
const POLL: Duration = if cfg!(test) { Duration::from_millis(100) } else { Duration::from_secs(10) };

const MEMBERS: &[u8] = b"torchelastic/agent/terminal_state/num_members";
const LAST_MEMBER: &[u8] = b"torchelastic/agent/terminal_state/last_member";
/// Counter of finished nodes under convoke. Only convoke uses this key.
const FINISHED: &[u8] = b"convoke/finished";

impl Fixed {
    /// Waits until all nodes have succeeded. Returns false if the job has ended otherwise.
    ///
    /// Nodes under convoke have no deadline: their loss is reported, and they need node 0's store.
    pub(super) fn wait_for_all(&self, joined: &Joined) -> Result<bool, StoreError> {
        let Some(court) = &joined.court else { return self.wait_without_court(joined.job.as_ref()) };
        court.note_end(End::Waiting);
        let has_succeeded = self.wait_with_court(joined.job.as_ref(), court);
        court.note_end(if matches!(has_succeeded, Ok(true)) { End::All } else { End::Unknown });
        has_succeeded
    }

    fn wait_without_court(&self, job: &dyn Store) -> Result<bool, StoreError> {
        let deadline = Instant::now() + TORCHRUN_TIMEOUT;
        if job.add(MEMBERS, 1, deadline)? < self.all() {
            job.wait(&[LAST_MEMBER], deadline)?;
        } else {
            job.set(LAST_MEMBER, b"<val_ignored>", deadline)?;
        }
        Ok(true)
    }

    fn wait_with_court(&self, job: &dyn Store, court: &StoreCourt) -> Result<bool, StoreError> {
        let soon = || Instant::now() + OPERATION_TIMEOUT;
        let all = self.all();
        let mut arrived = job.add(MEMBERS, 1, soon())?;
        job.add(FINISHED, 1, soon())?;
        let mut ours = None;
        let mut gives_up: Option<Instant> = None;
        let mut progress = Progress::new(Instant::now());
        while arrived < all {
            match job.wait(&[LAST_MEMBER], Instant::now() + POLL) {
                Ok(()) => return Ok(court.succeed()),
                Err(error @ StoreError::Timeout { .. })
                    if gives_up.is_some_and(|at| at <= Instant::now()) =>
                {
                    return Err(error);
                }
                Err(StoreError::Timeout { .. }) => {}
                // The watch of the verdict reports the loss of node 0.
                Err(StoreError::Lost { .. }) if self.node != 0 => return Ok(false),
                Err(error) => return Err(error),
            }
            arrived = job.add(MEMBERS, 0, soon())?;
            let ours = match ours {
                Some(ours) => ours,
                None => *ours.insert(self.count_ours(job)?),
            };
            if ours < all && job.add(FINISHED, 0, soon())? >= ours {
                gives_up.get_or_insert_with(|| Instant::now() + TORCHRUN_TIMEOUT);
            }
            let line = format!("this node is done and waits until all are: {arrived} of {all} are so far");
            progress.show_endless(&line);
        }
        let has_succeeded = court.succeed();
        if has_succeeded {
            job.set(LAST_MEMBER, b"<val_ignored>", soon())?;
        }
        Ok(has_succeeded)
    }

    /// Returns the number of nodes under convoke.
    fn count_ours(&self, job: &dyn Store) -> Result<i64, StoreError> {
        let soon = || Instant::now() + OPERATION_TIMEOUT;
        let keys: Vec<String> = (0..self.nodes).map(|node| format!("{NODE}{node}")).collect();
        let keys: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
        if job.check(&keys, soon())? {
            return Ok(self.all());
        }
        let mut ours = 0;
        for key in keys {
            ours += i64::from(job.check(&[key], soon())?);
        }
        Ok(ours)
    }

    fn all(&self) -> i64 {
        i64::try_from(self.nodes).unwrap_or(i64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};

    use super::*;
    use crate::rendezvous::{Barrier, Rendezvous};

    const LONG: Duration = Duration::from_secs(60);

    /// Returns nodes 0 and 1 of a job, which have met.
    fn two() -> [Fixed; 2] {
        let port = convoke_testkit::free_port();
        let node = |node| Fixed {
            host: "127.0.0.1".to_owned(),
            port,
            node,
            nodes: 2,
            run_id: "job".to_owned(),
            role: "default".to_owned(),
            workers: 1,
            timeout: LONG,
            joined: None,
        };
        let [mut first, mut second] = [node(0), node(1)];
        std::thread::scope(|scope| {
            let joins = scope.spawn(|| first.join(0).map(drop));
            second.join(0).unwrap();
            joins.join().unwrap().unwrap();
        });
        [first, second]
    }

    #[test]
    fn early_node_waits_for_other_nodes_without_time_limit() {
        for early in 0..2 {
            let [first, second] = two();
            let (mut early, mut late) = if early == 0 { (first, second) } else { (second, first) };
            let (tell, told) = channel();
            std::thread::scope(|scope| {
                let waiting = &mut early;
                scope.spawn(move || tell.send(waiting.barrier()).unwrap());
                // This exceeds the longest wait for nodes under torchrun.
                let nothing = told.recv_timeout(5 * TORCHRUN_TIMEOUT);
                assert_eq!(nothing, Err(RecvTimeoutError::Timeout), "it has given up");
                assert_eq!(late.barrier(), Barrier::Passed);
                assert_eq!(told.recv_timeout(LONG), Ok(Barrier::Passed));
            });
        }
    }

    #[test]
    fn late_node_does_not_report_orderly_node_0_as_lost() {
        let [mut first, mut second] = two();
        let court = second.court().unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| second.barrier());
            assert_eq!(first.barrier(), Barrier::Passed);
            first.court().unwrap().leave();
            drop(first);
            // All messages to this node have been sent.
            assert_eq!(court.hear(), None);
            assert_eq!(waits.join().unwrap(), Barrier::Passed);
        });
    }
}
