//! Maps element types and reductions to NCCL's types and reductions. Pure.

use half::{bf16, f16};
use smallvec::SmallVec;

use super::element::ElementType;
use crate::collectives::dtype::{Dtype, ReduceOp};
use crate::nccl::{DataType, NcclCall, NcclFunction, RedOp, Version};

/// The first version of NCCL with 8-bit floating-point types.
const FLOAT8_SINCE: Version = Version { major: 2, minor: 24, patch: 0 };

/// A reduction on a device: the operation, and for `PremulSum` the bytes of this rank's factor, a value of
/// the type `Element::Factor`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DeviceReduction {
    pub(crate) op: ReduceOp,
    pub(crate) factor: Option<[u8; 16]>,
}

/// A part of a device operation: an NCCL call, described by convoke's types.
pub(super) type Step = NcclCall<ElementType, DeviceReduction>;

/// The ranks with which `steps` exchange messages; `None` if a step is not a message.
pub(super) fn peers(steps: &[Step]) -> Option<SmallVec<[usize; 2]>> {
    let peer = |step: &Step| match step.function {
        NcclFunction::Send { to: peer } | NcclFunction::Recv { from: peer } => Some(peer),
        _ => None,
    };
    steps.iter().map(peer).collect()
}

/// Translates a step to NCCL's types. The error says what NCCL `version` lacks.
pub(super) fn to_nccl(step: Step, version: Version) -> Result<NcclCall, String> {
    let Step { send, recv, count, .. } = step;
    let (mut datatype, mut times) = transfer_type(step.datatype);
    let function = step.function.try_map(|by| {
        let op;
        (datatype, times, op) = reduction_type(step.datatype, by, version)?;
        Ok::<_, String>(op)
    })?;
    Ok(NcclCall { function, send, recv, count: count * times, datatype })
}

/// Returns whether NCCL can reduce elements of `dtype` by `op`.
#[must_use]
pub fn accepts(op: ReduceOp, dtype: Dtype) -> bool {
    let newest = Version { major: u32::MAX, minor: 0, patch: 0 };
    let by = DeviceReduction { op, factor: Some([0; 16]) };
    op.accepts(dtype) && reduction_type(ElementType { dtype, float8: None }, by, newest).is_ok()
}

/// NCCL's type for elements that are moved and not reduced, and how many of its values make one element.
fn transfer_type(datatype: ElementType) -> (DataType, usize) {
    native_type(datatype.dtype).map_or((DataType::U8, datatype.size_bytes()), |plain| (plain, 1))
}

/// NCCL's type with the same meaning; `None` if NCCL has none.
fn native_type(dtype: Dtype) -> Option<DataType> {
    Some(match dtype {
        Dtype::I8 => DataType::I8,
        Dtype::U8 => DataType::U8,
        Dtype::I32 => DataType::I32,
        Dtype::U32 => DataType::U32,
        Dtype::I64 => DataType::I64,
        Dtype::U64 => DataType::U64,
        Dtype::F16 => DataType::F16,
        Dtype::F32 => DataType::F32,
        Dtype::F64 => DataType::F64,
        Dtype::Bf16 => DataType::Bf16,
        Dtype::I16 | Dtype::U16 | Dtype::Bool | Dtype::ComplexF32 | Dtype::ComplexF64 => return None,
    })
}

/// NCCL's type for elements that are reduced, how many of its values make one element, and NCCL's operation.
fn reduction_type(
    datatype: ElementType,
    by: DeviceReduction,
    version: Version,
) -> Result<(DataType, usize, RedOp), String> {
    let cannot = || format!("NCCL has no {} of {}", by.op, datatype.name());
    let real = |op| {
        Some(match op {
            ReduceOp::Sum => RedOp::Sum,
            ReduceOp::Min => RedOp::Min,
            ReduceOp::Max => RedOp::Max,
            ReduceOp::Product => RedOp::Product,
            ReduceOp::Avg => RedOp::Avg,
            ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor | ReduceOp::PremulSum | ReduceOp::Custom => {
                return None;
            }
        })
    };
    if let Some(float8) = datatype.float8 {
        if version < FLOAT8_SINCE {
            return Err(format!("{} before {FLOAT8_SINCE}; this is {version}", cannot()));
        }
        // Averages are refused: NCCL would multiply by 1/n, rounded to 8 bits.
        let op = Some(by.op).filter(|op| *op != ReduceOp::Avg).and_then(real);
        return Ok((float8, 1, op.ok_or_else(cannot)?));
    }
    match (datatype.dtype, by.op) {
        // Boolean values are 0 and 1, so the maximum is OR and the minimum is AND.
        (Dtype::Bool, ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor) => Ok((DataType::U8, 1, RedOp::Max)),
        (Dtype::Bool, ReduceOp::Product | ReduceOp::Min | ReduceOp::Band) => {
            Ok((DataType::U8, 1, RedOp::Min))
        }
        // The sum of complex numbers is the sums of their real and imaginary parts.
        (Dtype::ComplexF32, ReduceOp::Sum) => Ok((DataType::F32, 2, RedOp::Sum)),
        (Dtype::ComplexF64, ReduceOp::Sum) => Ok((DataType::F64, 2, RedOp::Sum)),
        (Dtype::ComplexF32, ReduceOp::Avg) => Ok((DataType::F32, 2, RedOp::Avg)),
        (Dtype::ComplexF64, ReduceOp::Avg) => Ok((DataType::F64, 2, RedOp::Avg)),
        (dtype, ReduceOp::PremulSum) => {
            let (plain, factor) = native_type(dtype).zip(by.factor).ok_or_else(cannot)?;
            Ok((plain, 1, RedOp::PremulSum(factor_bytes(dtype, factor))))
        }
        (dtype, op) => native_type(dtype).zip(real(op)).map(|(plain, op)| (plain, 1, op)).ok_or_else(cannot),
    }
}

/// The bytes of a factor in the type of the elements, as NCCL wants it. For 16-bit floats, `factor` holds an
/// `f32`.
fn factor_bytes(dtype: Dtype, factor: [u8; 16]) -> [u8; 8] {
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
    use super::super::element::{F8E4M3, HasElementType};
    use super::*;
    use crate::collectives::dtype::Element;

    const NEW: Version = Version { major: 2, minor: 30, patch: 0 };

    fn sum<T: HasElementType>(op: ReduceOp, version: Version) -> Result<NcclCall, String> {
        let by = DeviceReduction { op, factor: None };
        let function = NcclFunction::AllReduce(by);
        to_nccl(Step { function, send: 1, recv: 2, count: 10, datatype: T::ELEMENT_TYPE }, version)
    }

    fn all_reduce(count: usize, datatype: DataType, op: RedOp) -> Result<NcclCall, String> {
        Ok(NcclCall { function: NcclFunction::AllReduce(op), send: 1, recv: 2, count, datatype })
    }

    #[test]
    fn every_type_maps_to_an_nccl_type_of_equal_size() {
        for dtype in Dtype::ALL {
            let (function, datatype) = (NcclFunction::Send { to: 0 }, ElementType { dtype, float8: None });
            let step = to_nccl(Step { function, send: 1, recv: 1, count: 10, datatype }, NEW);
            let Ok(NcclCall { count, datatype, .. }) = step else { panic!("{dtype}") };
            assert_eq!(count * datatype.size_bytes(), 10 * dtype.size_bytes(), "{dtype}");
        }
    }

    #[test]
    fn reductions_use_nccl_operations_where_available() {
        assert_eq!(sum::<f32>(ReduceOp::Avg, NEW), all_reduce(10, DataType::F32, RedOp::Avg));
        assert_eq!(sum::<bf16>(ReduceOp::Product, NEW), all_reduce(10, DataType::Bf16, RedOp::Product));
        assert_eq!(sum::<bool>(ReduceOp::Sum, NEW), all_reduce(10, DataType::U8, RedOp::Max));
        assert_eq!(sum::<bool>(ReduceOp::Band, NEW), all_reduce(10, DataType::U8, RedOp::Min));
        let complex = sum::<num_complex::Complex<f64>>(ReduceOp::Sum, NEW);
        assert_eq!(complex, all_reduce(20, DataType::F64, RedOp::Sum));
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
        assert_eq!(sum::<F8E4M3>(ReduceOp::Sum, NEW), all_reduce(10, DataType::F8E4M3, RedOp::Sum));
        let old = Version { major: 2, minor: 23, patch: 4 };
        let error = sum::<F8E4M3>(ReduceOp::Sum, old).unwrap_err();
        assert_eq!(error, "NCCL has no sum of f8e4m3 before 2.24.0; this is 2.23.4");
    }

    #[test]
    fn scale_factors_have_the_element_type() {
        let by = |bytes: &[u8]| {
            let mut factor = [0; 16];
            factor[..bytes.len()].copy_from_slice(bytes);
            DeviceReduction { op: ReduceOp::PremulSum, factor: Some(factor) }
        };
        let op = |dtype, by| match reduction_type(ElementType { dtype, float8: None }, by, NEW) {
            Ok((_, 1, RedOp::PremulSum(bytes))) => bytes,
            other => panic!("{other:?}"),
        };
        assert_eq!(op(f64::DTYPE, by(&0.5_f64.to_ne_bytes())), 0.5_f64.to_ne_bytes());
        assert_eq!(op(f16::DTYPE, by(&0.5_f32.to_ne_bytes()))[..2], f16::from_f32(0.5).to_ne_bytes());
        assert_eq!(op(i32::DTYPE, by(&3_i32.to_ne_bytes()))[..4], 3_i32.to_ne_bytes());
    }
}
