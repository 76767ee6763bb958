//! Exchange of failures between the nodes of an elastic job.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::board::{Over, Told};
use super::thread::Thread;
use crate::config::is_named;
use crate::membership::{Departure, Ending, Failure, Phase, Refusal};
use crate::rendezvous::court::{Court, FromOthers, Verdict, Verdicts, What};

/// Connection of one node to the outcome of an elastic job.
#[derive(Debug)]
pub(super) struct ElasticCourt {
    thread: Arc<Thread>,
    /// Rank of this node, and the round that it is in.
    seat: Mutex<(usize, u64)>,
    host: String,
    endpoint: String,
    run_id: String,
    /// Latest end of a round that has been reported to the caller.
    ended: Mutex<(u64, bool)>,
}

impl ElasticCourt {
    pub(super) fn new(
        thread: Arc<Thread>,
        (node, host): (usize, String),
        (endpoint, run_id): (String, String),
        round: u64,
    ) -> Self {
        Self { thread, seat: Mutex::new((node, round)), host, endpoint, run_id, ended: Mutex::default() }
    }

    /// Records that this node is in another round.
    pub(super) fn move_to(&self, node: usize, round: u64) {
        *self.seat.lock().unwrap_or_else(PoisonError::into_inner) = (node, round);
    }

    fn seat(&self) -> (usize, u64) {
        *self.seat.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the job or `round` is over. The inner value is `None` if only the round is over. The outer
    /// value is `None` if `deadline` passes first.
    fn wait_for_verdict(&self, round: u64, deadline: Option<Instant>) -> Option<Option<Verdict>> {
        self.thread.board.wait(deadline, |told: &Told| {
            let again = told.stopped.as_ref().is_some_and(|stopped| stopped.round >= round);
            match &told.over {
                _ if again => Some(None),
                Some(over) => Some(Some(self.verdict(over))),
                None => None,
            }
        })
    }

    fn verdict(&self, over: &Over) -> Verdict {
        let (mine, _) = self.seat();
        match over {
            Over::End(Ending::Failed { node, host, summary, report }) => {
                Verdict::new(*node, host, What::Failed { summary: summary.clone(), report: report.clone() })
            }
            Over::End(Ending::Deserted { node: Some(node), host, why }) => {
                Verdict::new(*node, host, What::Error { text: why.clone() })
            }
            over => {
                let text = describe(over, &self.endpoint, &self.run_id);
                Verdict::new(mine, &self.host, What::Alone { text })
            }
        }
    }
}

impl Court for ElasticCourt {
    fn hear(&self) -> Option<FromOthers> {
        let ended = || self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let known = *ended();
        let news = self.thread.board.wait(None, |told: &Told| {
            if let Some(stopped) = told.stopped.as_ref().filter(|stopped| stopped.order() > known) {
                let (round, cause, alone) = (stopped.round, stopped.cause.clone(), stopped.alone);
                return Some(Some(FromOthers::NewRound { round, cause, alone }));
            }
            match &told.over {
                Some(Over::End(Ending::Succeeded)) => Some(None),
                Some(over) => Some(Some(FromOthers::Verdict(self.verdict(over)))),
                None => None,
            }
        });
        let news = news.flatten();
        if let Some(FromOthers::NewRound { round, alone, .. }) = &news {
            *ended() = (*round, *alone);
        }
        news
    }

    fn failed(
        self: Arc<Self>,
        what: What,
        restarts: bool,
        others_first: Option<Instant>,
    ) -> Option<Verdicts> {
        let (_, round) = self.seat();
        let (summary, report) = match what {
            What::Failed { summary, report } => (summary, report),
            What::Error { text } | What::Alone { text } => (text, String::new()),
            What::Stopped { .. } | What::Lost | What::Succeeded => (String::new(), String::new()),
        };
        let phase = Phase::Failed { round, failure: Failure { summary, report, restarts } };
        // A node with a restart is about to enter the next round.
        let Some(others_first) = others_first.filter(|_| !restarts) else {
            self.thread.enter(phase);
            return (!restarts)
                .then(|| -> Verdicts { Box::new(move || self.wait_for_verdict(round, None).flatten()) });
        };
        Some(Box::new(move || {
            self.wait_for_verdict(round, Some(others_first)).unwrap_or_else(|| {
                self.thread.enter(phase);
                self.wait_for_verdict(round, None).flatten()
            })
        }))
    }

    fn declare(&self, what: What, _others_first: Option<Instant>) -> Verdict {
        let mine = Verdict::new(self.seat().0, &self.host, what);
        let departure = match &mine.what {
            What::Stopped { signal } => Departure::Stopped { signal: *signal },
            What::Error { text } | What::Alone { text } => Departure::Error(text.clone()),
            // The other nodes know already.
            What::Failed { .. } | What::Lost | What::Succeeded => return mine,
        };
        self.thread.leave(departure);
        mine
    }

    fn stops(&self, signal: i32) {
        if self.thread.is_host {
            // No other node can take over the coordinator: the job ends at once.
            self.declare(What::Stopped { signal }, None);
        } else {
            self.thread.enter(Phase::Leaving { round: self.seat().1, signal });
        }
    }

    fn leave(&self) {
        self.thread.leave(Departure::Ended);
    }

    fn is_mine(&self, verdict: &Verdict) -> bool {
        verdict.node == self.seat().0 && !matches!(verdict.what, What::Alone { .. })
    }

    fn has_last_word(&self) -> bool {
        true
    }
}

/// Describes why this job sends no further orders to this node.
pub(super) fn describe(over: &Over, endpoint: &str, run_id: &str) -> String {
    let id = if is_named(run_id) { format!("--rdzv-id={run_id}") } else { "no --rdzv-id".to_owned() };
    match over {
        Over::End(ending) => match ending {
            Ending::Succeeded => "the job has ended".to_owned(),
            Ending::Failed { node, host, summary, .. } => format!("node {node} ({host}) failed: {summary}"),
            Ending::Deserted { node: Some(node), host, why } => {
                format!(
                    "node {node} ({host}) could not go on: {why}; it has served the rendezvous at {endpoint}"
                )
            }
            Ending::Deserted { node: None, host, why } => {
                format!("the launcher on {host} that served the rendezvous at {endpoint} has ended: {why}")
            }
        },
        Over::Refused(Refusal::Closed(ending)) => {
            let how = match ending {
                Ending::Succeeded => "well",
                Ending::Failed { .. } => "with a failure",
                Ending::Deserted { .. } => "when its rendezvous went",
            };
            format!("the job with {id} at {endpoint} has ended {how}\n  try: another --rdzv-id")
        }
        Over::Refused(Refusal::Timeout { after_s, muster }) => {
            let here = super::describe(muster);
            format!(
                "no round within {after_s} s (join_timeout) with {id}: {here}\n  try: start more nodes, or a smaller --nnodes"
            )
        }
        Over::Refused(Refusal::Nodes { mine, theirs, host }) => format!(
            "--nnodes is {}:{} here and {}:{} on {host}, both with {id}\n  try: the same --nnodes on all nodes, or a \
             --rdzv-id for each job",
            mine.0, mine.1, theirs.0, theirs.1
        ),
        Over::Refused(Refusal::GivenUp { silent_s }) => {
            format!("this node was not heard for {silent_s} s, and the others went on without it")
        }
        Over::Unusable(why) => why.clone(),
        Over::Alone { silent, last } => {
            let last = if last.is_empty() { String::new() } else { format!(" ({last})") };
            let silent = silent.as_secs_f64();
            format!(
                "the rendezvous at {endpoint} is lost: not heard for {silent:.1} s{last}; its host or the network is down"
            )
        }
    }
}
