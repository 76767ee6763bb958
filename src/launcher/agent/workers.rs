//! Holds the state of the workers of the current round, and the socket to each of them.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::SystemTime;

use convoke_env::{ExitCause, Generation, ToWorker, Token};

use crate::cause::{Evidence, NotStarted};
use crate::guard::WorkerId;
use crate::logs::StderrTail;

/// The workers of one round, by local rank.
#[derive(Debug)]
pub(crate) struct Workers {
    /// Id of the worker with local rank 0. The ids of the other workers follow in order of local rank.
    first_id: u64,
    base_rank: usize,
    generation: Option<Generation>,
    list: Vec<Worker>,
    /// Time of the first spawn request.
    pub(crate) began: SystemTime,
    /// Local ranks in the order in which their exits were noticed.
    ended: Vec<usize>,
    /// The worker that could not be started, and the reason.
    pub(crate) not_started: Option<(usize, NotStarted)>,
}

/// State of one worker.
#[derive(Debug)]
pub(crate) struct Worker {
    /// The launcher's end of the worker's agent channel. Writes to it never block.
    channel: UnixStream,
    pub(crate) pid: Option<i32>,
    pub(crate) error_file: Option<PathBuf>,
    /// Time at which the worker's exit was noticed, and how it ended.
    pub(crate) ended: Option<(SystemTime, ExitCause)>,
    pub(crate) evidence: Evidence,
    /// Last lines of the worker's stderr.
    pub(crate) stderr: StderrTail,
}

impl Workers {
    /// Returns the state of a round without workers. The first worker added will have the id `first_id`.
    pub(crate) fn new(first_id: u64, base_rank: usize, generation: Option<Generation>) -> Self {
        let (began, list) = (SystemTime::now(), Vec::new());
        Self { first_id, base_rank, generation, list, began, ended: Vec::new(), not_started: None }
    }

    /// Adds the worker with the next local rank. Returns its id and its end of the agent channel, from which
    /// it can already read the hello message.
    pub(crate) fn add(
        &mut self,
        token: Option<&Token>,
        error_file: Option<PathBuf>,
        stderr: StderrTail,
    ) -> std::io::Result<(WorkerId, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        if let Some(generation) = self.generation {
            (&ours).write_all(&ToWorker::Hello { generation, token: token.cloned() }.encode())?;
        }
        let id = self.id(self.list.len());
        let (ended, evidence) = (None, Evidence::default());
        self.list.push(Worker { channel: ours, pid: None, error_file, ended, evidence, stderr });
        Ok((id, theirs))
    }

    /// Returns the first id that no worker of this round has.
    pub(crate) fn next_id(&self) -> u64 {
        self.first_id + self.list.len() as u64
    }

    pub(crate) fn id(&self, local_rank: usize) -> WorkerId {
        WorkerId(self.first_id + local_rank as u64)
    }

    /// Returns the local rank of worker `id`, or `None` if it belongs to an earlier round.
    pub(crate) fn local_rank(&self, id: WorkerId) -> Option<usize> {
        let local_rank = usize::try_from(id.0.checked_sub(self.first_id)?).ok()?;
        (local_rank < self.list.len()).then_some(local_rank)
    }

    pub(crate) fn rank(&self, local_rank: usize) -> usize {
        self.base_rank + local_rank
    }

    pub(crate) fn get(&self, local_rank: usize) -> &Worker {
        &self.list[local_rank]
    }

    pub(crate) fn record_start(&mut self, local_rank: usize, pid: i32) {
        self.list[local_rank].pid = Some(pid);
    }

    /// Returns true if the guard was asked to start the worker and has not reported its end. The worker may
    /// run before the guard reports its start.
    pub(crate) fn may_be_running(&self, local_rank: usize) -> bool {
        self.list.get(local_rank).is_some_and(|worker| worker.ended.is_none())
    }

    /// Returns true if some worker has not been reported as ended.
    pub(crate) fn any_not_ended(&self) -> bool {
        self.list.iter().any(|worker| worker.ended.is_none())
    }

    /// Returns the local rank of the worker with this pid, unless its exit has been noticed.
    pub(crate) fn running_with_pid(&self, pid: i32) -> Option<usize> {
        self.list.iter().position(|worker| worker.pid == Some(pid) && worker.ended.is_none())
    }

    /// Returns the local ranks of workers that have ended, in the order in which their exits were noticed.
    pub(crate) fn in_exit_order(&self) -> &[usize] {
        &self.ended
    }

    /// Records the end of a worker and sends it to the other workers.
    pub(crate) fn record_exit(
        &mut self,
        local_rank: usize,
        now: SystemTime,
        cause: ExitCause,
        evidence: Evidence,
    ) {
        self.list[local_rank].ended = Some((now, cause));
        self.list[local_rank].evidence = evidence;
        self.ended.push(local_rank);
        let Some(generation) = self.generation else { return };
        let message = ToWorker::PeerExit { generation, rank: self.rank(local_rank), cause }.encode();
        for (other, worker) in self.list.iter().enumerate() {
            if other != local_rank && worker.ended.is_none() {
                // The write fails if the worker does not read and its buffer is full, or if it is just
                // ending. It does not need the message in either case.
                let _ = (&worker.channel).write(&message);
            }
        }
    }
}
