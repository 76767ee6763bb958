//! Buffers on a GPU. A collective call with them returns when its operation is enqueued.

use std::sync::Arc;

use convoke_comm::device::cudarc::driver::CudaStream;
use convoke_comm::device::{self, DeviceBuffer, DeviceOptions};
use convoke_comm::{CommError, Group, op};

use super::buffers::BenchBuffers;
use super::call::Call;
use super::collective::Collective;
use super::error::PerfError;
use super::measure::Settings;
use super::values::{TestPattern, Value};
use super::verify::{self, WrongElement};

/// Time for which calls are enqueued before the host waits. Many calls share one wait, because waiting costs
/// as much as a call with few bytes.
const TARGET_MICROS: f64 = 500.0;
/// Maximum number of calls that are enqueued before the host waits.
const MAX_CALLS: f64 = 100.0;

/// Returns the group with this rank's device, and the stream for its calls.
pub(crate) fn join(group: &Group, staged: bool) -> Result<(Group, Arc<CudaStream>), CommError> {
    let context = device::open_for_rank(group)?;
    let group = group.with_device(&context, DeviceOptions::default().staged(staged))?;
    let stream =
        context.new_stream().map_err(|error| CommError::Unsupported(format!("a stream: {error}")))?;
    Ok((group, stream))
}

/// Buffers in the memory of a GPU.
pub(crate) struct DeviceBuffers<T: Value> {
    stream: Arc<CudaStream>,
    buffers: Vec<(DeviceBuffer<T>, DeviceBuffer<T>)>,
}

impl<T: Value> DeviceBuffers<T> {
    /// Allocates buffers `a` and `b` with at most `lens` elements.
    pub(crate) fn new(
        settings: &Settings,
        stream: &Arc<CudaStream>,
        lens: (usize, usize),
    ) -> Result<Self, PerfError> {
        let zeros = |len| DeviceBuffer::zeros(stream, len).map_err(CommError::from);
        let buffers = (0..settings.in_flight).map(|_| Ok((zeros(lens.0)?, zeros(lens.1)?)));
        Ok(Self { stream: Arc::clone(stream), buffers: buffers.collect::<Result<_, PerfError>>()? })
    }

    fn enqueue(
        group: &Group,
        stream: &Arc<CudaStream>,
        call: &Call<T>,
        (a, b): &mut (DeviceBuffer<T>, DeviceBuffer<T>),
        root: usize,
    ) -> Result<(), CommError> {
        let on = group.on(stream)?;
        let (len_a, len_b) = call.shape.buffer_lens();
        let (mut a, mut b) = (a.first(len_a), b.first(len_b));
        let (op, lens) = (call.reduction.clone(), &call.lens[..]);
        match call.shape.collective {
            Collective::AllReduce => on.enqueue(op::all_reduce(&mut a, op)),
            Collective::Broadcast => on.enqueue(op::broadcast(&mut a, root)),
            Collective::Reduce => on.enqueue(op::reduce(&mut a, op, root)),
            Collective::AllGather => on.enqueue(op::all_gather(&a, &mut b)),
            Collective::ReduceScatter => on.enqueue(op::reduce_scatter(&a, &mut b, op)),
            Collective::AllToAll => on.enqueue(op::all_to_all(&a, &mut b)),
            Collective::Gather => on.enqueue(op::gather(&a, &mut b, root)),
            Collective::Scatter => on.enqueue(op::scatter(&a, &mut b, root)),
            Collective::Barrier => on.enqueue(op::barrier()),
            Collective::AllGatherV => on.enqueue(op::all_gather_v(&a, &mut b, lens)),
            Collective::ReduceScatterV => on.enqueue(op::reduce_scatter_v(&a, &mut b, lens, op)),
            Collective::AllToAllV => on.enqueue(op::all_to_all_v((&a, lens), (&mut b, lens))),
            Collective::GatherV => on.enqueue(op::gather_v(&a, &mut b, lens, root)),
            Collective::ScatterV => on.enqueue(op::scatter_v(&a, &mut b, lens, root)),
            Collective::SendRecv => match call.peer {
                Some(peer) if call.is_first() => {
                    on.enqueue(op::send(&a, peer)).and_then(|_| on.enqueue(op::recv(&mut b, peer)))
                }
                Some(peer) => on.enqueue(op::recv(&mut b, peer)).and_then(|_| on.enqueue(op::send(&a, peer))),
                None => return Ok(()),
            },
            collective @ (Collective::Scan | Collective::ExclusiveScan) => {
                return Err(CommError::Unsupported(format!("{collective} on devices")));
            }
        }
        .map(drop)
    }
}

impl<T: Value> BenchBuffers for DeviceBuffers<T> {
    type Element = T;

    fn fill(&mut self, pattern: &TestPattern, call: &Call<T>) -> Result<(), PerfError> {
        let (len_a, len_b) = call.shape.buffer_lens();
        let (mut host_a, mut host_b) = (vec![T::from_parts(0, 0); len_a], vec![T::from_parts(0, 0); len_b]);
        verify::fill(pattern, &call.shape, &mut host_a, &mut host_b);
        for (a, b) in &mut self.buffers {
            a.write(&self.stream, &host_a).map_err(CommError::from)?;
            b.write(&self.stream, &host_b).map_err(CommError::from)?;
        }
        Ok(())
    }

    fn check(
        &self,
        pattern: &TestPattern,
        call: &Call<T>,
        root: usize,
    ) -> Result<Result<(), WrongElement>, PerfError> {
        let (len_a, len_b) = call.shape.buffer_lens();
        for (a, b) in &self.buffers {
            let [a, b] = [a, b].map(|buffer| buffer.read(&self.stream).map_err(CommError::from));
            let checked = verify::check(pattern, &call.shape, root, (&a?[..len_a], &b?[..len_b]));
            if checked.is_err() {
                return Ok(checked);
            }
        }
        Ok(Ok(()))
    }

    fn clear(&mut self, call: &Call<T>) -> Result<(), PerfError> {
        let (len_a, len_b) = call.shape.buffer_lens();
        for (a, b) in &mut self.buffers {
            a.write(&self.stream, &vec![T::from_parts(0, 0); len_a]).map_err(CommError::from)?;
            b.write(&self.stream, &vec![T::from_parts(0, 0); len_b]).map_err(CommError::from)?;
        }
        Ok(())
    }

    fn run(&mut self, group: &Group, call: &Call<T>, root: usize) -> Result<(), CommError> {
        let stream = &self.stream;
        self.buffers.iter_mut().try_for_each(|both| Self::enqueue(group, stream, call, both, root))
    }

    fn synchronize(&mut self) -> Result<(), CommError> {
        self.stream
            .synchronize()
            .map_err(|error| CommError::Unsupported(format!("to wait for a stream: {error}")))
    }

    fn calls_per_sample(&self, micros: f64) -> usize {
        (TARGET_MICROS / micros).clamp(1.0, MAX_CALLS) as usize
    }
}
