//! The headers of a collective's data over connections.

use crate::collectives::call::Call;
use crate::error::{ExecutionError, PeerMisbehaved};
use crate::transport::frame::{self, Frame, GroupId, HEADER_BYTES, Kind};
use crate::transport::links::hello::Credentials;

/// If a peer sends at most this many bytes in all, they are read ahead with their header, and copied. Of more bytes, those
/// that need no reduction are read into the operation's buffer by the system call that reads the header.
pub(super) const SHORT_BYTES: usize = 12 << 10;

/// The header of a collective's data, without the number of bytes behind it.
#[derive(Debug)]
pub(super) struct DataHeader {
    call: Call,
    pub(super) seq: u64,
    group: GroupId,
    /// The header, encoded once.
    encoded: [u8; HEADER_BYTES],
}

impl DataHeader {
    #[inline(always)]
    pub(super) fn new(credentials: &Credentials, call: Call, seq: u64) -> Self {
        let group = credentials.group_id();
        let encoded = Frame { call: call.encode(), ..Frame::empty(Kind::Data, group, seq) }.encode();
        Self { call, seq, group, encoded }
    }

    /// Returns the header of `bytes` bytes.
    #[inline(always)]
    pub(super) fn of(&self, bytes: usize) -> [u8; HEADER_BYTES] {
        frame::with_length(self.encoded, bytes as u64)
    }

    /// Checks a header from `peer`, which must announce `expected` bytes of this collective.
    #[inline(always)]
    pub(super) fn check(
        &self,
        peer: usize,
        header: &[u8; HEADER_BYTES],
        expected: usize,
    ) -> Result<(), ExecutionError> {
        if *header == self.of(expected) { Ok(()) } else { Err(self.unexpected(peer, header, expected)) }
    }

    /// Returns the error of a header from `peer` that does not announce `expected` bytes of this collective.
    #[cold]
    fn unexpected(&self, peer: usize, header: &[u8; HEADER_BYTES], expected: usize) -> ExecutionError {
        let protocol = |what| ExecutionError::Protocol { peer, what };
        let frame = match Frame::decode(header) {
            Ok(frame) => frame,
            Err(error) => return protocol(error.into()),
        };
        if frame.kind != Kind::Data {
            return protocol(PeerMisbehaved::NoDataFrame { kind: frame.kind });
        }
        let (theirs, ours) = (frame.group_id(), self.group);
        if theirs != ours {
            return protocol(PeerMisbehaved::ForeignData { theirs, ours });
        }
        match Call::decode(frame.call) {
            Err(error) => protocol(error.into()),
            Ok(theirs) if theirs != self.call || frame.seq != self.seq => {
                ExecutionError::Mismatch { peer, theirs, seq: frame.seq }
            }
            Ok(_) => protocol(PeerMisbehaved::DataLength { len: frame.len, call: self.call, expected }),
        }
    }
}
