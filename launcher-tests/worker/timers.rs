//! `test-worker timers`: a program with a 1 ms interval timer, whose signal handler interrupts every system
//! call. The program joins, runs collectives, splits groups and leaves; then it joins again.

use std::error::Error;

use convoke_comm::{ReduceOp, init};
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

const ROUNDS: usize = 3;
const CALLS: usize = 20;

extern "C" fn nothing(_: libc::c_int) {}

pub(super) fn run() -> Result<(), Box<dyn Error>> {
    start_timer()?;
    for _ in 0..ROUNDS {
        let world = init()?;
        let size = world.size() as f32;
        for count in 0..CALLS {
            let mut numbers = vec![1.0_f32; count * count * 100 + 1];
            world.all_reduce(&mut numbers, ReduceOp::Sum)?;
            if numbers.iter().any(|number| *number != size) {
                return Err("a wrong sum".into());
            }
        }
        let half = world.split(Some(world.rank() as u32 % 2), 0)?.ok_or("no group")?;
        half.barrier()?;
    }
    Ok(())
}

#[allow(unsafe_code)]
fn start_timer() -> Result<(), Box<dyn Error>> {
    let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler does nothing, so it is async-signal-safe.
    unsafe { sigaction(Signal::SIGALRM, &action) }?;
    let millisecond = libc::timeval { tv_sec: 0, tv_usec: 1000 };
    let timer = libc::itimerval { it_interval: millisecond, it_value: millisecond };
    // SAFETY: both pointers are valid for this call: one points to a value on the stack, and setitimer
    // accepts null for the other.
    match unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().into()),
    }
}
