//! The header of every frame that ranks send to each other. Pure: it converts bytes to values and back.
//!
//! Little endian, 64 bytes, one cache line:
//!
//! ```text
//!  0  magic "CVK1"     8  generation (16)   32  seq (8)            56  len (8)
//!  4  version         24  group (8)         40  call (16)
//!  5  kind
//!  6  flags (2), zero
//! ```
//!
//! `len` bytes of payload follow. An `Rts` frame has no payload, and an address in the place of `len`. The payload of
//! a `Data` frame holds elements of one collective call, as its plan of data transfers orders them. For other kinds see
//! [`Kind`].

use convoke_env::Generation;

/// First bytes of every frame.
pub(crate) const MAGIC: [u8; 4] = *b"CVK1";
/// Protocol version of all traffic between ranks.
pub(crate) const VERSION: u8 = 7;
/// Size of a header in bytes.
pub(crate) const HEADER_BYTES: usize = 64;
/// Longest payload, in bytes, of a frame that is buffered instead of received into a posted buffer.
pub(crate) const CONTROL_PAYLOAD_BYTES: usize = 4096;

/// The purpose of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// First frame of the connecting rank; payload: [`crate::transport::links::hello`].
    Hello,
    /// Answer of the accepting rank, with its proof of the token.
    Welcome,
    /// Proof of the connecting rank that it has the token. Frames for the purpose of the connection follow.
    Proof,
    /// Refusal of the connection; the payload is the reason as text. The connection is then closed.
    Refuse,
    /// Elements of a collective call; `seq` counts the collective calls of the group.
    Data,
    /// A small (eager) message with its elements; `seq` counts the messages of the sender.
    Eager,
    /// Request to send the large message `seq`; no payload. With an `address`, the receiver may read the elements there.
    Rts,
    /// Clear to send: the receiver is ready for the large message `seq`; no payload.
    Cts,
    /// Elements of the large message `seq`.
    Message,
    /// Nothing but the credit that each frame of messages can return.
    Credit,
    /// Request to open a data connection; `seq` is not a sequence number here but the number of the
    /// [`ConnectionKind`](crate::transport::links::hello::ConnectionKind). The lower rank of a pair sends it
    /// on the control connection, because only the higher rank opens connections. The higher rank announces
    /// by it that it opens a connection.
    Open,
    /// The operation in which the sender waits, by its `seq` and `call`. The payload lists the ranks for
    /// which the sender waits, 4 bytes each.
    State,
    /// Query for [`Self::State`]; `seq` is 1 if the sender waits for messages only.
    StateQuery,
    /// The group has failed; payload: [`crate::error::cause::Report`].
    Abort,
    /// The sender leaves the group without a failure, with no operation pending.
    Goodbye,
    /// Setup of shared memory among the ranks of a host; payload: [`crate::shm::bootstrap`].
    Share,
    /// The sender sends no more control frames of this group on the connection, which other groups still use.
    Close,
    /// Bytes of a data link that has no connection of its own yet; `seq` is the number of its
    /// [`ConnectionKind`](crate::transport::links::hello::ConnectionKind). After a frame without payload, the
    /// link's bytes come over a connection of its own.
    Stream,
    /// A receive that `call` describes is posted, and the next message of the peer is `seq`. If that is a large message
    /// for this receive, the peer may send its elements without a request. No payload.
    Ready,
    /// The receiver has read the elements of the large message `seq` at the address in its `Rts` frame. No payload.
    ReadDone,
}

impl Kind {
    pub(crate) const ALL: [Self; 20] = {
        use Kind::{
            Abort, Close, Credit, Cts, Data, Eager, Goodbye, Hello, Message, Open, Proof, ReadDone, Ready,
            Refuse, Rts, Share, State, StateQuery, Stream, Welcome,
        };
        [
            Hello, Welcome, Proof, Refuse, Data, Eager, Rts, Cts, Message, Credit, Open, State, StateQuery,
            Abort, Goodbye, Share, Close, Stream, Ready, ReadDone,
        ]
    };

    const fn to_wire(self) -> u8 {
        self as u8 + 1
    }

    fn from_wire(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte).checked_sub(1)?).copied()
    }

    /// Returns true if the payload consists of elements, which go to a posted buffer or a bounded queue.
    /// Other payloads are limited to [`CONTROL_PAYLOAD_BYTES`].
    pub(crate) const fn carries_elements(self) -> bool {
        matches!(self, Self::Data | Self::Eager | Self::Message)
    }

    /// Returns true if the frame belongs to messages, so that it may return credit.
    const fn returns_credit(self) -> bool {
        matches!(
            self,
            Self::Eager | Self::Rts | Self::Cts | Self::Message | Self::Credit | Self::Ready | Self::ReadDone
        )
    }
}

/// Bytes of one unit of credit.
pub(crate) const CREDIT_UNIT_BYTES: usize = 64;

/// The generation and the number of a group.
pub(crate) type GroupId = (Generation, u64);

/// A decoded frame header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    /// Flow control of messages: so many units of [`CREDIT_UNIT_BYTES`] of small messages have been received since the
    /// last frame that said so.
    pub(crate) credit: u16,
    pub(crate) generation: Generation,
    pub(crate) group: u64,
    pub(crate) seq: u64,
    /// The encoded descriptor of the collective or message (operation, element type, count); zero if none.
    pub(crate) call: [u8; 16],
    /// Length of the payload in bytes.
    pub(crate) len: u64,
    /// Address of the elements of a large message in the memory of the sender; 0 if the receiver must request them.
    pub(crate) address: u64,
}

/// The reason why bytes are not a valid frame header.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("not a convoke frame (it starts with {0:02x?})")]
    Magic([u8; 4]),
    #[error("frame of protocol version {0}; this is version {VERSION}")]
    Version(u8),
    #[error("unknown frame kind {0}")]
    Kind(u8),
    #[error("reserved bits are set in a {0:?} frame")]
    Reserved(Kind),
    #[error("a {kind:?} frame claims {len} bytes; the limit is {CONTROL_PAYLOAD_BYTES}")]
    Length { kind: Kind, len: u64 },
}

impl Frame {
    /// Returns a header without a call and with payload length 0.
    pub(crate) fn empty(kind: Kind, (generation, group): GroupId, seq: u64) -> Self {
        Self { kind, credit: 0, generation, group, seq, call: [0; 16], len: 0, address: 0 }
    }

    pub(crate) fn group_id(&self) -> GroupId {
        (self.generation, self.group)
    }

    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = VERSION;
        out[5] = self.kind.to_wire();
        out[6..8].copy_from_slice(&self.credit.to_le_bytes());
        out[8..24].copy_from_slice(&self.generation.to_bytes());
        out[24..32].copy_from_slice(&self.group.to_le_bytes());
        out[32..40].copy_from_slice(&self.seq.to_le_bytes());
        out[40..56].copy_from_slice(&self.call);
        with_length(out, if self.kind == Kind::Rts { self.address } else { self.len })
    }

    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let magic = bytes_at::<4>(bytes, 0);
        if magic != MAGIC {
            return Err(FrameError::Magic(magic));
        }
        if bytes[4] != VERSION {
            return Err(FrameError::Version(bytes[4]));
        }
        let kind = Kind::from_wire(bytes[5]).ok_or(FrameError::Kind(bytes[5]))?;
        let credit = u16::from_le_bytes(bytes_at(bytes, 6));
        if credit != 0 && !kind.returns_credit() {
            return Err(FrameError::Reserved(kind));
        }
        let last = u64::from_le_bytes(bytes_at(bytes, 56));
        let (address, len) = if kind == Kind::Rts { (last, 0) } else { (0, last) };
        if !kind.carries_elements() && len > CONTROL_PAYLOAD_BYTES as u64 {
            return Err(FrameError::Length { kind, len });
        }
        Ok(Self {
            kind,
            credit,
            generation: Generation::from_bytes(bytes_at(bytes, 8)),
            group: u64::from_le_bytes(bytes_at(bytes, 24)),
            seq: u64::from_le_bytes(bytes_at(bytes, 32)),
            call: bytes_at(bytes, 40),
            len,
            address,
        })
    }
}

/// Returns an encoded header with another payload length.
pub(crate) fn with_length(mut header: [u8; HEADER_BYTES], len: u64) -> [u8; HEADER_BYTES] {
    header[56..64].copy_from_slice(&len.to_le_bytes());
    header
}

/// Returns the `N` bytes at `at`; the caller ensures that they exist.
pub(super) fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn frame(kind: Kind) -> Frame {
        let generation = Generation::from_bytes([9; 16]);
        let credit = if kind.returns_credit() { 0x0302 } else { 0 };
        let (len, address) = if kind == Kind::Rts { (0, 0x7FFF_1234_5678) } else { (17, 0) };
        Frame { kind, credit, generation, group: 3, seq: u64::MAX - 1, call: [5; 16], len, address }
    }

    #[test]
    fn headers_round_trip() {
        for kind in Kind::ALL {
            assert_eq!(Frame::decode(&frame(kind).encode()), Ok(frame(kind)));
        }
    }

    /// Bytes of protocol version 3. A change of the layout must raise the version.
    #[test]
    fn headers_of_this_version_have_these_bytes() {
        let mut generation = [0; 16];
        generation.iter_mut().zip(0xA0..).for_each(|(byte, value)| *byte = value);
        let mut call = [0; 16];
        call.iter_mut().zip(0xC0..).for_each(|(byte, value)| *byte = value);
        let frame = Frame {
            kind: Kind::Rts,
            credit: 0x3231,
            generation: Generation::from_bytes(generation),
            group: 0x0807_0605_0403_0201,
            seq: 0x1817_1615_1413_1211,
            call,
            len: 0,
            address: 0x0102,
        };
        #[rustfmt::skip]
        let bytes = [
            b'C', b'V', b'K', b'1', 7, 7, 0x31, 0x32,
            0xA0, 0xA1, 0xA2, 0xA3, 0xA4, 0xA5, 0xA6, 0xA7, 0xA8, 0xA9, 0xAA, 0xAB, 0xAC, 0xAD, 0xAE, 0xAF,
            1, 2, 3, 4, 5, 6, 7, 8,
            0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18,
            0xC0, 0xC1, 0xC2, 0xC3, 0xC4, 0xC5, 0xC6, 0xC7, 0xC8, 0xC9, 0xCA, 0xCB, 0xCC, 0xCD, 0xCE, 0xCF,
            2, 1, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(frame.encode(), bytes);
        assert_eq!(Frame::decode(&bytes), Ok(frame));
    }

    #[test]
    fn kinds_have_these_numbers() {
        let numbers = [
            (Kind::Hello, 1),
            (Kind::Welcome, 2),
            (Kind::Proof, 3),
            (Kind::Refuse, 4),
            (Kind::Data, 5),
            (Kind::Eager, 6),
            (Kind::Rts, 7),
            (Kind::Cts, 8),
            (Kind::Message, 9),
            (Kind::Credit, 10),
            (Kind::Open, 11),
            (Kind::State, 12),
            (Kind::StateQuery, 13),
            (Kind::Abort, 14),
            (Kind::Goodbye, 15),
            (Kind::Share, 16),
            (Kind::Close, 17),
            (Kind::Stream, 18),
            (Kind::Ready, 19),
            (Kind::ReadDone, 20),
        ];
        assert_eq!(numbers.len(), Kind::ALL.len());
        for (kind, number) in numbers {
            assert_eq!((kind.to_wire(), Kind::from_wire(number)), (number, Some(kind)));
        }
    }

    #[test]
    fn each_malformed_header_has_its_error() {
        let good = frame(Kind::State).encode();
        let with = |index: usize, byte: u8| {
            let mut bytes = good;
            bytes[index] = byte;
            Frame::decode(&bytes).unwrap_err()
        };
        assert_eq!(with(0, b'X'), FrameError::Magic(*b"XVK1"));
        assert_eq!(with(4, 1), FrameError::Version(1));
        assert_eq!(with(5, 0), FrameError::Kind(0));
        assert_eq!(with(5, 21), FrameError::Kind(21));
        assert_eq!(with(6, 1), FrameError::Reserved(Kind::State));
        assert_eq!(with(7, 1), FrameError::Reserved(Kind::State));
        assert!(matches!(with(63, 0x80), FrameError::Length { .. }));
    }

    #[test]
    fn random_headers_never_cause_a_panic() {
        let mut random = convoke_testkit::Random::new("random_headers_never_cause_a_panic");
        for round in 0..200_000 {
            let mut bytes = frame(Kind::ALL[round % Kind::ALL.len()]).encode();
            for _ in 0..random.below(4) {
                bytes[random.below(HEADER_BYTES)] = random.next() as u8;
            }
            if random.below(8) == 0 {
                bytes.fill_with(|| random.next() as u8);
            }
            if let Ok(frame) = Frame::decode(&bytes) {
                assert_eq!(frame.encode(), bytes);
                assert!(frame.kind.carries_elements() || frame.len <= CONTROL_PAYLOAD_BYTES as u64);
                let _ = crate::collectives::call::Call::decode(frame.call);
            }
        }
    }
}
