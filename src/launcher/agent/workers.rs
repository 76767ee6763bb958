//! What the agent knows of the workers of the current round, and its channels to them.

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
    /// Identity of local rank 0; the others follow.
    first_id: u64,
    base_rank: usize,
    generation: Option<Generation>,
    list: Vec<Worker>,
    /// When the first was asked for.
    pub(crate) began: SystemTime,
    /// Local ranks in the order in which their ends were noticed.
    ended: Vec<usize>,
    /// Who could not be started, and why.
    pub(crate) not_started: Option<(usize, NotStarted)>,
}

/// One worker.
#[derive(Debug)]
pub(crate) struct Worker {
    /// Our end of its agent channel; it is never waited for.
    channel: UnixStream,
    pub(crate) pid: Option<i32>,
    pub(crate) error_file: Option<PathBuf>,
    /// When its end was noticed, and how it ended.
    pub(crate) ended: Option<(SystemTime, ExitCause)>,
    pub(crate) evidence: Evidence,
    /// The end of its stderr.
    pub(crate) stderr: StderrTail,
}

impl Workers {
    /// No workers yet; the first will be `first_id`.
    pub(crate) fn new(first_id: u64, base_rank: usize, generation: Option<Generation>) -> Self {
        let (began, list) = (SystemTime::now(), Vec::new());
        Self { first_id, base_rank, generation, list, began, ended: Vec::new(), not_started: None }
    }

    /// Adds the next local rank; the descriptor is its end of the channel, with the hello in it.
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

    /// The identity that comes after those of this round.
    pub(crate) fn next_id(&self) -> u64 {
        self.first_id + self.list.len() as u64
    }

    pub(crate) fn id(&self, local_rank: usize) -> WorkerId {
        WorkerId(self.first_id + local_rank as u64)
    }

    /// Which worker of this round `id` is; `None` for one of an earlier round.
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

    pub(crate) fn started(&mut self, local_rank: usize, pid: i32) {
        self.list[local_rank].pid = Some(pid);
    }

    /// Whether it was asked for and its end is not known. It may run before the guard has said so.
    pub(crate) fn may_run(&self, local_rank: usize) -> bool {
        self.list.get(local_rank).is_some_and(|worker| worker.ended.is_none())
    }

    /// Whether there is one whose end is not known.
    pub(crate) fn any_unknown(&self) -> bool {
        self.list.iter().any(|worker| worker.ended.is_none())
    }

    /// The worker that was started as this process, if its end is not known yet.
    pub(crate) fn running_as(&self, pid: i32) -> Option<usize> {
        self.list.iter().position(|worker| worker.pid == Some(pid) && worker.ended.is_none())
    }

    /// Local ranks of those that have ended, the first first.
    pub(crate) fn in_order_of_end(&self) -> &[usize] {
        &self.ended
    }

    /// Notes the end of a worker and tells the others.
    pub(crate) fn ended(&mut self, local_rank: usize, now: SystemTime, cause: ExitCause, evidence: Evidence) {
        self.list[local_rank].ended = Some((now, cause));
        self.list[local_rank].evidence = evidence;
        self.ended.push(local_rank);
        let Some(generation) = self.generation else { return };
        let message = ToWorker::PeerExit { generation, rank: self.rank(local_rank), cause }.encode();
        for (other, worker) in self.list.iter().enumerate() {
            if other != local_rank && worker.ended.is_none() {
                // A worker that does not read has a full buffer, or is just ending: both are no loss.
                let _ = (&worker.channel).write(&message);
            }
        }
    }
}
