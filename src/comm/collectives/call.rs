//! The descriptor of a collective or message call. The ranks of a call must have equal descriptors before
//! data moves.

use std::fmt;

use convoke_recorder::names;
use serde::{Deserialize, Serialize};

use crate::collectives::dtype::{Dtype, ReduceOp, Transfer};
use crate::collectives::named_enum::named_enum;

named_enum! {
    /// The kind of a collective or message call.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[non_exhaustive]
    pub enum CallKind {
        /// `barrier`
        Barrier = "barrier()",
        /// `all_reduce`
        AllReduce = "all_reduce(%t, %n%l%o)",
        /// `broadcast`
        Broadcast = "broadcast(%t, %n%o, root %r)",
        /// `send` and the `recv` that matches it
        PointToPoint = "send/recv(%t, %n, tag %r)",
        /// `reduce`
        Reduce = "reduce(%t, %n%o, root %r)",
        /// `all_gather`
        AllGather = "all_gather(%t, %n%l%o)",
        /// `reduce_scatter`
        ReduceScatter = "reduce_scatter(%t, %n%l%o)",
        /// `gather`
        Gather = "gather(%t, %n%o, root %r)",
        /// `scatter`
        Scatter = "scatter(%t, %n%o, root %r)",
        /// `all_to_all`
        AllToAll = "all_to_all(%t, %n%l%o)",
        /// `all_gather_v`
        AllGatherV = "all_gather_v(%t, %n in blocks of lengths %x%o)",
        /// `reduce_scatter_v`
        ReduceScatterV = "reduce_scatter_v(%t, %n in blocks of lengths %x%o)",
        /// `gather_v`
        GatherV = "gather_v(%t, root %r)",
        /// `scatter_v`
        ScatterV = "scatter_v(%t, root %r)",
        /// `all_to_all_v`
        AllToAllV = "all_to_all_v(%t)",
        /// `scan`
        Scan = "scan(%t, %n%l%o)",
        /// `exclusive_scan`
        ExclusiveScan = "exclusive_scan(%t, %n%l%o)",
        /// `monitored_barrier`
        MonitoredBarrier = "monitored_barrier()",
        /// `subgroup`, `split`, and the operations built on them
        Subgroup = "subgroup/split()",
    }
    /// All kinds of calls, in the order of their wire numbers.
    pub(crate) const ALL: [Self; _];
    /// Returns the template of the text that describes a call of this kind; see
    /// [`convoke_recorder::names`].
    pub(crate) const fn template(self) -> &'static str;
}

impl fmt::Display for CallKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, _) = self.template().split_once('(').expect("each template has its arguments in brackets");
        f.write_str(name)
    }
}

/// A collective or message call of one rank, described for comparison with the calls of its peers.
///
/// It is sent in the header of every transfer, and compared before any data is written. It takes 16 bytes in
/// memory as well: a larger descriptor made a message of 4 bytes in shared memory 9 % slower.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "[u8; 16]", into = "[u8; 16]")]
pub struct Call {
    pub(crate) kind: CallKind,
    pub(crate) dtype: Dtype,
    pub(crate) op: Option<ReduceOp>,
    /// Root of a collective, tag of a point-to-point message, or fingerprint of buffer lengths that all ranks
    /// know; else 0.
    pub(crate) root: u32,
    /// Number of elements in the low 48 bits, which exceed the memory of any machine. The high 16 bits hold
    /// the upper bits of the fingerprint that [`Self::lens`] returns.
    pub(crate) count_and_lens: u64,
    /// The low 8 bits of the fingerprint that [`Self::lens`] returns.
    pub(crate) lens: u8,
}

/// The reason why bytes are not a valid call descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    #[error("unknown operation {0} in a call descriptor")]
    Operation(u8),
    #[error("unknown element type {0} in a call descriptor")]
    ElementType(u8),
    #[error("unknown reduction {0} in a call descriptor")]
    Reduction(u8),
}

/// Number of bits of the element count.
const COUNT_BITS: u32 = 48;

/// Wire number for "no reduction".
const NO_OP: u8 = 0xFF;

impl Call {
    /// Makes the descriptor of a call that has no list of buffers; `count` is below 2^48.
    pub(crate) const fn new(
        kind: CallKind,
        dtype: Dtype,
        op: Option<ReduceOp>,
        root: u32,
        count: u64,
    ) -> Self {
        Self { kind, dtype, op, root, count_and_lens: count, lens: 0 }
    }

    /// Returns this call with a 24-bit fingerprint of the lengths of the buffers in a list.
    pub(crate) const fn with_lens(self, lens: u32) -> Self {
        let count_and_lens = self.count() | (lens as u64 >> 8) << COUNT_BITS;
        Self { count_and_lens, lens: lens as u8, ..self }
    }

    /// Returns this call with another number of elements.
    pub(crate) const fn with_count(self, count: u64) -> Self {
        Self { count_and_lens: count, ..self }.with_lens(self.lens())
    }

    /// Returns the fingerprint of the lengths of the buffers in a list, for a collective with a root; else 0.
    /// For a message, 1 means that the reporting rank waits in a send.
    pub(crate) const fn lens(&self) -> u32 {
        (self.count_and_lens >> COUNT_BITS << 8) as u32 | self.lens as u32
    }

    /// Returns the kind of the call.
    #[must_use]
    pub const fn kind(&self) -> CallKind {
        self.kind
    }

    /// Returns the type of the elements.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the reduction operator; `None` if the call does not reduce.
    #[must_use]
    pub const fn op(&self) -> Option<ReduceOp> {
        self.op
    }

    /// Returns the number of elements; for kinds of calls with one block for each rank, the number in one
    /// block.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count_and_lens & ((1 << COUNT_BITS) - 1)
    }

    /// Marks the call of a message as a send, so that the report of what this rank waits in says that it
    /// sends.
    pub(crate) fn as_send(self) -> Self {
        self.with_lens(1)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.count().saturating_mul(self.dtype.size_bytes() as u64)
    }

    pub(crate) fn encode(&self) -> [u8; 16] {
        let mut out = [0; 16];
        out[0] = self.kind as u8;
        out[1] = self.dtype as u8;
        out[2] = self.op.map_or(NO_OP, |op| op as u8);
        out[3] = self.lens;
        out[4..8].copy_from_slice(&self.root.to_le_bytes());
        out[8..16].copy_from_slice(&self.count_and_lens.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: [u8; 16]) -> Result<Self, CallError> {
        let [kind, dtype, op, lens, r0, r1, r2, r3, ..] = bytes;
        let [.., c0, c1, c2, c3, c4, c5, c6, c7] = bytes;
        Ok(Self {
            kind: *CallKind::ALL.get(usize::from(kind)).ok_or(CallError::Operation(kind))?,
            dtype: *Dtype::ALL.get(usize::from(dtype)).ok_or(CallError::ElementType(dtype))?,
            op: match op {
                NO_OP => None,
                op => Some(*ReduceOp::ALL.get(usize::from(op)).ok_or(CallError::Reduction(op))?),
            },
            root: u32::from_le_bytes([r0, r1, r2, r3]),
            count_and_lens: u64::from_le_bytes([c0, c1, c2, c3, c4, c5, c6, c7]),
            lens,
        })
    }
}

impl From<Call> for [u8; 16] {
    fn from(call: Call) -> Self {
        call.encode()
    }
}

impl TryFrom<[u8; 16]> for Call {
    type Error = String;

    fn try_from(bytes: [u8; 16]) -> Result<Self, String> {
        Self::decode(bytes).map_err(|error| error.to_string())
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, dtype, op, root, .. } = self;
        let template = match self.lens() {
            0 => kind.template().to_owned(),
            lens => kind.template().replace("%n", &format!("%n in a list of lengths {lens:06x}")),
        };
        let (dtype, op) = (dtype.name(), op.map(ReduceOp::name));
        f.write_str(&names::fill_template(&template, dtype, op, *root, self.count()))
    }
}

/// Source, tag, length and element type of a message, like `MPI_Status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    pub(crate) source: usize,
    pub(crate) call: Call,
}

impl Status {
    /// The status of a message that has not been received yet.
    pub(crate) const PENDING: Self =
        Self { source: 0, call: Call::new(CallKind::PointToPoint, Dtype::U8, None, 0, 0) };

    /// Returns the status with the length in values of `T`.
    pub(crate) fn of<T: Transfer>(self) -> Self {
        match T::TYPE.units() as u64 {
            1 => self,
            units => Self { call: self.call.with_count(self.call.count() / units), ..self },
        }
    }

    /// Returns the rank that sent the message.
    #[must_use]
    pub const fn source(&self) -> usize {
        self.source
    }

    /// Returns the tag of the message.
    #[must_use]
    pub const fn tag(&self) -> u32 {
        self.call.root
    }

    /// Returns the number of elements of the message. For [plain data](crate::Transfer), a receive returns
    /// the number of whole values, and a probe the number of bytes.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.call.count() as usize
    }

    /// Returns the type of the elements.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.call.dtype
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_round_trip() {
        for kind in CallKind::ALL {
            for op in [None, Some(ReduceOp::Max)] {
                for lens in [0, 1, 0x00FE_DCBA] {
                    let call = Call::new(kind, Dtype::I64, op, 0x0102_0304, 1 << 40).with_lens(lens);
                    assert_eq!((call.count(), call.lens()), (1 << 40, lens));
                    assert_eq!(Call::decode(call.encode()), Ok(call));
                }
            }
        }
    }

    /// A larger descriptor is passed through memory instead of registers, which slows each small message.
    #[test]
    fn call_descriptor_fits_into_two_registers() {
        assert_eq!(size_of::<Call>(), 16);
    }

    /// Bytes of protocol version 2. A change of the layout must raise the version.
    #[test]
    fn descriptors_of_this_version_have_these_bytes() {
        let reduces =
            Call::new(CallKind::Reduce, Dtype::F64, Some(ReduceOp::Bxor), 0x0403_0201, 0x1615_1413_1211)
                .with_lens(0x0018_1700);
        let bytes = [4, 9, 7, 0, 1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18];
        assert_eq!((reduces.encode(), Call::decode(bytes)), (bytes, Ok(reduces)));
        let barrier = Call::new(CallKind::Barrier, Dtype::I8, None, 0, 0);
        let bytes = [0, 0, 255, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!((barrier.encode(), Call::decode(bytes)), (bytes, Ok(barrier)));
    }

    #[test]
    fn operations_have_these_numbers() {
        let numbers = [
            (CallKind::Barrier, 0),
            (CallKind::AllReduce, 1),
            (CallKind::Broadcast, 2),
            (CallKind::PointToPoint, 3),
            (CallKind::Reduce, 4),
            (CallKind::AllGather, 5),
            (CallKind::ReduceScatter, 6),
            (CallKind::Gather, 7),
            (CallKind::Scatter, 8),
            (CallKind::AllToAll, 9),
            (CallKind::AllGatherV, 10),
            (CallKind::ReduceScatterV, 11),
            (CallKind::GatherV, 12),
            (CallKind::ScatterV, 13),
            (CallKind::AllToAllV, 14),
            (CallKind::Scan, 15),
            (CallKind::ExclusiveScan, 16),
            (CallKind::MonitoredBarrier, 17),
            (CallKind::Subgroup, 18),
        ];
        assert_eq!(numbers.len(), CallKind::ALL.len());
        for (kind, number) in numbers {
            let bytes = Call::new(kind, Dtype::U8, None, 0, 0).encode();
            assert_eq!((bytes[0], Call::decode(bytes).unwrap().kind), (number, kind));
        }
    }

    #[test]
    fn random_descriptors_never_cause_a_panic() {
        let op = Some(ReduceOp::Max);
        let good = CallKind::ALL.map(|kind| Call::new(kind, Dtype::I64, op, 0x0102_0304, 1 << 40).encode());
        let decode = |bytes: &[u8]| Call::decode(bytes.try_into().ok()?).ok();
        let encode = |call: &Call| {
            assert!(call.to_string().len() < 200);
            call.encode().to_vec()
        };
        convoke_testkit::fuzz("random_descriptors_never_cause_a_panic", &good, 1000, decode, encode);
    }

    #[test]
    fn unknown_numbers_are_named() {
        let good = Call::new(CallKind::Barrier, Dtype::U8, None, 0, 0).encode();
        for (index, what) in [(0, "operation"), (1, "element type"), (2, "reduction")] {
            let mut bytes = good;
            bytes[index] = 77;
            let error = Call::decode(bytes).unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
        }
    }
}
