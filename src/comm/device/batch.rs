//! Operations on buffers of a device that are enqueued as one.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};
use smallvec::SmallVec;

use super::element::{DeviceElement, Of};
use super::side::Core;
use super::words::By;
use crate::call::{Call, CallKind};
use crate::dtype::ReduceOp;
use crate::error::CommError;
use crate::group::Group;
use crate::group::work::Work;
use crate::nccl::{Address, Step};
use crate::reduction::Reduction;

/// Operations that a stream carries out as one, from [`OnStream::batch`](super::OnStream::batch): NCCL sees them together, and sends and
/// receives go side by side. Without [`Self::enqueue`] nothing happens.
///
/// Each method is its namesake of [`Group`], with the same meaning and arguments; buffers are on the group's device. A
/// buffer that is not looked at, such as that for what others than the root gather, may have any length.
#[must_use = "without `enqueue` nothing happens"]
pub struct DeviceBatch<'a> {
    group: &'a Group,
    core: Arc<Core>,
    stream: &'a CudaStream,
    steps: SmallVec<[Step<Of, By>; 2]>,
    /// Dropped when all is enqueued: then other streams may be told to wait.
    guards: SmallVec<[SyncOnDrop<'a>; 2]>,
    call: Option<Call>,
}

impl<'a> DeviceBatch<'a> {
    pub(super) fn new(group: &'a Group, core: Arc<Core>, stream: &'a CudaStream) -> Self {
        Self { group, core, stream, steps: SmallVec::new(), guards: SmallVec::new(), call: None }
    }

    /// As [`Group::all_reduce`].
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if the buffer is on another device or the operation has no meaning.
    pub fn all_reduce<T: DeviceElement>(
        &mut self,
        buf: &'a mut impl DevicePtrMut<T>,
        op: impl Into<Reduction<T>>,
    ) -> Result<&mut Self, CommError> {
        let (count, op) = (buf.len(), by(&op.into())?);
        let at = self.written(buf)?;
        let step = Step::AllReduce { send: at, recv: at, count, of: T::OF, op };
        Ok(self.add::<T>(CallKind::AllReduce, Some(op.op), 0, count, [step]))
    }

    /// As [`Group::all_reduce_into`].
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; also if the two are not equally long.
    pub fn all_reduce_into<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        op: impl Into<Reduction<T>>,
    ) -> Result<&mut Self, CommError> {
        let (count, op) = (send.len(), by(&op.into())?);
        check("recv", recv.len(), count)?;
        let (send, recv) = (self.read(send)?, self.written(recv)?);
        let step = Step::AllReduce { send, recv, count, of: T::OF, op };
        Ok(self.add::<T>(CallKind::AllReduce, Some(op.op), 0, count, [step]))
    }

    /// As [`Group::broadcast`].
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; also if there is no such rank.
    pub fn broadcast<T: DeviceElement>(
        &mut self,
        buf: &'a mut impl DevicePtrMut<T>,
        root: usize,
    ) -> Result<&mut Self, CommError> {
        self.check_rank(root, "root")?;
        let count = buf.len();
        let at = self.written(buf)?;
        let step = Step::Broadcast { send: at, recv: at, count, of: T::OF, root };
        Ok(self.add::<T>(CallKind::Broadcast, None, root, count, [step]))
    }

    /// As [`Group::reduce`].
    ///
    /// # Errors
    /// As [`Self::broadcast`].
    pub fn reduce<T: DeviceElement>(
        &mut self,
        buf: &'a mut impl DevicePtrMut<T>,
        op: impl Into<Reduction<T>>,
        root: usize,
    ) -> Result<&mut Self, CommError> {
        self.check_rank(root, "root")?;
        let (count, op) = (buf.len(), by(&op.into())?);
        let at = self.written(buf)?;
        let step = Step::Reduce { send: at, recv: at, count, of: T::OF, op, root };
        Ok(self.add::<T>(CallKind::Reduce, Some(op.op), root, count, [step]))
    }

    /// As [`Group::reduce_into`].
    ///
    /// # Errors
    /// As [`Self::broadcast`]; also if on the root the two are not equally long.
    pub fn reduce_into<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        op: impl Into<Reduction<T>>,
        root: usize,
    ) -> Result<&mut Self, CommError> {
        self.check_rank(root, "root")?;
        let (count, op, of) = (send.len(), by(&op.into())?, T::OF);
        let is_root = self.group.rank() == root;
        check("recv", if is_root { recv.len() } else { count }, count)?;
        let send = self.read(send)?;
        let recv = if is_root { self.written(recv)? } else { send };
        Ok(self.add::<T>(
            CallKind::Reduce,
            Some(op.op),
            root,
            count,
            [Step::Reduce { send, recv, count, of, op, root }],
        ))
    }

    /// As [`Group::all_gather`].
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; also if `recv` is not as long as all blocks.
    pub fn all_gather<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
    ) -> Result<&mut Self, CommError> {
        let count = send.len();
        check("recv", recv.len(), count * self.group.size())?;
        let (send, recv) = (self.read(send)?, self.written(recv)?);
        let step = Step::AllGather { send, recv, count, of: T::OF };
        Ok(self.add::<T>(CallKind::AllGather, None, 0, count, [step]))
    }

    /// As [`Group::reduce_scatter`].
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; also if `send` is not as long as all blocks.
    pub fn reduce_scatter<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        op: impl Into<Reduction<T>>,
    ) -> Result<&mut Self, CommError> {
        let (count, op) = (recv.len(), by(&op.into())?);
        check("send", send.len(), count * self.group.size())?;
        let (send, recv) = (self.read(send)?, self.written(recv)?);
        let step = Step::ReduceScatter { send, recv, count, of: T::OF, op };
        Ok(self.add::<T>(CallKind::ReduceScatter, Some(op.op), 0, count, [step]))
    }

    /// As [`Group::gather`].
    ///
    /// # Errors
    /// As [`Self::broadcast`]; also if on the root `recv` is not as long as all blocks.
    pub fn gather<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        root: usize,
    ) -> Result<&mut Self, CommError> {
        let lens = vec![send.len(); self.group.size()];
        self.gathered(CallKind::Gather, send, recv, &lens, root)
    }

    /// As [`Group::scatter`].
    ///
    /// # Errors
    /// As [`Self::broadcast`]; also if on the root `send` is not as long as all blocks.
    pub fn scatter<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        root: usize,
    ) -> Result<&mut Self, CommError> {
        let lens = vec![recv.len(); self.group.size()];
        self.scattered(CallKind::Scatter, send, recv, &lens, root)
    }

    /// As [`Group::all_to_all`].
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; also if the two are not equally long, or cannot be cut into a block for each rank.
    pub fn all_to_all<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
    ) -> Result<&mut Self, CommError> {
        let (size, len) = (self.group.size(), send.len());
        if !len.is_multiple_of(size) {
            let what = format!("send has {len} elements, which is no multiple of {size} ranks");
            return Err(CommError::InvalidArgument(what));
        }
        let lens = vec![len / size; size];
        self.exchanged(CallKind::AllToAll, (send, &lens), (recv, &lens))
    }

    /// As [`Group::all_gather_v`].
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; also if lengths and buffers do not fit.
    pub fn all_gather_v<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        lens: &[usize],
    ) -> Result<&mut Self, CommError> {
        let (me, of) = (self.group.rank(), T::OF);
        self.check_lens(lens)?;
        check("send", send.len(), lens[me])?;
        check("recv", recv.len(), lens.iter().sum())?;
        let (send, recv) = (self.read(send)?, self.written(recv)?);
        let steps = blocks(lens, of, recv).map(|(root, recv, count)| {
            let send = if root == me { send } else { recv };
            Step::Broadcast { send, recv, count, of, root }
        });
        Ok(self.add::<T>(CallKind::AllGatherV, None, 0, lens.iter().sum(), steps))
    }

    /// As [`Group::reduce_scatter_v`].
    ///
    /// # Errors
    /// As [`Self::all_gather_v`].
    pub fn reduce_scatter_v<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        lens: &[usize],
        op: impl Into<Reduction<T>>,
    ) -> Result<&mut Self, CommError> {
        let (me, of, op) = (self.group.rank(), T::OF, by(&op.into())?);
        self.check_lens(lens)?;
        check("send", send.len(), lens.iter().sum())?;
        check("recv", recv.len(), lens[me])?;
        let (send, recv) = (self.read(send)?, self.written(recv)?);
        let steps = blocks(lens, of, send).map(|(root, send, count)| {
            let recv = if root == me { recv } else { send };
            Step::Reduce { send, recv, count, of, op, root }
        });
        Ok(self.add::<T>(CallKind::ReduceScatterV, Some(op.op), 0, lens.iter().sum(), steps))
    }

    /// As [`Group::gather_v`].
    ///
    /// # Errors
    /// As [`Self::all_gather_v`], and if there is no such rank.
    pub fn gather_v<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        lens: &[usize],
        root: usize,
    ) -> Result<&mut Self, CommError> {
        self.gathered(CallKind::GatherV, send, recv, lens, root)
    }

    /// As [`Group::scatter_v`].
    ///
    /// # Errors
    /// As [`Self::gather_v`].
    pub fn scatter_v<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        lens: &[usize],
        root: usize,
    ) -> Result<&mut Self, CommError> {
        self.scattered(CallKind::ScatterV, send, recv, lens, root)
    }

    /// As [`Group::all_to_all_v`].
    ///
    /// # Errors
    /// As [`Self::all_gather_v`].
    pub fn all_to_all_v<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        send_lens: &[usize],
        recv: &'a mut impl DevicePtrMut<T>,
        recv_lens: &[usize],
    ) -> Result<&mut Self, CommError> {
        self.exchanged(CallKind::AllToAllV, (send, send_lens), (recv, recv_lens))
    }

    /// Sends to rank `to`, which receives as much on its device. There are no tags: messages between two ranks arrive in
    /// the order in which they were enqueued. Two ranks that send to each other do so in one batch each.
    ///
    /// # Errors
    /// As [`Self::broadcast`].
    pub fn send<T: DeviceElement>(
        &mut self,
        buf: &'a impl DevicePtr<T>,
        to: usize,
    ) -> Result<&mut Self, CommError> {
        self.check_rank(to, "send to")?;
        let count = buf.len();
        let step = Step::Send { send: self.read(buf)?, count, of: T::OF, to };
        Ok(self.add::<T>(CallKind::PointToPoint, None, 0, count, [step]))
    }

    /// Receives from rank `from` as much as the buffer has.
    ///
    /// # Errors
    /// As [`Self::broadcast`].
    pub fn recv<T: DeviceElement>(
        &mut self,
        buf: &'a mut impl DevicePtrMut<T>,
        from: usize,
    ) -> Result<&mut Self, CommError> {
        self.check_rank(from, "receive from")?;
        let count = buf.len();
        let step = Step::Recv { recv: self.written(buf)?, count, of: T::OF, from };
        Ok(self.add::<T>(CallKind::PointToPoint, None, 0, count, [step]))
    }

    /// Enqueues all of it, behind what the stream has to do. The [`Work`] is done when the stream has come past it; on the
    /// stream itself nobody need wait for it.
    ///
    /// # Errors
    /// [`CommError::Unsupported`] if NCCL cannot do that with that type; nothing is enqueued. [`CommError::Device`].
    /// Else whatever ended the group.
    pub fn enqueue(self) -> Result<Work<()>, CommError> {
        let Some(call) = self.call else { return Ok(Work::on_device(self.group.clone(), None)) };
        if self.core.options.checked && call.kind != CallKind::PointToPoint {
            self.group.compare_on_host(call, self.core.calls())?;
        }
        // SAFETY: the stream is of this device (`OnStream`), and so is the memory (`read`, `written`), which is as long as
        // its count. That it stays: cudarc's buffers are freed behind what their guards, dropped below, say of them; who
        // makes a `RawBuffer` promises it.
        #[allow(unsafe_code)]
        let begun = unsafe { self.core.enqueue(call, &self.steps, self.stream, self.group.limit()) }?;
        drop(self.guards);
        Ok(Work::on_device(self.group.clone(), begun))
    }

    fn gathered<T: DeviceElement>(
        &mut self,
        kind: CallKind,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        lens: &[usize],
        root: usize,
    ) -> Result<&mut Self, CommError> {
        self.check_rank(root, "root")?;
        let (of, count, is_root) = (T::OF, send.len(), self.group.rank() == root);
        if is_root {
            self.check_lens(lens)?;
            check("send", count, lens[root])?;
            check("recv", recv.len(), lens.iter().sum())?;
        }
        let mut steps = SmallVec::<[_; 8]>::new();
        if count > 0 {
            steps.push(Step::Send { send: self.read(send)?, count, of, to: root });
        }
        if is_root {
            let at = self.written(recv)?;
            steps.extend(blocks(lens, of, at).map(|(from, recv, count)| Step::Recv {
                recv,
                count,
                of,
                from,
            }));
        }
        Ok(self.add::<T>(kind, None, root, compared(kind, count), steps))
    }

    fn scattered<T: DeviceElement>(
        &mut self,
        kind: CallKind,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        lens: &[usize],
        root: usize,
    ) -> Result<&mut Self, CommError> {
        self.check_rank(root, "root")?;
        let (of, count, is_root) = (T::OF, recv.len(), self.group.rank() == root);
        let mut steps = SmallVec::<[_; 8]>::new();
        if is_root {
            self.check_lens(lens)?;
            check("recv", count, lens[root])?;
            check("send", send.len(), lens.iter().sum())?;
            let at = self.read(send)?;
            steps.extend(blocks(lens, of, at).map(|(to, send, count)| Step::Send { send, count, of, to }));
        }
        if count > 0 {
            steps.push(Step::Recv { recv: self.written(recv)?, count, of, from: root });
        }
        Ok(self.add::<T>(kind, None, root, compared(kind, count), steps))
    }

    fn exchanged<T: DeviceElement>(
        &mut self,
        kind: CallKind,
        (send, send_lens): (&'a impl DevicePtr<T>, &[usize]),
        (recv, recv_lens): (&'a mut impl DevicePtrMut<T>, &[usize]),
    ) -> Result<&mut Self, CommError> {
        let of = T::OF;
        self.check_lens(send_lens)?;
        self.check_lens(recv_lens)?;
        check("send", send.len(), send_lens.iter().sum())?;
        check("recv", recv.len(), recv_lens.iter().sum())?;
        let count = compared(kind, send_lens[0]);
        let (send, recv) = (self.read(send)?, self.written(recv)?);
        let sends = blocks(send_lens, of, send).map(|(to, send, count)| Step::Send { send, count, of, to });
        let recvs =
            blocks(recv_lens, of, recv).map(|(from, recv, count)| Step::Recv { recv, count, of, from });
        Ok(self.add::<T>(kind, None, 0, count, sends.chain(recvs)))
    }

    fn add<T: DeviceElement>(
        &mut self,
        kind: CallKind,
        op: Option<ReduceOp>,
        root: usize,
        count: usize,
        steps: impl IntoIterator<Item = Step<Of, By>>,
    ) -> &mut Self {
        let call = Call { kind, dtype: T::OF.dtype, op, root: root as u32, count: count as u64 };
        self.call.get_or_insert(call);
        self.steps.extend(steps);
        self
    }

    fn read<T>(&mut self, buf: &'a impl DevicePtr<T>) -> Result<Address, CommError> {
        self.check_device(buf)?;
        let (at, guard) = buf.device_ptr(self.stream);
        self.guards.push(guard);
        Ok(at)
    }

    fn written<T>(&mut self, buf: &'a mut impl DevicePtrMut<T>) -> Result<Address, CommError> {
        self.check_device(buf)?;
        let (at, guard) = buf.device_ptr_mut(self.stream);
        self.guards.push(guard);
        Ok(at)
    }

    fn check_device<T>(&self, buf: &impl DeviceSlice<T>) -> Result<(), CommError> {
        let (theirs, ours) = (buf.stream().context(), &self.core.context);
        if theirs == ours {
            return Ok(());
        }
        let (theirs, ours) = (theirs.ordinal(), ours.ordinal());
        let what = format!("a buffer is on device {theirs}; the group's side is on device {ours}");
        Err(CommError::InvalidArgument(what))
    }

    fn check_rank(&self, rank: usize, what: &str) -> Result<(), CommError> {
        self.group.check_rank(rank, what)
    }

    fn check_lens(&self, lens: &[usize]) -> Result<(), CommError> {
        check("the list of lengths", lens.len(), self.group.size())
    }
}

impl fmt::Debug for DeviceBatch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBatch").field("steps", &self.steps).finish_non_exhaustive()
    }
}

/// What ranks compare of a count: where each has its own, nothing.
fn compared(kind: CallKind, count: usize) -> usize {
    match kind {
        CallKind::GatherV | CallKind::ScatterV | CallKind::AllToAllV => 0,
        _ => count,
    }
}

/// How elements become one, for the device.
fn by<T: DeviceElement>(op: &Reduction<T>) -> Result<By, CommError> {
    let (by, dtype) = (By { op: op.op(), factor: op.factor() }, T::OF.dtype);
    match by.op {
        ReduceOp::Custom => Err(CommError::Unsupported(
            "a reduction function on a device: it is a function of the host".to_owned(),
        )),
        ReduceOp::PremulSum if by.factor.is_none() => {
            Err(CommError::InvalidArgument("premul_sum needs its factor: Reduction::premul_sum".to_owned()))
        }
        op if T::OF.eight.is_none() && !op.accepts(dtype) => {
            Err(CommError::InvalidArgument(format!("{op} of {dtype} has no meaning")))
        }
        _ => Ok(by),
    }
}

/// The blocks of a buffer that have any elements: rank, address, number.
fn blocks(lens: &[usize], of: Of, start: Address) -> impl Iterator<Item = (usize, Address, usize)> {
    let mut at = start;
    lens.iter()
        .enumerate()
        .map(move |(rank, &count)| {
            let block = (rank, at, count);
            at += (count * of.size_bytes()) as Address;
            block
        })
        .filter(|&(.., count)| count > 0)
}

fn check(what: &str, len: usize, expected: usize) -> Result<(), CommError> {
    if len == expected {
        return Ok(());
    }
    Err(CommError::InvalidArgument(format!("{what} has {len} elements, not {expected}")))
}
