//! The current round of this node: its workers and their output, and what is known of earlier rounds.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Instant, SystemTime};

use convoke_env::{ExitCause, ToWorker, Token};

use crate::cause::{Evidence, NotStarted};
use crate::guard::WorkerId;
use crate::logs::{StderrTail, Tee};
use crate::rendezvous::Assignment;
use crate::supervise::Supervisor;

#[derive(Default)]
pub(super) struct Rounds {
    pub(super) current: Option<Round>,
    /// Number of restarts that have been used up.
    pub(super) restarts: u32,
    /// Number of the latest round that other nodes have ended.
    pub(super) ended: Option<u64>,
    /// Number of the latest round that this node ended because it was cut off from the other nodes.
    partitioned: Option<u64>,
    /// True if this node's workers succeeded in the last round.
    pub(super) succeeded: bool,
}

pub(super) struct Round {
    pub(super) assignment: Assignment,
    pub(super) supervisor: Supervisor,
    /// The workers that the guard was asked to start, by local rank.
    pub(super) workers: Vec<Worker>,
    /// Id of the worker with local rank 0. The ids of the other workers follow in order of local rank.
    first_id: u64,
    /// Local ranks in the order in which the exits of the workers were noticed.
    pub(super) exit_order: Vec<usize>,
    /// The worker that could not be started, and the reason.
    pub(super) not_started: Option<(usize, NotStarted)>,
    pub(super) tee: Option<Tee>,
    pub(super) began: Instant,
    /// The time `began`, as users read it.
    pub(super) began_at: SystemTime,
    /// Time at which the first worker failed.
    pub(super) first_failed: Option<Instant>,
    /// True if no process of any worker was left when the latest worker exited.
    pub(super) no_process_left: bool,
}

pub(super) struct Worker {
    /// The launcher's end of the worker's agent channel. Writes to it never block.
    channel: UnixStream,
    pub(super) pid: Option<i32>,
    pub(super) error_file: Option<PathBuf>,
    /// Time at which the worker's exit was noticed, and how it ended. The worker may run before the guard
    /// reports its start.
    pub(super) ended: Option<(SystemTime, ExitCause)>,
    pub(super) evidence: Evidence,
    /// Last lines of the worker's stderr.
    pub(super) stderr: StderrTail,
}

impl Rounds {
    /// Makes a round the current one. Its workers are not started yet.
    pub(super) fn begin(&mut self, assignment: Assignment, supervisor: Supervisor) {
        let last = self.current.as_ref();
        self.current = Some(Round {
            assignment,
            supervisor,
            workers: Vec::new(),
            first_id: last.map_or(0, |last| last.id(last.workers.len()).0),
            exit_order: Vec::new(),
            not_started: None,
            tee: None,
            began: Instant::now(),
            began_at: SystemTime::now(),
            first_failed: None,
            no_process_left: false,
        });
    }

    pub(super) fn assignment(&self) -> Option<&Assignment> {
        self.current.as_ref().map(|round| &round.assignment)
    }

    pub(super) fn tee(&self) -> Option<&Tee> {
        self.current.as_ref()?.tee.as_ref()
    }

    /// Returns the current round and the local rank of worker `id`, unless the worker belongs to an earlier
    /// round.
    pub(super) fn of_worker(&mut self, id: WorkerId) -> Option<(&mut Round, usize)> {
        let round = self.current.as_mut()?;
        let local_rank = usize::try_from(id.0.checked_sub(round.first_id)?).ok()?;
        round.workers.get(local_rank)?;
        Some((round, local_rank))
    }

    /// Records that other nodes have ended a round. Returns true if it is the current one.
    pub(super) fn note_end(&mut self, round: u64, partitioned: bool) -> bool {
        self.ended = self.ended.max(Some(round));
        let is_current = self.assignment().is_some_and(|current| current.round == round);
        if is_current && partitioned {
            self.partitioned = Some(round);
        }
        is_current
    }

    /// Returns true if this node was cut off from the other nodes in the current round.
    pub(super) fn is_partitioned(&self) -> bool {
        let round = self.assignment().map(|assignment| assignment.round);
        self.partitioned.is_some() && self.partitioned == round
    }

    /// Records the end of a worker that this process reaped after the loss of the guard.
    pub(super) fn record_reaped(&mut self, pid: i32, cause: ExitCause) {
        let is_it = |worker: &Worker| worker.pid == Some(pid) && worker.ended.is_none();
        if let Some(round) = &mut self.current
            && let Some(local_rank) = round.workers.iter().position(is_it)
        {
            round.record_exit(local_rank, cause, Evidence::default());
        }
    }
}

impl Round {
    /// Adds the worker with the next local rank. Returns its id and its end of the agent channel, from which
    /// it can already read the hello message.
    pub(super) fn add_worker(
        &mut self,
        token: Option<&Token>,
        error_file: Option<PathBuf>,
        stderr: StderrTail,
    ) -> std::io::Result<(WorkerId, UnixStream)> {
        let (channel, theirs) = UnixStream::pair()?;
        channel.set_nonblocking(true)?;
        if let Some(generation) = self.assignment.generation {
            (&channel).write_all(&ToWorker::Hello { generation, token: token.cloned() }.encode())?;
        }
        let id = self.id(self.workers.len());
        let (ended, evidence) = (None, Evidence::default());
        self.workers.push(Worker { channel, pid: None, error_file, ended, evidence, stderr });
        Ok((id, theirs))
    }

    pub(super) fn id(&self, local_rank: usize) -> WorkerId {
        WorkerId(self.first_id + local_rank as u64)
    }

    pub(super) fn rank(&self, local_rank: usize) -> usize {
        self.assignment.base_rank + local_rank
    }

    /// Records the end of a worker and sends it to the other workers.
    pub(super) fn record_exit(&mut self, local_rank: usize, cause: ExitCause, evidence: Evidence) {
        self.workers[local_rank].ended = Some((SystemTime::now(), cause));
        self.workers[local_rank].evidence = evidence;
        self.exit_order.push(local_rank);
        let Some(generation) = self.assignment.generation else { return };
        self.tell_workers(&ToWorker::PeerExit { generation, rank: self.rank(local_rank), cause });
    }

    /// Sends a message to all workers that have not ended.
    pub(super) fn tell_workers(&self, message: &ToWorker) {
        let message = message.encode();
        for worker in self.workers.iter().filter(|worker| worker.ended.is_none()) {
            // The write fails if the worker does not read and its buffer is full, or if it is just ending. It
            // does not need the message in either case.
            let _ = (&worker.channel).write(&message);
        }
    }
}
