//! Unix sockets over which the ranks of a host pass file descriptors. A socket has an abstract name, so it
//! leaves no file. No function of this module blocks.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::layout::MAX_RANKS;

pub(super) const SECRET_BYTES: usize = 16;
/// The size of the longest message.
pub(super) const MESSAGE_BYTES: usize = 1024;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

fn address(name: &[u8; SECRET_BYTES]) -> io::Result<SocketAddrUnix> {
    let name = name.iter().fold("convoke-".to_owned(), |name, byte| format!("{name}{byte:02x}"));
    Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
}

/// Opens a unix socket that keeps message boundaries.
fn socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?)
}

pub(super) fn listen(name: &[u8; SECRET_BYTES]) -> io::Result<OwnedFd> {
    let listener = socket()?;
    rustix::net::bind(&listener, &address(name)?)?;
    rustix::net::listen(&listener, MAX_RANKS as i32)?;
    Ok(listener)
}

pub(super) fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
    Ok(rustix::net::accept_with(listener, FLAGS)?)
}

pub(super) fn connect(name: &[u8; SECRET_BYTES]) -> io::Result<OwnedFd> {
    let conn = socket()?;
    rustix::net::connect(&conn, &address(name)?)?;
    Ok(conn)
}

pub(super) fn send(conn: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(descriptors.len()))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    rustix::net::sendmsg(conn, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Returns the next message and its file descriptors; `None` if no message has arrived yet.
pub(super) fn receive(conn: &OwnedFd) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2 * MAX_RANKS + 2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; MESSAGE_BYTES];
    let parts = &mut [IoSliceMut::new(&mut bytes)];
    let got = match rustix::net::recvmsg(conn, parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
        Ok(got) => got.bytes,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    if got == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    bytes.truncate(got);
    let descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok(Some((bytes, descriptors.flatten().collect())))
}
