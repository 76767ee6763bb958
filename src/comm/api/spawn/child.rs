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

use super::output::{Mark, mark};
use super::{SpawnCallId, SpawnError, VARIABLE};
use crate::error::cause;

/// Exit code of a Rust program that panics.
const PANICKED: i32 = 101;

/// The role of this process in a call of spawn.
pub(super) enum ProcessRole {
    /// This process starts ranks.
    Spawner,
    /// This process is a rank that reaches its own call of spawn later on this thread.
    EarlierCall,
    /// This process was started as this rank for this call.
    Rank(SpawnCallId, usize),
}

/// Set once this process runs the worker of a rank.
static IN_WORKER: AtomicBool = AtomicBool::new(false);

/// Returns the role of this process in call number `call` of this thread, at source position `place`.
pub(super) fn process_role(call: u64, place: &str) -> Result<ProcessRole, SpawnError> {
    if IN_WORKER.load(Ordering::SeqCst) {
        return Err(SpawnError::Unusable("a rank that was spawned cannot spawn ranks itself".to_owned()));
    }
    let variable = |name: &str| std::env::var(name).ok();
    let Some(call_id) = variable(VARIABLE).and_then(|text| text.parse::<SpawnCallId>().ok()) else {
        return Ok(ProcessRole::Spawner);
    };
    if parent_id() != call_id.spawner {
        // Either a rank started this process, which inherited the variable, or this is a rank whose spawner
        // died. A rank without its spawner must not start ranks. Only a rank leads a process group, which
        // tells the two cases apart.
        let inherited = getpgrp() != getpid() || convoke_env::ancestors().any(|pid| pid == call_id.spawner);
        if inherited {
            return Ok(ProcessRole::Spawner);
        }
        exit(1);
    }
    if call < call_id.call {
        return Ok(ProcessRole::EarlierCall);
    }
    let rank = variable(vars::RANK).and_then(|text| text.parse().ok());
    match rank.filter(|_| call == call_id.call && place == call_id.place) {
        Some(rank) => Ok(ProcessRole::Rank(call_id, rank)),
        None => {
            let why =
                format!("a spawned rank reached call {call} of spawn at {place} instead of {call_id}\n");
            let _ = io::stderr().write_all(why.as_bytes());
            exit(1)
        }
    }
}

/// Runs the worker of a rank, and ends the process.
pub(super) fn run_worker<T: Termination>(
    call_id: &SpawnCallId,
    rank: usize,
    worker: impl FnOnce(usize) -> T,
) -> ! {
    IN_WORKER.store(true, Ordering::SeqCst);
    // If the kernel refuses the death signal, a rank whose spawner dies runs to its end.
    let _ = set_pdeathsig(Signal::SIGKILL);
    if parent_id() != call_id.spawner {
        exit(1);
    }
    write_mark(&mut io::stdout(), call_id, Mark::Begin);
    write_mark(&mut io::stderr(), call_id, Mark::Begin);
    // The values that the closure has borrowed are not used again, so a panic cannot expose broken ones.
    let outcome = catch_unwind(AssertUnwindSafe(|| worker(rank).report()));
    let code = outcome.map_or(PANICKED, exit_code_number);
    if code != 0 && cause::is_consequence() {
        write_mark(&mut io::stdout(), call_id, Mark::Consequence);
    }
    exit(code)
}

/// Returns the number of an exit code. `ExitCode` only supports comparison, so each number is tried.
fn exit_code_number(code: ExitCode) -> i32 {
    (0..=u8::MAX).find(|&number| ExitCode::from(number) == code).map_or(1, i32::from)
}

fn write_mark(to: &mut dyn Write, call_id: &SpawnCallId, what: Mark) {
    // If nobody reads the pipe, the spawner has died, and the kernel kills this rank too.
    let _ = to.write_all(&mark(&call_id.token, what)).and_then(|()| to.flush());
}

/// Ends the process. A rank must not run the rest of the program after its worker.
#[allow(clippy::exit)]
fn exit(code: i32) -> ! {
    std::process::exit(code)
}
