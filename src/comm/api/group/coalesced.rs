//! Coalesced collectives: one operation on a list of buffers, as if they were one buffer. A list has at least
//! one buffer, and all buffers have one type.

use super::{
    BorrowedBuffer, Call, CallKind, Group, Prepared, ReduceOp, Scratch, Slice, SliceMut, UntypedReduction,
    ValueType, call,
};
use crate::collectives::plan::fingerprint;

impl Group {
    pub(crate) fn prepare_all_reduce_list<'a>(
        &self,
        bufs: Vec<SliceMut<'a>>,
        op: &UntypedReduction,
    ) -> Prepared<'a> {
        let (buffer, value, lens) = concatenated(bufs);
        let kernel = op.kernel(value.dtype, self.size())?;
        let call = list_call(value, CallKind::AllReduce, Some(op.op()), None, &lens);
        self.planned(call, buffer, Some(kernel))
    }

    pub(crate) fn prepare_broadcast_list<'a>(&self, bufs: Vec<SliceMut<'a>>, root: usize) -> Prepared<'a> {
        self.check_rank(root, "root")?;
        let (buffer, value, lens) = concatenated(bufs);
        self.planned(list_call(value, CallKind::Broadcast, None, Some(root), &lens), buffer, None)
    }

    pub(crate) fn prepare_reduce_list<'a>(
        &self,
        bufs: Vec<SliceMut<'a>>,
        op: &UntypedReduction,
        root: usize,
    ) -> Prepared<'a> {
        self.check_rank(root, "root")?;
        let (buffer, value, lens) = concatenated(bufs);
        let kernel = op.kernel(value.dtype, self.size())?;
        let call = list_call(value, CallKind::Reduce, Some(op.op()), Some(root), &lens);
        self.planned(call, buffer, Some(kernel))
    }

    pub(crate) fn prepare_all_gather_list<'a>(
        &self,
        buffers: Vec<(Slice<'a>, SliceMut<'a>)>,
    ) -> Prepared<'a> {
        let value = buffers[0].0.value_type();
        let lens: Vec<usize> = buffers.iter().map(|(send, _)| send.len()).collect();
        let count: usize = lens.iter().sum();
        let (mut buffer, mut within) = (BorrowedBuffer::default(), 0);
        for (send, recv) in buffers {
            self.check_blocks("recv", recv.len(), send.len())?;
            let mut rest = recv;
            for rank in 0..self.size() {
                let (mut block, behind) = rest.split_at(send.len());
                if rank == self.rank() {
                    block.copy_from(send);
                }
                buffer = buffer.with_mut(rank * count + within, block);
                rest = behind;
            }
            within += send.len();
        }
        self.planned(list_call(value, CallKind::AllGather, None, None, &lens), buffer, None)
    }

    pub(crate) fn prepare_reduce_scatter_list<'a>(
        &self,
        buffers: Vec<(Slice<'a>, SliceMut<'a>)>,
        op: &UntypedReduction,
    ) -> Prepared<'a> {
        let value = buffers[0].0.value_type();
        let kernel = op.kernel(value.dtype, self.size())?;
        let lens: Vec<usize> = buffers.iter().map(|(_, recv)| recv.len()).collect();
        let count: usize = lens.iter().sum();
        for (send, recv) in &buffers {
            self.check_blocks("send", send.len(), recv.len())?;
        }
        let call = list_call(value, CallKind::ReduceScatter, Some(op.op()), None, &lens);
        let (own, mut buffer, mut within) = (self.own_range(count), BorrowedBuffer::default(), 0);
        if self.inner.needs_scratch_copy(&call) {
            let blocks = (0..self.size()).flat_map(|rank| {
                buffers.iter().map(move |(send, recv)| send.part(rank * recv.len()..(rank + 1) * recv.len()))
            });
            buffer = buffer.with_scratch_around(own.clone(), Scratch::copy_of(value, blocks));
        } else {
            for (send, recv) in &buffers {
                for rank in (0..self.size()).filter(|&rank| rank != self.rank()) {
                    let block = send.part(rank * recv.len()..(rank + 1) * recv.len());
                    buffer = buffer.with_ref(rank * count + within, block);
                }
                within += recv.len();
            }
        }
        within = own.start;
        for (send, mut recv) in buffers {
            let len = recv.len();
            recv.copy_from(send.part(self.own_range(len)));
            buffer = buffer.with_mut(within, recv);
            within += len;
        }
        self.planned(call, buffer, Some(kernel))
    }
}

/// Concatenates the buffers; returns their type and lengths too.
fn concatenated(bufs: Vec<SliceMut<'_>>) -> (BorrowedBuffer<'_>, ValueType, Vec<usize>) {
    let value = bufs[0].value_type();
    let (mut buffer, mut lens, mut at) = (BorrowedBuffer::default(), Vec::new(), 0);
    for buf in bufs {
        let len = buf.len();
        buffer = buffer.with_mut(at, buf);
        lens.push(len);
        at += len;
    }
    (buffer, value, lens)
}

/// Returns the descriptor of a collective call on buffers of lengths `lens`; it must be equal on all ranks.
/// The fingerprint of the lengths is in the place of the root, or beside it. 0 stands for a call without a
/// list, so no fingerprint is 0.
fn list_call(
    value: ValueType,
    kind: CallKind,
    op: Option<ReduceOp>,
    root: Option<usize>,
    lens: &[usize],
) -> Call {
    let hash = fingerprint(lens);
    let hash = (hash ^ hash >> 32) as u32 | 1;
    let call = call(value, kind, op, root.map_or(hash, |root| root as u32), lens.iter().sum());
    if root.is_some() { call.with_lens((hash ^ hash >> 24) & 0x00FF_FFFF | 1) } else { call }
}
