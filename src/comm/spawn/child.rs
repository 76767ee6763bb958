//! The rank's side.

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

/// What a call of spawn is to this process.
pub(super) enum Me {
    /// It is to start ranks.
    Spawner,
    /// This process is a rank that is to come to a later call.
    OnTheWay,
    /// This is the call that the process was started for, as this rank.
    Rank(Ticket, usize),
}

/// Set as soon as this process is at work as a rank.
static AT_WORK: AtomicBool = AtomicBool::new(false);

/// What call number `call` of this thread, which stands at `place`, is to this process.
pub(super) fn who_am_i(call: u64, place: &str) -> Result<Me, SpawnError> {
    if AT_WORK.load(Ordering::SeqCst) {
        return Err(SpawnError::Unusable("a rank that was spawned cannot spawn ranks itself".to_owned()));
    }
    let variable = |name: &str| std::env::var(name).ok();
    let Some(ticket) = variable(VARIABLE).and_then(|text| text.parse::<Ticket>().ok()) else {
        return Ok(Me::Spawner);
    };
    if parent_id() != ticket.spawner {
        // Either a process that a rank has started, which has inherited the variable; or a rank whose spawner
        // has died, which must not become a spawner now. Ranks lead a process group.
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

/// Does the work of a rank, and ends the process.
pub(super) fn work<T: Termination>(ticket: &Ticket, rank: usize, worker: impl FnOnce(usize) -> T) -> ! {
    AT_WORK.store(true, Ordering::SeqCst);
    // If it cannot be had, a rank whose spawner dies goes on to its end.
    let _ = set_pdeathsig(Signal::SIGKILL);
    if parent_id() != ticket.spawner {
        exit(1);
    }
    say(&mut io::stdout(), ticket, Mark::Begin);
    say(&mut io::stderr(), ticket, Mark::Begin);
    // What the closure has borrowed is not looked at again.
    let outcome = catch_unwind(AssertUnwindSafe(|| worker(rank).report()));
    let code = outcome.map_or(PANICKED, number);
    if code != 0 && cause::is_consequence() {
        say(&mut io::stdout(), ticket, Mark::Consequence);
    }
    exit(code)
}

/// An exit code as a number, which it can only be compared for.
fn number(code: ExitCode) -> i32 {
    (0..=u8::MAX).find(|&number| ExitCode::from(number) == code).map_or(1, i32::from)
}

fn say(to: &mut dyn Write, ticket: &Ticket, what: Mark) {
    // Who does not read it has died, and we shall too.
    let _ = to.write_all(&mark(&ticket.token, what)).and_then(|()| to.flush());
}

/// Ends the process: a rank has no business after its work, in particular not in the rest of the program.
#[allow(clippy::exit)]
fn exit(code: i32) -> ! {
    std::process::exit(code)
}
