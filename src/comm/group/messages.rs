//! Messages from one rank to another.

use super::{Call, CallKind, CommError, Element, Envelope, Group, Lent, Operation, Prepared, call};

impl Group {
    /// Sends `buf` to rank `to`, which receives it with the same `tag`, type and length.
    ///
    /// Returns when `buf` may be reused. Up to 64 KiB that is as a rule before the receiver has asked
    /// for it, so two ranks may send to each other first; beyond, it is when the receiver takes it.
    /// Messages of one sender with one tag are received in the order in which they were sent.
    ///
    /// A rank may send to itself. That never waits: what no receive waits for is copied, whatever its length, and
    /// kept until one takes it.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no rank `to`. Else whatever ended the group.
    pub fn send<T: Element>(&self, buf: &[T], to: usize, tag: u32) -> Result<(), CommError> {
        self.carry_out(self.prepare_send(buf, to, tag)).map(drop)
    }

    pub(super) fn prepare_send<'a, T: Element>(&self, buf: &'a [T], to: usize, tag: u32) -> Prepared<'a> {
        self.check_peer(to, "send to")?;
        let lent = Lent::default().sent(0, buf);
        Ok(Some(Operation::Send { to, call: message::<T>(tag, buf.len()), lent }))
    }

    /// Fills `buf` with the next message with this `tag` from rank `from`, which may be this one.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no rank `from`. [`CommError::Mismatch`] if the
    /// message has another type or length. Else whatever ended the group.
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
        Ok(Some(Operation::Recv { from: Some(from), call, lent: Lent::default().filled(0, buf) }))
    }

    /// Fills `buf` with the next message with this `tag` from any rank, this one included; returns which.
    ///
    /// Of messages that are there already the one that came first is taken. It competes with receives that name
    /// their sender: whichever was called first gets the message.
    ///
    /// # Errors
    /// As [`Self::recv`].
    pub fn recv_any<T: Element>(&self, buf: &mut [T], tag: u32) -> Result<usize, CommError> {
        let envelope = self.carry_out(self.prepare_recv_any(buf, tag))?;
        Ok(envelope.map_or(usize::MAX, |envelope| envelope.from))
    }

    pub(super) fn prepare_recv_any<'a, T: Element>(&self, buf: &'a mut [T], tag: u32) -> Prepared<'a> {
        self.check_message()?;
        let call = message::<T>(tag, buf.len());
        Ok(Some(Operation::Recv { from: None, call, lent: Lent::default().filled(0, buf) }))
    }

    /// Sends `send` to rank `to` and receives `recv` from rank `from`, side by side: a ring of ranks that all do so
    /// never waits in a circle, however much they send.
    ///
    /// # Errors
    /// As [`Self::send`] and [`Self::recv`].
    pub fn send_recv<T: Element, U: Element>(
        &self,
        (send, to, send_tag): (&[T], usize, u32),
        (recv, from, recv_tag): (&mut [U], usize, u32),
    ) -> Result<(), CommError> {
        let mut batch = self.batch();
        batch.recv(recv, from, recv_tag)?.send(send, to, send_tag)?;
        batch.wait()
    }

    /// An empty batch of messages, which are then sent and received side by side.
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

    /// Waits until a message with this `tag` from rank `from`, or from any if that is `None`, can be received, and
    /// tells what it is; it stays where it is.
    ///
    /// # Errors
    /// As [`Self::recv`], and [`Self::recv_any`].
    pub fn probe(&self, from: Option<usize>, tag: u32) -> Result<Envelope, CommError> {
        loop {
            // Never without one if it waits.
            if let Some(envelope) = self.look_for(from, tag, true)? {
                return Ok(envelope);
            }
        }
    }

    /// As [`Self::probe`], without waiting: `None` if there is none now.
    ///
    /// # Errors
    /// As [`Self::probe`].
    pub fn try_probe(&self, from: Option<usize>, tag: u32) -> Result<Option<Envelope>, CommError> {
        self.look_for(from, tag, false)
    }

    fn look_for(&self, from: Option<usize>, tag: u32, wait: bool) -> Result<Option<Envelope>, CommError> {
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

/// Messages that are sent and received side by side; from [`Group::batch`]. Without [`Self::wait`] nothing happens.
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

    /// Carries them all out.
    ///
    /// # Errors
    /// The first error, as of [`Group::send`] and [`Group::recv`].
    pub fn wait(self) -> Result<(), CommError> {
        match self.group.inner.shared() {
            Some(shared) => shared.call_all(self.operations, self.group.limit()),
            None => Ok(()),
        }
    }
}
