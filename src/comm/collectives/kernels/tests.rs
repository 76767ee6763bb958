//! Tests of every kernel against a scalar reference in wider arithmetic.

use half::{bf16, f16};

use super::simd::SimdLevel;
use super::*;
use crate::collectives::dtype::Element;
use convoke_testkit::Random;

/// Number of ranks of an average.
const WORLD: usize = 7;

/// Returns `values` as bytes, preceded by `shift` others: kernels must not depend on alignment.
fn bytes_of<T: Element>(values: &[T], shift: usize) -> Vec<u8> {
    let mut bytes = vec![0; shift + size_of_val(values)];
    T::write(values, &mut bytes[shift..]);
    bytes
}

fn values_of<T: Element>(bytes: &[u8]) -> Vec<T> {
    let mut values = Vec::new();
    T::read(bytes, &mut values);
    values
}

fn reduce<T: Element>(kernel: &Kernel, a: &[T], b: &[T], shift: usize) -> Vec<T> {
    let (mut into, from) = (bytes_of(a, shift), bytes_of(b, 3));
    kernel.reduce(&mut into[shift..], &from[3..], false, true).unwrap();
    values_of(&into[shift..])
}

fn multiply<T: Element>(factor: T::Factor, values: &[T], shift: usize) -> Vec<T> {
    let mut bytes = bytes_of(values, shift);
    factor.multiply(&mut bytes[shift..]);
    values_of(&bytes[shift..])
}

/// Returns the named operations that have a meaning for `dtype`.
fn operations(dtype: Dtype) -> impl Iterator<Item = (ReduceOp, Kernel)> {
    ReduceOp::ALL.into_iter().filter_map(move |op| Some((op, Kernel::of(dtype, op, WORLD)?)))
}

#[test]
fn undefined_type_and_operation_pairs_have_no_kernel() {
    use ReduceOp::{Avg, Band, Bor, Bxor, Custom, Max, Min, PremulSum};
    for dtype in Dtype::ALL {
        let refused: &[ReduceOp] = match dtype {
            Dtype::F32 | Dtype::F64 | Dtype::F16 | Dtype::Bf16 => &[Band, Bor, Bxor, Custom],
            Dtype::ComplexF32 | Dtype::ComplexF64 => &[Min, Max, Band, Bor, Bxor, Custom],
            Dtype::Bool => &[Avg, PremulSum, Custom],
            _ => &[Avg, Custom],
        };
        for op in ReduceOp::ALL {
            let found = Kernel::of(dtype, op, WORLD).is_some();
            assert_eq!(found, !refused.contains(&op), "{op} of {dtype}");
            assert_eq!(op.accepts(dtype), found || op == Custom, "{op} of {dtype}");
        }
    }
}

macro_rules! check_integers {
    ($($int:ident),*) => {$(
        #[test]
        fn $int() { SimdLevel::for_each_supported(|| {
            let mut random = Random::new(stringify!($int));
            for len in 0..130 {
                let a: Vec<$int> = (0..len).map(|_| random.next() as $int).collect();
                let b: Vec<$int> = (0..len).map(|_| random.next() as $int).collect();
                for (op, kernel) in operations($int::DTYPE) {
                    let got = reduce(&kernel, &a, &b, len % 9);
                    for i in 0..len {
                        let (x, y) = (i128::from(a[i]), i128::from(b[i]));
                        let want = match op {
                            ReduceOp::Sum | ReduceOp::PremulSum => x + y,
                            ReduceOp::Min => if x < y { x } else { y },
                            ReduceOp::Max => if x > y { x } else { y },
                            ReduceOp::Product => x.wrapping_mul(y),
                            ReduceOp::Band => x & y,
                            ReduceOp::Bor => x | y,
                            ReduceOp::Bxor => x ^ y,
                            ReduceOp::Avg | ReduceOp::Custom => unreachable!("refused"),
                        };
                        assert_eq!(got[i], want as $int, "{op} {x} {y}");
                    }
                }
                let factor = random.next() as $int;
                let want = |x: &$int| i128::from(*x).wrapping_mul(i128::from(factor)) as $int;
                assert_eq!(multiply(factor, &a, len % 9), a.iter().map(want).collect::<Vec<_>>());
            }
        }); }
    )*};
}

check_integers!(i8, u8, i16, u16, i32, u32, i64, u64);

/// Returns pairs of the special values of a float.
macro_rules! special_pairs {
    ($float:ident) => {{
        let special = [
            0.0,
            -0.0,
            1.0,
            -1.5,
            3.25e7,
            $float::INFINITY,
            $float::NEG_INFINITY,
            $float::NAN,
            $float::MIN_POSITIVE,
            -$float::MIN_POSITIVE / 2.0,
            $float::MAX,
            $float::MIN,
            $float::EPSILON,
        ];
        special.iter().flat_map(|&a| special.map(|b| (a, b))).collect::<Vec<_>>()
    }};
}

macro_rules! check_floats {
    ($($float:ident, $wide:ident;)*) => {$(
        #[test]
        fn $float() { SimdLevel::for_each_supported(|| {
            let pairs = special_pairs!($float);
            // Values are equal if their bits are, or if both are NaN, whose payload is left open.
            let same = |p: $float, q: $float| p.to_bits() == q.to_bits() || p.is_nan() && q.is_nan();
            for len in (0..130).chain([pairs.len()]) {
                let (a, b): (Vec<_>, Vec<_>) = pairs[pairs.len() - len..].iter().copied().unzip();
                for (op, kernel) in operations($float::DTYPE) {
                    let got = reduce(&kernel, &a, &b, len % 9);
                    let swapped = reduce(&kernel, &b, &a, len % 9);
                    for i in 0..a.len() {
                        let (x, y) = ($wide::from(a[i]), $wide::from(b[i]));
                        // With at least twice as many digits and two more, the two roundings give the result
                        // of one.
                        let want = match op {
                            ReduceOp::Sum | ReduceOp::PremulSum => (x + y) as $float,
                            ReduceOp::Product => (x * y) as $float,
                            ReduceOp::Avg => ($wide::from((x + y) as $float) / WORLD as $wide) as $float,
                            ReduceOp::Min | ReduceOp::Max if x.is_nan() || y.is_nan() => $float::NAN,
                            ReduceOp::Min => if x.total_cmp(&y).is_lt() { a[i] } else { b[i] },
                            ReduceOp::Max => if x.total_cmp(&y).is_gt() { a[i] } else { b[i] },
                            _ => unreachable!("refused"),
                        };
                        assert!(same(got[i], want), "{op} {x} {y}: {} not {want}", got[i]);
                        assert!(same(got[i], swapped[i]), "{op} {x} {y} is not commutative");
                    }
                }
                let products = multiply(0.3, &a, len % 9);
                for (&x, got) in a.iter().zip(products) {
                    assert!(same(got, ($wide::from(x) * $wide::from(0.3 as $float)) as $float), "{x} times 0.3");
                }
            }
        }); }
    )*};
}

check_floats! { f32, f64; f64, f64; }

macro_rules! check_halves {
    ($($name:ident, $half:ident, $max:expr;)*) => {$(
        mod $name {
            use super::*;

            fn all() -> impl Iterator<Item = $half> {
                (0..=u16::MAX).map($half::from_bits)
            }

            fn conversion() -> &'static F32Conversion {
                F32Conversion::of($half::DTYPE).unwrap()
            }

            fn widened(values: &[$half], shift: usize) -> Vec<f32> {
                let (from, mut into) = (bytes_of(values, shift), vec![0; 1 + 4 * values.len()]);
                (conversion().widen)(&from[shift..], &mut into[1..]);
                values_of(&into[1..])
            }

            fn narrowed(values: &[f32], shift: usize) -> Vec<$half> {
                let (from, mut into) = (bytes_of(values, shift), vec![0; 1 + 2 * values.len()]);
                (conversion().narrow)(&from[shift..], &mut into[1..]);
                values_of(&into[1..])
            }

            fn same(a: $half, b: $half) -> bool {
                a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
            }

            #[test]
            fn every_half_converts_to_float_and_back() { SimdLevel::for_each_supported(|| {
                let halves: Vec<_> = all().collect();
                let floats = widened(&halves, 1);
                for (half, float) in halves.iter().zip(&floats) {
                    assert!(f64::from(*float) == half.to_f64() || float.is_nan() && half.is_nan(), "{half}");
                    assert_eq!(float.is_sign_negative(), half.is_sign_negative(), "{half}");
                }
                for (half, back) in halves.iter().zip(narrowed(&floats, 1)) {
                    assert!(same(*half, back), "{half} {back}");
                }
            }); }

            #[test]
            fn conversion_to_half_rounds_to_nearest_even() { SimdLevel::for_each_supported(|| {
                let pairs = all().filter(|half| half.is_finite() && half.is_sign_positive());
                for low in pairs {
                    let high = $half::from_bits(low.to_bits() + 1);
                    // After the greatest half, the next one would follow if there were more exponents.
                    let step = if high.is_finite() { high } else { low }.to_f64()
                        - $half::from_bits(low.to_bits() - u16::from(!high.is_finite())).to_f64();
                    let middle = (low.to_f64() + step / 2.0) as f32;
                    let even = if low.to_bits() % 2 == 0 { low } else { high };
                    let cases = [(middle.next_down(), low), (middle, even), (middle.next_up(), high)];
                    let (floats, want): (Vec<_>, Vec<_>) = cases.into_iter().unzip();
                    assert_eq!(narrowed(&floats, 3), want);
                    let negative: Vec<f32> = floats.iter().map(|float| -float).collect();
                    assert_eq!(narrowed(&negative, 3), want.iter().map(|half| -half).collect::<Vec<_>>());
                }
                assert_eq!($half::MAX.to_f64(), $max);
                assert_eq!(narrowed(&[f32::MAX, f32::MIN], 0), [$half::INFINITY, $half::NEG_INFINITY]);
            }); }

            #[test]
            fn half_minimum_and_maximum_handle_special_values() { SimdLevel::for_each_supported(|| {
                let special = [0.0, -0.0, 1.0, -1.5, 1000.0, -2e-5, 3e-5, f32::INFINITY, -f32::INFINITY, f32::NAN,
                    -f32::NAN].map($half::from_f32);
                let pairs: Vec<_> = special.iter().flat_map(|&a| special.map(|b| (a, b))).collect();
                for len in 0..pairs.len() {
                    let (a, b): (Vec<_>, Vec<_>) = pairs[pairs.len() - len..].iter().copied().unzip();
                    for op in [ReduceOp::Min, ReduceOp::Max] {
                        let got = reduce(&Kernel::of($half::DTYPE, op, WORLD).unwrap(), &a, &b, len % 9);
                        for i in 0..len {
                            let (x, y) = (a[i].to_f64(), b[i].to_f64());
                            let want = match x.total_cmp(&y) {
                                _ if x.is_nan() || y.is_nan() => $half::NAN,
                                order => if order.is_lt() == (op == ReduceOp::Min) { a[i] } else { b[i] },
                            };
                            assert!(same(got[i], want), "{op} {x} {y}: {}", got[i]);
                        }
                    }
                }
            }); }

            #[test]
            fn ordered_reductions_round_once() { SimdLevel::for_each_supported(|| {
                let mut random = Random::new("ordered_reductions_round_once");
                for len in (0..130).chain([1000]) {
                    let mut values =
                        || (0..len).map(|_| $half::from_bits(random.next() as u16)).collect::<Vec<_>>();
                    // Rank 1 adds the contributions of ranks 0, 2 and 3.
                    let (own, others) = (values(), [values(), values(), values()]);
                    for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Avg] {
                        let kernel = Kernel::of($half::DTYPE, op, 4).unwrap();
                        for narrow in [true, false] {
                            let conversion = kernel.f32_conversion().filter(|_| narrow);
                            let bytes = |values: &[$half]| {
                                if narrow { bytes_of(values, 5) } else { bytes_of(&widened(values, 0), 5) }
                            };
                            let (mut contribution, mut sums) = (bytes(&own), vec![0xFF; 4 * len]);
                            for (index, from) in others.iter().enumerate() {
                                let step = OrderedReduceStep { first: index == 0, own: index == 0, last: index == 2 };
                                kernel.reduce_ordered(step, conversion, &mut sums, &bytes(from)[5..], &mut contribution[5..]).unwrap();
                            }
                            let got = if narrow {
                                values_of(&contribution[5..])
                            } else {
                                narrowed(&values_of(&contribution[5..]), 0)
                            };
                            for i in 0..len {
                                let contributions = [others[0][i], own[i], others[1][i], others[2][i]].map(f32::from);
                                let want = match op {
                                    ReduceOp::Product => contributions.into_iter().reduce(|a, b| a * b).unwrap(),
                                    ReduceOp::Sum => contributions.into_iter().reduce(|a, b| a + b).unwrap(),
                                    _ => contributions.into_iter().reduce(|a, b| a + b).unwrap() / 4.0,
                                };
                                let want = $half::from_f32(want);
                                assert!(same(got[i], want), "{op} {contributions:?}: {} {want}", got[i]);
                            }
                        }
                    }
                }
            }); }
        }
    )*};
}

check_halves! { ieee, f16, 65504.0; brain, bf16, 2_f64.powi(128) - 2_f64.powi(120); }

/// Small whole numbers, so that the reference in integers is exact.
fn complex_numbers<F: From<i8>>(random: &mut Random, len: usize) -> (Vec<Complex<F>>, Vec<[i128; 2]>) {
    let parts: Vec<[i8; 2]> =
        (0..len).map(|_| random.next().to_ne_bytes().map(|b| b as i8 / 4)[..2].try_into().unwrap()).collect();
    let numbers = parts.iter().map(|[re, im]| Complex::new((*re).into(), (*im).into())).collect();
    (numbers, parts.iter().map(|parts| parts.map(i128::from)).collect())
}

fn check_complex<F: From<i8> + Copy + PartialEq + fmt::Debug>(test: &'static str)
where
    f64: From<F>,
    Complex<F>: Element<Factor = Complex<F>>,
{
    let mut random = Random::new(test);
    for len in 0..130 {
        let (a, x) = complex_numbers::<F>(&mut random, len);
        let (b, y) = complex_numbers::<F>(&mut random, len);
        let product = |[a, b]: [i128; 2], [c, d]: [i128; 2]| [a * c - b * d, a * d + b * c];
        let same = |got: &Complex<F>, want: [i128; 2]| {
            [got.re, got.im].map(f64::from) == want.map(|part| part as f64)
        };
        for (op, kernel) in operations(Complex::<F>::DTYPE) {
            for (i, got) in reduce(&kernel, &a, &b, len % 9).iter().enumerate() {
                let sum = [x[i][0] + y[i][0], x[i][1] + y[i][1]];
                match op {
                    ReduceOp::Product => assert!(same(got, product(x[i], y[i])), "{got:?}"),
                    ReduceOp::Sum | ReduceOp::PremulSum => assert!(same(got, sum), "{got:?}"),
                    ReduceOp::Avg => {
                        let parts = [got.re, got.im].map(f64::from);
                        let close = |part: f64, sum: i128| (part - sum as f64 / WORLD as f64).abs() < 1e-5;
                        assert!(close(parts[0], sum[0]) && close(parts[1], sum[1]), "{got:?}");
                    }
                    _ => unreachable!("refused"),
                }
            }
        }
        let factor = Complex::new(2.into(), (-3).into());
        for (got, x) in multiply(factor, &a, len % 9).iter().zip(x) {
            assert!(same(got, product(x, [2, -3])), "{got:?}");
        }
    }
}

#[test]
fn complex_f32() {
    SimdLevel::for_each_supported(|| {
        check_complex::<f32>("complex_f32");
    });
}

#[test]
fn complex_f64() {
    SimdLevel::for_each_supported(|| {
        check_complex::<f64>("complex_f64");
    });
}

#[test]
fn bool_reductions_are_correct() {
    SimdLevel::for_each_supported(|| {
        for len in 0..130 {
            let a: Vec<bool> = (0..len).map(|i| i % 2 == 1).collect();
            let b: Vec<bool> = (0..len).map(|i| i % 4 > 1).collect();
            for (op, kernel) in operations(Dtype::Bool) {
                let want = |(a, b): (&bool, &bool)| match op {
                    ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => a | b,
                    ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => a & b,
                    _ => a ^ b,
                };
                let want: Vec<bool> = a.iter().zip(&b).map(want).collect();
                assert_eq!(reduce(&kernel, &a, &b, len % 9), want, "{op}");
            }
        }
    });
}

/// Keeps the number with the greater absolute value; of equal ones the first.
fn farthest(into: &mut [f64], from: &[f64]) {
    assert!(into.len() == from.len() && into.as_ptr().is_aligned() && from.as_ptr().is_aligned());
    for (a, b) in into.iter_mut().zip(from) {
        *a = if b.abs() > a.abs() { *b } else { *a };
    }
}

#[test]
fn user_functions_get_aligned_elements_in_the_documented_order() {
    let kernel = Kernel::custom(Arc::new(wrap_function(farthest)));
    for len in (0..130).chain([5000, 10_000]) {
        let a: Vec<f64> = (0..len).map(|i| f64::from(i % 5) - 2.0).collect();
        let b: Vec<f64> = (0..len).map(|i| f64::from(i % 3) - 1.0).collect();
        for from_is_first in [false, true] {
            let shift = len as usize % 9;
            let (mut into, from) = (bytes_of(&a, shift), bytes_of(&b, 3));
            kernel.reduce(&mut into[shift..], &from[3..], from_is_first, true).unwrap();
            let (mut first, second) = if from_is_first { (b.clone(), &a) } else { (a.clone(), &b) };
            farthest(&mut first, second);
            assert_eq!(values_of::<f64>(&into[shift..]), first);
        }
    }
}

#[test]
fn user_function_panic_is_an_error_and_changes_nothing() {
    let kernel = Kernel::custom(Arc::new(wrap_function(|into: &mut [bool], _: &[bool]| {
        assert!(is_in_reduction_function());
        into.fill(true);
        panic!("no {}", "reason");
    })));
    let mut into = [0, 1, 0];
    let error = kernel.reduce(&mut into, &[1, 1, 1], false, true).unwrap_err();
    assert_eq!(error, "the reduction function panicked: no reason");
    assert_eq!(into, [0, 1, 0]);
    assert!(!is_in_reduction_function());
}

#[test]
fn each_vector_instruction_set_is_tested() {
    let kinds = SimdLevel::for_each_supported(|| {});
    eprintln!("this processor has {kinds} kinds of vectors");
    #[cfg(target_arch = "x86_64")]
    assert_eq!(kinds > 1, std::arch::is_x86_feature_detected!("avx2"));
    #[cfg(not(target_arch = "x86_64"))]
    assert_eq!(kinds, 1);
}

/// Returns the sum of the contributions of `ranks` ranks, added by rank `me`.
fn reduced_at(kernel: &Kernel, contributions: &[Vec<u8>], me: usize) -> Vec<u8> {
    let (mut own, mut published) = (contributions[me].clone(), vec![0; contributions[me].len()]);
    let mut scratch = Scratch::default();
    scratch.bytes().fill(0xA5);
    let contribution = |rank: usize, at: usize, len: usize| {
        assert_ne!(rank, me);
        SourceBytes::from(&contributions[rank][at..at + len])
    };
    let ranks = Contributors { count: contributions.len(), me };
    kernel
        .reduce_all(ranks, &mut own, &mut scratch, contribution, |at, sums| {
            published[at..at + sums.len()].copy_from_slice(sums);
        })
        .unwrap();
    assert_eq!(own, published);
    own
}

#[test]
fn operands_are_added_in_rank_order_in_every_kernel() {
    SimdLevel::for_each_supported(|| {
        let mut random = Random::new("operands_are_added_in_rank_order_in_every_kernel");
        for (ranks, bytes) in [(2, 64), (2, 9008), (3, 12_304), (4, 16), (5, 8192), (7, 4100 * 16)] {
            for dtype in Dtype::ALL {
                let contributions: Vec<Vec<u8>> = (0..ranks)
                    .map(|_| match dtype {
                        Dtype::Bool => (0..bytes).map(|_| random.below(2) as u8).collect(),
                        // Random bits are NaN or out of range too often.
                        Dtype::F32 | Dtype::ComplexF32 => {
                            let value = |_| random.below(2000) as f32 / 7.0 - 100.0;
                            bytes_of(&(0..bytes / 4).map(value).collect::<Vec<f32>>(), 0)
                        }
                        Dtype::F64 | Dtype::ComplexF64 => {
                            let value = |_| random.below(2000) as f64 / 7.0 - 100.0;
                            bytes_of(&(0..bytes / 8).map(value).collect::<Vec<f64>>(), 0)
                        }
                        Dtype::F16 | Dtype::Bf16 => {
                            let value = |_| f16::from_f32(random.below(100) as f32 / 8.0);
                            bytes_of(&(0..bytes / 2).map(value).collect::<Vec<f16>>(), 0)
                        }
                        _ => (0..bytes).map(|_| random.next() as u8).collect(),
                    })
                    .collect();
                for op in ReduceOp::ALL {
                    let Some(kernel) = Kernel::of(dtype, op, ranks) else { continue };
                    let want = match kernel.f32_conversion() {
                        Some(_) => reduced_at(&kernel, &contributions, 0),
                        None => {
                            let mut sums = contributions[0].clone();
                            for (index, contribution) in contributions.iter().enumerate().skip(1) {
                                kernel.reduce(&mut sums, contribution, false, index + 1 == ranks).unwrap();
                            }
                            sums
                        }
                    };
                    for me in 0..ranks {
                        assert_eq!(
                            reduced_at(&kernel, &contributions, me),
                            want,
                            "{op} of {dtype} at {me} of {ranks}"
                        );
                    }
                }
            }
        }
    });
}

#[test]
fn copies_at_any_page_offset_are_complete_and_stay_inside() {
    const PAGE: usize = 4096;
    let from: Vec<u8> = (0..5 * PAGE).map(|i| (i % 251) as u8 + 1).collect();
    let mut into = vec![0; 6 * PAGE];
    // The start of the target in its page is this many bytes after the start of the source in its own page.
    let base = from.as_ptr().addr().wrapping_sub(into.as_ptr().addr()) % PAGE;
    for behind in (0..66).chain([2048, 4032, 4095]) {
        let start = (base + behind) % PAGE;
        for len in [0, 1, 2047, 2048, 2049, 4095, 4096, 4097, 4 * PAGE - 1] {
            let kinds = SimdLevel::for_each_supported(|| {
                into.fill(0);
                SourceBytes::from(&from[..len]).copy_to(&mut into[start..start + len]);
                assert!(into[start..start + len] == from[..len], "{len} bytes, {behind} behind");
                let mut beside = into[..start].iter().chain(&into[start + len..]);
                assert!(beside.all(|&byte| byte == 0), "{len} bytes, {behind} behind");
            });
            assert!(kinds > 0);
        }
    }
}
