//! Operations of a batch with one block for each rank. They use NCCL's messages, or a broadcast or reduction
//! with each rank as the root.

use cudarc::driver::{DevicePtr, DevicePtrMut};
use smallvec::SmallVec;

use super::{DeviceBatch, by, check};
use crate::call::CallKind;
use crate::device::element::{DeviceElement, Of};
use crate::error::CommError;
use crate::nccl::{Address, Step};
use crate::plan::Blocks;
use crate::reduction::Reduction;

/// Operations with one block for each rank.
impl<'a> DeviceBatch<'a> {
    /// As [`Group::gather`](crate::Group::gather).
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

    /// As [`Group::scatter`](crate::Group::scatter).
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

    /// As [`Group::all_to_all`](crate::Group::all_to_all).
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; also if the two are not equally long, or cannot be cut into a block for each
    /// rank.
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

    /// As [`Group::all_gather_v`](crate::Group::all_gather_v).
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
        let blocks = self.group.blocks(lens)?;
        check("send", send.len(), lens[me])?;
        check("recv", recv.len(), blocks.end())?;
        let (send, recv) = (self.read(send)?, self.written(recv)?);
        let steps = filled(&blocks, of, recv).map(|(root, recv, count)| {
            let send = if root == me { send } else { recv };
            Step::Broadcast { send, recv, count, of, root }
        });
        Ok(self.add::<T>(CallKind::AllGatherV, None, 0, blocks.end(), steps))
    }

    /// As [`Group::reduce_scatter_v`](crate::Group::reduce_scatter_v).
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
        let blocks = self.group.blocks(lens)?;
        check("send", send.len(), blocks.end())?;
        check("recv", recv.len(), lens[me])?;
        let (send, recv) = (self.read(send)?, self.written(recv)?);
        let steps = filled(&blocks, of, send).map(|(root, send, count)| {
            let recv = if root == me { recv } else { send };
            Step::Reduce { send, recv, count, of, op, root }
        });
        Ok(self.add::<T>(CallKind::ReduceScatterV, Some(op.op), 0, blocks.end(), steps))
    }

    /// As [`Group::gather_v`](crate::Group::gather_v).
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

    /// As [`Group::scatter_v`](crate::Group::scatter_v).
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

    /// As [`Group::all_to_all_v`](crate::Group::all_to_all_v).
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
        let blocks = if is_root { Some(self.group.blocks(lens)?) } else { None };
        if let Some(blocks) = &blocks {
            check("send", count, lens[root])?;
            check("recv", recv.len(), blocks.end())?;
        }
        let mut steps = SmallVec::<[_; 8]>::new();
        if count > 0 {
            steps.push(Step::Send { send: self.read(send)?, count, of, to: root });
        }
        if let Some(blocks) = &blocks {
            let at = self.written(recv)?;
            steps.extend(filled(blocks, of, at).map(|(from, recv, count)| Step::Recv {
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
            let blocks = self.group.blocks(lens)?;
            check("recv", count, lens[root])?;
            check("send", send.len(), blocks.end())?;
            let at = self.read(send)?;
            steps.extend(filled(&blocks, of, at).map(|(to, send, count)| Step::Send { send, count, of, to }));
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
        let (sent, received) = (self.group.blocks(send_lens)?, self.group.blocks(recv_lens)?);
        check("send", send.len(), sent.end())?;
        check("recv", recv.len(), received.end())?;
        let count = compared(kind, send_lens[0]);
        let (send, recv) = (self.read(send)?, self.written(recv)?);
        let sends = filled(&sent, of, send).map(|(to, send, count)| Step::Send { send, count, of, to });
        let recvs =
            filled(&received, of, recv).map(|(from, recv, count)| Step::Recv { recv, count, of, from });
        Ok(self.add::<T>(kind, None, 0, count, sends.chain(recvs)))
    }
}

/// The count that ranks compare; 0 for calls in which each rank has its own counts.
fn compared(kind: CallKind, count: usize) -> usize {
    match kind {
        CallKind::GatherV | CallKind::ScatterV | CallKind::AllToAllV => 0,
        _ => count,
    }
}

/// The non-empty blocks of a buffer: rank, address, number of elements.
fn filled(blocks: &Blocks, of: Of, start: Address) -> impl Iterator<Item = (usize, Address, usize)> {
    let place = move |rank: usize| {
        let range = blocks.of(rank);
        (rank, start + (range.start * of.size_bytes()) as Address, range.len())
    };
    (0..blocks.world()).map(place).filter(|&(.., count)| count > 0)
}
