//! `test-worker exit HOW WHO WORK`: all ranks work together until rank WHO ends in the way HOW, in the
//! middle of the work.
//!
//! HOW: `error` and `panic` leave `main`; `exit`, `abort`, `segv` and `kill` do not. `return` and `exit0`
//! end too early with code 0.
//! WORK: in `reduce`, all ranks need each other. In `ring`, each rank needs its neighbours. In `apart`, no
//! rank needs WHO, and the others wait for a message that never comes.

#![allow(clippy::exit, clippy::panic)] // the worker must end in these ways

use std::error::Error;

use convoke_comm::{ReduceOp, World, op};
use nix::sys::signal::{Signal, raise};

/// Number of rounds before rank WHO ends.
const ROUNDS: usize = 50;

pub(super) fn run(arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    let [how, who, work] = arguments else { return Err("HOW WHO WORK".into()) };
    let world = convoke_comm::init()?;
    let (me, who) = (world.rank(), who.parse::<usize>()?);
    if *work == "apart" {
        if me == who {
            return exit_with(how);
        }
        let other =
            (0..world.size()).rev().find(|&rank| rank != me && rank != who).ok_or("at least 3 ranks")?;
        world.recv(&mut [0_u8], other, 0)?;
        return Ok(());
    }
    for round in 0.. {
        if me == who && round == ROUNDS {
            return exit_with(how);
        }
        step(&world, work)?;
    }
    Ok(())
}

fn step(world: &World, work: &str) -> Result<(), Box<dyn Error>> {
    let (me, size) = (world.rank(), world.size());
    if work == "reduce" {
        world.all_reduce(&mut [me as f32; 100], ReduceOp::Sum)?;
    } else {
        let mut from = [0_u64];
        world.run((op::send(&[me as u64], (me + 1) % size), op::recv(&mut from, (me + size - 1) % size)))?;
    }
    Ok(())
}

fn exit_with(how: &str) -> Result<(), Box<dyn Error>> {
    match how {
        "error" => Err(std::io::Error::other("the data set is empty").into()),
        "panic" => panic!("the loader is gone"),
        "exit" => std::process::exit(3),
        "abort" => std::process::abort(),
        // Rust's own handler, which checks for a stack overflow, receives the first signal. The second one
        // kills the process.
        "segv" => loop {
            raise(Signal::SIGSEGV)?;
        },
        "kill" => Ok(raise(Signal::SIGKILL)?),
        "exit0" => std::process::exit(0),
        "return" => Ok(()),
        other => Err(format!("how? {other:?}").into()),
    }
}
