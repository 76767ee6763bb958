//! Device operations that are one step: one call of NCCL.

use super::{DeviceBatch, Enqueue, device_reduction};
use crate::api::device::memory::{DeviceSource, DeviceTarget};
use crate::api::group::check_len;
use crate::api::op::{
    self, AllGather, AllReduce, AllReduceInto, Barrier, Broadcast, Recv, Reduce, ReduceInto, ReduceScatter,
    Send,
};
use crate::collectives::call::CallKind;
use crate::collectives::dtype::ReduceOp;
use crate::error::CommError;
use crate::nccl::NcclFunction;

device_operations! {
    [B: DeviceTarget] AllReduce<B>, |operation, batch| {
        let (count, op) = (operation.buffers.count(), device_reduction(&operation.op)?);
        let at = batch.output(operation.buffers)?;
        batch.add_step::<B>(CallKind::AllReduce, NcclFunction::AllReduce(op), (at, at), count);
    }

    [S: DeviceSource, R: DeviceTarget<Element = S::Element>] AllReduceInto<S, R>, |operation, batch| {
        let ((send, recv), op) = (operation.buffers, device_reduction(&operation.op)?);
        let count = send.count();
        check_len("recv", recv.count(), count)?;
        let at = (batch.input(send)?, batch.output(recv)?);
        batch.add_step::<S>(CallKind::AllReduce, NcclFunction::AllReduce(op), at, count);
    }

    [B: DeviceTarget] Broadcast<B>, |operation, batch| {
        let (count, root) = (operation.buffers.count(), operation.root);
        batch.group.check_rank(root, "root")?;
        let at = batch.output(operation.buffers)?;
        batch.add_step::<B>(CallKind::Broadcast, NcclFunction::Broadcast { root }, (at, at), count);
    }

    [B: DeviceTarget] Reduce<B>, |operation, batch| {
        let (count, root) = (operation.buffers.count(), operation.root);
        batch.group.check_rank(root, "root")?;
        let op = device_reduction(&operation.op)?;
        let at = batch.output(operation.buffers)?;
        batch.add_step::<B>(CallKind::Reduce, NcclFunction::Reduce { op, root }, (at, at), count);
    }

    [S: DeviceSource, R: DeviceTarget<Element = S::Element>] ReduceInto<S, R>, |operation, batch| {
        let ((send, recv), root) = (operation.buffers, operation.root);
        batch.group.check_rank(root, "root")?;
        let (count, op) = (send.count(), device_reduction(&operation.op)?);
        let is_root = batch.group.rank() == root;
        check_len("recv", if is_root { recv.count() } else { count }, count)?;
        let send = batch.input(send)?;
        let recv = if is_root { batch.output(recv)? } else { send };
        batch.add_step::<S>(CallKind::Reduce, NcclFunction::Reduce { op, root }, (send, recv), count);
    }

    [S: DeviceSource, R: DeviceTarget<Element = S::Element>] AllGather<S, R>, |operation, batch| {
        let (send, recv) = operation.buffers;
        let count = send.count();
        check_len("recv", recv.count(), count.saturating_mul(batch.group.size()))?;
        let at = (batch.input(send)?, batch.output(recv)?);
        batch.add_step::<S>(CallKind::AllGather, NcclFunction::AllGather, at, count);
    }

    [S: DeviceSource, R: DeviceTarget<Element = S::Element>] ReduceScatter<S, R>, |operation, batch| {
        let ((send, recv), op) = (operation.buffers, device_reduction(&operation.op)?);
        let count = recv.count();
        check_len("send", send.count(), count.saturating_mul(batch.group.size()))?;
        let at = (batch.input(send)?, batch.output(recv)?);
        batch.add_step::<S>(CallKind::ReduceScatter, NcclFunction::ReduceScatter(op), at, count);
    }

    [B: DeviceSource] Send<B>, |operation, batch| {
        let Send { buffer, to, tag } = operation;
        batch.group.check_rank(to, "send to")?;
        check_tag(tag)?;
        let count = buffer.count();
        let at = batch.input(buffer)?;
        batch.add_step::<B>(CallKind::PointToPoint, NcclFunction::Send { to }, (at, at), count);
    }

    [B: DeviceTarget] Recv<B>, |operation, batch| {
        let Recv { buffer, from, tag } = operation;
        let from = from.ok_or_else(|| {
            CommError::Unsupported("a receive from any rank on a device: NCCL receives from a named rank".to_owned())
        })?;
        batch.group.check_rank(from, "receive from")?;
        check_tag(tag)?;
        let count = buffer.count();
        let at = batch.output(buffer)?;
        batch.add_step::<B>(CallKind::PointToPoint, NcclFunction::Recv { from }, (at, at), count);
    }

    [] Barrier, HAS_BARRIER = true, |_barrier, batch| {
        // A second barrier of a batch would wait for nothing more.
        if let Some(buffer) = batch.barrier_buffer.take() {
            op::all_reduce(buffer, ReduceOp::Max).add(batch)?;
        }
    }
}

fn check_tag(tag: u32) -> Result<(), CommError> {
    if tag == 0 {
        return Ok(());
    }
    Err(CommError::InvalidArgument(format!("a message on a device with tag {tag}: NCCL has no tags")))
}
