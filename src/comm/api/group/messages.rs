//! Point-to-point messages.

use super::{BorrowedBuffer, Call, CallKind, CommError, Element, Envelope, Group, Operation, Prepared, call};

impl Group {
    /// Sends `buf` to rank `to`, which must receive it with equal tag, type and length.
    ///
    /// Returns when `buf` may be reused. Up to 64 KiB that is usually before the receiver has posted its
    /// receive (eager), so two ranks may both send before they receive. Larger messages wait for the receiver
    /// (rendezvous). Messages of one sender with one tag are received in the order in which they were sent.
    ///
    /// A rank may send to itself. Such a send never waits: if no receive is posted, the message is copied,
    /// whatever its length, and kept until it is received.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no rank `to`. Otherwise the error that ended the group.
    pub fn send<T: Element>(&self, buf: &[T], to: usize, tag: u32) -> Result<(), CommError> {
        self.carry_out(self.prepare_send(buf, to, tag)).map(drop)
    }

    pub(super) fn prepare_send<'a, T: Element>(&self, buf: &'a [T], to: usize, tag: u32) -> Prepared<'a> {
        self.check_peer(to, "send to")?;
        let buffer = BorrowedBuffer::default().with_ref(0, buf);
        Ok(Some(Operation::Send { to, call: message::<T>(tag, buf.len()), buffer }))
    }

    /// Fills `buf` with the next message with this `tag` from rank `from`, which may be this rank.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no rank `from`. [`CommError::Mismatch`] if the message
    /// has another type or length. Otherwise the error that ended the group.
    pub fn recv<T: Element>(&self, buf: &mut [T], from: usize, tag: u32) -> Result<(), CommError> {
        self.carry_out(self.prepare_recv(buf, from, tag)).map(drop)
    }

    pub(super) fn prepare_recv<'a, T: Element>(
        &self,
        buf: &'a mut [T],
        from: usize,
        tag: u32,
    ) -> Prepared<'a> {
        self.check_peer(from, "receive from")?;
        let call = message::<T>(tag, buf.len());
        Ok(Some(Operation::Recv {
            from: Some(from),
            call,
            buffer: BorrowedBuffer::default().with_mut(0, buf),
        }))
    }

    /// Fills `buf` with the next message with this `tag` from any rank, this rank included; returns the
    /// sender.
    ///
    /// Among messages that have arrived, the earliest is received. Receives from a named rank and from any
    /// rank get messages in the order in which the receives were called.
    ///
    /// # Errors
    /// The errors of [`Self::recv`].
    pub fn recv_any<T: Element>(&self, buf: &mut [T], tag: u32) -> Result<usize, CommError> {
        let envelope = self.carry_out(self.prepare_recv_any(buf, tag))?;
        Ok(envelope.expect("a successful receive has an envelope").source)
    }

    pub(super) fn prepare_recv_any<'a, T: Element>(&self, buf: &'a mut [T], tag: u32) -> Prepared<'a> {
        self.check_message()?;
        let call = message::<T>(tag, buf.len());
        Ok(Some(Operation::Recv { from: None, call, buffer: BorrowedBuffer::default().with_mut(0, buf) }))
    }

    /// Sends `send` to rank `to` and receives `recv` from rank `from` concurrently, like `MPI_Sendrecv`. A
    /// ring of ranks that all call it does not deadlock, whatever the lengths.
    ///
    /// # Errors
    /// The errors of [`Self::send`] and [`Self::recv`].
    pub fn send_recv<T: Element, U: Element>(
        &self,
        (send, to, send_tag): (&[T], usize, u32),
        (recv, from, recv_tag): (&mut [U], usize, u32),
    ) -> Result<(), CommError> {
        let mut batch = self.batch();
        batch.recv(recv, from, recv_tag)?.send(send, to, send_tag)?;
        batch.wait()
    }

    /// Returns an empty batch of messages, which are sent and received concurrently.
    ///
    /// ```
    /// # fn main() -> Result<(), convoke_comm::CommError> {
    /// # let world = convoke_comm::init()?;
    /// let (rank, size) = (world.rank(), world.size());
    /// let (mine, mut left, mut right) = ([rank as u64], [0], [0]);
    /// let mut batch = world.batch();
    /// if size > 1 {
    ///     let (before, after) = ((rank + size - 1) % size, (rank + 1) % size);
    ///     batch.send(&mine, before, 0)?.send(&mine, after, 1)?;
    ///     batch.recv(&mut right, after, 0)?.recv(&mut left, before, 1)?;
    /// }
    /// batch.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn batch(&self) -> Batch<'_> {
        Batch { group: self, operations: Vec::new() }
    }

    /// Waits until a message with this `tag` from rank `from`, or from any rank if `None`, can be received.
    /// Returns its envelope without receiving it, like `MPI_Probe`.
    ///
    /// # Errors
    /// The errors of [`Self::recv`] and [`Self::recv_any`].
    pub fn probe(&self, from: Option<usize>, tag: u32) -> Result<Envelope, CommError> {
        loop {
            // A waiting probe that succeeds always returns an envelope.
            if let Some(envelope) = self.probe_message(from, tag, true)? {
                return Ok(envelope);
            }
        }
    }

    /// Nonblocking form of [`Self::probe`]: returns `None` if there is no such message now.
    ///
    /// # Errors
    /// The errors of [`Self::probe`].
    pub fn try_probe(&self, from: Option<usize>, tag: u32) -> Result<Option<Envelope>, CommError> {
        self.probe_message(from, tag, false)
    }

    fn probe_message(
        &self,
        from: Option<usize>,
        tag: u32,
        wait: bool,
    ) -> Result<Option<Envelope>, CommError> {
        match from {
            Some(from) => self.check_peer(from, "receive from")?,
            None => self.check_message()?,
        }
        self.carry_out(Ok(Some(Operation::Probe { from, call: message::<u8>(tag, 0), wait })))
    }

    fn check_peer(&self, rank: usize, what: &str) -> Result<(), CommError> {
        self.check_rank(rank, what)?;
        self.check_message()
    }

    fn check_message(&self) -> Result<(), CommError> {
        self.inner.check_caller()?;
        self.inner.ensure_shared()
    }
}

fn message<T: Element>(tag: u32, count: usize) -> Call {
    call::<T>(CallKind::PointToPoint, None, tag, count)
}

/// A batch of messages that are sent and received concurrently, from [`Group::batch`]. [`Self::wait`]
/// starts them.
#[derive(Debug)]
#[must_use = "without `wait` nothing is sent"]
pub struct Batch<'a> {
    group: &'a Group,
    operations: Vec<Operation<'a>>,
}

impl<'a> Batch<'a> {
    /// Adds a [`Group::send`].
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no rank `to`.
    pub fn send<T: Element>(&mut self, buf: &'a [T], to: usize, tag: u32) -> Result<&mut Self, CommError> {
        self.operations.extend(self.group.prepare_send(buf, to, tag)?);
        Ok(self)
    }

    /// Adds a [`Group::recv`].
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no rank `from`.
    pub fn recv<T: Element>(
        &mut self,
        buf: &'a mut [T],
        from: usize,
        tag: u32,
    ) -> Result<&mut Self, CommError> {
        self.operations.extend(self.group.prepare_recv(buf, from, tag)?);
        Ok(self)
    }

    /// Runs all operations of the batch and waits for them.
    ///
    /// # Errors
    /// The first error, from those of [`Group::send`] and [`Group::recv`].
    pub fn wait(self) -> Result<(), CommError> {
        match self.group.inner.shared() {
            Some(shared) => shared.call_all(self.operations, self.group.limit()),
            None => Ok(()),
        }
    }
}
