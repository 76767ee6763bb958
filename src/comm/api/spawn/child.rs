//! The part of spawn that runs in a spawned rank.

use std::io::{self, Write};
use std::os::unix::process::parent_id;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{ExitCode, Termination};
use std::sync::atomic::{AtomicBool, Ordering};

use convoke_env::vars;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::unistd::{getpgrp, getpid};

use super::SpawnError;
use super::calls::SpawnCall;
use super::output::{CONSEQUENCE, REACHED};
use crate::error::cause;

/// Exit code of a Rust program that panics.
const PANICKED: i32 = 101;

/// The role of this process in a call of spawn.
pub(super) enum ProcessRole {
    /// This process starts ranks.
    Spawner,
    /// This process is a rank that reaches its own call of spawn later on this thread. This call had this
    /// result in the spawner.
    EarlierCall(Result<(), SpawnError>),
    /// This process was started as this rank for this call.
    Rank { rank: usize, spawner: u32 },
}

/// Set once this process runs the worker of a rank.
static IN_WORKER: AtomicBool = AtomicBool::new(false);

/// Returns the role of this process in call `number` of this thread, at source position `place`.
pub(super) fn process_role(number: u64, place: &str) -> Result<ProcessRole, SpawnError> {
    if IN_WORKER.load(Ordering::SeqCst) {
        return Err(SpawnError::Unusable("a rank that was spawned cannot spawn ranks itself".to_owned()));
    }
    let Some(mut call) = SpawnCall::from_process()? else { return Ok(ProcessRole::Spawner) };
    if parent_id() != call.spawner {
        // Either a rank started this process, which inherited the variable, or this is a rank whose spawner
        // died. A rank without its spawner must not start ranks. Only a rank leads a process group, which
        // tells the two cases apart.
        let inherited = getpgrp() != getpid() || convoke_env::ancestors().any(|pid| pid == call.spawner);
        if inherited {
            return Ok(ProcessRole::Spawner);
        }
        exit(1);
    }
    if number < call.number {
        return Ok(ProcessRole::EarlierCall(call.errors.remove(&number).map_or(Ok(()), Err)));
    }
    let rank = std::env::var(vars::RANK).ok().and_then(|text| text.parse().ok());
    if let Some(rank) = rank.filter(|_| number == call.number && place == call.place) {
        return Ok(ProcessRole::Rank { rank, spawner: call.spawner });
    }
    let why = format!(
        "a spawned rank reached call {number} of spawn at {place} instead of call {} at {}\n",
        call.number, call.place
    );
    let _ = io::stderr().write_all(why.as_bytes());
    exit(1)
}

/// Runs the worker of a rank, and ends the process.
pub(super) fn run_worker<T: Termination>(rank: usize, spawner: u32, worker: impl FnOnce(usize) -> T) -> ! {
    IN_WORKER.store(true, Ordering::SeqCst);
    // If the kernel refuses the death signal, a rank whose spawner dies runs to its end.
    let _ = set_pdeathsig(Signal::SIGKILL);
    if parent_id() != spawner {
        exit(1);
    }
    write_mark(&mut io::stdout(), REACHED);
    write_mark(&mut io::stderr(), REACHED);
    // The values that the closure has borrowed are not used again, so a panic cannot expose broken ones.
    let outcome = catch_unwind(AssertUnwindSafe(|| worker(rank).report()));
    let code = outcome.map_or(PANICKED, exit_code_number);
    if code != 0 && cause::is_consequence() {
        write_mark(&mut io::stderr(), CONSEQUENCE);
    }
    exit(code)
}

/// Returns the number of an exit code. `ExitCode` only supports comparison, so each number is tried.
fn exit_code_number(code: ExitCode) -> i32 {
    (0..=u8::MAX).find(|&number| ExitCode::from(number) == code).map_or(1, i32::from)
}

fn write_mark(to: &mut dyn Write, mark: &[u8]) {
    // If nobody reads the pipe, the spawner has died, and the kernel kills this rank too.
    let _ = to.write_all(mark).and_then(|()| to.flush());
}

/// Ends the process. A rank must not run the rest of the program after its worker.
#[allow(clippy::exit)]
fn exit(code: i32) -> ! {
    std::process::exit(code)
}
