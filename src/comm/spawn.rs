//! Ranks without a launcher: processes of this program, as `torch.multiprocessing.spawn` starts them.
//!
//! A function cannot be handed to another program, and forking a process with threads is not sound. So a
//! rank is this program, started again: it runs as before until it comes to the same call of spawn, carries
//! out the function there as its rank, and ends. `child` is that side, `parent` the one that waits; what
//! they have in common is the [`Ticket`] in the rank's environment.

mod child;
mod course;
mod error;
mod output;
mod parent;
mod past;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::fmt;
use std::panic::Location;
use std::process::Termination;
use std::str::FromStr;
use std::time::Duration;

use convoke_env::Generation;

use child::Me;
pub use error::SpawnError;

/// Tells a process that it is a rank: the [`Ticket`].
const VARIABLE: &str = "CONVOKE_SPAWN";

/// Runs `worker` as `size` ranks, each a process of its own, and waits for them.
///
/// The twin of `torch.multiprocessing.spawn`; the same as [`Spawn::run`] with nothing changed, see there.
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
/// As [`Spawn::run`].
#[track_caller]
pub fn spawn<T: Termination>(size: usize, worker: impl FnOnce(usize) -> T) -> Result<(), SpawnError> {
    Spawn::new(size).run(worker)
}

/// How to start ranks as processes of this program.
#[derive(Debug, Clone)]
pub struct Spawn {
    size: usize,
    env: Vec<(OsString, OsString)>,
    timeout: Option<Duration>,
    grace: Duration,
    use_pidfds: bool,
}

impl Spawn {
    /// `size` ranks, without a bound of time; those that are told to end get 5 seconds.
    #[must_use]
    pub fn new(size: usize) -> Self {
        Self { size, env: Vec::new(), timeout: None, grace: Duration::from_secs(5), use_pidfds: true }
    }

    /// Sets a variable in the environment of all ranks. What they are given must travel so: see
    /// [`Self::run`].
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// How long all of it may take.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// How long ranks have from SIGTERM to SIGKILL, when another has failed.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Starts the ranks, runs `worker` with its rank in each of them, and waits until all have ended.
    ///
    /// A rank is this program with the same arguments; inside of a test, the test program with this test
    /// alone. **It runs from the beginning up to this call**, then `worker`, and exits. So what stands
    /// before the call is done in each rank too: its values are computed again and may differ (a port, a
    /// random number, a temporary folder; hand those on by [`Self::env`]), earlier calls of spawn start
    /// nothing and return what they have returned here, and what it prints is dropped. Call it where the
    /// program always comes to, on the main thread or on that of a test.
    ///
    /// - A rank has the variables of a worker (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR,
    ///   MASTER_PORT, ...), so [`init`](crate::init) connects it to the others. This process serves the
    ///   store. Standard input is empty; output goes to this process's, whole lines at a time.
    /// - `worker` may return what `main` may; a panic ends the rank with code 101.
    /// - If a rank fails the others are ended: SIGTERM, then SIGKILL. The error names the rank that failed by
    ///   itself, not one that lost its connection to it.
    /// - Nothing is left over: each rank leads a process group, which is killed when the rank has ended. If this
    ///   process (or thread) dies, the kernel kills the ranks, from the moment on that they are at this call. Only
    ///   processes that a rank has moved into another group can outlive it.
    ///
    /// # Errors
    /// [`SpawnError::Failed`] names the rank, how it ended and its last words. [`SpawnError::Unreached`] if a rank
    /// did not come to this call, [`SpawnError::Timeout`], [`SpawnError::Unusable`] if it cannot be called so
    /// or here, [`SpawnError::System`].
    #[track_caller]
    pub fn run<T: Termination>(self, worker: impl FnOnce(usize) -> T) -> Result<(), SpawnError> {
        let call = past::next_call();
        let place = Location::caller().to_string();
        match child::who_am_i(call, &place)? {
            Me::Spawner => {
                let secret = || Generation::random().map(|random| random.to_string());
                let token = secret().map_err(|source| SpawnError::system("get random numbers", source))?;
                let ticket = Ticket { spawner: std::process::id(), token, call, place };
                let outcome = parent::run(&self, &ticket);
                past::remember(call, &outcome);
                outcome
            }
            Me::OnTheWay => past::outcome_of(call),
            Me::Rank(ticket, rank) => child::work(&ticket, rank, worker),
        }
    }
}

/// What a rank is told of the call that it is to come to.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Ticket {
    /// Pid of the process that spawns.
    spawner: u32,
    /// Nobody else writes this to standard output by chance.
    token: String,
    /// Number of the call on its thread.
    call: u64,
    /// File, line and column of the call.
    place: String,
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} {}", self.spawner, self.token, self.call, self.place)
    }
}

impl FromStr for Ticket {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.splitn(4, ' ');
        let mut part = || parts.next().ok_or(());
        let spawner = part()?.parse().map_err(|_| ())?;
        let token = part()?.to_owned();
        let call = part()?.parse().map_err(|_| ())?;
        Ok(Self { spawner, token, call, place: part()?.to_owned() })
    }
}
