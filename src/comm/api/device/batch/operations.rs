//! Device operations that are one step: one call of NCCL.

use super::{DeviceBatch, Enqueue, call, check, datatype, device_reduction};
use crate::api::device::memory::{DeviceSource, DeviceTarget};
use crate::api::op::{
    self, AllGather, AllReduce, AllReduceInto, Barrier, Broadcast, Recv, Reduce, ReduceInto, ReduceScatter,
    Send,
};
use crate::collectives::call::CallKind;
use crate::collectives::dtype::ReduceOp;
use crate::error::CommError;
use crate::nccl::NcclCall;

device_operations! {
    [B: DeviceTarget] AllReduce<B>, |operation, batch| {
        let (buf, op) = (operation.buffers, device_reduction(&operation.op)?);
        let (count, datatype) = (buf.count(), datatype::<B>());
        let at = batch.output(buf)?;
        let call = call::<B>(CallKind::AllReduce, Some(op.op), 0, count);
        batch.add(call, [NcclCall::AllReduce { send: at, recv: at, count, datatype, op }]);
    }

    [S: DeviceSource, R: DeviceTarget<Element = S::Element>] AllReduceInto<S, R>, |operation, batch| {
        let ((send, recv), op) = (operation.buffers, device_reduction(&operation.op)?);
        let (count, datatype) = (send.count(), datatype::<S>());
        check("recv", recv.count(), count)?;
        let (send, recv) = (batch.input(send)?, batch.output(recv)?);
        let call = call::<S>(CallKind::AllReduce, Some(op.op), 0, count);
        batch.add(call, [NcclCall::AllReduce { send, recv, count, datatype, op }]);
    }

    [B: DeviceTarget] Broadcast<B>, |operation, batch| {
        let (buf, root) = (operation.buffers, operation.root);
        batch.check_rank(root, "root")?;
        let (count, datatype) = (buf.count(), datatype::<B>());
        let at = batch.output(buf)?;
        let call = call::<B>(CallKind::Broadcast, None, root, count);
        batch.add(call, [NcclCall::Broadcast { send: at, recv: at, count, datatype, root }]);
    }

    [B: DeviceTarget] Reduce<B>, |operation, batch| {
        let (buf, root) = (operation.buffers, operation.root);
        batch.check_rank(root, "root")?;
        let (count, datatype, op) = (buf.count(), datatype::<B>(), device_reduction(&operation.op)?);
        let at = batch.output(buf)?;
        let call = call::<B>(CallKind::Reduce, Some(op.op), root, count);
        batch.add(call, [NcclCall::Reduce { send: at, recv: at, count, datatype, op, root }]);
    }

    [S: DeviceSource, R: DeviceTarget<Element = S::Element>] ReduceInto<S, R>, |operation, batch| {
        let ((send, recv), root) = (operation.buffers, operation.root);
        batch.check_rank(root, "root")?;
        let (count, datatype, op) = (send.count(), datatype::<S>(), device_reduction(&operation.op)?);
        let is_root = batch.group.rank() == root;
        check("recv", if is_root { recv.count() } else { count }, count)?;
        let send = batch.input(send)?;
        let recv = if is_root { batch.output(recv)? } else { send };
        let call = call::<S>(CallKind::Reduce, Some(op.op), root, count);
        batch.add(call, [NcclCall::Reduce { send, recv, count, datatype, op, root }]);
    }

    [S: DeviceSource, R: DeviceTarget<Element = S::Element>] AllGather<S, R>, |operation, batch| {
        let (send, recv) = operation.buffers;
        let (count, datatype) = (send.count(), datatype::<S>());
        check("recv", recv.count(), count.saturating_mul(batch.group.size()))?;
        let (send, recv) = (batch.input(send)?, batch.output(recv)?);
        let call = call::<S>(CallKind::AllGather, None, 0, count);
        batch.add(call, [NcclCall::AllGather { send, recv, count, datatype }]);
    }

    [S: DeviceSource, R: DeviceTarget<Element = S::Element>] ReduceScatter<S, R>, |operation, batch| {
        let ((send, recv), op) = (operation.buffers, device_reduction(&operation.op)?);
        let (count, datatype) = (recv.count(), datatype::<S>());
        check("send", send.count(), count.saturating_mul(batch.group.size()))?;
        let (send, recv) = (batch.input(send)?, batch.output(recv)?);
        let call = call::<S>(CallKind::ReduceScatter, Some(op.op), 0, count);
        batch.add(call, [NcclCall::ReduceScatter { send, recv, count, datatype, op }]);
    }

    [B: DeviceSource] Send<B>, |operation, batch| {
        let Send { buffer, to, tag } = operation;
        batch.check_rank(to, "send to")?;
        check_tag(tag)?;
        let (count, datatype) = (buffer.count(), datatype::<B>());
        let step = NcclCall::Send { send: batch.input(buffer)?, count, datatype, to };
        batch.add(call::<B>(CallKind::PointToPoint, None, 0, count), [step]);
    }

    [B: DeviceTarget] Recv<B>, |operation, batch| {
        let Recv { buffer, from, tag } = operation;
        let from = from.ok_or_else(|| {
            CommError::Unsupported("a receive from any rank on a device: NCCL receives from a named rank".to_owned())
        })?;
        batch.check_rank(from, "receive from")?;
        check_tag(tag)?;
        let (count, datatype) = (buffer.count(), datatype::<B>());
        let step = NcclCall::Recv { recv: batch.output(buffer)?, count, datatype, from };
        batch.add(call::<B>(CallKind::PointToPoint, None, 0, count), [step]);
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
