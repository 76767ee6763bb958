//! Every kernel against a scalar reference in wider arithmetic.

use super::*;

fn bytes_of<T: Arith<N>, const N: usize>(values: &[T]) -> Vec<u8> {
    values.iter().flat_map(|v| v.write()).collect()
}

fn run<T: Arith<N>, const N: usize>(dtype: Dtype, op: ReduceOp, a: &[T], b: &[T], shift: usize) -> Vec<T> {
    let kernel = Kernel::of(dtype, op).unwrap();
    // `shift` bytes in front: kernels must not care about alignment.
    let mut into = vec![0; shift];
    into.extend(bytes_of(a));
    let mut from = vec![0; 3];
    from.extend(bytes_of(b));
    (kernel.reduce)(&mut into[shift..], &from[3..]);
    if let Some(finish) = kernel.finish {
        finish(&mut into[shift..], 7);
    }
    into[shift..].as_chunks::<N>().0.iter().map(|&chunk| T::read(chunk)).collect()
}

macro_rules! check_integers {
    ($($int:ident => $dtype:ident),*) => {$(
        #[test]
        fn $int() {
            let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
            let mut next = || {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                seed as $int
            };
            for len in 0..130 {
                let a: Vec<$int> = (0..len).map(|_| next()).collect();
                let b: Vec<$int> = (0..len).map(|_| next()).collect();
                for op in ReduceOp::ALL.into_iter().filter(|op| op.accepts(Dtype::$dtype)) {
                    let got = run(Dtype::$dtype, op, &a, &b, len % 9);
                    for i in 0..len {
                        let (x, y) = (i128::from(a[i]), i128::from(b[i]));
                        let want = match op {
                            ReduceOp::Sum => x + y,
                            ReduceOp::Min => if x < y { x } else { y },
                            ReduceOp::Max => if x > y { x } else { y },
                            ReduceOp::Product => x.wrapping_mul(y),
                            ReduceOp::Band => x & y,
                            ReduceOp::Bor => x | y,
                            ReduceOp::Bxor => x ^ y,
                            ReduceOp::Avg => unreachable!("refused"),
                        };
                        assert_eq!(got[i], want as $int, "{op} {x} {y}");
                    }
                }
            }
            assert!(Kernel::of(Dtype::$dtype, ReduceOp::Avg).is_none());
        }
    )*};
}

check_integers!(i8 => I8, u8 => U8, i16 => I16, u16 => U16, i32 => I32, u32 => U32, i64 => I64, u64 => U64);

macro_rules! check_floats {
    ($($float:ident => $dtype:ident),*) => {$(
        #[test]
        fn $float() {
            let special = [0.0, -0.0, 1.0, -1.5, 3.25e7, $float::INFINITY, $float::NEG_INFINITY, $float::NAN,
                $float::MIN_POSITIVE, $float::MAX, $float::EPSILON];
            let pairs: Vec<_> = special.iter().flat_map(|&a| special.map(|b| (a, b))).collect();
            for len in (0..130).chain([pairs.len()]) {
                let (a, b): (Vec<_>, Vec<_>) = pairs[..len.min(pairs.len())].iter().copied().unzip();
                for op in ReduceOp::ALL.into_iter().filter(|op| op.accepts(Dtype::$dtype)) {
                    let got = run(Dtype::$dtype, op, &a, &b, len % 9);
                    let swapped = run(Dtype::$dtype, op, &b, &a, len % 9);
                    for i in 0..a.len() {
                        let (x, y) = (a[i], b[i]);
                        let want = match op {
                            ReduceOp::Sum => x + y,
                            ReduceOp::Product => x * y,
                            ReduceOp::Avg => (x + y) / 7.0,
                            ReduceOp::Min | ReduceOp::Max if x.is_nan() || y.is_nan() => $float::NAN,
                            ReduceOp::Min => if x.total_cmp(&y).is_lt() { x } else { y },
                            ReduceOp::Max => if x.total_cmp(&y).is_gt() { x } else { y },
                            ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => unreachable!("refused"),
                        };
                        let same = |p: $float, q: $float| p.to_bits() == q.to_bits() || p.is_nan() && q.is_nan();
                        assert!(same(got[i], want), "{op} {x} {y}: {} not {want}", got[i]);
                        assert!(same(got[i], swapped[i]), "{op} {x} {y} is not commutative");
                    }
                }
            }
        }
    )*};
}

check_floats!(f32 => F32, f64 => F64);
