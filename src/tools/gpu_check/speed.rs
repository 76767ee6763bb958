//! Compares operations of groups with cudarc's calls of NCCL. Both alternate in one process.

use std::sync::Arc;
use std::time::Instant;

use convoke_comm::{Group, ReduceOp, op};
use convoke_train::{DdpOptions, DeviceDdp};
use cudarc::driver::{CudaSlice, CudaStream};
use cudarc::nccl::{Comm, Id, ReduceOp as RawOp, group_end, group_start};

use super::gpu::{CheckError, Gpu};
use super::report::Outcome;

/// Maximum time in µs by which a call of up to [`SMALL_CALL_BYTES`] may exceed cudarc's call.
const MAX_EXTRA_MICROS: f64 = 2.0;
/// Maximum ratio of the time of a call with a large buffer to cudarc's call.
const MAX_RATIO: f64 = 1.02;
/// Maximum buffer size in bytes up to which a call counts as small.
const SMALL_CALL_BYTES: usize = 4096;
/// Number of operations that are enqueued as one batch.
const BATCH_CALLS: usize = 4;

/// Settings of the measurement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SpeedCheck {
    calls: u32,
    rounds: u32,
    enforced: bool,
}

/// A group of this process alone, and an equivalent cudarc communicator.
struct GroupAndCommunicator {
    stream: Arc<CudaStream>,
    group: Group,
    raw: Comm,
}

impl GroupAndCommunicator {
    fn new() -> Result<Self, CheckError> {
        let gpu = Gpu::new()?;
        let (group, stream) = (gpu.group()?, gpu.stream()?);
        let raw = Comm::from_rank(Arc::clone(&stream), 0, 1, Id::new()?)?;
        Ok(Self { stream, group, raw })
    }

    fn buffers(&self, elements: usize, count: usize) -> Result<Vec<CudaSlice<f32>>, CheckError> {
        Ok((0..count).map(|_| self.stream.alloc_zeros(elements)).collect::<Result<_, _>>()?)
    }
}

impl SpeedCheck {
    pub(crate) fn new(calls: u32, rounds: u32, enforced: bool) -> Self {
        Self { calls, rounds, enforced }
    }

    /// Compares the time of a group's `all_reduce` with that of cudarc's `all_reduce`. Both are called out of
    /// place, one call after the other on a CUDA stream.
    pub(crate) fn calls(self, elements: usize) -> Result<Outcome, CheckError> {
        let both = GroupAndCommunicator::new()?;
        let (send, mut recvs) = (both.buffers(elements, 1)?, both.buffers(elements, 2)?);
        let [raw_recvs, group_recvs] = &mut recvs[..] else {
            return Err(CheckError::Other("two buffers".to_owned()));
        };
        self.compare(
            "all_reduce, out of place",
            elements,
            &both.stream,
            || both.raw.all_reduce(&send[0], raw_recvs, &RawOp::Sum).map(drop).map_err(CheckError::from),
            || {
                let on = both.group.on(&both.stream)?;
                drop(on.enqueue(op::all_reduce_into(&send[0], &mut *group_recvs, ReduceOp::Sum))?);
                Ok(())
            },
        )
    }

    /// Compares the time of batches of several calls with NCCL groups of cudarc's calls.
    pub(crate) fn grouped(self, elements: usize) -> Result<Outcome, CheckError> {
        let both = GroupAndCommunicator::new()?;
        let sends = both.buffers(elements, BATCH_CALLS)?;
        let (mut raw_recvs, mut group_recvs) =
            (both.buffers(elements, BATCH_CALLS)?, both.buffers(elements, BATCH_CALLS)?);
        self.compare(
            &format!("{BATCH_CALLS} all_reduce as one"),
            elements,
            &both.stream,
            || {
                group_start()?;
                for (send, recv) in sends.iter().zip(&mut raw_recvs) {
                    both.raw.all_reduce(send, recv, &RawOp::Sum)?;
                }
                Ok(group_end().map(drop)?)
            },
            || {
                let on = both.group.on(&both.stream)?;
                let pairs = sends.iter().zip(&mut group_recvs);
                let calls = pairs.map(|(send, recv)| op::all_reduce_into(send, recv, ReduceOp::Sum));
                drop(on.enqueue(calls.collect::<Vec<_>>())?);
                Ok(())
            },
        )
    }

    /// Compares the time of a pass of `DeviceDdp` with one parameter to that of a hand-written step: copy,
    /// wait, average on another stream, wait.
    pub(crate) fn steps(self, elements: usize) -> Result<Outcome, CheckError> {
        let both = GroupAndCommunicator::new()?;
        let computing = both.stream.context().new_stream()?;
        let (gradient, mut buckets) = (both.buffers(elements, 1)?, both.buffers(elements, 1)?);
        let size = elements * 4;
        let options = DdpOptions::default().bucket_bytes(size).first_bucket_bytes(size);
        let context = both.stream.context();
        let (mut ddp, ids) = DeviceDdp::<f32>::new(&both.group, context, [("only", elements)], options)?;
        self.compare(
            "training steps",
            elements,
            &computing,
            || {
                computing.memcpy_dtod(&gradient[0], &mut buckets[0])?;
                both.stream.join(&computing)?;
                both.raw.all_reduce_in_place(&mut buckets[0], &RawOp::Avg)?;
                Ok(computing.join(&both.stream)?)
            },
            || {
                let mut pass = ddp.pass(&computing);
                pass.add(ids[0], &gradient[0])?;
                Ok(pass.finish()?)
            },
        )
    }

    /// Times both functions alternately. Their calls are enqueued on a stream and waited for together.
    fn compare(
        self,
        what: &str,
        elements: usize,
        stream: &CudaStream,
        mut raw: impl FnMut() -> Result<(), CheckError>,
        mut ours: impl FnMut() -> Result<(), CheckError>,
    ) -> Result<Outcome, CheckError> {
        let time = |call: &mut dyn FnMut() -> Result<(), CheckError>| -> Result<f64, CheckError> {
            stream.synchronize()?;
            let begin = Instant::now();
            (0..self.calls).try_for_each(|_| call())?;
            stream.synchronize()?;
            Ok(begin.elapsed().as_secs_f64() * 1e6 / f64::from(self.calls))
        };
        // The first calls set up NCCL and the buffers, which is not timed.
        time(&mut raw)?;
        time(&mut ours)?;
        let (mut raw_times, mut group_times) = (Vec::new(), Vec::new());
        for round in 0..self.rounds {
            if round % 2 == 0 {
                raw_times.push(time(&mut raw)?);
                group_times.push(time(&mut ours)?);
            } else {
                group_times.push(time(&mut ours)?);
                raw_times.push(time(&mut raw)?);
            }
        }
        let (raw, ours) = (median(&mut raw_times), median(&mut group_times));
        let bytes = elements * 4;
        let details = format!(
            "{what} of {bytes} B: cudarc {raw:.2} µs, convoke {ours:.2} µs, {:+.2} µs, {:+.1} % (medians of {} rounds of {})",
            ours - raw,
            100.0 * (ours / raw - 1.0),
            self.rounds,
            self.calls
        );
        let is_good =
            if bytes <= SMALL_CALL_BYTES { ours - raw < MAX_EXTRA_MICROS } else { ours < raw * MAX_RATIO };
        Ok(if is_good || !self.enforced { Outcome::passed(details) } else { Outcome::failed(details) })
    }
}

/// The median of `times`, which has at least one element.
fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
