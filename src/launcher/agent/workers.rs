//! State of the workers of the current round, and the channels to them.

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
    /// Id of the worker with local rank 0; the others follow.
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

/// One worker.
#[derive(Debug)]
pub(crate) struct Worker {
    /// Our end of its agent channel. We never block on it.
    channel: UnixStream,
    pub(crate) pid: Option<i32>,
    pub(crate) error_file: Option<PathBuf>,
    /// Time at which its exit was noticed, and how it ended.
    pub(crate) ended: Option<(SystemTime, ExitCause)>,
    pub(crate) evidence: Evidence,
    /// Last lines of its stderr.
    pub(crate) stderr: StderrTail,
}

impl Workers {
    /// Returns a round without workers. The first one will have the id `first_id`.
    pub(crate) fn new(first_id: u64, base_rank: usize, generation: Option<Generation>) -> Self {
        let (began, list) = (SystemTime::now(), Vec::new());
        Self { first_id, base_rank, generation, list, began, ended: Vec::new(), not_started: None }
    }

    /// Adds the worker with the next local rank. Returns its end of the channel, which already holds the
    /// hello message.
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

    /// Returns the first id after those of this round.
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

    /// Returns true if the worker was requested and has not been reported as ended. It may run before the
    /// guard reports that.
    pub(crate) fn may_be_running(&self, local_rank: usize) -> bool {
        self.list.get(local_rank).is_some_and(|worker| worker.ended.is_none())
    }

    /// Returns true if some worker has not been reported as ended.
    pub(crate) fn any_not_ended(&self) -> bool {
        self.list.iter().any(|worker| worker.ended.is_none())
    }

    /// Returns the worker with this pid, unless its exit has been noticed.
    pub(crate) fn running_with_pid(&self, pid: i32) -> Option<usize> {
        self.list.iter().position(|worker| worker.pid == Some(pid) && worker.ended.is_none())
    }

    /// Returns the local ranks of workers that have ended, in the order of their ends.
    pub(crate) fn in_exit_order(&self) -> &[usize] {
        &self.ended
    }

    /// Records the end of a worker and tells the other workers.
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
                // A worker that does not read has a full buffer or is just ending. The message is not needed
                // in either case.
                let _ = (&worker.channel).write(&message);
            }
        }
    }
}
