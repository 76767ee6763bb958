//! Random programs: all operations, in all their forms, on overlapping groups and from several threads,
//! compared with a model that computes the results of every rank.
//!
//! A seed determines a program: its groups, 200 operations, its termination, and the faults of its
//! connections. It also determines the thread and the form in which a rank carries out an operation. Forms
//! are: blocking, begun and waited for in any way and order, in a scope, or with a dropped handle. Only
//! timing does not depend on the seed.
//!
//! [`matrix`] runs each collective in turn against this model.
//!
//! [`random_program`] defines the operations, and [`model`] the results. [`calls`], [`messages`], [`objects`]
//! and [`scope`] carry them out. [`handles`] waits, [`rank`] drives one rank, and [`termination`] has the
//! terminations with errors.
//!
//! The test runs a fixed set of seeds, then random ones for some seconds. With CONVOKE_FULL=1 there are 5,000
//! programs. With CONVOKE_SEED it runs the program of that seed repeatedly for the usual time.

// A failed expectation in a test panics.
#![allow(clippy::panic)]

mod calls;
mod handles;
mod matrix;
mod messages;
mod model;
mod objects;
mod random_program;
mod rank;
mod scope;
mod termination;
mod values;

use std::collections::BTreeSet;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use convoke_store::{MemoryStore, Store};

use convoke_testkit::Random;
use random_program::RandomProgram;
use rank::SharedState;

/// The number of programs that every run includes.
const FIXED_SEEDS: usize = 50;
/// The number of programs of the full form.
const FULL_RUN_PROGRAMS: usize = 5000;
/// The time in which the short form begins programs beyond the fixed ones.
const SHORT_RUN: Duration = Duration::from_secs(5);
/// The longest time that a program may run: more than any of its waits.
const MAX_PROGRAM_TIME: Duration = Duration::from_secs(200);
/// The longest time in which no thread of a program may progress. A longer pause means that a message was not
/// noticed until its ranks probed each other, shortly before a deadline. The total time proves nothing: on a
/// busy machine each context switch takes milliseconds.
const MAX_STALL: Duration = Duration::from_secs(45);

#[test]
fn random_call_sequences_match_the_reference_and_leak_nothing() {
    let variable = |name: &str| std::env::var(name).ok();
    let given = variable("CONVOKE_SEED").and_then(|seed| seed.parse::<u64>().ok());
    let full = given.is_none() && variable("CONVOKE_FULL").is_some_and(|value| value == "1");
    // A seed short enough to be typed.
    let first = given.unwrap_or_else(|| Random::new("").next() >> 32);
    let (start, begun) = (Instant::now(), AtomicUsize::new(0));
    let programs = || {
        let mut ran = 0;
        loop {
            let number = begun.fetch_add(1, Ordering::Relaxed);
            if number >= FIXED_SEEDS
                && if full { number >= FULL_RUN_PROGRAMS } else { start.elapsed() > SHORT_RUN }
            {
                return Ok(ran);
            }
            let seed = given.unwrap_or(number as u64 + if number < FIXED_SEEDS { 0 } else { first });
            run(seed).map_err(|what| {
                format!("run it alone: CONVOKE_SEED={seed} cargo test -p convoke-comm --lib programs\n{what}")
            })?;
            ran += 1;
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let ran: Vec<Result<usize, String>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(programs)).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    let ran: usize = ran.into_iter().map(|ran| ran.unwrap_or_else(|wrong| panic!("{wrong}"))).sum();
    // Written directly to stderr, since the harness hides the output of a test that passes.
    let took = start.elapsed().as_secs_f64();
    writeln!(std::io::stderr(), "random programs: {ran} from seed {first}, {took:.0} s").unwrap();
}

/// Runs the program of `seed`. The error describes the failure.
fn run(seed: u64) -> Result<(), String> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let shared = Arc::new(SharedState::new(RandomProgram::random(seed), Arc::clone(&store)));
    let (ranks, description) = (shared.program.world(), shared.program.to_string());
    let (sender, receiver) = mpsc::channel();
    for rank in 0..ranks {
        let (shared, sender) = (Arc::clone(&shared), sender.clone());
        std::thread::spawn(move || {
            let ended = catch_unwind(AssertUnwindSafe(|| rank::run(&shared, rank)));
            drop(shared);
            // Nobody listens if another rank hangs.
            let _ = sender.send((rank, ended.unwrap_or_else(|_| Err("panicked".to_owned()))));
        });
    }
    let (deadline, mut wrong, mut causes) = (Instant::now() + MAX_PROGRAM_TIME, Vec::new(), BTreeSet::new());
    for _ in 0..ranks {
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((_, Ok(cause))) => causes.extend(cause),
            Ok((rank, Err(what))) => wrong.push(format!("rank {rank}: {what}")),
            Err(_) => {
                wrong.push(format!("it hangs; the threads of the ranks: {:#?}", shared.current_steps.lock()));
                break;
            }
        }
    }
    let pause = shared.current_steps.lock().expect("nobody panics with it").longest_pause;
    drop(shared);
    if wrong.is_empty() && pause > MAX_STALL {
        wrong.push(format!("no thread got on for {} s", pause.as_secs()));
    }
    if wrong.is_empty() && causes.len() > 1 {
        wrong.push(format!("the ranks name different causes: {causes:#?}"));
    }
    // Every group, its engine and its thread hold the store.
    while wrong.is_empty() && Arc::strong_count(&store) > 1 {
        if Instant::now() > deadline {
            wrong.push(format!("{} things are left that have the store", Arc::strong_count(&store) - 1));
        }
        std::thread::yield_now();
    }
    if wrong.is_empty() { Ok(()) } else { Err(format!("{}\n{description}", wrong.join("\n"))) }
}
