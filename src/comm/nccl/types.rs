//! The needed part of NCCL's header: layouts and numbers. Pure.

use std::ffi::{c_char, c_int, c_uint};
use std::ptr;

/// `ncclResult_t`.
pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;
/// `NCCL_SPLIT_NOCOLOR`.
pub(super) const NO_COLOR: c_int = -1;
/// `ncclScalarHostImmediate`: NCCL reads a factor from host memory during the call.
pub(super) const HOST_IMMEDIATE: c_int = 1;
/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;
const MAGIC: c_uint = 0xcafe_beef;

/// `ncclUniqueId`: identifies a group while its ranks connect.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

/// `ncclComm`, used only by pointer.
#[repr(C)]
pub(super) struct Comm {
    hidden: [u8; 0],
}

/// `ncclConfig_t` of 2.18. Later versions are longer: NCCL reads `size` bytes and uses defaults for the rest.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Returns a configuration in which calls return before NCCL has carried them out.
    pub(super) fn nonblocking() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: MAGIC,
            version: 21_800,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// `ncclDataType_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum DataType {
    I8 = 0,
    U8 = 1,
    I32 = 2,
    U32 = 3,
    I64 = 4,
    U64 = 5,
    F16 = 6,
    F32 = 7,
    F64 = 8,
    Bf16 = 9,
    F8E4M3 = 10,
    F8E5M2 = 11,
}

#[cfg(test)]
impl DataType {
    /// Bytes of an element.
    pub(crate) const fn size_bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }
}

/// `ncclRedOp_t`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum RedOp {
    Sum,
    Product,
    Max,
    Min,
    Avg,
    /// A sum of all ranks' elements, each multiplied by its rank's factor. The array starts with the bytes of
    /// this rank's factor, in the elements' type.
    PremulSum([u8; 8]),
}

impl RedOp {
    /// NCCL's number of the operation; for one with a factor, the number of a plain sum.
    pub(super) const fn number(self) -> c_int {
        match self {
            Self::Sum | Self::PremulSum(_) => 0,
            Self::Product => 1,
            Self::Max => 2,
            Self::Min => 3,
            Self::Avg => 4,
        }
    }
}

/// An address on a device.
pub(crate) type Address = u64;

/// One NCCL call on elements of type `T` with the reduction `O`; the defaults are NCCL's own types.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct NcclCall<T = DataType, O = RedOp> {
    pub(crate) function: NcclFunction<O>,
    /// The memory that the call reads; unused by `Recv`.
    pub(crate) send: Address,
    /// The memory that the call writes; unused by `Send`.
    pub(crate) recv: Address,
    /// The number of elements; for `AllGather` and `ReduceScatter` those of one rank's block.
    pub(crate) count: usize,
    pub(crate) datatype: T,
}

/// The function of a call, with its arguments apart from the memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum NcclFunction<O = RedOp> {
    AllReduce(O),
    Broadcast { root: usize },
    Reduce { op: O, root: usize },
    AllGather,
    ReduceScatter(O),
    Send { to: usize },
    Recv { from: usize },
}

impl<O> NcclFunction<O> {
    pub(crate) fn reduction(self) -> Option<O> {
        match self {
            Self::AllReduce(op) | Self::Reduce { op, .. } | Self::ReduceScatter(op) => Some(op),
            Self::Broadcast { .. } | Self::AllGather | Self::Send { .. } | Self::Recv { .. } => None,
        }
    }

    /// Converts the reduction, if there is one.
    pub(crate) fn try_map<P, E>(self, convert: impl FnOnce(O) -> Result<P, E>) -> Result<NcclFunction<P>, E> {
        Ok(match self {
            Self::AllReduce(op) => NcclFunction::AllReduce(convert(op)?),
            Self::Broadcast { root } => NcclFunction::Broadcast { root },
            Self::Reduce { op, root } => NcclFunction::Reduce { op: convert(op)?, root },
            Self::AllGather => NcclFunction::AllGather,
            Self::ReduceScatter(op) => NcclFunction::ReduceScatter(convert(op)?),
            Self::Send { to } => NcclFunction::Send { to },
            Self::Recv { from } => NcclFunction::Recv { from },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_match_nccl_h() {
        assert_eq!((size_of::<UniqueId>(), align_of::<UniqueId>()), (128, 1));
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(std::mem::offset_of!(Config, split_share), 40);
    }
}
