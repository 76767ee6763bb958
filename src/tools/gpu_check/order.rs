//! The example of all tutorials about streams: the result of an operation is used on another stream.

use convoke_comm::ReduceOp;
use convoke_comm::device::RawBuffer;
use cudarc::driver::DevicePtr;

use super::kernels::AddOne;
use super::place::{CheckError, Place};
use super::report::Outcome;

/// Enough numbers that one stream would see what another has not done.
const NUMBERS: usize = 4096;
/// How long the first kernel takes, in ticks of the processor's clock: tens of µs.
const TICKS: i64 = 50_000;

/// On one stream a kernel writes, slowly, and the operation comes behind it; on another a kernel changes the result, ordered by
/// [`Work::wait_on`](convoke_comm::Work::wait_on) alone.
#[allow(unsafe_code)]
pub(crate) fn check(place: &Place, times: u32) -> Result<Outcome, CheckError> {
    let group = place.group()?;
    let (computing, other) = (place.stream()?, place.stream()?);
    let add_one = AddOne::new(&computing)?;
    let mut memory = computing.alloc_zeros::<f32>(NUMBERS)?;
    let at = memory.device_ptr(&computing).0;
    // SAFETY: the memory outlives the loop, in which each stream is waited for. An address, so that cudarc, which would have
    // streams wait for each other by itself, knows nothing of it.
    let mut buffer = unsafe { RawBuffer::<f32>::new(at, NUMBERS, computing.clone()) };
    let mut wrong = 0;
    for _ in 0..times {
        computing.memset_zeros(&mut memory)?;
        // SAFETY: there are so many numbers.
        unsafe { add_one.run(&computing, at, NUMBERS as u64, TICKS)? };
        let work = group.on(&computing)?.all_reduce(&mut buffer, ReduceOp::Sum)?;
        work.wait_on(&other)?;
        // SAFETY: as above; ordered behind the operation by the line before.
        unsafe { add_one.run(&other, at, NUMBERS as u64, 0)? };
        other.synchronize()?;
        let numbers = computing.clone_dtoh(&memory)?;
        computing.synchronize()?;
        wrong += u32::from(numbers.iter().any(|&number| number != 2.0));
    }
    let seen = format!("right {} of {times} times", times - wrong);
    Ok(if wrong == 0 { Outcome::passed(seen) } else { Outcome::failed(seen) })
}
