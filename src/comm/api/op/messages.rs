//! Messages between two ranks as values.

use super::buffers::{Buffer, BufferMut, Elements};
use super::sealed::HostOperation;
use crate::api::group::{Group, Prepared};
use crate::collectives::call::Status;

/// The operation of [`send`].
#[derive(Debug)]
#[must_use = "an operation does nothing until a group carries it out"]
pub struct Send<B> {
    pub(crate) buffer: B,
    pub(crate) to: usize,
    pub(crate) tag: u32,
}

/// The operation [`Group::send`] to rank `to`, with tag 0; [`Send::tag`] sets another.
pub fn send<B: Elements>(buffer: B, to: usize) -> Send<B> {
    Send { buffer, to, tag: 0 }
}

impl<B> Send<B> {
    /// Sets the tag. There are no tags on devices: there it must be 0.
    pub fn tag(self, tag: u32) -> Self {
        Self { tag, ..self }
    }
}

impl<B: Buffer> HostOperation for Send<B> {
    type Output = B;
    type Arguments = (usize, u32);

    fn into_parts(self) -> (B, Self::Arguments) {
        (self.buffer, (self.to, self.tag))
    }

    fn prepare<'a>(group: &Group, buffer: &'a mut B, (to, tag): &Self::Arguments) -> Prepared<'a> {
        group.prepare_send(buffer.elements().into(), *to, *tag)
    }
}

/// The operation of [`recv`] and [`recv_any`].
#[derive(Debug)]
#[must_use = "an operation does nothing until a group carries it out"]
pub struct Recv<B> {
    pub(crate) buffer: B,
    pub(crate) from: Option<usize>,
    pub(crate) tag: u32,
}

/// The operation [`Group::recv`] from rank `from`, with tag 0; [`Recv::tag`] sets another. It returns the
/// buffer, and the [`Status`] of the message.
pub fn recv<B: Elements>(buffer: B, from: usize) -> Recv<B> {
    Recv { buffer, from: Some(from), tag: 0 }
}

/// The operation [`Group::recv_any`], with tag 0; [`Recv::tag`] sets another. It returns the buffer, and the
/// [`Status`] of the message, with its source.
pub fn recv_any<B: Elements>(buffer: B) -> Recv<B> {
    Recv { buffer, from: None, tag: 0 }
}

impl<B> Recv<B> {
    /// Sets the tag. There are no tags on devices: there it must be 0.
    pub fn tag(self, tag: u32) -> Self {
        Self { tag, ..self }
    }
}

impl<B: BufferMut> HostOperation for Recv<B> {
    type Output = (B, Status);
    type Arguments = (Option<usize>, u32);

    fn into_parts(self) -> (Self::Output, Self::Arguments) {
        ((self.buffer, Status::PENDING), (self.from, self.tag))
    }

    fn prepare<'a>(
        group: &Group,
        (buffer, _): &'a mut Self::Output,
        (from, tag): &Self::Arguments,
    ) -> Prepared<'a> {
        group.prepare_recv(buffer.elements_mut().into(), *from, *tag)
    }
}
