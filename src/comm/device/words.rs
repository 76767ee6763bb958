//! The mapping of types and operations to NCCL's. Pure.

use half::{bf16, f16};
use smallvec::SmallVec;

use super::element::Of;
use crate::dtype::{Dtype, ReduceOp};
use crate::nccl::{Op, Step, Type, Version};

/// The first version that adds floating-point numbers of 8 bits.
const EIGHT_BITS: Version = Version { major: 2, minor: 24, patch: 0 };

/// The reduction: the operation, and the bytes of this rank's factor in the type of factors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct By {
    pub(crate) op: ReduceOp,
    pub(crate) factor: Option<[u8; 16]>,
}

/// The ranks that messages go to and come from; `None` if there are other operations than messages.
pub(super) fn peers(steps: &[Step<Of, By>]) -> Option<SmallVec<[usize; 2]>> {
    let peer = |step: &Step<Of, By>| match *step {
        Step::Send { to: peer, .. } | Step::Recv { from: peer, .. } => Some(peer),
        _ => None,
    };
    steps.iter().map(peer).collect()
}

/// Maps a call to NCCL's. The error tells what NCCL cannot do.
pub(crate) fn in_nccl(step: Step<Of, By>, version: Version) -> Result<Step, String> {
    let moved = |of: Of, count: usize| {
        let (of, times) = moved(of);
        (of, count * times)
    };
    let reduced = |of: Of, count: usize, op: By| {
        let (of, times, op) = reduced(of, op, version)?;
        Ok::<_, String>((of, count * times, op))
    };
    Ok(match step {
        Step::AllReduce { send, recv, count, of, op } => {
            let (of, count, op) = reduced(of, count, op)?;
            Step::AllReduce { send, recv, count, of, op }
        }
        Step::Reduce { send, recv, count, of, op, root } => {
            let (of, count, op) = reduced(of, count, op)?;
            Step::Reduce { send, recv, count, of, op, root }
        }
        Step::ReduceScatter { send, recv, count, of, op } => {
            let (of, count, op) = reduced(of, count, op)?;
            Step::ReduceScatter { send, recv, count, of, op }
        }
        Step::Broadcast { send, recv, count, of, root } => {
            let (of, count) = moved(of, count);
            Step::Broadcast { send, recv, count, of, root }
        }
        Step::AllGather { send, recv, count, of } => {
            let (of, count) = moved(of, count);
            Step::AllGather { send, recv, count, of }
        }
        Step::Send { send, count, of, to } => {
            let (of, count) = moved(of, count);
            Step::Send { send, count, of, to }
        }
        Step::Recv { recv, count, of, from } => {
            let (of, count) = moved(of, count);
            Step::Recv { recv, count, of, from }
        }
    })
}

/// Returns whether NCCL can reduce elements of `dtype` by `op`.
#[must_use]
pub fn accepts(op: ReduceOp, dtype: Dtype) -> bool {
    let newest = Version { major: u32::MAX, minor: 0, patch: 0 };
    op.accepts(dtype) && reduced(Of { dtype, eight: None }, By { op, factor: Some([0; 16]) }, newest).is_ok()
}

/// NCCL's type for elements that are only moved, and the number of those in each element.
fn moved(of: Of) -> (Type, usize) {
    plain(of.dtype).map_or((Type::U8, of.size_bytes()), |plain| (plain, 1))
}

/// NCCL's type of the same name.
fn plain(dtype: Dtype) -> Option<Type> {
    Some(match dtype {
        Dtype::I8 => Type::I8,
        Dtype::U8 => Type::U8,
        Dtype::I32 => Type::I32,
        Dtype::U32 => Type::U32,
        Dtype::I64 => Type::I64,
        Dtype::U64 => Type::U64,
        Dtype::F16 => Type::F16,
        Dtype::F32 => Type::F32,
        Dtype::F64 => Type::F64,
        Dtype::Bf16 => Type::Bf16,
        Dtype::I16 | Dtype::U16 | Dtype::Bool | Dtype::ComplexF32 | Dtype::ComplexF64 => return None,
    })
}

/// NCCL's type for elements that are reduced, the number of those in each element, and the operation.
fn reduced(of: Of, by: By, version: Version) -> Result<(Type, usize, Op), String> {
    let cannot = || format!("NCCL has no {} of {}", by.op, of.name());
    let real = |op| {
        Some(match op {
            ReduceOp::Sum => Op::Sum,
            ReduceOp::Min => Op::Min,
            ReduceOp::Max => Op::Max,
            ReduceOp::Product => Op::Product,
            ReduceOp::Avg => Op::Avg,
            ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor | ReduceOp::PremulSum | ReduceOp::Custom => {
                return None;
            }
        })
    };
    if let Some(eight) = of.eight {
        if version < EIGHT_BITS {
            return Err(format!("{} before {EIGHT_BITS}; this is {version}", cannot()));
        }
        // NCCL would multiply by 1/n, rounded to 8 bits.
        let op = Some(by.op).filter(|op| *op != ReduceOp::Avg).and_then(real);
        return Ok((eight, 1, op.ok_or_else(cannot)?));
    }
    match (of.dtype, by.op) {
        // The values are 0 and 1, so the maximum is OR and the minimum is AND.
        (Dtype::Bool, ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor) => Ok((Type::U8, 1, Op::Max)),
        (Dtype::Bool, ReduceOp::Product | ReduceOp::Min | ReduceOp::Band) => Ok((Type::U8, 1, Op::Min)),
        // Sums of the real and the imaginary parts.
        (Dtype::ComplexF32, ReduceOp::Sum) => Ok((Type::F32, 2, Op::Sum)),
        (Dtype::ComplexF64, ReduceOp::Sum) => Ok((Type::F64, 2, Op::Sum)),
        (Dtype::ComplexF32, ReduceOp::Avg) => Ok((Type::F32, 2, Op::Avg)),
        (Dtype::ComplexF64, ReduceOp::Avg) => Ok((Type::F64, 2, Op::Avg)),
        (dtype, ReduceOp::PremulSum) => {
            let (plain, factor) = plain(dtype).zip(by.factor).ok_or_else(cannot)?;
            Ok((plain, 1, Op::PremulSum(in_type(dtype, factor))))
        }
        (dtype, op) => plain(dtype).zip(real(op)).map(|(plain, op)| (plain, 1, op)).ok_or_else(cannot),
    }
}

/// The bytes of a factor in the type of the elements, as NCCL wants it. Factors of 16-bit floats are `f32`
/// here.
fn in_type(dtype: Dtype, factor: [u8; 16]) -> [u8; 8] {
    let (mut bytes, of_half) = ([0; 8], f32::from_ne_bytes([factor[0], factor[1], factor[2], factor[3]]));
    bytes.copy_from_slice(&factor[..8]);
    match dtype {
        Dtype::F16 => bytes[..2].copy_from_slice(&f16::from_f32(of_half).to_ne_bytes()),
        Dtype::Bf16 => bytes[..2].copy_from_slice(&bf16::from_f32(of_half).to_ne_bytes()),
        _ => {}
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::super::element::{F8E4M3, sealed::Sealed};
    use super::*;
    use crate::dtype::Element;

    const NEW: Version = Version { major: 2, minor: 30, patch: 0 };

    fn sum<T: Sealed>(op: ReduceOp, version: Version) -> Result<Step, String> {
        let by = By { op, factor: None };
        in_nccl(Step::AllReduce { send: 1, recv: 2, count: 10, of: T::OF, op: by }, version)
    }

    fn all_reduce(count: usize, of: Type, op: Op) -> Result<Step, String> {
        Ok(Step::AllReduce { send: 1, recv: 2, count, of, op })
    }

    #[test]
    fn every_type_maps_to_an_nccl_type_of_equal_size() {
        for dtype in Dtype::ALL {
            let step = Step::Send { send: 1, count: 10, of: Of { dtype, eight: None }, to: 0 };
            let Ok(Step::Send { count, of, .. }) = in_nccl(step, NEW) else { panic!("{dtype}") };
            assert_eq!(count * of.size_bytes(), 10 * dtype.size_bytes(), "{dtype}");
        }
    }

    #[test]
    fn reductions_use_nccl_operations_where_available() {
        assert_eq!(sum::<f32>(ReduceOp::Avg, NEW), all_reduce(10, Type::F32, Op::Avg));
        assert_eq!(sum::<bf16>(ReduceOp::Product, NEW), all_reduce(10, Type::Bf16, Op::Product));
        assert_eq!(sum::<bool>(ReduceOp::Sum, NEW), all_reduce(10, Type::U8, Op::Max));
        assert_eq!(sum::<bool>(ReduceOp::Band, NEW), all_reduce(10, Type::U8, Op::Min));
        let complex = sum::<num_complex::Complex<f64>>(ReduceOp::Sum, NEW);
        assert_eq!(complex, all_reduce(20, Type::F64, Op::Sum));
    }

    #[test]
    fn operations_missing_in_nccl_are_named() {
        assert_eq!(sum::<i32>(ReduceOp::Bxor, NEW), Err("NCCL has no bxor of i32".to_owned()));
        assert_eq!(sum::<i16>(ReduceOp::Sum, NEW), Err("NCCL has no sum of i16".to_owned()));
        assert_eq!(sum::<bool>(ReduceOp::Bxor, NEW), Err("NCCL has no bxor of bool".to_owned()));
        let product = sum::<num_complex::Complex<f32>>(ReduceOp::Product, NEW);
        assert_eq!(product, Err("NCCL has no product of complex_f32".to_owned()));
    }

    #[test]
    fn fp8_sums_need_an_nccl_version_that_supports_them() {
        assert_eq!(sum::<F8E4M3>(ReduceOp::Sum, NEW), all_reduce(10, Type::F8E4M3, Op::Sum));
        let old = Version { major: 2, minor: 23, patch: 4 };
        let error = sum::<F8E4M3>(ReduceOp::Sum, old).unwrap_err();
        assert_eq!(error, "NCCL has no sum of f8e4m3 before 2.24.0; this is 2.23.4");
    }

    #[test]
    fn scale_factors_have_the_element_type() {
        let by = |bytes: &[u8]| {
            let mut factor = [0; 16];
            factor[..bytes.len()].copy_from_slice(bytes);
            By { op: ReduceOp::PremulSum, factor: Some(factor) }
        };
        let op = |dtype, by| match reduced(Of { dtype, eight: None }, by, NEW) {
            Ok((_, 1, Op::PremulSum(bytes))) => bytes,
            other => panic!("{other:?}"),
        };
        assert_eq!(op(f64::DTYPE, by(&0.5_f64.to_ne_bytes())), 0.5_f64.to_ne_bytes());
        assert_eq!(op(f16::DTYPE, by(&0.5_f32.to_ne_bytes()))[..2], f16::from_f32(0.5).to_ne_bytes());
        assert_eq!(op(i32::DTYPE, by(&3_i32.to_ne_bytes()))[..4], 3_i32.to_ne_bytes());
    }
}
