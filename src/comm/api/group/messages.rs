//! Point-to-point messages.

use super::{
    Call, CallKind, CommError, Group, Operation, Prepared, SendRecvBuffers, Slice, SliceMut, Status,
    Transfer, ValueType, call,
};

impl Group {
    /// Sends `buf` to rank `to`, which must receive it with equal tag and type, in a buffer that is not
    /// shorter.
    ///
    /// Returns when `buf` may be reused. A message of up to 256 KiB is usually sent before its receive is posted
    /// (eager). So two ranks may both send such a message before they receive. Larger messages wait for the
    /// receiver (rendezvous). Messages of one sender with one tag are received in the order in which they were sent.
    ///
    /// A rank may send to itself. Such a send never waits: if no receive is posted, the message is copied,
    /// whatever its length, and kept until it is received.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no rank `to`. Otherwise the error that ended the group.
    pub fn send<T: Transfer>(&self, buf: &[T], to: usize, tag: u32) -> Result<(), CommError> {
        let (call, mut buffers) = self.checked_send(buf.into(), to, tag)?;
        let shared = self.shared();
        if let Some(sent) =
            shared.and_then(|shared| shared.send_eager(to, call, &mut buffers, &|| self.limit()))
        {
            return sent;
        }
        let buffer = buffers.into_borrowed(call.kind);
        self.carry_out(Ok(Some(Operation::Send { to, call, buffer }))).map(drop)
    }

    #[inline]
    pub(crate) fn prepare_send<'a>(&self, buf: Slice<'a>, to: usize, tag: u32) -> Prepared<'a> {
        let (call, buffers) = self.checked_send(buf, to, tag)?;
        Ok(Some(Operation::Send { to, call, buffer: buffers.into_borrowed(call.kind) }))
    }

    /// Checks the arguments of a send.
    #[inline(always)]
    fn checked_send<'a>(
        &self,
        buf: Slice<'a>,
        to: usize,
        tag: u32,
    ) -> Result<(Call, SendRecvBuffers<'a>), CommError> {
        self.check_rank(to, "send to")?;
        self.check_message()?;
        Ok((message(buf.value_type(), tag, buf.len()), SendRecvBuffers::send_only(0, buf)))
    }

    /// Fills the beginning of `buf` with the next message with this `tag` from rank `from`, which may be this
    /// rank. The message may be shorter than `buf`; [`Status::count`] returns its length.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no rank `from`. [`CommError::Truncated`] if the message is
    /// longer than `buf`; it is received nevertheless, and the group continues. [`CommError::Mismatch`] if
    /// the message has another type. Otherwise the error that ended the group.
    pub fn recv<T: Transfer>(&self, buf: &mut [T], from: usize, tag: u32) -> Result<Status, CommError> {
        let (call, mut buffers) = self.checked_recv(buf.into(), Some(from), tag)?;
        let shared = self.shared();
        if let Some(outcome) =
            shared.and_then(|shared| shared.recv_eager(from, call, &mut buffers, &|| self.limit()))
        {
            return outcome.map(|status| status.of::<T>());
        }
        let buffer = buffers.into_borrowed(call.kind);
        self.receive::<T>(Ok(Some(Operation::Recv { from: Some(from), call, buffer })))
    }

    /// Fills the beginning of `buf` with the next message with this `tag` from any rank, this rank included;
    /// [`Status::source`] returns the sender.
    ///
    /// Among messages that have arrived, the earliest is received. Receives from a named rank and from any
    /// rank get messages in the order in which the receives were called.
    ///
    /// # Errors
    /// The errors of [`Self::recv`].
    pub fn recv_any<T: Transfer>(&self, buf: &mut [T], tag: u32) -> Result<Status, CommError> {
        self.receive::<T>(self.prepare_recv(buf.into(), None, tag))
    }

    fn receive<T: Transfer>(&self, prepared: Prepared<'_>) -> Result<Status, CommError> {
        Ok(self.carry_out(prepared)?.expect("a successful receive has a status").of::<T>())
    }

    #[inline]
    pub(crate) fn prepare_recv<'a>(&self, buf: SliceMut<'a>, from: Option<usize>, tag: u32) -> Prepared<'a> {
        let (call, buffers) = self.checked_recv(buf, from, tag)?;
        Ok(Some(Operation::Recv { from, call, buffer: buffers.into_borrowed(call.kind) }))
    }

    /// Checks the arguments of a receive.
    #[inline(always)]
    fn checked_recv<'a>(
        &self,
        buf: SliceMut<'a>,
        from: Option<usize>,
        tag: u32,
    ) -> Result<(Call, SendRecvBuffers<'a>), CommError> {
        self.check_source(from)?;
        Ok((message(buf.value_type(), tag, buf.len()), SendRecvBuffers::recv_only(0, buf)))
    }

    /// Waits until a message with this `tag` from rank `from`, or from any rank if `None`, can be received.
    /// Returns its status without receiving it, like `MPI_Probe`.
    ///
    /// # Errors
    /// The errors of [`Self::recv`] and [`Self::recv_any`].
    pub fn probe(&self, from: Option<usize>, tag: u32) -> Result<Status, CommError> {
        loop {
            // A waiting probe that succeeds always returns a status.
            if let Some(status) = self.probe_message(from, tag, true)? {
                return Ok(status);
            }
        }
    }

    /// Nonblocking form of [`Self::probe`]: returns `None` if there is no such message now.
    ///
    /// # Errors
    /// The errors of [`Self::probe`].
    pub fn try_probe(&self, from: Option<usize>, tag: u32) -> Result<Option<Status>, CommError> {
        self.probe_message(from, tag, false)
    }

    fn probe_message(&self, from: Option<usize>, tag: u32, wait: bool) -> Result<Option<Status>, CommError> {
        self.check_source(from)?;
        let call = message(ValueType::of::<u8>(), tag, 0);
        self.carry_out(Ok(Some(Operation::Probe { from, call, wait })))
    }

    fn check_source(&self, from: Option<usize>) -> Result<(), CommError> {
        from.map_or(Ok(()), |from| self.check_rank(from, "receive from"))?;
        self.check_message()
    }

    fn check_message(&self) -> Result<(), CommError> {
        self.inner.check_caller()?;
        self.inner.ensure_shared()
    }
}

fn message(value: ValueType, tag: u32, count: usize) -> Call {
    call(value, CallKind::PointToPoint, None, tag, count)
}
