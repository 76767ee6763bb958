//! Element types, and the arithmetic of the model: as simple as possible, one element after the other.

use std::fmt::Debug;

use crate::{Complex, Dtype, Element, ReduceOp, bf16, f16};

pub(crate) trait Value: Element + Debug + PartialEq {
    /// A value; sums and products of a few of these are exact in every order.
    fn exact(random: u64) -> Self;

    /// A value whose sums are rounded, if the type rounds.
    fn rounded(random: u64) -> Self {
        Self::exact(random)
    }

    /// Combines two values. [`ReduceOp::PremulSum`] and [`ReduceOp::Custom`] are sums too.
    fn reduce(op: ReduceOp, a: Self, b: Self) -> Self;

    /// Divides a sum for an average.
    fn divided_by(self, ranks: usize) -> Self {
        panic!("{self:?} divided by {ranks} ranks")
    }

    /// The factor with which a rank multiplies its share.
    fn factor(random: u64) -> Self::Factor;

    /// The share multiplied by the factor.
    fn scaled(self, random: u64) -> Self;

    /// Returns whether both are equal; all NaN are equal.
    fn equals(self, other: Self) -> bool {
        self == other
    }

    /// Returns whether both are equal except for rounding.
    fn is_close(self, other: Self) -> bool {
        self == other
    }

    /// The bits of the value; all NaN have equal ones.
    fn bits(self) -> u64;
}

macro_rules! integers {
    ($($int:ty),*) => {$(
        impl Value for $int {
            fn exact(random: u64) -> Self {
                random as Self
            }

            fn reduce(op: ReduceOp, a: Self, b: Self) -> Self {
                match op {
                    ReduceOp::Sum | ReduceOp::PremulSum | ReduceOp::Custom => a.wrapping_add(b),
                    ReduceOp::Product => a.wrapping_mul(b),
                    ReduceOp::Min => Ord::min(a, b),
                    ReduceOp::Max => Ord::max(a, b),
                    ReduceOp::Band => a & b,
                    ReduceOp::Bor => a | b,
                    ReduceOp::Bxor => a ^ b,
                    op => panic!("{op} of integers"),
                }
            }

            fn factor(random: u64) -> Self {
                random as Self
            }

            fn scaled(self, random: u64) -> Self {
                self.wrapping_mul(Self::factor(random))
            }

            fn bits(self) -> u64 {
                let mut bytes = [0; 8];
                bytes[..size_of::<Self>()].copy_from_slice(&self.to_le_bytes());
                u64::from_le_bytes(bytes)
            }
        }
    )*};
}

integers!(i8, i16, i32, i64, u8, u16, u32, u64);

impl Value for bool {
    fn exact(random: u64) -> Self {
        random & 256 != 0
    }

    fn reduce(op: ReduceOp, a: Self, b: Self) -> Self {
        match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => a | b,
            ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => a & b,
            ReduceOp::Bxor | ReduceOp::Custom => a ^ b,
            op => panic!("{op} of truth values"),
        }
    }

    fn factor(_: u64) -> Self::Factor {
        panic!("a factor of truth values")
    }

    fn scaled(self, random: u64) -> Self {
        panic!("{self} multiplied by {random}")
    }

    fn bits(self) -> u64 {
        self.into()
    }
}

/// Values with few significant bits, both zeros among them.
const EXACT: [f32; 16] =
    [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, -3.0, 1.5, -1.5, 4.0, 0.25, 8.0, -8.0];
const SPECIAL: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
/// One value in this many is NaN or infinite.
const SPECIAL_ONE_IN: u64 = 200;
const FACTORS: [f32; 2] = [1.0, -1.0];

fn exact(random: u64) -> f32 {
    let of = |table: &[f32]| table[(random >> 32) as usize % table.len()];
    if random.is_multiple_of(SPECIAL_ONE_IN) { of(&SPECIAL) } else { of(&EXACT) }
}

/// A value between -1 and 1.
fn rounded(random: u64) -> f64 {
    random as i64 as f64 / i64::MAX as f64
}

fn factor(random: u64) -> f32 {
    FACTORS[random as usize % FACTORS.len()]
}

fn reduce(op: ReduceOp, a: f32, b: f32) -> f32 {
    let (less, greater) = if a.total_cmp(&b).is_le() { (a, b) } else { (b, a) };
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum | ReduceOp::Custom => a + b,
        ReduceOp::Product => a * b,
        ReduceOp::Min | ReduceOp::Max if a.is_nan() || b.is_nan() => f32::NAN,
        ReduceOp::Min => less,
        ReduceOp::Max => greater,
        op => panic!("{op} of floats"),
    }
}

macro_rules! floats {
    ($($float:ty, $near:expr, $factor:ty, |$value:ident| $to_f32:expr, |$ranks:ident| $average:expr,
      $from_f32:path, $from_f64:path;)*) => {$(
        impl Value for $float {
            fn exact(random: u64) -> Self {
                $from_f32(exact(random))
            }

            fn rounded(random: u64) -> Self {
                $from_f64(rounded(random))
            }

            fn reduce(op: ReduceOp, a: Self, b: Self) -> Self {
                let wide = |$value: Self| $to_f32;
                $from_f32(reduce(op, wide(a), wide(b)))
            }

            fn divided_by(self, $ranks: usize) -> Self {
                let $value = self;
                $average
            }

            fn factor(random: u64) -> $factor {
                factor(random).into()
            }

            fn scaled(self, random: u64) -> Self {
                let $value = self;
                $from_f32($to_f32 * factor(random))
            }

            fn equals(self, other: Self) -> bool {
                self.to_bits() == other.to_bits() || self.is_nan() && other.is_nan()
            }

            fn is_close(self, other: Self) -> bool {
                let wide = |$value: Self| $to_f32;
                (wide(self) - wide(other)).abs() < $near
            }

            fn bits(self) -> u64 {
                if self.is_nan() { 0 } else { self.to_bits().into() }
            }
        }
    )*};
}

fn same<T>(value: T) -> T {
    value
}

fn narrow(value: f64) -> f32 {
    value as f32
}

floats! {
    f32, 1e-5, f32, |value| value, |ranks| value / ranks as Self, same, narrow;
    f64, 1e-5, Self, |value| narrow(value), |ranks| value / ranks as Self, Self::from, same;
    f16, 0.02, f32, |value| value.to_f32(), |ranks| Self::from_f32(value.to_f32() / ranks as f32),
        Self::from_f32, Self::from_f64;
    bf16, 0.2, f32, |value| value.to_f32(), |ranks| Self::from_f32(value.to_f32() / ranks as f32),
        Self::from_f32, Self::from_f64;
}

macro_rules! complex {
    ($($float:ty),*) => {$(
        /// A product depends on the order in the sign of zero, and would depend on it more with infinities.
        impl Value for Complex<$float> {
            fn exact(random: u64) -> Self {
                let of = |bits: u64| <$float>::from(EXACT[bits as usize % EXACT.len()]);
                Self::new(of(random >> 32), of(random >> 40))
            }

            fn rounded(random: u64) -> Self {
                Self::new(rounded(random) as $float, rounded(random.rotate_left(32)) as $float)
            }

            fn reduce(op: ReduceOp, a: Self, b: Self) -> Self {
                match op {
                    ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum | ReduceOp::Custom => a + b,
                    ReduceOp::Product => a * b,
                    op => panic!("{op} of complex numbers"),
                }
            }

            fn divided_by(self, ranks: usize) -> Self {
                Self::new(self.re / ranks as $float, self.im / ranks as $float)
            }

            fn factor(random: u64) -> Self {
                Self::new(factor(random).into(), factor(random >> 8).into())
            }

            fn scaled(self, random: u64) -> Self {
                self * Self::factor(random)
            }

            fn is_close(self, other: Self) -> bool {
                (self - other).norm_sqr() < 1e-10
            }

            fn bits(self) -> u64 {
                u64::from(self.re.to_bits()) ^ u64::from(self.im.to_bits()).rotate_left(1)
            }
        }
    )*};
}

complex!(f32, f64);

/// The types that programs use: of all sizes, exact and rounded, and those with special code paths. (Each
/// takes time to compile; the matrix has all types.)
pub(crate) const TYPES: [Dtype; 6] =
    [Dtype::Bool, Dtype::I16, Dtype::F32, Dtype::I64, Dtype::Bf16, Dtype::ComplexF64];

/// Evaluates an expression with the listed type that corresponds to `dtype`.
macro_rules! match_type {
    ([$($Name:ident: $type:ty),*], $dtype:expr, $T:ident => $body:expr, $other:ident => $else:expr) => {
        match $dtype {
            $(Dtype::$Name => {
                type $T = $type;
                $body
            })*
            $other => $else,
        }
    };
}
pub(crate) use match_type;

/// Evaluates an expression with the type of [`TYPES`] that corresponds to `dtype`.
macro_rules! with_type {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::programs::values::match_type!(
            [Bool: bool, I16: i16, F32: f32, I64: i64, Bf16: crate::bf16, ComplexF64: crate::Complex<f64>],
            $dtype,
            $T => $body,
            other => panic!("no values of {other}")
        )
    };
}
pub(crate) use with_type;

/// Evaluates an expression with the type that corresponds to `dtype`, out of all types.
macro_rules! with_any_type {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::programs::values::match_type!(
            [I8: i8, I32: i32, U8: u8, U16: u16, U32: u32, U64: u64, F64: f64, F16: crate::f16,
                ComplexF32: crate::Complex<f32>],
            $dtype,
            $T => $body,
            other => $crate::programs::values::with_type!(other, $T => $body)
        )
    };
}
pub(crate) use with_any_type;

/// A pseudorandom number that depends only on the arguments.
pub(crate) fn hash(seed: u64, rank: usize, index: usize) -> u64 {
    let mut x = seed ^ (rank as u64).wrapping_mul(0xA24B_AED4_963E_E407);
    x = x.wrapping_add((index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^ (x >> 29)
}

/// A digest: equal for equal bits, and almost never otherwise.
pub(crate) fn digest<T: Value>(values: &[T]) -> u64 {
    values.iter().fold(values.len() as u64, |sum, value| hash(sum, 1, 0).wrapping_add(value.bits()))
}
