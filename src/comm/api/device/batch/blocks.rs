//! Device operations with one block for each rank. They consist of NCCL sends and receives, or of one
//! broadcast or reduction for each root.

use smallvec::SmallVec;

use super::{DeviceBatch, Enqueue, call, check, datatype, device_reduction};
use crate::api::device::element::ElementType;
use crate::api::device::memory::{DeviceSource, DeviceTarget};
use crate::api::op::{AllGatherV, AllToAll, AllToAllV, Gather, GatherV, ReduceScatterV, Scatter, ScatterV};
use crate::collectives::call::CallKind;
use crate::collectives::plan::Blocks;
use crate::error::CommError;
use crate::nccl::{Address, NcclCall};

device_operations! {
    [S: DeviceSource, R: DeviceTarget<Element = S::Element>] Gather<S, R>, |operation, batch| {
        let lens = vec![operation.buffers.0.count(); batch.group.size()];
        batch.gather(CallKind::Gather, operation.buffers, &lens, operation.root)?;
    }

    [S: DeviceSource, R: DeviceTarget<Element = S::Element>] Scatter<S, R>, |operation, batch| {
        let lens = vec![operation.buffers.1.count(); batch.group.size()];
        batch.scatter(CallKind::Scatter, operation.buffers, &lens, operation.root)?;
    }

    [S: DeviceSource, R: DeviceTarget<Element = S::Element>] AllToAll<S, R>, |operation, batch| {
        let (size, len) = (batch.group.size(), operation.buffers.0.count());
        if !len.is_multiple_of(size) {
            let what = format!("send has {len} elements, which is no multiple of {size} ranks");
            return Err(CommError::InvalidArgument(what));
        }
        let lens = vec![len / size; size];
        batch.all_to_all(CallKind::AllToAll, operation.buffers, (&lens, &lens))?;
    }

    ['l, S: DeviceSource, R: DeviceTarget<Element = S::Element>] AllGatherV<'l, S, R>, |operation, batch| {
        let ((send, recv), lens) = (operation.buffers, operation.lens);
        let (me, datatype, blocks) = (batch.group.rank(), datatype::<S>(), batch.group.blocks(lens)?);
        check("send", send.count(), lens[me])?;
        check("recv", recv.count(), blocks.end())?;
        let (send, recv) = (batch.input(send)?, batch.output(recv)?);
        let steps = nonempty_blocks(&blocks, datatype, recv).map(|(root, recv, count)| {
            let send = if root == me { send } else { recv };
            NcclCall::Broadcast { send, recv, count, datatype, root }
        });
        batch.add(call::<S>(CallKind::AllGatherV, None, 0, blocks.end()), steps);
    }

    ['l, S: DeviceSource, R: DeviceTarget<Element = S::Element>] ReduceScatterV<'l, S, R>, |operation, batch| {
        let ((send, recv), lens) = (operation.buffers, operation.lens);
        let (me, datatype, op) = (batch.group.rank(), datatype::<S>(), device_reduction(&operation.op)?);
        let blocks = batch.group.blocks(lens)?;
        check("send", send.count(), blocks.end())?;
        check("recv", recv.count(), lens[me])?;
        let (send, recv) = (batch.input(send)?, batch.output(recv)?);
        let steps = nonempty_blocks(&blocks, datatype, send).map(|(root, send, count)| {
            let recv = if root == me { recv } else { send };
            NcclCall::Reduce { send, recv, count, datatype, op, root }
        });
        batch.add(call::<S>(CallKind::ReduceScatterV, Some(op.op), 0, blocks.end()), steps);
    }

    ['l, S: DeviceSource, R: DeviceTarget<Element = S::Element>] GatherV<'l, S, R>, |operation, batch| {
        batch.gather(CallKind::GatherV, operation.buffers, operation.lens, operation.root)?;
    }

    ['l, S: DeviceSource, R: DeviceTarget<Element = S::Element>] ScatterV<'l, S, R>, |operation, batch| {
        batch.scatter(CallKind::ScatterV, operation.buffers, operation.lens, operation.root)?;
    }

    ['l, S: DeviceSource, R: DeviceTarget<Element = S::Element>] AllToAllV<'l, S, R>, |operation, batch| {
        batch.all_to_all(CallKind::AllToAllV, operation.buffers, operation.lens)?;
    }
}

impl<'a> DeviceBatch<'a> {
    fn gather<S: DeviceSource + 'a, R: DeviceTarget<Element = S::Element> + 'a>(
        &mut self,
        kind: CallKind,
        (send, recv): (S, R),
        lens: &[usize],
        root: usize,
    ) -> Result<(), CommError> {
        self.check_rank(root, "root")?;
        let (datatype, count, is_root) = (datatype::<S>(), send.count(), self.group.rank() == root);
        let blocks = if is_root { Some(self.group.blocks(lens)?) } else { None };
        if let Some(blocks) = &blocks {
            check("send", count, lens[root])?;
            check("recv", recv.count(), blocks.end())?;
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
        self.add(call::<S>(kind, None, root, compared_count(kind, count)), steps);
        Ok(())
    }

    fn scatter<S: DeviceSource + 'a, R: DeviceTarget<Element = S::Element> + 'a>(
        &mut self,
        kind: CallKind,
        (send, recv): (S, R),
        lens: &[usize],
        root: usize,
    ) -> Result<(), CommError> {
        self.check_rank(root, "root")?;
        let (datatype, count, is_root) = (datatype::<S>(), recv.count(), self.group.rank() == root);
        let mut steps = SmallVec::<[_; 8]>::new();
        if is_root {
            let blocks = self.group.blocks(lens)?;
            check("recv", count, lens[root])?;
            check("send", send.count(), blocks.end())?;
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
        self.add(call::<S>(kind, None, root, compared_count(kind, count)), steps);
        Ok(())
    }

    fn all_to_all<S: DeviceSource + 'a, R: DeviceTarget<Element = S::Element> + 'a>(
        &mut self,
        kind: CallKind,
        (send, recv): (S, R),
        (send_lens, recv_lens): (&[usize], &[usize]),
    ) -> Result<(), CommError> {
        let datatype = datatype::<S>();
        let (sent, received) = (self.group.blocks(send_lens)?, self.group.blocks(recv_lens)?);
        check("send", send.count(), sent.end())?;
        check("recv", recv.count(), received.end())?;
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
        self.add(call::<S>(kind, None, 0, count), sends.chain(recvs));
        Ok(())
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
