//! Checks that another stream sees the result of an operation, as in stream tutorials.

use convoke_comm::device::RawBuffer;
use convoke_comm::{ReduceOp, op};
use cudarc::driver::DevicePtr;

use super::gpu::{CheckError, Gpu};
use super::kernels::AddOne;
use super::report::Outcome;

/// Number of elements: so many that a stream that runs too early would read unfinished results.
const NUMBERS: usize = 4096;
/// Duration of the first kernel in ticks of the GPU clock: tens of µs.
const TICKS: i64 = 50_000;

/// Runs a slow kernel and then the operation on one stream. A kernel on another stream changes the result.
/// Only [`Work::wait_on`](convoke_comm::Work::wait_on) orders the second stream.
#[allow(unsafe_code)]
pub(crate) fn check(gpu: &Gpu, times: u32) -> Result<Outcome, CheckError> {
    let group = gpu.group()?;
    let (computing, other) = (gpu.stream()?, gpu.stream()?);
    let add_one = AddOne::new(&computing)?;
    let mut memory = computing.alloc_zeros::<f32>(NUMBERS)?;
    let at = memory.device_ptr(&computing).0;
    // SAFETY: the memory outlives the loop, and each iteration waits for both streams. A raw address hides
    // the memory from cudarc, which would otherwise order the streams itself.
    let mut buffer = unsafe { RawBuffer::<f32>::new(at, NUMBERS, computing.clone()) };
    let mut wrong = 0;
    for _ in 0..times {
        computing.memset_zeros(&mut memory)?;
        // SAFETY: the memory holds `NUMBERS` elements.
        unsafe { add_one.run(&computing, at, NUMBERS as u64, TICKS)? };
        let work = group.on(&computing)?.enqueue(op::all_reduce(&mut buffer, ReduceOp::Sum))?;
        work.wait_on(&other)?;
        // SAFETY: the memory holds `NUMBERS` elements, and `wait_on` orders the kernel behind the operation.
        unsafe { add_one.run(&other, at, NUMBERS as u64, 0)? };
        other.synchronize()?;
        let numbers = computing.clone_dtoh(&memory)?;
        computing.synchronize()?;
        wrong += u32::from(numbers.iter().any(|&number| number != 2.0));
    }
    Ok(Outcome { passed: wrong == 0, details: format!("right {} of {times} times", times - wrong) })
}
