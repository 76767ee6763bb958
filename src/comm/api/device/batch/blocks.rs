//! Device operations with one block for each rank. They consist of NCCL sends and receives, or of one
//! broadcast or reduction for each root.

use super::{DeviceBatch, Enqueue, call, datatype, device_reduction};
use crate::api::device::memory::{DeviceSource, DeviceTarget};
use crate::api::device::type_mapping::{DeviceReduction, Step};
use crate::api::group::check_len;
use crate::api::op::{AllGatherV, AllToAll, AllToAllV, Gather, GatherV, ReduceScatterV, Scatter, ScatterV};
use crate::collectives::call::CallKind;
use crate::collectives::plan::Blocks;
use crate::error::CommError;
use crate::nccl::{Address, NcclFunction};

type Function = NcclFunction<DeviceReduction>;

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
        let (me, blocks) = (batch.group.rank(), batch.group.blocks(lens)?);
        check_len("send", send.count(), lens[me])?;
        check_len("recv", recv.count(), blocks.end())?;
        let (send, recv) = (batch.input(send)?, batch.output(recv)?);
        let steps = block_steps::<S>(&blocks, recv, |root, recv| {
            (NcclFunction::Broadcast { root }, if root == me { send } else { recv }, recv)
        });
        batch.add(call::<S>(CallKind::AllGatherV, None, 0, blocks.end()), steps);
    }

    ['l, S: DeviceSource, R: DeviceTarget<Element = S::Element>] ReduceScatterV<'l, S, R>, |operation, batch| {
        let ((send, recv), lens) = (operation.buffers, operation.lens);
        let (me, op) = (batch.group.rank(), device_reduction(&operation.op)?);
        let blocks = batch.group.blocks(lens)?;
        check_len("send", send.count(), blocks.end())?;
        check_len("recv", recv.count(), lens[me])?;
        let (send, recv) = (batch.input(send)?, batch.output(recv)?);
        let steps = block_steps::<S>(&blocks, send, |root, send| {
            (NcclFunction::Reduce { op, root }, send, if root == me { recv } else { send })
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
        self.group.check_rank(root, "root")?;
        let count = send.count();
        let blocks = if self.group.rank() == root { Some(self.group.blocks(lens)?) } else { None };
        if let Some(blocks) = &blocks {
            check_len("send", count, lens[root])?;
            check_len("recv", recv.count(), blocks.end())?;
        }
        let call = call::<S>(kind, None, root, compared_count(kind, count));
        let send = if count > 0 { Some(self.input(send)?) } else { None };
        self.add(call, send.map(|at| message::<S>(NcclFunction::Send { to: root }, at, count)));
        if let Some(blocks) = &blocks {
            let recv = self.output(recv)?;
            self.add(call, block_steps::<S>(blocks, recv, |from, at| (NcclFunction::Recv { from }, at, at)));
        }
        Ok(())
    }

    fn scatter<S: DeviceSource + 'a, R: DeviceTarget<Element = S::Element> + 'a>(
        &mut self,
        kind: CallKind,
        (send, recv): (S, R),
        lens: &[usize],
        root: usize,
    ) -> Result<(), CommError> {
        self.group.check_rank(root, "root")?;
        let count = recv.count();
        let call = call::<S>(kind, None, root, compared_count(kind, count));
        if self.group.rank() == root {
            let blocks = self.group.blocks(lens)?;
            check_len("recv", count, lens[root])?;
            check_len("send", send.count(), blocks.end())?;
            let send = self.input(send)?;
            self.add(call, block_steps::<S>(&blocks, send, |to, at| (NcclFunction::Send { to }, at, at)));
        }
        let recv = if count > 0 { Some(self.output(recv)?) } else { None };
        self.add(call, recv.map(|at| message::<S>(NcclFunction::Recv { from: root }, at, count)));
        Ok(())
    }

    fn all_to_all<S: DeviceSource + 'a, R: DeviceTarget<Element = S::Element> + 'a>(
        &mut self,
        kind: CallKind,
        (send, recv): (S, R),
        (send_lens, recv_lens): (&[usize], &[usize]),
    ) -> Result<(), CommError> {
        let (sent, received) = (self.group.blocks(send_lens)?, self.group.blocks(recv_lens)?);
        check_len("send", send.count(), sent.end())?;
        check_len("recv", recv.count(), received.end())?;
        let call = call::<S>(kind, None, 0, compared_count(kind, send_lens[0]));
        let (send, recv) = (self.input(send)?, self.output(recv)?);
        self.add(call, block_steps::<S>(&sent, send, |to, at| (NcclFunction::Send { to }, at, at)));
        self.add(call, block_steps::<S>(&received, recv, |from, at| (NcclFunction::Recv { from }, at, at)));
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

/// A message of `count` elements like those of `B`, from or to the address `at`.
fn message<B: DeviceSource>(function: Function, at: Address, count: usize) -> Step {
    Step { function, send: at, recv: at, count, datatype: datatype::<B>() }
}

/// The steps on the non-empty blocks of a buffer at `start`, of elements like those of `B`. For a rank and
/// the address of its block, `step` returns the function, and the addresses to read and write.
fn block_steps<B: DeviceSource>(
    blocks: &Blocks,
    start: Address,
    step: impl Fn(usize, Address) -> (Function, Address, Address),
) -> impl Iterator<Item = Step> {
    let datatype = datatype::<B>();
    (0..blocks.world()).filter(move |&rank| !blocks.range(rank).is_empty()).map(move |rank| {
        let range = blocks.range(rank);
        let (function, send, recv) = step(rank, start + (range.start * datatype.size_bytes()) as Address);
        Step { function, send, recv, count: range.len(), datatype }
    })
}
