//! The buffers of a collective as most callers pass them: one to send and one to receive.

use std::marker::PhantomData;
use std::ops::Range;

use super::borrowed::{Part, PendingCopy};
use super::{BorrowedBuffer, BytesMut, Scratch, Slice, SliceMut, ValueType};
use crate::collectives::call::CallKind;
use crate::collectives::dtype::Dtype;
use crate::collectives::kernels::copy;

/// A send buffer and a receive buffer, each contiguous, with their positions in the range of bytes that the
/// collective works on (see [`BorrowedBuffer`]). A call in place has one buffer in both roles.
///
/// A short call in shared memory uses these buffers directly, because making the list of parts of a
/// [`BorrowedBuffer`] takes a tenth of its time. Other calls [convert](Self::into_borrowed) them.
///
/// While a `SendRecvBuffers` exists, its memory is valid and used as that of a [`BorrowedBuffer`].
#[derive(Debug)]
pub(crate) struct SendRecvBuffers<'a> {
    send: Part,
    recv: Part,
    /// The copy of this rank's own block from the send to the receive buffer; no bytes if there is none.
    own: PendingCopy,
    bools: bool,
    borrowed: PhantomData<&'a mut [u8]>,
}

// SAFETY: as for `BorrowedBuffer`.
#[allow(unsafe_code)]
unsafe impl Send for SendRecvBuffers<'_> {}

/// The buffers of a collective: one to send and one to receive, or a list of parts.
#[derive(Debug)]
pub(crate) enum CollectiveBuffers<'a> {
    SendRecv(SendRecvBuffers<'a>),
    Parts(BorrowedBuffer<'a>),
}

impl<'a> CollectiveBuffers<'a> {
    /// Returns the buffers of a collective of this kind as a list of parts.
    pub(crate) fn into_borrowed(self, kind: CallKind) -> BorrowedBuffer<'a> {
        match self {
            Self::SendRecv(buffers) => buffers.into_borrowed(kind),
            Self::Parts(buffer) => buffer,
        }
    }
}

impl Part {
    /// Returns the bytes of the collective that this part has.
    fn range(&self) -> Range<usize> {
        self.at..self.at + self.len
    }

    /// Returns the bytes of the collective that are at `start` in memory, within this part.
    fn range_of(&self, start: *const u8, len: usize) -> Range<usize> {
        if len == 0 {
            return 0..0;
        }
        let at = self.at + (start as usize - self.start as usize);
        at..at + len
    }

    /// Returns whether this part has the bytes `range` of the collective.
    #[inline(always)]
    fn has(&self, range: &Range<usize>) -> bool {
        let (at, len) = (range.start.wrapping_sub(self.at), range.end.wrapping_sub(range.start));
        at <= self.len && len <= self.len - at
    }

    /// Returns the address of the bytes `range` of the collective, which this part must have.
    #[inline(always)]
    fn address(&self, range: &Range<usize>) -> *mut u8 {
        assert!(self.has(range), "{range:?} of {self:?}");
        self.start.wrapping_add(range.start.wrapping_sub(self.at))
    }
}

impl<'a> From<BorrowedBuffer<'a>> for CollectiveBuffers<'a> {
    fn from(buffer: BorrowedBuffer<'a>) -> Self {
        Self::Parts(buffer)
    }
}

impl<'a> From<SendRecvBuffers<'a>> for CollectiveBuffers<'a> {
    #[inline(always)]
    fn from(buffers: SendRecvBuffers<'a>) -> Self {
        Self::SendRecv(buffers)
    }
}

impl<'a> SendRecvBuffers<'a> {
    /// No buffers, for a call that moves no data.
    #[inline(always)]
    pub(crate) fn none() -> Self {
        Self::of(Part::NONE, Part::NONE, false)
    }

    /// A buffer that is read and changed.
    #[inline(always)]
    pub(crate) fn in_place(buf: SliceMut<'a>) -> Self {
        Self::of(Part::new(0, &buf, false), Part::new(0, &buf, true), is_bool(buf.value_type()))
    }

    /// A buffer that is read and then filled. The bytes that are filled follow those that are read.
    #[inline(always)]
    pub(crate) fn exchanged(buf: SliceMut<'a>) -> Self {
        let (send, recv) = (Part::new(0, &buf, false), Part::new(buf.len(), &buf, true));
        Self::of(send, recv, is_bool(buf.value_type()))
    }

    /// A buffer that is read, from value `at` of the collective on.
    #[inline(always)]
    pub(crate) fn send_only(at: usize, send: Slice<'a>) -> Self {
        Self::of(Part::new(at, &send, false), Part::NONE, is_bool(send.value_type()))
    }

    /// A buffer that is filled, from value `at` of the collective on.
    #[inline(always)]
    pub(crate) fn recv_only(at: usize, recv: SliceMut<'a>) -> Self {
        Self::of(Part::NONE, Part::new(at, &recv, true), is_bool(recv.value_type()))
    }

    /// A buffer that is read and one that is filled, of equal type, with their positions in the collective.
    /// The values `own` of each buffer are those that this rank sends to itself: they are copied.
    #[inline(always)]
    pub(crate) fn new(
        (send_at, send): (usize, Slice<'a>),
        (recv_at, recv): (usize, SliceMut<'a>),
        own: (Range<usize>, Range<usize>),
    ) -> Self {
        let value = recv.value_type();
        let (from, into) = (send.part(own.0), recv.as_slice().part(own.1));
        assert!(value == send.value_type() && from.len() == into.len(), "the copy fits");
        let own = PendingCopy { from: from.start(), into: into.start(), len: from.size_bytes() };
        let (send, recv) = (Part::new(send_at, &send, false), Part::new(recv_at, &recv, true));
        Self { own, ..Self::of(send, recv, is_bool(value)) }
    }

    #[inline(always)]
    fn of(send: Part, recv: Part, bools: bool) -> Self {
        Self { send, recv, own: PendingCopy::NONE, bools, borrowed: PhantomData }
    }

    /// Returns whether there are no bytes to send or to fill.
    pub(crate) fn is_empty(&self) -> bool {
        self.send.len == 0 && self.recv.len == 0
    }

    /// Returns whether the send buffer has the bytes `range` of the collective.
    #[inline(always)]
    pub(crate) fn sends(&self, range: &Range<usize>) -> bool {
        self.send.has(range)
    }

    /// Returns whether the receive buffer has the bytes `range` of the collective.
    #[inline(always)]
    pub(crate) fn receives(&self, range: &Range<usize>) -> bool {
        self.recv.has(range)
    }

    /// Returns whether one buffer is sent and filled.
    fn is_in_place(&self) -> bool {
        self.send.start == self.recv.start && self.send.len == self.recv.len
    }

    /// Returns the buffers of a reduce-scatter whose plan overwrites the blocks of other ranks: these blocks are copies.
    pub(crate) fn with_scratch_blocks(mut self) -> BorrowedBuffer<'a> {
        if self.is_in_place() {
            return self.into_borrowed(CallKind::ReduceScatter);
        }
        self.copy_own();
        let sent = Scratch::copy_of_bytes(self.sent(self.send.range()));
        let buffer = BorrowedBuffer::default();
        let mut buffer = match self.send.range_of(self.own.from, self.own.len) {
            none if none.is_empty() => buffer.with_scratch(0, sent),
            own => buffer.with_scratch_around(own, sent),
        };
        buffer.bools = self.bools;
        buffer.add(self.recv);
        buffer
    }

    /// Takes these buffers out, as a list of parts for a collective of this kind.
    pub(crate) fn take(&mut self, kind: CallKind) -> BorrowedBuffer<'a> {
        std::mem::replace(self, Self::none()).into_borrowed(kind)
    }

    /// Returns the buffers of a collective of this kind as a list of parts.
    pub(crate) fn into_borrowed(mut self, kind: CallKind) -> BorrowedBuffer<'a> {
        let is_in_place = self.is_in_place();
        // An exchange in place overwrites what it still sends, and a reduction adds to what it sends.
        let is_changed =
            is_in_place && self.send.at != self.recv.at || kind == CallKind::Reduce && self.recv.len == 0;
        // A rank reduces into its own block, which is its contribution at first. In other calls, the block is copied
        // while the rank waits for data.
        let reduces = matches!(kind, CallKind::ReduceScatter | CallKind::ReduceScatterV);
        if reduces {
            self.copy_own();
        }
        let mut buffer = BorrowedBuffer::default();
        if is_changed {
            buffer = buffer.with_scratch(0, Scratch::copy_of_bytes(self.sent(self.send.range())));
        }
        let Self { send, recv, own, bools, .. } = self;
        buffer.bools = bools;
        if !is_in_place && !is_changed {
            let hole = if reduces { send.range_of(own.from, own.len) } else { 0..0 };
            buffer.add_around(send, hole);
        }
        if reduces {
            buffer.add(recv);
        } else {
            let hole = recv.range_of(own.into, own.len);
            buffer.add_around(recv, hole);
            buffer.add_copy(own);
        }
        buffer
    }
}

#[inline(always)]
fn is_bool(value: ValueType) -> bool {
    value.dtype == Dtype::Bool
}

#[allow(unsafe_code)]
impl SendRecvBuffers<'_> {
    /// Copies this rank's own block. More than one copy does no harm.
    #[inline(always)]
    pub(crate) fn copy_own(&mut self) {
        let PendingCopy { from, into, len } = self.own;
        // SAFETY: both are parts of borrowed slices of one type, with `len` bytes each. They are apart, since one was
        // borrowed exclusively beside the other, and nobody else accesses them.
        unsafe { copy(from, into, len) };
    }

    /// Returns the bytes `range` of the collective, which the send buffer has.
    #[inline(always)]
    pub(crate) fn sent(&self, range: Range<usize>) -> &[u8] {
        let start = self.send.address(&range);
        // SAFETY: in bounds, checked by `address`; borrowed and initialised; written only through `received`, which
        // borrows `self` exclusively.
        unsafe { std::slice::from_raw_parts(start, range.len()) }
    }

    /// Returns the bytes `range` of the collective, which the receive buffer has.
    #[inline(always)]
    pub(crate) fn received(&mut self, range: Range<usize>) -> BytesMut<'_> {
        let start = self.recv.address(&range);
        // SAFETY: in bounds, checked by `address`; borrowed exclusively and initialised, and `self` is borrowed
        // exclusively too. `BytesMut` makes bytes valid elements.
        BytesMut::new(unsafe { std::slice::from_raw_parts_mut(start, range.len()) }, self.bools)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes of each part of `buffer` after its copies, their positions, and whether they are writable.
    fn parts(mut buffer: BorrowedBuffer<'_>) -> Vec<(usize, Vec<u8>, bool)> {
        buffer.copy_some(usize::MAX);
        let ranges: Vec<_> = buffer.ranges().collect();
        ranges
            .into_iter()
            .map(|(range, writable)| (range.start, buffer.bytes(range).to_vec(), writable))
            .collect()
    }

    #[test]
    fn own_block_is_copied_and_the_rest_is_filled() {
        let (send, mut recv) = ([7_u16; 2], [1_u16, 2, 3, 4, 5, 6]);
        let buffers =
            SendRecvBuffers::new((2, (&send[..]).into()), (0, (&mut recv[..]).into()), (0..2, 2..4));
        let bytes = |values: &[u16]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<_>>();
        assert_eq!(
            parts(buffers.into_borrowed(CallKind::AllGather)),
            [(0, bytes(&[1, 2]), true), (4, bytes(&[7, 7]), false), (8, bytes(&[5, 6]), true)]
        );
        assert_eq!(recv, [1, 2, 7, 7, 5, 6]);
    }

    #[test]
    fn reduce_scatter_reduces_into_a_copy_of_the_own_block() {
        for scratch in [false, true] {
            let (send, mut recv) = ([1_u8, 2, 3, 4, 5, 6], [0_u8; 2]);
            let buffers =
                SendRecvBuffers::new((0, (&send[..]).into()), (2, (&mut recv[..]).into()), (2..4, 0..2));
            let buffer = match scratch {
                true => buffers.with_scratch_blocks(),
                false => buffers.into_borrowed(CallKind::ReduceScatter),
            };
            let expected = [(0, vec![1, 2], scratch), (2, vec![3, 4], true), (4, vec![5, 6], scratch)];
            assert_eq!(parts(buffer), expected);
            assert_eq!((send, recv), ([1, 2, 3, 4, 5, 6], [3, 4]));
        }
        // A rank may have an empty block.
        let buffers = SendRecvBuffers::new(
            (0, (&[1_u8, 2][..]).into()),
            (1, (&mut [0_u8; 0][..]).into()),
            (1..1, 0..0),
        );
        assert_eq!(parts(buffers.with_scratch_blocks()), [(0, vec![1, 2], true)]);
    }

    #[test]
    fn exchange_in_place_sends_a_copy() {
        let mut buf = [1_u8, 2, 3, 4];
        let mut buffer = SendRecvBuffers::exchanged((&mut buf[..]).into()).into_borrowed(CallKind::AllToAll);
        buffer.bytes_mut(4..8).fill(9);
        assert_eq!(parts(buffer), [(0, vec![1, 2, 3, 4], true), (4, vec![9; 4], true)]);
        assert_eq!(buf, [9; 4]);
    }

    #[test]
    fn send_buffer_of_a_reduce_is_not_changed() {
        let send = [1_u8, 2];
        let mut buffer = SendRecvBuffers::send_only(0, (&send[..]).into()).into_borrowed(CallKind::Reduce);
        buffer.bytes_mut(0..2).fill(9);
        assert_eq!(send, [1, 2]);
        let gathered = SendRecvBuffers::send_only(3, (&send[..]).into()).into_borrowed(CallKind::Gather);
        assert_eq!(parts(gathered), [(3, vec![1, 2], false)]);
    }

    #[test]
    fn each_buffer_has_its_own_bytes() {
        let (send, mut recv) = ([true, false, true, true], [false; 4]);
        let mut buffers =
            SendRecvBuffers::new((0, (&send[..]).into()), (4, (&mut recv[..]).into()), (1..2, 1..2));
        assert_eq!(buffers.sent(1..4), [0, 1, 1]);
        buffers.copy_own();
        buffers.received(6..8).copy_from_slice(&[0, 77]);
        assert_eq!(recv, [false, false, false, true]);
        assert_eq!(SendRecvBuffers::none().sent(0..0), [0; 0]);
    }

    #[test]
    #[should_panic = "1..5 of"]
    fn bytes_outside_of_a_buffer_are_refused() {
        let mut buf = [0_u8; 4];
        SendRecvBuffers::in_place((&mut buf[..]).into()).sent(1..5);
    }
}
