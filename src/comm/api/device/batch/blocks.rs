//! Operations of a batch with one block for each rank. They consist of NCCL sends and receives, or of one
//! broadcast or reduction for each root.

use cudarc::driver::{DevicePtr, DevicePtrMut};
use smallvec::SmallVec;

use super::{DeviceBatch, check, device_reduction};
use crate::api::device::element::{DeviceElement, ElementType};
use crate::api::reduction::Reduction;
use crate::collectives::call::CallKind;
use crate::collectives::plan::Blocks;
use crate::error::CommError;
use crate::nccl::{Address, NcclCall};

/// Operations with one block for each rank.
impl<'a> DeviceBatch<'a> {
    /// As [`Group::gather`](crate::Group::gather).
    ///
    /// # Errors
    /// As [`Self::broadcast`]; also if on the root `recv` is not as long as all blocks together.
    pub fn gather<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        root: usize,
    ) -> Result<&mut Self, CommError> {
        let lens = vec![send.len(); self.group.size()];
        self.push_gather(CallKind::Gather, send, recv, &lens, root)
    }

    /// As [`Group::scatter`](crate::Group::scatter).
    ///
    /// # Errors
    /// As [`Self::broadcast`]; also if on the root `send` is not as long as all blocks together.
    pub fn scatter<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        root: usize,
    ) -> Result<&mut Self, CommError> {
        let lens = vec![recv.len(); self.group.size()];
        self.push_scatter(CallKind::Scatter, send, recv, &lens, root)
    }

    /// As [`Group::all_to_all`](crate::Group::all_to_all).
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; also if `send` and `recv` are not equally long, or do not divide into one
    /// equal block for each rank.
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
        self.push_all_to_all(CallKind::AllToAll, (send, &lens), (recv, &lens))
    }

    /// As [`Group::all_gather_v`](crate::Group::all_gather_v).
    ///
    /// # Errors
    /// As [`Self::all_reduce`]; also if the buffers do not have the lengths of their blocks.
    pub fn all_gather_v<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        lens: &[usize],
    ) -> Result<&mut Self, CommError> {
        let (me, datatype) = (self.group.rank(), T::ELEMENT_TYPE);
        let blocks = self.group.blocks(lens)?;
        check("send", send.len(), lens[me])?;
        check("recv", recv.len(), blocks.end())?;
        let (send, recv) = (self.input(send)?, self.output(recv)?);
        let steps = nonempty_blocks(&blocks, datatype, recv).map(|(root, recv, count)| {
            let send = if root == me { send } else { recv };
            NcclCall::Broadcast { send, recv, count, datatype, root }
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
        let (me, datatype, op) = (self.group.rank(), T::ELEMENT_TYPE, device_reduction(&op.into())?);
        let blocks = self.group.blocks(lens)?;
        check("send", send.len(), blocks.end())?;
        check("recv", recv.len(), lens[me])?;
        let (send, recv) = (self.input(send)?, self.output(recv)?);
        let steps = nonempty_blocks(&blocks, datatype, send).map(|(root, send, count)| {
            let recv = if root == me { recv } else { send };
            NcclCall::Reduce { send, recv, count, datatype, op, root }
        });
        Ok(self.add::<T>(CallKind::ReduceScatterV, Some(op.op), 0, blocks.end(), steps))
    }

    /// As [`Group::gather_v`](crate::Group::gather_v).
    ///
    /// # Errors
    /// As [`Self::all_gather_v`], and if there is no rank `root`.
    pub fn gather_v<T: DeviceElement>(
        &mut self,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        lens: &[usize],
        root: usize,
    ) -> Result<&mut Self, CommError> {
        self.push_gather(CallKind::GatherV, send, recv, lens, root)
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
        self.push_scatter(CallKind::ScatterV, send, recv, lens, root)
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
        self.push_all_to_all(CallKind::AllToAllV, (send, send_lens), (recv, recv_lens))
    }

    fn push_gather<T: DeviceElement>(
        &mut self,
        kind: CallKind,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        lens: &[usize],
        root: usize,
    ) -> Result<&mut Self, CommError> {
        self.check_rank(root, "root")?;
        let (datatype, count, is_root) = (T::ELEMENT_TYPE, send.len(), self.group.rank() == root);
        let blocks = if is_root { Some(self.group.blocks(lens)?) } else { None };
        if let Some(blocks) = &blocks {
            check("send", count, lens[root])?;
            check("recv", recv.len(), blocks.end())?;
        }
        let mut steps = SmallVec::<[_; 8]>::new();
        if count > 0 {
            steps.push(NcclCall::Send { send: self.input(send)?, count, datatype, to: root });
        }
        if let Some(blocks) = &blocks {
            let at = self.output(recv)?;
            steps.extend(nonempty_blocks(blocks, datatype, at).map(|(from, recv, count)| NcclCall::Recv {
                recv,
                count,
                datatype,
                from,
            }));
        }
        Ok(self.add::<T>(kind, None, root, compared_count(kind, count), steps))
    }

    fn push_scatter<T: DeviceElement>(
        &mut self,
        kind: CallKind,
        send: &'a impl DevicePtr<T>,
        recv: &'a mut impl DevicePtrMut<T>,
        lens: &[usize],
        root: usize,
    ) -> Result<&mut Self, CommError> {
        self.check_rank(root, "root")?;
        let (datatype, count, is_root) = (T::ELEMENT_TYPE, recv.len(), self.group.rank() == root);
        let mut steps = SmallVec::<[_; 8]>::new();
        if is_root {
            let blocks = self.group.blocks(lens)?;
            check("recv", count, lens[root])?;
            check("send", send.len(), blocks.end())?;
            let at = self.input(send)?;
            steps.extend(nonempty_blocks(&blocks, datatype, at).map(|(to, send, count)| NcclCall::Send {
                send,
                count,
                datatype,
                to,
            }));
        }
        if count > 0 {
            steps.push(NcclCall::Recv { recv: self.output(recv)?, count, datatype, from: root });
        }
        Ok(self.add::<T>(kind, None, root, compared_count(kind, count), steps))
    }

    fn push_all_to_all<T: DeviceElement>(
        &mut self,
        kind: CallKind,
        (send, send_lens): (&'a impl DevicePtr<T>, &[usize]),
        (recv, recv_lens): (&'a mut impl DevicePtrMut<T>, &[usize]),
    ) -> Result<&mut Self, CommError> {
        let datatype = T::ELEMENT_TYPE;
        let (sent, received) = (self.group.blocks(send_lens)?, self.group.blocks(recv_lens)?);
        check("send", send.len(), sent.end())?;
        check("recv", recv.len(), received.end())?;
        let count = compared_count(kind, send_lens[0]);
        let (send, recv) = (self.input(send)?, self.output(recv)?);
        let sends = nonempty_blocks(&sent, datatype, send).map(|(to, send, count)| NcclCall::Send {
            send,
            count,
            datatype,
            to,
        });
        let recvs = nonempty_blocks(&received, datatype, recv).map(|(from, recv, count)| NcclCall::Recv {
            recv,
            count,
            datatype,
            from,
        });
        Ok(self.add::<T>(kind, None, 0, count, sends.chain(recvs)))
    }
}

/// The element count by which ranks compare their calls; 0 for calls in which each rank has its own counts.
fn compared_count(kind: CallKind, count: usize) -> usize {
    match kind {
        CallKind::GatherV | CallKind::ScatterV | CallKind::AllToAllV => 0,
        _ => count,
    }
}

/// The non-empty blocks of a buffer: rank, device address, number of elements.
fn nonempty_blocks(
    blocks: &Blocks,
    datatype: ElementType,
    start: Address,
) -> impl Iterator<Item = (usize, Address, usize)> {
    let location = move |rank: usize| {
        let range = blocks.range(rank);
        (rank, start + (range.start * datatype.size_bytes()) as Address, range.len())
    };
    (0..blocks.world()).map(location).filter(|&(.., count)| count > 0)
}
