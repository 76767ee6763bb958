//! Element types and reduction operations, as values and as a sealed trait.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Type of the elements of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Dtype {
    /// `i8`
    I8,
    /// `u8`
    U8,
    /// `i16`
    I16,
    /// `u16`
    U16,
    /// `i32`
    I32,
    /// `u32`
    U32,
    /// `i64`
    I64,
    /// `u64`
    U64,
    /// `f32`
    F32,
    /// `f64`
    F64,
}

impl Dtype {
    /// All types, in the order of their wire numbers.
    pub const ALL: [Self; 10] = [
        Self::I8,
        Self::U8,
        Self::I16,
        Self::U16,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
        Self::F32,
        Self::F64,
    ];

    /// Size of one element in bytes.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// Whether elements are floating-point numbers.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I16 => "i16",
            Self::U16 => "u16",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I64 => "i64",
            Self::U64 => "u64",
            Self::F32 => "f32",
            Self::F64 => "f64",
        }
    }

    pub(crate) const fn to_wire(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_wire(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte)).copied()
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How the ranks' elements become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ReduceOp {
    /// Sum; integers wrap.
    Sum,
    /// Least value. NaN wins over numbers, -0 over +0.
    Min,
    /// Greatest value. NaN wins over numbers, +0 over -0.
    Max,
    /// Product; integers wrap.
    Product,
    /// Sum divided by the number of ranks; floating-point types only.
    Avg,
    /// Bitwise AND; integers only.
    Band,
    /// Bitwise OR; integers only.
    Bor,
    /// Bitwise exclusive OR; integers only.
    Bxor,
}

impl ReduceOp {
    /// All operations, in the order of their wire numbers.
    pub const ALL: [Self; 8] =
        [Self::Sum, Self::Min, Self::Max, Self::Product, Self::Avg, Self::Band, Self::Bor, Self::Bxor];

    /// Whether the operation has a meaning for `dtype`.
    #[must_use]
    pub const fn accepts(self, dtype: Dtype) -> bool {
        match self {
            Self::Sum | Self::Min | Self::Max | Self::Product => true,
            Self::Avg => dtype.is_float(),
            Self::Band | Self::Bor | Self::Bxor => !dtype.is_float(),
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "product",
            Self::Avg => "avg",
            Self::Band => "band",
            Self::Bor => "bor",
            Self::Bxor => "bxor",
        }
    }

    pub(crate) const fn to_wire(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_wire(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte)).copied()
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A type whose values can be sent and reduced: plain numbers, any bit pattern of which is a value.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The type as a value.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $rust {}
        impl Element for $rust {
            const DTYPE: Dtype = Dtype::$dtype;
        }
    )*};
}

elements! {
    i8 => I8, u8 => U8, i16 => I16, u16 => U16, i32 => I32, u32 => U32, i64 => I64, u64 => U64,
    f32 => F32, f64 => F64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_numbers_round_trip() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::from_wire(dtype.to_wire()), Some(dtype));
        }
        for op in ReduceOp::ALL {
            assert_eq!(ReduceOp::from_wire(op.to_wire()), Some(op));
        }
        assert_eq!(Dtype::from_wire(10), None);
        assert_eq!(ReduceOp::from_wire(8), None);
    }

    #[test]
    fn sizes_are_those_of_rust() {
        assert_eq!(Dtype::F64.size_bytes(), size_of::<f64>());
        assert_eq!(<i16 as Element>::DTYPE.size_bytes(), size_of::<i16>());
    }
}
