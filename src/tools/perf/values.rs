//! The element types, and test numbers whose results every type represents exactly. Pure.

use std::fmt::Debug;
use std::ops::Range;

use convoke_comm::{Complex, Dtype, Element, ReduceOp, Reduction, bf16, f16};

/// An element that can be built from whole numbers and compared.
pub(crate) trait Value: Element + PartialEq + Debug {
    /// Converts the whole number `re`, with imaginary part `im` if the type has one. Overflow wraps as in the
    /// type.
    fn from_parts(re: i64, im: i64) -> Self;

    /// Reduction that adds contributions, of which this rank's is multiplied by `factor`. `None` if the type
    /// has no products.
    fn premul_sum(factor: u8) -> Option<Reduction<Self>>;
}

/// Implements [`Value`] for types, by expressions for the results of its two functions.
macro_rules! values {
    ($($type:ty),*; |$re:ident, $im:ident| $value:expr, |$factor:ident| $premul_sum:expr) => {$(
        impl Value for $type {
            fn from_parts($re: i64, $im: i64) -> Self {
                $value
            }

            fn premul_sum($factor: u8) -> Option<Reduction<Self>> {
                $premul_sum
            }
        }
    )*};
}

values!(i8, u8, i16, u16, i32, u32, i64, u64, f32, f64; |re, _im| re as Self,
    |factor| Some(Reduction::premul_sum(<Self as Value>::from_parts(factor.into(), 0))));
values!(f16, bf16; |re, _im| Self::from_f32(re as f32), |factor| Some(Reduction::premul_sum(f32::from(factor))));
values!(Complex<f32>, Complex<f64>; |re, im| Self::new(re as _, im as _),
    |factor| Some(Reduction::premul_sum(Self::new(factor.into(), 0.0))));
values!(bool; |re, _im| re != 0, |_factor| None);

/// Evaluates `$body` with `$type` as the Rust type of `$dtype`, or `$else` if this program has no such type.
macro_rules! with_type {
    ($dtype:expr, $type:ident => $body:expr, else $else:expr) => {{
        use convoke_comm::Dtype;
        macro_rules! arm {
            ($rust:ty) => {{
                type $type = $rust;
                $body
            }};
        }
        match $dtype {
            Dtype::I8 => arm!(i8),
            Dtype::U8 => arm!(u8),
            Dtype::I16 => arm!(i16),
            Dtype::U16 => arm!(u16),
            Dtype::I32 => arm!(i32),
            Dtype::U32 => arm!(u32),
            Dtype::I64 => arm!(i64),
            Dtype::U64 => arm!(u64),
            Dtype::F32 => arm!(f32),
            Dtype::F64 => arm!(f64),
            Dtype::F16 => arm!(convoke_comm::f16),
            Dtype::Bf16 => arm!(convoke_comm::bf16),
            Dtype::Bool => arm!(bool),
            Dtype::ComplexF32 => arm!(convoke_comm::Complex<f32>),
            Dtype::ComplexF64 => arm!(convoke_comm::Complex<f64>),
            _ => $else,
        }
    }};
}
pub(crate) use with_type;

/// Number of elements after which the test numbers repeat. It is a prime, so that blocks begin with different
/// numbers.
pub(crate) const PERIOD: usize = 251;

/// The numbers that each rank contributes at each index, and their reductions.
///
/// The numbers are small and whole, so that results are exact. Sums fit into the 24-bit precision in which
/// floats and 16-bit types are added, and into the range of `f16` up to 2000 ranks.
///
/// In some reductions one element decides the result, such as a minimum. That element comes from one rank, a
/// different one at each index. With random numbers, all results of many ranks would be equal.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TestPattern {
    /// The reduction; `None` if the collective does not reduce. For bool, the equivalent bitwise operation.
    op: Option<ReduceOp>,
    is_bool: bool,
    has_imaginary: bool,
    ranks: usize,
}

impl TestPattern {
    pub(crate) fn new(op: Option<ReduceOp>, dtype: Dtype, ranks: usize) -> Self {
        let is_bool = dtype == Dtype::Bool;
        let op = match op {
            Some(ReduceOp::Sum | ReduceOp::Max) if is_bool => Some(ReduceOp::Bor),
            Some(ReduceOp::Product | ReduceOp::Min) if is_bool => Some(ReduceOp::Band),
            op => op,
        };
        // Imaginary parts are left out of products, which would mix real and imaginary parts.
        let has_imaginary = op != Some(ReduceOp::Product);
        Self { op, is_bool, has_imaginary, ranks }
    }

    /// The element of `rank` at `index`. A rank beyond the last gets numbers that no rank has.
    pub(crate) fn element<T: Value>(&self, rank: usize, index: usize) -> T {
        self.value(self.number(rank, index))
    }

    /// The reduction of the elements of `ranks` at `index`.
    pub(crate) fn reduced<T: Value>(&self, ranks: Range<usize>, index: usize) -> T {
        let numbers = ranks.clone().map(|rank| self.number(rank, index));
        let result = match self.op {
            Some(ReduceOp::Min) => numbers.min().expect("a reduction has at least one rank"),
            Some(ReduceOp::Max) => numbers.max().expect("a reduction has at least one rank"),
            Some(ReduceOp::Product) => numbers.product(),
            Some(ReduceOp::Avg) => numbers.sum::<i64>() / ranks.len().max(1) as i64,
            Some(ReduceOp::Band) => numbers.fold(-1, |a, b| a & b),
            Some(ReduceOp::Bor) => numbers.fold(0, |a, b| a | b),
            Some(ReduceOp::Bxor) => numbers.fold(0, |a, b| a ^ b),
            Some(ReduceOp::PremulSum) => {
                numbers.zip(ranks).map(|(number, rank)| number * i64::from(Self::factor(rank))).sum()
            }
            _ => numbers.sum(),
        };
        self.value(result)
    }

    /// The factor of `rank` in a premul_sum.
    pub(crate) fn factor(rank: usize) -> u8 {
        if rank.is_multiple_of(2) { 1 } else { 2 }
    }

    fn value<T: Value>(&self, number: i64) -> T {
        T::from_parts(number, if self.has_imaginary { -number } else { 0 })
    }

    fn number(&self, rank: usize, index: usize) -> i64 {
        let position = index % PERIOD;
        let random = |below: i64| (hash(rank, position) % below as u64) as i64;
        let decides = rank == position % self.ranks;
        let number = match self.op {
            None => random(121),
            Some(ReduceOp::Min) => random(60) + if decides { 0 } else { 60 },
            Some(ReduceOp::Max) => random(60) + if decides { 60 } else { 0 },
            Some(ReduceOp::Product) if decides => 2 + random(2),
            Some(ReduceOp::Product) => 1 - 2 * random(2),
            Some(ReduceOp::Band) if !decides => 127,
            Some(ReduceOp::Bor) if !decides => 0,
            Some(ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor) => random(128),
            Some(ReduceOp::Avg) => self.around_mean(rank, position),
            Some(_) => random(16),
        };
        if self.is_bool { number & 1 } else { number }
    }

    /// Numbers with a whole mean: each rank's difference from the mean is the opposite of its mirror rank's.
    fn around_mean(&self, rank: usize, position: usize) -> i64 {
        let mean = (hash(usize::MAX, position) % 16) as i64;
        if rank >= self.ranks {
            return mean + 9;
        }
        let mirror = self.ranks - 1 - rank;
        let more = (hash(rank.min(mirror), position) % 8) as i64;
        mean + more * (rank as i64 - mirror as i64).signum()
    }
}

/// Returns a pseudo-random number.
fn hash(rank: usize, position: usize) -> u64 {
    let x = (rank as u64).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
        ^ (position as u64 + 1).wrapping_mul(0xC2B2_AE3D_27D4_EB4F);
    let x = (x ^ (x >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^ (x >> 29)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests every valid pair of operation and type, on one and on several ranks.
    fn each(check: impl Fn(ReduceOp, Dtype, usize)) {
        for (op, dtype) in ReduceOp::ALL.iter().flat_map(|op| Dtype::ALL.map(|dtype| (*op, dtype))) {
            if op.accepts(dtype) && op != ReduceOp::Custom {
                [1, 2, 3, 4, 17].into_iter().for_each(|ranks| check(op, dtype, ranks));
            }
        }
    }

    #[test]
    fn expected_results_are_exact_in_every_type() {
        each(|op, dtype, ranks| {
            let pattern = TestPattern::new(Some(op), dtype, ranks);
            with_type!(dtype, T => for index in 0..PERIOD {
                // The result as a complex number of 64-bit floats is exact; the type's own result must equal
                // it.
                let exact: Complex<f64> = pattern.reduced(0..ranks, index);
                if dtype.is_float() || dtype.is_complex() {
                    assert!(exact.re.fract() == 0.0 && exact.re.abs() <= 256.0 * ranks as f64);
                    let own = format!("{:?}", pattern.reduced::<T>(0..ranks, index));
                    let rounded = format!("{:?}", T::from_parts(exact.re as i64, exact.im as i64));
                    assert_eq!(own, rounded, "{op} of {dtype} on {ranks}");
                }
            }, else panic!("{dtype}"));
        });
    }

    #[test]
    fn every_rank_affects_some_result() {
        each(|op, dtype, ranks| {
            let pattern = TestPattern::new(Some(op), dtype, ranks);
            with_type!(dtype, T => for lost in 0..ranks.min(PERIOD) {
                // At some index, a wrong number of the rank must change the result.
                let matters = |index: usize| {
                    let all: Vec<T> = (0..ranks).map(|rank| pattern.element(rank, index)).collect();
                    all[lost] != pattern.element::<T>(ranks, index)
                };
                assert!((0..PERIOD).any(matters), "{op} of {dtype}: rank {lost} of {ranks}");
            }, else panic!("{dtype}"));
        });
    }

    #[test]
    fn expected_results_match_manual_calculation() {
        let reduced = |op, dtype, ranks: usize| {
            let pattern = TestPattern::new(Some(op), dtype, ranks);
            let own = (0..ranks).map(|rank| pattern.element::<i64>(rank, 5)).collect::<Vec<_>>();
            (own, pattern.reduced::<i64>(0..ranks, 5))
        };
        for ranks in [2, 3, 5] {
            let (own, sum) = reduced(ReduceOp::Sum, Dtype::I64, ranks);
            assert_eq!(sum, own.iter().sum::<i64>());
            let (own, product) = reduced(ReduceOp::Product, Dtype::I64, ranks);
            assert_eq!(product, own.iter().product::<i64>());
            let (own, avg) = reduced(ReduceOp::Avg, Dtype::F64, ranks);
            assert_eq!(avg * ranks as i64, own.iter().sum::<i64>(), "whole");
            let (own, least) = reduced(ReduceOp::Min, Dtype::I64, ranks);
            assert_eq!(Some(&least), own.iter().min());
            let (own, premul) = reduced(ReduceOp::PremulSum, Dtype::I64, ranks);
            assert_eq!(
                premul,
                own.iter().enumerate().map(|(i, x)| x * i64::from(1 + i as u8 % 2)).sum::<i64>()
            );
            // A product of bools is AND.
            let (own, and) = reduced(ReduceOp::Product, Dtype::Bool, ranks);
            assert_eq!(and, i64::from(own.iter().all(|x| *x != 0)));
        }
    }
}
