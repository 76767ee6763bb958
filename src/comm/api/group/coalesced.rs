//! Coalesced collectives: one operation on a list of buffers, as if they were one buffer.

use super::{BorrowedBuffer, Call, CallKind, Element, Group, Prepared, ReduceOp, Reduction, Transfer, call};
use crate::collectives::plan::fingerprint;

impl Group {
    pub(in crate::api) fn prepare_all_reduce_list<'a, T: Element>(
        &self,
        bufs: impl Iterator<Item = &'a mut [T]>,
        op: &Reduction<T>,
    ) -> Prepared<'a> {
        let kernel = op.kernel(self.size())?;
        let (buffer, lens) = concatenated(bufs);
        self.planned(list_call::<T>(CallKind::AllReduce, Some(op.op()), &lens), buffer, Some(kernel))
    }

    pub(in crate::api) fn prepare_broadcast_list<'a, T: Transfer>(
        &self,
        bufs: impl Iterator<Item = &'a mut [T]>,
        root: usize,
    ) -> Prepared<'a> {
        self.check_rank(root, "root")?;
        let (buffer, lens) = concatenated(bufs);
        self.planned(rooted_list_call::<T>(CallKind::Broadcast, None, root, &lens), buffer, None)
    }

    pub(in crate::api) fn prepare_reduce_list<'a, T: Element>(
        &self,
        bufs: impl Iterator<Item = &'a mut [T]>,
        op: &Reduction<T>,
        root: usize,
    ) -> Prepared<'a> {
        self.check_rank(root, "root")?;
        let kernel = op.kernel(self.size())?;
        let (buffer, lens) = concatenated(bufs);
        self.planned(
            rooted_list_call::<T>(CallKind::Reduce, Some(op.op()), root, &lens),
            buffer,
            Some(kernel),
        )
    }

    pub(in crate::api) fn prepare_all_gather_list<'a, T: Transfer>(
        &self,
        buffers: impl Iterator<Item = (&'a [T], &'a mut [T])>,
    ) -> Prepared<'a> {
        let buffers: Vec<_> = buffers.collect();
        let lens: Vec<usize> = buffers.iter().map(|(send, _)| send.len()).collect();
        let count: usize = lens.iter().sum();
        let (mut buffer, mut within) = (BorrowedBuffer::default(), 0);
        for (send, recv) in buffers {
            self.check_blocks("recv", recv.len(), send.len())?;
            self.own_block_mut(recv, send.len()).copy_from_slice(send);
            for (rank, block) in recv.chunks_exact_mut(send.len().max(1)).enumerate() {
                buffer = buffer.with_mut(rank * count + within, block);
            }
            within += send.len();
        }
        self.planned(list_call::<T>(CallKind::AllGather, None, &lens), buffer, None)
    }

    pub(in crate::api) fn prepare_reduce_scatter_list<'a, T: Element>(
        &self,
        buffers: impl Iterator<Item = (&'a [T], &'a mut [T])>,
        op: &Reduction<T>,
    ) -> Prepared<'a> {
        let kernel = op.kernel(self.size())?;
        let buffers: Vec<_> = buffers.collect();
        let lens: Vec<usize> = buffers.iter().map(|(_, recv)| recv.len()).collect();
        let count: usize = lens.iter().sum();
        let call = list_call::<T>(CallKind::ReduceScatter, Some(op.op()), &lens);
        let needs_copy = self.inner.needs_scratch_copy(&call);
        let (own, mut buffer, mut within) = (self.own_range(count), BorrowedBuffer::default(), 0);
        let mut copy = vec![Vec::new(); if needs_copy { self.size() } else { 0 }];
        for (send, recv) in buffers {
            let len = recv.len();
            self.check_blocks("send", send.len(), len)?;
            recv.copy_from_slice(self.own_block(send, len));
            for (rank, block) in send.chunks_exact(len.max(1)).enumerate() {
                if needs_copy {
                    copy[rank].extend_from_slice(block);
                } else if rank != self.rank() {
                    buffer = buffer.with_ref(rank * count + within, block);
                }
            }
            buffer = buffer.with_mut(own.start + within, recv);
            within += len;
        }
        if needs_copy {
            buffer = buffer.with_scratch_around(own, copy.concat());
        }
        self.planned(call, buffer, Some(kernel))
    }
}

/// Concatenates the buffers; returns their lengths too.
fn concatenated<'a, T: Transfer>(
    bufs: impl Iterator<Item = &'a mut [T]>,
) -> (BorrowedBuffer<'a>, Vec<usize>) {
    let (mut buffer, mut lens, mut at) = (BorrowedBuffer::default(), Vec::new(), 0);
    for buf in bufs {
        let len = buf.len();
        buffer = buffer.with_mut(at, buf);
        lens.push(len);
        at += len;
    }
    (buffer, lens)
}

/// Returns the descriptor of a collective call on buffers of lengths `lens`; it must be equal on all ranks.
fn list_call<T: Transfer>(kind: CallKind, op: Option<ReduceOp>, lens: &[usize]) -> Call {
    let hash = fingerprint(lens);
    // 0 stands for a call without a list, so the fingerprint is never 0.
    call::<T>(kind, op, (hash ^ hash >> 32) as u32 | 1, lens.iter().sum())
}

/// Returns the descriptor of [`list_call`] with the rank `root`.
fn rooted_list_call<T: Transfer>(kind: CallKind, op: Option<ReduceOp>, root: usize, lens: &[usize]) -> Call {
    let list = list_call::<T>(kind, op, lens);
    Call { root: root as u32, ..list }.with_lens((list.root ^ list.root >> 24) & 0x00FF_FFFF | 1)
}
