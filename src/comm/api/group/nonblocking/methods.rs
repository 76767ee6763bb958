//! The methods of [`Nonblocking`], one for each operation.

use super::Nonblocking;
use crate::api::group::buffers::{AnySource, Buffer, BufferMut, List, Lists};
use crate::api::group::work::Work;
use crate::api::reduction::Reduction;
use crate::error::CommError;

/// Operations on whole buffers.
impl<'scope> Nonblocking<'scope, '_> {
    /// Nonblocking form of [`Group::all_reduce`](crate::Group::all_reduce).
    ///
    /// # Errors
    /// The errors of [`Group::all_reduce`](crate::Group::all_reduce).
    pub fn all_reduce<B: BufferMut + 'scope>(
        &self,
        buf: B,
        op: impl Into<Reduction<B::Element>>,
    ) -> Result<Work<B>, CommError> {
        let op = op.into();
        self.begin(buf, |group, buf| group.prepare_all_reduce(buf.elements_mut(), &op))
    }

    /// Nonblocking form of [`Group::all_reduce_into`](crate::Group::all_reduce_into).
    ///
    /// # Errors
    /// The errors of [`Group::all_reduce_into`](crate::Group::all_reduce_into).
    pub fn all_reduce_into<S, R>(
        &self,
        send: S,
        recv: R,
        op: impl Into<Reduction<S::Element>>,
    ) -> Result<Work<(S, R)>, CommError>
    where
        S: Buffer + 'scope,
        R: BufferMut<Element = S::Element> + 'scope,
    {
        let op = op.into();
        self.begin((send, recv), |group, (send, recv)| {
            group.prepare_all_reduce_into(send.elements(), recv.elements_mut(), &op)
        })
    }

    /// Nonblocking form of [`Group::broadcast`](crate::Group::broadcast).
    ///
    /// # Errors
    /// The errors of [`Group::broadcast`](crate::Group::broadcast).
    pub fn broadcast<B: BufferMut + 'scope>(&self, buf: B, root: usize) -> Result<Work<B>, CommError> {
        self.begin(buf, |group, buf| group.prepare_broadcast(buf.elements_mut(), root))
    }

    /// Nonblocking form of [`Group::reduce`](crate::Group::reduce).
    ///
    /// # Errors
    /// The errors of [`Group::reduce`](crate::Group::reduce).
    pub fn reduce<B: BufferMut + 'scope>(
        &self,
        buf: B,
        op: impl Into<Reduction<B::Element>>,
        root: usize,
    ) -> Result<Work<B>, CommError> {
        let op = op.into();
        self.begin(buf, |group, buf| group.prepare_reduce(buf.elements_mut(), &op, root))
    }

    /// Nonblocking form of [`Group::reduce_into`](crate::Group::reduce_into).
    ///
    /// # Errors
    /// The errors of [`Group::reduce_into`](crate::Group::reduce_into).
    pub fn reduce_into<S, R>(
        &self,
        send: S,
        recv: R,
        op: impl Into<Reduction<S::Element>>,
        root: usize,
    ) -> Result<Work<(S, R)>, CommError>
    where
        S: Buffer + 'scope,
        R: BufferMut<Element = S::Element> + 'scope,
    {
        let op = op.into();
        self.begin((send, recv), |group, (send, recv)| {
            group.prepare_reduce_into(send.elements(), recv.elements_mut(), &op, root)
        })
    }

    /// Nonblocking form of [`Group::scan`](crate::Group::scan).
    ///
    /// # Errors
    /// The errors of [`Group::scan`](crate::Group::scan).
    pub fn scan<B: BufferMut + 'scope>(
        &self,
        buf: B,
        op: impl Into<Reduction<B::Element>>,
    ) -> Result<Work<B>, CommError> {
        let op = op.into();
        self.begin(buf, |group, buf| group.prepare_scan(buf.elements_mut(), &op))
    }

    /// Nonblocking form of [`Group::exclusive_scan`](crate::Group::exclusive_scan).
    ///
    /// # Errors
    /// The errors of [`Group::exclusive_scan`](crate::Group::exclusive_scan).
    pub fn exclusive_scan<B: BufferMut + 'scope>(
        &self,
        buf: B,
        op: impl Into<Reduction<B::Element>>,
    ) -> Result<Work<B>, CommError> {
        let op = op.into();
        self.begin(buf, |group, buf| group.prepare_exclusive_scan(buf.elements_mut(), &op))
    }

    /// Nonblocking form of [`Group::barrier`](crate::Group::barrier).
    ///
    /// # Errors
    /// The errors of [`Group::barrier`](crate::Group::barrier).
    pub fn barrier(&self) -> Result<Work<()>, CommError> {
        self.begin((), |group, ()| group.prepare_barrier())
    }
}

/// Collectives with blocks of equal length.
impl<'scope> Nonblocking<'scope, '_> {
    /// Nonblocking form of [`Group::all_gather`](crate::Group::all_gather).
    ///
    /// # Errors
    /// The errors of [`Group::all_gather`](crate::Group::all_gather).
    pub fn all_gather<S, R>(&self, send: S, recv: R) -> Result<Work<(S, R)>, CommError>
    where
        S: Buffer + 'scope,
        R: BufferMut<Element = S::Element> + 'scope,
    {
        self.begin((send, recv), |group, (send, recv)| {
            group.prepare_all_gather(send.elements(), recv.elements_mut())
        })
    }

    /// Nonblocking form of [`Group::all_gather_in_place`](crate::Group::all_gather_in_place).
    ///
    /// # Errors
    /// The errors of [`Group::all_gather_in_place`](crate::Group::all_gather_in_place).
    pub fn all_gather_in_place<B: BufferMut + 'scope>(&self, buf: B) -> Result<Work<B>, CommError> {
        self.begin(buf, |group, buf| group.prepare_all_gather_in_place(buf.elements_mut()))
    }

    /// Nonblocking form of [`Group::reduce_scatter`](crate::Group::reduce_scatter).
    ///
    /// # Errors
    /// The errors of [`Group::reduce_scatter`](crate::Group::reduce_scatter).
    pub fn reduce_scatter<S, R>(
        &self,
        send: S,
        recv: R,
        op: impl Into<Reduction<S::Element>>,
    ) -> Result<Work<(S, R)>, CommError>
    where
        S: Buffer + 'scope,
        R: BufferMut<Element = S::Element> + 'scope,
    {
        let op = op.into();
        self.begin((send, recv), |group, (send, recv)| {
            group.prepare_reduce_scatter(send.elements(), recv.elements_mut(), &op)
        })
    }

    /// Nonblocking form of [`Group::reduce_scatter_in_place`](crate::Group::reduce_scatter_in_place).
    ///
    /// # Errors
    /// The errors of [`Group::reduce_scatter_in_place`](crate::Group::reduce_scatter_in_place).
    pub fn reduce_scatter_in_place<B: BufferMut + 'scope>(
        &self,
        buf: B,
        op: impl Into<Reduction<B::Element>>,
    ) -> Result<Work<B>, CommError> {
        let op = op.into();
        self.begin(buf, |group, buf| group.prepare_reduce_scatter_in_place(buf.elements_mut(), &op))
    }

    /// Nonblocking form of [`Group::gather`](crate::Group::gather).
    ///
    /// # Errors
    /// The errors of [`Group::gather`](crate::Group::gather).
    pub fn gather<S, R>(&self, send: S, recv: R, root: usize) -> Result<Work<(S, R)>, CommError>
    where
        S: Buffer + 'scope,
        R: BufferMut<Element = S::Element> + 'scope,
    {
        self.begin((send, recv), |group, (send, recv)| {
            group.prepare_gather(send.elements(), recv.elements_mut(), root)
        })
    }

    /// Nonblocking form of [`Group::scatter`](crate::Group::scatter).
    ///
    /// # Errors
    /// The errors of [`Group::scatter`](crate::Group::scatter).
    pub fn scatter<S, R>(&self, send: S, recv: R, root: usize) -> Result<Work<(S, R)>, CommError>
    where
        S: Buffer + 'scope,
        R: BufferMut<Element = S::Element> + 'scope,
    {
        self.begin((send, recv), |group, (send, recv)| {
            group.prepare_scatter(send.elements(), recv.elements_mut(), root)
        })
    }

    /// Nonblocking form of [`Group::all_to_all`](crate::Group::all_to_all).
    ///
    /// # Errors
    /// The errors of [`Group::all_to_all`](crate::Group::all_to_all).
    pub fn all_to_all<S, R>(&self, send: S, recv: R) -> Result<Work<(S, R)>, CommError>
    where
        S: Buffer + 'scope,
        R: BufferMut<Element = S::Element> + 'scope,
    {
        self.begin((send, recv), |group, (send, recv)| {
            group.prepare_all_to_all(send.elements(), recv.elements_mut())
        })
    }

    /// Nonblocking form of [`Group::all_to_all_in_place`](crate::Group::all_to_all_in_place).
    ///
    /// # Errors
    /// The errors of [`Group::all_to_all_in_place`](crate::Group::all_to_all_in_place).
    pub fn all_to_all_in_place<B: BufferMut + 'scope>(&self, buf: B) -> Result<Work<B>, CommError> {
        self.begin(buf, |group, buf| group.prepare_all_to_all_in_place(buf.elements_mut()))
    }
}

/// Collectives with blocks of unequal lengths.
impl<'scope> Nonblocking<'scope, '_> {
    /// Nonblocking form of [`Group::all_gather_v`](crate::Group::all_gather_v).
    ///
    /// # Errors
    /// The errors of [`Group::all_gather_v`](crate::Group::all_gather_v).
    pub fn all_gather_v<S, R>(&self, send: S, recv: R, lens: &[usize]) -> Result<Work<(S, R)>, CommError>
    where
        S: Buffer + 'scope,
        R: BufferMut<Element = S::Element> + 'scope,
    {
        self.begin((send, recv), |group, (send, recv)| {
            group.prepare_all_gather_v(send.elements(), recv.elements_mut(), lens)
        })
    }

    /// Nonblocking form of [`Group::reduce_scatter_v`](crate::Group::reduce_scatter_v).
    ///
    /// # Errors
    /// The errors of [`Group::reduce_scatter_v`](crate::Group::reduce_scatter_v).
    pub fn reduce_scatter_v<S, R>(
        &self,
        send: S,
        recv: R,
        lens: &[usize],
        op: impl Into<Reduction<S::Element>>,
    ) -> Result<Work<(S, R)>, CommError>
    where
        S: Buffer + 'scope,
        R: BufferMut<Element = S::Element> + 'scope,
    {
        let op = op.into();
        self.begin((send, recv), |group, (send, recv)| {
            group.prepare_reduce_scatter_v(send.elements(), recv.elements_mut(), lens, &op)
        })
    }

    /// Nonblocking form of [`Group::gather_v`](crate::Group::gather_v).
    ///
    /// # Errors
    /// The errors of [`Group::gather_v`](crate::Group::gather_v).
    pub fn gather_v<S, R>(
        &self,
        send: S,
        recv: R,
        lens: &[usize],
        root: usize,
    ) -> Result<Work<(S, R)>, CommError>
    where
        S: Buffer + 'scope,
        R: BufferMut<Element = S::Element> + 'scope,
    {
        self.begin((send, recv), |group, (send, recv)| {
            group.prepare_gather_v(send.elements(), recv.elements_mut(), lens, root)
        })
    }

    /// Nonblocking form of [`Group::scatter_v`](crate::Group::scatter_v).
    ///
    /// # Errors
    /// The errors of [`Group::scatter_v`](crate::Group::scatter_v).
    pub fn scatter_v<S, R>(
        &self,
        send: S,
        recv: R,
        lens: &[usize],
        root: usize,
    ) -> Result<Work<(S, R)>, CommError>
    where
        S: Buffer + 'scope,
        R: BufferMut<Element = S::Element> + 'scope,
    {
        self.begin((send, recv), |group, (send, recv)| {
            group.prepare_scatter_v(send.elements(), recv.elements_mut(), lens, root)
        })
    }

    /// Nonblocking form of [`Group::all_to_all_v`](crate::Group::all_to_all_v).
    ///
    /// # Errors
    /// The errors of [`Group::all_to_all_v`](crate::Group::all_to_all_v).
    pub fn all_to_all_v<S, R>(
        &self,
        (send, send_lens): (S, &[usize]),
        (recv, recv_lens): (R, &[usize]),
    ) -> Result<Work<(S, R)>, CommError>
    where
        S: Buffer + 'scope,
        R: BufferMut<Element = S::Element> + 'scope,
    {
        self.begin((send, recv), |group, (send, recv)| {
            group.prepare_all_to_all_v((send.elements(), send_lens), (recv.elements_mut(), recv_lens))
        })
    }
}

/// Collectives on lists of buffers.
impl<'scope> Nonblocking<'scope, '_> {
    /// Nonblocking form of [`Group::all_reduce_coalesced`](crate::Group::all_reduce_coalesced).
    ///
    /// # Errors
    /// The errors of [`Group::all_reduce_coalesced`](crate::Group::all_reduce_coalesced).
    pub fn all_reduce_coalesced<B: BufferMut + 'scope>(
        &self,
        bufs: Vec<B>,
        op: impl Into<Reduction<B::Element>>,
    ) -> Result<Work<List<B>>, CommError> {
        let op = op.into();
        self.begin(List(bufs), |group, bufs| {
            group.prepare_all_reduce_coalesced(bufs.0.iter_mut().map(B::elements_mut), &op)
        })
    }

    /// Nonblocking form of [`Group::broadcast_coalesced`](crate::Group::broadcast_coalesced).
    ///
    /// # Errors
    /// The errors of [`Group::broadcast_coalesced`](crate::Group::broadcast_coalesced).
    pub fn broadcast_coalesced<B: BufferMut + 'scope>(
        &self,
        bufs: Vec<B>,
        root: usize,
    ) -> Result<Work<List<B>>, CommError> {
        self.begin(List(bufs), |group, bufs| {
            group.prepare_broadcast_coalesced(bufs.0.iter_mut().map(B::elements_mut), root)
        })
    }

    /// Nonblocking form of [`Group::reduce_coalesced`](crate::Group::reduce_coalesced).
    ///
    /// # Errors
    /// The errors of [`Group::reduce_coalesced`](crate::Group::reduce_coalesced).
    pub fn reduce_coalesced<B: BufferMut + 'scope>(
        &self,
        bufs: Vec<B>,
        op: impl Into<Reduction<B::Element>>,
        root: usize,
    ) -> Result<Work<List<B>>, CommError> {
        let op = op.into();
        self.begin(List(bufs), |group, bufs| {
            group.prepare_reduce_coalesced(bufs.0.iter_mut().map(B::elements_mut), &op, root)
        })
    }

    /// Nonblocking form of [`Group::all_gather_coalesced`](crate::Group::all_gather_coalesced).
    ///
    /// # Errors
    /// The errors of [`Group::all_gather_coalesced`](crate::Group::all_gather_coalesced).
    pub fn all_gather_coalesced<S, R>(
        &self,
        sends: Vec<S>,
        recvs: Vec<R>,
    ) -> Result<Work<Lists<S, R>>, CommError>
    where
        S: Buffer + 'scope,
        R: BufferMut<Element = S::Element> + 'scope,
    {
        self.begin((List(sends), List(recvs)), |group, (sends, recvs)| {
            let sends = sends.0.iter().map(S::elements);
            group.prepare_all_gather_coalesced(sends, recvs.0.iter_mut().map(R::elements_mut))
        })
    }

    /// Nonblocking form of [`Group::reduce_scatter_coalesced`](crate::Group::reduce_scatter_coalesced).
    ///
    /// # Errors
    /// The errors of [`Group::reduce_scatter_coalesced`](crate::Group::reduce_scatter_coalesced).
    pub fn reduce_scatter_coalesced<S, R>(
        &self,
        sends: Vec<S>,
        recvs: Vec<R>,
        op: impl Into<Reduction<S::Element>>,
    ) -> Result<Work<Lists<S, R>>, CommError>
    where
        S: Buffer + 'scope,
        R: BufferMut<Element = S::Element> + 'scope,
    {
        let op = op.into();
        self.begin((List(sends), List(recvs)), |group, (sends, recvs)| {
            let sends = sends.0.iter().map(S::elements);
            group.prepare_reduce_scatter_coalesced(sends, recvs.0.iter_mut().map(R::elements_mut), &op)
        })
    }
}

/// Point-to-point messages.
impl<'scope> Nonblocking<'scope, '_> {
    /// Nonblocking form of [`Group::send`](crate::Group::send).
    ///
    /// # Errors
    /// The errors of [`Group::send`](crate::Group::send).
    pub fn send<B: Buffer + 'scope>(&self, buf: B, to: usize, tag: u32) -> Result<Work<B>, CommError> {
        self.begin(buf, |group, buf| group.prepare_send(buf.elements(), to, tag))
    }

    /// Nonblocking form of [`Group::recv`](crate::Group::recv).
    ///
    /// # Errors
    /// The errors of [`Group::recv`](crate::Group::recv).
    pub fn recv<B: BufferMut + 'scope>(&self, buf: B, from: usize, tag: u32) -> Result<Work<B>, CommError> {
        self.begin(buf, |group, buf| group.prepare_recv(buf.elements_mut(), from, tag))
    }

    /// Nonblocking form of [`Group::recv_any`](crate::Group::recv_any); returns the buffer with the rank of
    /// the sender.
    ///
    /// # Errors
    /// The errors of [`Group::recv_any`](crate::Group::recv_any).
    pub fn recv_any<B: BufferMut + 'scope>(&self, buf: B, tag: u32) -> Result<Work<AnySource<B>>, CommError> {
        self.begin(AnySource(buf), |group, buf| group.prepare_recv_any(buf.0.elements_mut(), tag))
    }
}
