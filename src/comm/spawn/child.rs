//! The side of the rank.

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
use super::{SpawnError, Ticket, VARIABLE};
use crate::cause;

/// Exit code of a Rust program that panics.
const PANICKED: i32 = 101;

/// The role of this process in a call of spawn.
pub(super) enum Me {
    /// This process starts ranks.
    Spawner,
    /// This process is a rank, and its call comes later on this thread.
    OnTheWay,
    /// This process was started as this rank for this call.
    Rank(Ticket, usize),
}

/// Set once this process runs the worker of a rank.
static AT_WORK: AtomicBool = AtomicBool::new(false);

/// Returns the role of this process in call number `call` of this thread, at source position `place`.
pub(super) fn who_am_i(call: u64, place: &str) -> Result<Me, SpawnError> {
    if AT_WORK.load(Ordering::SeqCst) {
        return Err(SpawnError::Unusable("a rank that was spawned cannot spawn ranks itself".to_owned()));
    }
    let variable = |name: &str| std::env::var(name).ok();
    let Some(ticket) = variable(VARIABLE).and_then(|text| text.parse::<Ticket>().ok()) else {
        return Ok(Me::Spawner);
    };
    if parent_id() != ticket.spawner {
        // Either a rank started this process, which inherited the variable, or this is a rank whose spawner
        // died. Such a rank must not start ranks now. A rank leads a process group, which tells the two
        // cases apart.
        let inherited = getpgrp() != getpid() || convoke_env::ancestors().any(|pid| pid == ticket.spawner);
        if inherited {
            return Ok(Me::Spawner);
        }
        exit(1);
    }
    if call < ticket.call {
        return Ok(Me::OnTheWay);
    }
    let rank = variable(vars::RANK).and_then(|text| text.parse().ok());
    match rank.filter(|_| call == ticket.call && place == ticket.place) {
        Some(rank) => Ok(Me::Rank(ticket, rank)),
        None => {
            let why =
                format!("a spawned rank came to call {call} of spawn at {place}, and not to {ticket}\n");
            let _ = io::stderr().write_all(why.as_bytes());
            exit(1)
        }
    }
}

/// Runs the worker of a rank, and ends the process.
pub(super) fn work<T: Termination>(ticket: &Ticket, rank: usize, worker: impl FnOnce(usize) -> T) -> ! {
    AT_WORK.store(true, Ordering::SeqCst);
    // If the kernel refuses it, a rank whose spawner dies runs to its end.
    let _ = set_pdeathsig(Signal::SIGKILL);
    if parent_id() != ticket.spawner {
        exit(1);
    }
    say(&mut io::stdout(), ticket, Mark::Begin);
    say(&mut io::stderr(), ticket, Mark::Begin);
    // The values that the closure has borrowed are not used again.
    let outcome = catch_unwind(AssertUnwindSafe(|| worker(rank).report()));
    let code = outcome.map_or(PANICKED, number);
    if code != 0 && cause::is_consequence() {
        say(&mut io::stdout(), ticket, Mark::Consequence);
    }
    exit(code)
}

/// Returns the number of an exit code. `ExitCode` only supports comparison, so each number is tried.
fn number(code: ExitCode) -> i32 {
    (0..=u8::MAX).find(|&number| ExitCode::from(number) == code).map_or(1, i32::from)
}

fn say(to: &mut dyn Write, ticket: &Ticket, what: Mark) {
    // If nobody reads the pipe, the spawner has died, and the kernel kills this rank too.
    let _ = to.write_all(&mark(&ticket.token, what)).and_then(|()| to.flush());
}

/// Ends the process. A rank must not run the rest of the program after its worker.
#[allow(clippy::exit)]
fn exit(code: i32) -> ! {
    std::process::exit(code)
}
