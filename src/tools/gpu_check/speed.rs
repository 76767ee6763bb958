//! Compares operations of groups with cudarc's calls of NCCL. Both alternate in one process.
//!
//! A core that other programs or machines share may take half as long again. So both are timed in short
//! turns, as pairs, on one CPU of this machine after the other, and the limits apply to the fastest quarter
//! of the pairs.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use convoke_comm::{Group, ReduceOp, op};
use convoke_train::{DdpOptions, DeviceDdp};
use cudarc::driver::{CudaSlice, CudaStream};
use cudarc::nccl::{Comm, Id, ReduceOp as RawOp, group_end, group_start};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use super::gpu::{CheckError, Gpu};
use super::report::Outcome;

/// Maximum time in µs by which a call of up to [`SMALL_CALL_BYTES`] may exceed cudarc's call.
const MAX_EXTRA_MICROS: f64 = 2.0;
/// Maximum ratio of the time of a call with a large buffer to cudarc's call.
const MAX_RATIO: f64 = 1.02;
/// Maximum buffer size in bytes up to which a call counts as small.
const SMALL_CALL_BYTES: usize = 4096;
/// Maximum number of calls that are timed together. Of small calls, they take 0.3 to 2 ms.
const CALLS_PER_TIME: u32 = 50;
/// The calling thread, as the system calls for CPU affinity name it.
const THIS_THREAD: Pid = Pid::from_raw(0);
const BATCH_CALLS: usize = 4;

#[derive(Debug, Clone, Copy)]
pub(crate) struct SpeedCheck {
    pub(crate) calls: u32,
    pub(crate) rounds: u32,
    pub(crate) enforced: bool,
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
    /// Compares the time of a group's `all_reduce` with that of cudarc's `all_reduce`. Both are called out of
    /// place, one call after the other on a CUDA stream.
    pub(crate) fn calls(self, elements: usize) -> Result<Outcome, CheckError> {
        let both = GroupAndCommunicator::new()?;
        let (send, mut raw_recv) = (both.buffers(elements, 1)?, both.buffers(elements, 1)?);
        let mut group_recv = both.buffers(elements, 1)?;
        self.compare(
            "all_reduce, out of place",
            elements,
            &both.stream,
            || Ok(both.raw.all_reduce(&send[0], &mut raw_recv[0], &RawOp::Sum).map(drop)?),
            || {
                let on = both.group.on(&both.stream)?;
                drop(on.enqueue(op::all_reduce_into(&send[0], &mut group_recv[0], ReduceOp::Sum))?);
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

    /// Times both functions alternately, and compares the pairs of times that were measured at full speed of
    /// the core.
    fn compare(
        self,
        what: &str,
        elements: usize,
        stream: &CudaStream,
        mut raw: impl FnMut() -> Result<(), CheckError>,
        mut ours: impl FnMut() -> Result<(), CheckError>,
    ) -> Result<Outcome, CheckError> {
        // The first calls set up NCCL and the buffers, which is not timed.
        time_calls(stream, self.calls, &mut raw)?;
        time_calls(stream, self.calls, &mut ours)?;
        let (calls, pairs) =
            (self.calls.min(CALLS_PER_TIME), self.rounds * self.calls.div_ceil(CALLS_PER_TIME));
        let allowed = sched_getaffinity(THIS_THREAD).map_err(io::Error::from)?;
        let cpus: Vec<usize> =
            (0..CpuSet::count()).filter(|&cpu| allowed.is_set(cpu).unwrap_or(false)).collect();
        let mut times = Vec::new();
        for pair in 0..pairs {
            run_on(cpus[pair as usize * cpus.len() / pairs as usize])?;
            times.push(if pair % 2 == 0 {
                let raw = time_calls(stream, calls, &mut raw)?;
                Pair { raw, ours: time_calls(stream, calls, &mut ours)? }
            } else {
                let ours = time_calls(stream, calls, &mut ours)?;
                Pair { raw: time_calls(stream, calls, &mut raw)?, ours }
            });
        }
        sched_setaffinity(THIS_THREAD, &allowed).map_err(io::Error::from)?;
        let all = Pair::medians(&times);
        let fastest = Pair::medians(Pair::fastest_quarter(&mut times));
        let bytes = elements * 4;
        let details = format!(
            "{what} of {bytes} B: {fastest}; all {pairs} pairs: {all} (medians; a time is the mean of {calls} calls)"
        );
        let is_good = if bytes <= SMALL_CALL_BYTES {
            fastest.ours - fastest.raw < MAX_EXTRA_MICROS
        } else {
            fastest.ours < fastest.raw * MAX_RATIO
        };
        Ok(Outcome { passed: is_good || !self.enforced, details })
    }
}

/// The times in µs of a call of cudarc and of a call of a group, measured one directly after the other.
#[derive(Debug, Clone, Copy)]
struct Pair {
    raw: f64,
    ours: f64,
}

impl Pair {
    /// The quarter of `pairs` with the least sum of both times; at least one pair. The sum treats both alike.
    fn fastest_quarter(pairs: &mut [Self]) -> &[Self] {
        pairs.sort_by(|a, b| (a.raw + a.ours).total_cmp(&(b.raw + b.ours)));
        &pairs[..pairs.len().div_ceil(4)]
    }

    /// The median time of cudarc's calls, and that plus the median difference.
    fn medians(pairs: &[Self]) -> Self {
        let raw = median(pairs.iter().map(|pair| pair.raw));
        Self { raw, ours: raw + median(pairs.iter().map(|pair| pair.ours - pair.raw)) }
    }
}

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { raw, ours } = self;
        let percent = 100.0 * (ours / raw - 1.0);
        write!(f, "cudarc {raw:.2} µs, convoke {:+.2} µs, {percent:+.1} %", ours - raw)
    }
}

/// Enqueues `calls` calls on a stream and waits for them together. Returns the mean time in µs.
fn time_calls(
    stream: &CudaStream,
    calls: u32,
    call: &mut impl FnMut() -> Result<(), CheckError>,
) -> Result<f64, CheckError> {
    stream.synchronize()?;
    let begin = Instant::now();
    (0..calls).try_for_each(|_| call())?;
    stream.synchronize()?;
    Ok(begin.elapsed().as_secs_f64() * 1e6 / f64::from(calls))
}

fn run_on(cpu: usize) -> Result<(), CheckError> {
    let mut only = CpuSet::new();
    only.set(cpu).and_then(|()| sched_setaffinity(THIS_THREAD, &only)).map_err(io::Error::from)?;
    Ok(())
}

/// The median of `times`, of which there is at least one.
fn median(times: impl Iterator<Item = f64>) -> f64 {
    let mut times: Vec<f64> = times.collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
