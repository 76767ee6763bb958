//! Operations without NCCL: they copy from the device to pinned host memory, use the host side, and copy
//! back.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result};

use super::driver::bind;
use super::type_mapping::{DeviceReduction, Step};
use crate::api::group::Group;
use crate::api::op;
use crate::api::reduction::Reduction;
use crate::collectives::dtype::sealed::Factor;
use crate::collectives::dtype::{Dtype, Element, ReduceOp, with_element_type};
use crate::error::{CommError, DeviceError};
use crate::nccl::NcclFunction;

/// The alignment of buffers in pinned memory.
const ALIGNMENT: usize = 64;
/// The tag of the host side's messages that carry messages between devices.
const TAG: u32 = u32::MAX;

/// Pinned host memory, which grows as it is needed.
pub(crate) struct Staging {
    context: Arc<CudaContext>,
    /// The start of the memory, of `bytes` bytes; null if there is none.
    start: *mut u8,
    bytes: usize,
    /// Set while copies may use the memory. If it is still set when the memory would be freed, the memory is
    /// leaked.
    busy: bool,
}

// SAFETY: the memory belongs to the process, not to a thread.
#[allow(unsafe_code)]
unsafe impl Send for Staging {}

/// A step, with the ranges of pinned memory for its input and output on this rank; empty if it has none.
struct StagedCall {
    step: Step,
    send: Range<usize>,
    recv: Range<usize>,
}

#[allow(unsafe_code)]
impl Staging {
    pub(super) fn new(context: Arc<CudaContext>) -> Self {
        Self { context, start: std::ptr::null_mut(), bytes: 0, busy: false }
    }

    /// Carries out steps on device memory after the earlier work of `stream`. On success the stream has
    /// executed all copies; `settle` waits until the stream has executed what is enqueued.
    ///
    /// # Safety
    /// `stream` is of this device. The memory at the addresses is on that device, long enough, and stays so
    /// until the stream has passed the copies.
    pub(super) unsafe fn carry_out(
        &mut self,
        group: &Group,
        steps: &[Step],
        stream: &CudaStream,
        mut settle: impl FnMut() -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        if self.busy {
            // An earlier call failed, and its copies may still use the memory, so the memory is leaked and
            // replaced.
            self.free();
        }
        let mut end = 0;
        let staged: Vec<StagedCall> =
            steps.iter().map(|step| assign_ranges(*step, group, &mut end)).collect();
        self.grow(end)?;
        let raw = stream.cu_stream();
        self.busy = true;
        let mut sends = staged.iter().filter(|staged| !staged.send.is_empty());
        // SAFETY: the caller promises it for the device; the host range is within our memory, which is
        // otherwise unused now.
        let copied = sends.try_for_each(|StagedCall { step, send, .. }| unsafe {
            result::memcpy_dtoh_async(self.slice::<u8>(send), step.send, raw)
        });
        copied.map_err(DeviceError::driver("a copy between device and host failed"))?;
        settle()?;
        self.busy = false;
        // SAFETY: all ranges are disjoint.
        unsafe { self.run_on_host(group, &staged)? };
        self.busy = true;
        let mut recvs = staged.iter().filter(|staged| !staged.recv.is_empty());
        // SAFETY: the caller promises it for the device; the host range is ours, and unused otherwise.
        let copied = recvs.try_for_each(|StagedCall { step, recv, .. }| unsafe {
            result::memcpy_htod_async(step.recv, &*self.slice::<u8>(recv), raw)
        });
        copied.map_err(DeviceError::driver("a copy between host and device failed"))?;
        settle()?;
        self.busy = false;
        Ok(())
    }

    /// Carries out the steps on the host side: messages concurrently, then collectives one after the other.
    ///
    /// # Safety
    /// Nothing else uses the memory.
    unsafe fn run_on_host(&self, group: &Group, staged: &[StagedCall]) -> Result<(), CommError> {
        let me = group.rank();
        // SAFETY: the caller promises it; ranges of different steps are disjoint.
        let slice = |range: &Range<usize>| unsafe { self.slice::<u8>(range) };
        let (mut sends, mut recvs) = (Vec::new(), Vec::new());
        // Sends of this rank to itself, in order; its receives from itself copy from them.
        let mut own = staged.iter().filter(|staged| staged.step.function == NcclFunction::Send { to: me });
        for StagedCall { step, send, recv } in staged {
            match step.function {
                NcclFunction::Send { to } if to != me => sends.push(op::send(slice(send), to).tag(TAG)),
                NcclFunction::Recv { from } if from != me => recvs.push(op::recv(slice(recv), from).tag(TAG)),
                NcclFunction::Recv { .. } => {
                    let sent = own.next().filter(|sent| sent.send.len() == recv.len());
                    let what = "a receive of this rank from itself has no send of equal length in the batch";
                    let sent = sent.ok_or_else(|| CommError::InvalidArgument(what.to_owned()))?;
                    slice(recv).copy_from_slice(slice(&sent.send));
                }
                _ => {}
            }
        }
        let (received, _) = group.run((recvs, sends))?;
        if let Some((buffer, status)) =
            received.iter().find(|(buffer, status)| buffer.len() != status.count())
        {
            let (from, sent, room) = (status.source(), status.count(), buffer.len());
            let what = format!("rank {from} has sent {sent} bytes to a receive of {room} bytes");
            return Err(CommError::InvalidArgument(what));
        }
        for StagedCall { step, send, recv } in staged {
            match step.function {
                NcclFunction::Send { .. } | NcclFunction::Recv { .. } => {}
                NcclFunction::Broadcast { root } => {
                    let all = if me == root { send } else { recv };
                    group.broadcast(slice(all), root)?;
                    if me == root {
                        slice(recv).copy_from_slice(slice(send));
                    }
                }
                NcclFunction::AllGather => group.all_gather(&*slice(send), slice(recv))?,
                NcclFunction::AllReduce(by)
                | NcclFunction::Reduce { op: by, .. }
                | NcclFunction::ReduceScatter(by) => {
                    // SAFETY: the caller promises it.
                    unsafe { self.reduce(group, step, by, send, recv)? };
                }
            }
        }
        Ok(())
    }

    /// # Safety
    /// Nothing else uses the memory.
    unsafe fn reduce(
        &self,
        group: &Group,
        step: &Step,
        by: DeviceReduction,
        send: &Range<usize>,
        recv: &Range<usize>,
    ) -> Result<(), CommError> {
        let datatype = step.datatype;
        if datatype.float8.is_some() {
            let (op, name) = (by.op, datatype.name());
            let what = format!("{op} of {name} when data are staged through host memory");
            return Err(CommError::Unsupported(what));
        }
        if datatype.dtype == Dtype::Bool {
            // Reduced as bytes, not as `bool`: a device's boolean values may be any bytes.
            let op = match by.op {
                ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => ReduceOp::Max,
                ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => ReduceOp::Min,
                other => other,
            };
            // SAFETY: the caller promises it.
            let (send, recv) = unsafe { (self.slice::<u8>(send), self.slice::<u8>(recv)) };
            return run_reduction(group, step, send, recv, op.into());
        }
        with_element_type!(datatype.dtype, T => {
            // SAFETY: the caller promises it. Of the element types only `bool` does not allow all bytes.
            let (send, recv) = unsafe { (self.slice::<T>(send), self.slice::<T>(recv)) };
            run_reduction(group, step, send, recv, reduction::<T>(by))
        })
    }

    fn grow(&mut self, bytes: usize) -> Result<(), CommError> {
        if bytes <= self.bytes {
            return Ok(());
        }
        self.free();
        let bytes = bytes.next_power_of_two();
        // SAFETY: freed in `free`.
        let start = unsafe { result::malloc_host(bytes, 0) };
        let start = start.map_err(DeviceError::driver("cannot allocate pinned memory on the host"))?;
        (self.start, self.bytes) = (start.cast(), bytes);
        Ok(())
    }

    fn free(&mut self) {
        if !self.start.is_null() && !self.busy {
            // SAFETY: from `grow`, and freed once. No copy is under way: each was waited for.
            let _ = unsafe { result::free_host(self.start.cast::<c_void>()) };
        }
        (self.start, self.bytes, self.busy) = (std::ptr::null_mut(), 0, false);
    }

    /// Returns the elements in a range of the memory.
    ///
    /// # Safety
    /// Nothing else uses that range, and any bytes are a `T`.
    #[allow(clippy::mut_from_ref)] // a part of memory that we have a pointer to
    unsafe fn slice<T>(&self, range: &Range<usize>) -> &mut [T] {
        if range.is_empty() {
            return &mut [];
        }
        assert!(range.end <= self.bytes && range.start.is_multiple_of(ALIGNMENT));
        // SAFETY: within our memory, which begins at a page; the caller promises the rest.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.add(range.start).cast(), range.len() / size_of::<T>())
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if bind(&self.context).is_ok() {
            self.free();
        }
    }
}

/// Assigns ranges of pinned memory, from `end` on, to the buffers that a step reads and writes on this rank.
fn assign_ranges(step: Step, group: &Group, end: &mut usize) -> StagedCall {
    let (count, ranks) = (step.count, group.size());
    let on_root = |root| if group.rank() == root { count } else { 0 };
    let (sent, received) = match step.function {
        NcclFunction::AllReduce(_) => (count, count),
        NcclFunction::Broadcast { root } => (on_root(root), count),
        NcclFunction::Reduce { root, .. } => (count, on_root(root)),
        NcclFunction::AllGather => (count, count * ranks),
        NcclFunction::ReduceScatter(_) => (count * ranks, count),
        NcclFunction::Send { .. } => (count, 0),
        NcclFunction::Recv { .. } => (0, count),
    };
    let mut next = |count: usize| {
        let start = *end;
        let range = start..start + count * step.datatype.size_bytes();
        *end = range.end.next_multiple_of(ALIGNMENT);
        range
    };
    StagedCall { step, send: next(sent), recv: next(received) }
}

/// The host side's reduction that is equivalent to the device reduction `by`, on elements `T`.
fn reduction<T: Element>(by: DeviceReduction) -> Reduction<T> {
    let factor = by.factor.and_then(T::Factor::from_bytes);
    factor.map_or_else(|| by.op.into(), Reduction::premul_sum)
}

fn run_reduction<T: Element>(
    group: &Group,
    step: &Step,
    send: &mut [T],
    recv: &mut [T],
    op: Reduction<T>,
) -> Result<(), CommError> {
    match step.function {
        NcclFunction::AllReduce(_) => group.all_reduce_into(send, recv, op),
        NcclFunction::Reduce { root, .. } => group.reduce_into(send, recv, op, root),
        NcclFunction::ReduceScatter(_) => group.reduce_scatter(send, recv, op),
        _ => Ok(()),
    }
}
