//! Element types and reduction operations as values; element types as Rust types ([`element`]).

pub(crate) mod element;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::collectives::named_enum::named_enum;
pub use element::{Element, Transfer, TransferType};
pub(crate) use element::{NativeBytes, sealed};

named_enum! {
    /// Type of the elements of a buffer.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    #[non_exhaustive]
    pub enum Dtype {
        /// `i8`
        I8 = "i8",
        /// `u8`
        U8 = "u8",
        /// `i16`
        I16 = "i16",
        /// `u16`
        U16 = "u16",
        /// `i32`
        I32 = "i32",
        /// `u32`
        U32 = "u32",
        /// `i64`
        I64 = "i64",
        /// `u64`
        U64 = "u64",
        /// `f32`
        F32 = "f32",
        /// `f64`
        F64 = "f64",
        /// `f16`: IEEE half precision
        F16 = "f16",
        /// `bf16`: the upper 16 bits of an `f32`
        Bf16 = "bf16",
        /// `bool`
        Bool = "bool",
        /// `Complex<f32>`
        ComplexF32 = "complex_f32",
        /// `Complex<f64>`
        ComplexF64 = "complex_f64",
    }
    /// All types, in the order of their numbers in messages.
    pub const ALL: [Self; _];
    pub(crate) const fn name(self) -> &'static str;
}

impl Dtype {
    /// Returns the size of one element in bytes.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::Bool => 1,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 | Self::ComplexF32 => 8,
            Self::ComplexF64 => 16,
        }
    }

    /// Returns true for real floating-point types; complex types do not count.
    #[must_use]
    pub const fn is_float(self) -> bool {
        self.is_half() || matches!(self, Self::F32 | Self::F64)
    }

    /// Returns true for floating-point types of 16 bits.
    #[must_use]
    pub const fn is_half(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16)
    }

    /// Returns true for complex types.
    #[must_use]
    pub const fn is_complex(self) -> bool {
        matches!(self, Self::ComplexF32 | Self::ComplexF64)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

named_enum! {
    /// The reduction that combines the ranks' elements into one.
    ///
    /// On [`bool`], sum, maximum and bitwise OR are OR; product, minimum and bitwise AND are AND.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    #[non_exhaustive]
    pub enum ReduceOp {
        /// Sum; integers wrap.
        Sum = "sum",
        /// Minimum. It is NaN if an operand is NaN; -0 is less than +0. Not defined for complex numbers.
        Min = "min",
        /// Maximum. It is NaN if an operand is NaN; +0 is greater than -0. Not defined for complex numbers.
        Max = "max",
        /// Product; integers wrap.
        Product = "product",
        /// Sum divided by the number of ranks; floating-point and complex types only.
        Avg = "avg",
        /// Bitwise AND; integers and `bool` only.
        Band = "band",
        /// Bitwise OR; integers and `bool` only.
        Bor = "bor",
        /// Bitwise exclusive OR; integers and `bool` only.
        Bxor = "bxor",
        /// Sum of inputs that each rank multiplies by its own factor; not for `bool`.
        /// [`Reduction::premul_sum`](crate::Reduction::premul_sum) makes it and holds the factor.
        PremulSum = "premul_sum",
        /// A function of the program. [`Reduction::new`](crate::Reduction::new) makes it and holds the
        /// function.
        Custom = "custom",
    }
    /// All operations, in the order of their numbers in messages.
    pub const ALL: [Self; _];
    pub(crate) const fn name(self) -> &'static str;
}

impl ReduceOp {
    /// Returns true if the operation is defined for `dtype`.
    #[must_use]
    pub const fn accepts(self, dtype: Dtype) -> bool {
        match self {
            Self::Sum | Self::Product | Self::Custom => true,
            Self::Min | Self::Max => !dtype.is_complex(),
            Self::Avg => dtype.is_float() || dtype.is_complex(),
            Self::Band | Self::Bor | Self::Bxor => !dtype.is_float() && !dtype.is_complex(),
            Self::PremulSum => !matches!(dtype, Dtype::Bool),
        }
    }

    /// Returns true if `dtype` has too few digits for the intermediate results of the operation. They are
    /// then kept as `f32`, and rounded once at the end.
    pub(crate) const fn accumulates_in_f32(self, dtype: Dtype) -> bool {
        dtype.is_half() && matches!(self, Self::Sum | Self::Product | Self::Avg | Self::PremulSum)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Evaluates an expression with the Rust type of a [`Dtype`].
macro_rules! with_element_type {
    ($dtype:expr, $T:ident => $value:expr) => {
        with_element_type!(@ $dtype, $T => $value; I8 i8, U8 u8, I16 i16, U16 u16, I32 i32, U32 u32, I64 i64, U64 u64,
            F32 f32, F64 f64, F16 half::f16, Bf16 half::bf16, Bool bool, ComplexF32 num_complex::Complex<f32>,
            ComplexF64 num_complex::Complex<f64>)
    };
    (@ $dtype:expr, $T:ident => $value:expr; $($name:ident $rust:ty),*) => {
        match $dtype {
            $($crate::collectives::dtype::Dtype::$name => {
                type $T = $rust;
                $value
            })*
        }
    };
}
pub(crate) use with_element_type;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_numbers_round_trip() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::ALL[dtype as usize], dtype);
        }
        for op in ReduceOp::ALL {
            assert_eq!(ReduceOp::ALL[op as usize], op);
        }
    }

    #[test]
    fn wire_numbers_are_stable() {
        assert_eq!(
            [Dtype::I8, Dtype::F64, Dtype::F16, Dtype::ComplexF64].map(|dtype| dtype as u8),
            [0, 9, 10, 14]
        );
        assert_eq!([ReduceOp::Sum, ReduceOp::Bxor, ReduceOp::Custom].map(|op| op as u8), [0, 7, 9]);
    }
}
