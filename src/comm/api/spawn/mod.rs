//! Starts ranks without a launcher, as processes of this program, like `torch.multiprocessing.spawn`.
//!
//! A function cannot be passed to another program, and forking a process with threads is not sound. So a rank
//! is this program, started again: it runs until it reaches the same call of spawn. There it runs the
//! function as its rank, and exits. `child` is the code of the rank, `parent` that of the spawner. The rank
//! reads from its environment which call to reach (`calls`).
//!
//! This module does what its model does: it starts processes, waits for them, and ends the others when one
//! fails. The launcher supervises in another way (a guard process, restarts, reports with root causes), so
//! the two share no code.

mod calls;
mod child;
mod error;
mod output;
mod parent;

use std::ffi::OsString;
use std::panic::Location;
use std::process::Termination;
use std::time::Duration;

use calls::SpawnCall;
use child::ProcessRole;
pub use error::SpawnError;

/// Runs `worker` as `size` ranks, each a process of its own, and waits for them.
///
/// Counterpart of `torch.multiprocessing.spawn`, and short for [`Spawn::run`] with default settings; see
/// [`Spawn::run`] for details.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use convoke_comm::{CommError, ReduceOp, init, spawn};
///
/// spawn(2, |rank| -> Result<(), CommError> {
///     let world = init()?;
///     let mut sum = [rank as i64 + 1];
///     world.all_reduce(&mut sum, ReduceOp::Sum)?;
///     assert_eq!(sum, [3]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The errors of [`Spawn::run`].
#[track_caller]
pub fn spawn<T: Termination>(size: usize, worker: impl FnOnce(usize) -> T) -> Result<(), SpawnError> {
    Spawn::new(size).run(worker)
}

/// Settings for starting ranks as processes of this program.
#[derive(Debug, Clone)]
pub struct Spawn {
    size: usize,
    env: Vec<(OsString, OsString)>,
    timeout: Option<Duration>,
    grace: Duration,
}

impl Spawn {
    /// Creates settings for `size` ranks, without a timeout and with a grace period of 5 seconds.
    #[must_use]
    pub fn new(size: usize) -> Self {
        Self { size, env: Vec::new(), timeout: None, grace: Duration::from_secs(5) }
    }

    /// Sets a variable in the environment of all ranks. A value that must be equal on all ranks has to be
    /// passed like this, since each rank runs the program again: see [`Self::run`].
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Sets the time limit of the whole call; there is none by default.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }

    /// Sets the time from SIGTERM to SIGKILL for ranks that are stopped; 5 seconds by default.
    #[must_use]
    pub fn grace(self, grace: Duration) -> Self {
        Self { grace, ..self }
    }

    /// Starts the ranks, calls `worker` with the rank in each of them, and waits until all have ended.
    ///
    /// A rank is this program with the same arguments; in a test, it is the test program with this test
    /// alone. The rank **runs from the beginning up to this call**, then runs `worker`, and exits. So each
    /// rank also executes the code before the call.
    ///
    /// - Values computed before the call are computed again and may differ (a port, a random number, a
    ///   temporary folder). Pass them with [`Self::env`].
    /// - Earlier calls of spawn start nothing in a rank, and return the result that the spawner got.
    /// - Output before the call is dropped.
    ///
    /// Call `run` at a point that every run of the program reaches, on the main thread or on the thread of a
    /// test.
    ///
    /// - A rank has the variables of a worker (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR,
    ///   MASTER_PORT, ...), so [`init`](crate::init) connects it to the others. This process serves the
    ///   store. Standard input is empty; output goes to this process's output in whole lines.
    /// - `worker` may return any type that `main` may return; a panic ends the rank with code 101.
    /// - If a rank fails, the others get SIGTERM, and SIGKILL after the grace period. The error names the
    ///   rank that failed first, not a rank that failed because it lost that peer.
    /// - No process is left behind: each rank leads a process group, which is killed when the rank has
    ///   ended. If this process or thread dies, the kernel kills the ranks that have reached this call.
    ///   Only processes that a rank has moved into another group can outlive it.
    ///
    /// # Errors
    /// [`SpawnError::Failed`] names the rank, its exit status and the end of its standard error.
    /// [`SpawnError::Unreached`] if a rank ended before it reached this call. [`SpawnError::Timeout`] if
    /// ranks still ran after the time limit. [`SpawnError::Unusable`] if there are 0 ranks, or the call is
    /// made in a rank, or on a thread that is neither the main one nor that of a test.
    /// [`SpawnError::System`] if a system call failed.
    #[track_caller]
    pub fn run<T: Termination>(self, worker: impl FnOnce(usize) -> T) -> Result<(), SpawnError> {
        let (number, place) = (calls::next_number(), Location::caller().to_string());
        match child::process_role(number, &place)? {
            ProcessRole::Spawner => {
                let outcome = parent::run(&self, SpawnCall::of_this_thread(number, place));
                if let Err(error) = &outcome {
                    calls::record_error(number, error);
                }
                outcome
            }
            ProcessRole::EarlierCall(result) => result,
            ProcessRole::Rank { rank, spawner } => child::run_worker(rank, spawner, worker),
        }
    }
}
