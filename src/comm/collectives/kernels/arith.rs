//! Operations on single numbers.

use num_complex::Complex;

use crate::collectives::dtype::NativeBytes;

/// A number of `N` bytes that can be multiplied, real or complex.
pub(super) trait Multiply<const N: usize>: NativeBytes<N> {
    fn product(self, other: Self) -> Self;
}

/// A real number.
pub(super) trait Arith<const N: usize>: Multiply<N> {
    fn sum(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn divided_by(self, divisor: u32) -> Self;
}

macro_rules! integers {
    ($($int:ty),*) => {$(
        impl Multiply<{ size_of::<$int>() }> for $int {
            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
        }

        impl Arith<{ size_of::<$int>() }> for $int {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                Ord::min(self, other)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                Ord::max(self, other)
            }
            // This function is never called: an average of integers is refused.
            #[inline(always)]
            fn divided_by(self, _: u32) -> Self {
                self
            }
        }
    )*};
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64);

// `f32::min` drops NaN and leaves the sign of zero open. So two ranks that compare one pair in different
// order could end with different bits. Equal numbers differ at most in the sign of zero, so OR and AND of
// their bits choose -0 and +0.
macro_rules! floats {
    ($($float:ident),*) => {$(
        impl Multiply<{ size_of::<$float>() }> for $float {
            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self * other
            }
        }

        impl Multiply<{ 2 * size_of::<$float>() }> for Complex<$float> {
            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self * other
            }
        }

        impl Arith<{ size_of::<$float>() }> for $float {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                let less = if self < other { self } else { other };
                let tied = Self::from_bits(self.to_bits() | other.to_bits());
                let number = if self == other { tied } else { less };
                if self.is_nan() | other.is_nan() { Self::NAN } else { number }
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                let greater = if self > other { self } else { other };
                let tied = Self::from_bits(self.to_bits() & other.to_bits());
                let number = if self == other { tied } else { greater };
                if self.is_nan() | other.is_nan() { Self::NAN } else { number }
            }
            // The divisor is the number of ranks, which is below 2^24, so the conversion is exact.
            #[inline(always)]
            #[allow(clippy::cast_lossless)]
            fn divided_by(self, divisor: u32) -> Self {
                self / divisor as Self
            }
        }
    )*};
}

floats!(f32, f64);
