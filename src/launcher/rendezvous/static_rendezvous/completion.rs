//! Successful end of a static job: each node waits until all nodes have succeeded.

use std::sync::Arc;
use std::time::{Duration, Instant};

use convoke_store::{Store, StoreError};

use super::outcome_store::{OutcomeStore, Success};
use super::{Joined, NODE, StaticRendezvous, soon};
use crate::messages::Progress;

/// Longest time that nodes that have succeeded wait for nodes under torchrun, whose loss no watch reports.
const TORCHRUN_TIMEOUT: Duration =
    if cfg!(test) { Duration::from_millis(200) } else { Duration::from_secs(300) };
/// Interval at which a waiting node counts the nodes that have succeeded.
const POLL: Duration = if cfg!(test) { Duration::from_millis(100) } else { Duration::from_secs(10) };

const MEMBERS: &[u8] = b"torchelastic/agent/terminal_state/num_members";
const LAST_MEMBER: &[u8] = b"torchelastic/agent/terminal_state/last_member";
/// Key of the counter of nodes under convoke that have succeeded. Only convoke uses this key.
const FINISHED: &[u8] = b"convoke/finished";

/// The wait of one node for the success of all nodes.
pub(super) struct Completion {
    job: Arc<dyn Store>,
    outcomes: Option<Arc<OutcomeStore>>,
    node: usize,
    nodes: usize,
}

impl Completion {
    pub(super) fn new(rendezvous: &StaticRendezvous, joined: &Joined) -> Self {
        let (job, outcomes) = (Arc::clone(&joined.job), joined.outcomes.clone());
        Self { job, outcomes, node: rendezvous.node, nodes: rendezvous.nodes }
    }

    /// Waits until all nodes have succeeded. Returns false if the job has ended otherwise.
    ///
    /// The wait for nodes under convoke has no deadline: their loss is reported by the watch of the outcome,
    /// and they need node 0's store until they have succeeded.
    pub(super) fn wait(&self) -> Result<bool, StoreError> {
        let Some(outcomes) = &self.outcomes else { return self.wait_with_torchrun() };
        outcomes.set_success(Success::Waiting);
        let has_succeeded = self.wait_with_convoke(outcomes);
        let known = matches!(has_succeeded, Ok(true));
        outcomes.set_success(if known { Success::Succeeded } else { Success::Unknown });
        has_succeeded
    }

    fn wait_with_torchrun(&self) -> Result<bool, StoreError> {
        let job = &self.job;
        let deadline = Instant::now() + TORCHRUN_TIMEOUT;
        if job.add(MEMBERS, 1, deadline)? < self.all() {
            job.wait(&[LAST_MEMBER], deadline)?;
        } else {
            job.set(LAST_MEMBER, b"<val_ignored>", deadline)?;
        }
        Ok(true)
    }

    fn wait_with_convoke(&self, outcomes: &OutcomeStore) -> Result<bool, StoreError> {
        let job = &self.job;
        let all = self.all();
        let mut arrived = job.add(MEMBERS, 1, soon())?;
        job.add(FINISHED, 1, soon())?;
        let mut convoke_nodes = None;
        let mut give_up_at: Option<Instant> = None;
        let mut progress = Progress::new(Instant::now());
        while arrived < all {
            match job.wait(&[LAST_MEMBER], Instant::now() + POLL) {
                Ok(()) => return Ok(outcomes.propose_success()),
                Err(error @ StoreError::Timeout { .. })
                    if give_up_at.is_some_and(|at| at <= Instant::now()) =>
                {
                    return Err(error);
                }
                Err(StoreError::Timeout { .. }) => {}
                // The watch of the outcome reports the loss of node 0.
                Err(StoreError::Lost { .. }) if self.node != 0 => return Ok(false),
                Err(error) => return Err(error),
            }
            arrived = job.add(MEMBERS, 0, soon())?;
            let convoke_nodes = match convoke_nodes {
                Some(convoke_nodes) => convoke_nodes,
                None => *convoke_nodes.insert(self.count_convoke_nodes()?),
            };
            if convoke_nodes < all && job.add(FINISHED, 0, soon())? >= convoke_nodes {
                give_up_at.get_or_insert_with(|| Instant::now() + TORCHRUN_TIMEOUT);
            }
            let line = format!(
                "this node has finished and waits for the others: {arrived} of {all} have finished so far"
            );
            progress.show_endless(&line);
        }
        let has_succeeded = outcomes.propose_success();
        if has_succeeded {
            job.set(LAST_MEMBER, b"<val_ignored>", soon())?;
        }
        Ok(has_succeeded)
    }

    /// Returns the number of nodes that run under convoke, not under torchrun.
    fn count_convoke_nodes(&self) -> Result<i64, StoreError> {
        let job = &self.job;
        let keys: Vec<String> = (0..self.nodes).map(|node| format!("{NODE}{node}")).collect();
        let keys: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
        if job.check(&keys, soon())? {
            return Ok(self.all());
        }
        let mut convoke_nodes = 0;
        for key in keys {
            convoke_nodes += i64::from(job.check(&[key], soon())?);
        }
        Ok(convoke_nodes)
    }

    fn all(&self) -> i64 {
        i64::try_from(self.nodes).unwrap_or(i64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};

    use super::*;
    const LONG: Duration = Duration::from_secs(60);

    /// Returns nodes 0 and 1 of a job, which have met.
    fn two() -> [StaticRendezvous; 2] {
        let port = convoke_testkit::free_port();
        let node = |node| StaticRendezvous {
            host: "127.0.0.1".to_owned(),
            port,
            search: None,
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
            let joins = scope.spawn(|| first.join().map(drop));
            second.join().unwrap();
            joins.join().unwrap().unwrap();
        });
        [first, second]
    }

    fn barrier(node: &StaticRendezvous) -> bool {
        Completion::new(node, node.joined.as_ref().unwrap()).wait().unwrap()
    }

    #[test]
    fn early_node_waits_for_other_nodes_without_time_limit() {
        for early in 0..2 {
            let [first, second] = two();
            let (early, late) = if early == 0 { (first, second) } else { (second, first) };
            let (sender, receiver) = channel();
            std::thread::scope(|scope| {
                let waiting = &early;
                scope.spawn(move || sender.send(barrier(waiting)).unwrap());
                // This exceeds the longest wait for nodes under torchrun.
                let nothing = receiver.recv_timeout(5 * TORCHRUN_TIMEOUT);
                assert_eq!(nothing, Err(RecvTimeoutError::Timeout), "it has given up");
                assert!(barrier(&late));
                assert_eq!(receiver.recv_timeout(LONG), Ok(true));
            });
        }
    }

    #[test]
    fn late_node_does_not_report_orderly_node_0_as_lost() {
        let [first, second] = two();
        let outcomes = Arc::clone(second.outcomes().unwrap());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| barrier(&second));
            assert!(barrier(&first));
            first.outcomes().unwrap().leave();
            drop(first);
            // All messages to this node have been sent.
            assert_eq!(outcomes.watch(), None);
            assert!(waits.join().unwrap());
        });
    }
}
