//! Arithmetic on buffers: one table from (type, operation) to functions, looked up once per collective call.
//!
//! Kernels work in place on bytes: `into = into op from`, element by element in native byte order. Bytes need
//! no alignment, and the loops use the widest [vectors](simd) that the processor has. The two operands cannot
//! overlap, so no scalar fallback is compiled. The read-only operand may be in memory that processes share.
//!
//! Every operation gives equal bits with swapped operands (NaN payloads excepted). So two ranks that exchange
//! values and combine them with their own get equal results.
//!
//! Types share functions if their bits allow it. Complex numbers are added as twice as many real numbers,
//! truth values are combined as bits, and half-precision values are added as `f32` ([`half_precision`]).

mod arith;
mod contributions;
mod custom;
mod half_precision;
mod non_temporal;
mod simd;

use std::convert::Infallible;
use std::fmt;
use std::ops::{BitAnd, BitOr, BitXor};
use std::sync::Arc;

use num_complex::Complex;

use crate::collectives::dtype::sealed::Factor;
use crate::collectives::dtype::{Dtype, NativeBytes, ReduceOp};
use arith::{Arith, Multiply};
pub(crate) use contributions::{Contributors, Scratch};
pub(crate) use custom::{ReductionFn, is_in_reduction_function, wrap_function};
pub(crate) use half_precision::{ACCUMULATOR_BYTES, F32Conversion};
pub(crate) use non_temporal::{copy_non_temporal, is_uncached, store_fence, uncached_message_bytes};
pub(crate) use simd::{SourceBytes, TWO_PLACES_BYTES, copy, is_made_by};
use simd::{map_in_place, zip_in_place};

/// `into[i] = into[i] op from[i]`; both slices have the same length, a multiple of the element size.
type ReduceFn = fn(into: &mut [u8], from: SourceBytes<'_>);

/// `buf[i] = buf[i] / divisor`.
type DivideFn = fn(buf: &mut [u8], divisor: u32);

/// `buf[i] = buf[i] * factor`.
pub(crate) type ScaleFn = dyn Fn(&mut [u8]) + Send + Sync;

/// Elements that are processed at once if a temporary buffer is needed, so that it fits in the L1 cache.
const CHUNK: usize = 256;

/// The arithmetic of a reduction.
#[derive(Clone)]
pub(crate) struct Kernel {
    reduce: ReduceImpl,
    /// Divides the sum by the number of ranks after the last contribution; `None` if the operation is no
    /// average.
    divide: Option<DivideFn>,
    /// The divisor of averages.
    world: u32,
    scale: Option<Arc<ScaleFn>>,
    /// The conversion of half-precision elements, if they are reduced as `f32`: then `reduce` and `divide`
    /// take `f32`.
    f32_conversion: Option<&'static F32Conversion>,
}

#[derive(Clone)]
enum ReduceImpl {
    Builtin(ReduceFn),
    Custom(Arc<ReductionFn>),
}

/// One step of adding all ranks' contributions of a range in the order of the ranks
/// ([`Kernel::reduce_ordered`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OrderedReduceStep {
    /// The contribution that has arrived is the first one, so it replaces the sums.
    pub(crate) first: bool,
    /// This rank's own contribution is added directly after the one that has arrived.
    pub(crate) own: bool,
    /// With this step all contributions are added, so the result is stored.
    pub(crate) last: bool,
}

impl Kernel {
    /// Returns the kernel of a named `op` on `dtype` over `world` ranks; `None` if the operation is not
    /// defined for the type.
    pub(crate) fn of(dtype: Dtype, op: ReduceOp, world: usize) -> Option<Self> {
        if !op.accepts(dtype) {
            return None;
        }
        let functions = match dtype {
            Dtype::I8 => integers::<i8, 1>(op),
            Dtype::U8 => integers::<u8, 1>(op),
            Dtype::I16 => integers::<i16, 2>(op),
            Dtype::U16 => integers::<u16, 2>(op),
            Dtype::I32 => integers::<i32, 4>(op),
            Dtype::U32 => integers::<u32, 4>(op),
            Dtype::I64 => integers::<i64, 8>(op),
            Dtype::U64 => integers::<u64, 8>(op),
            Dtype::F32 => numbers::<f32, 4>(op),
            Dtype::F64 => numbers::<f64, 8>(op),
            Dtype::F16 | Dtype::Bf16 if op.accumulates_in_f32(dtype) => numbers::<f32, 4>(op),
            Dtype::F16 => half_precision::min_max::<{ half_precision::F16_INFINITY }>(op),
            Dtype::Bf16 => half_precision::min_max::<{ half_precision::BF16_INFINITY }>(op),
            Dtype::Bool => booleans(op),
            Dtype::ComplexF32 => complex::<Complex<f32>, 8, f32, 4>(op),
            Dtype::ComplexF64 => complex::<Complex<f64>, 16, f64, 8>(op),
        };
        let (reduce, divide) = functions?;
        let f32_conversion = if op.accumulates_in_f32(dtype) { F32Conversion::of(dtype) } else { None };
        let world = u32::try_from(world).expect("a group has fewer than 2^32 ranks");
        Some(Self { reduce: ReduceImpl::Builtin(reduce), divide, world, scale: None, f32_conversion })
    }

    /// Returns the kernel of a sum whose contributions are first multiplied by `scale`.
    pub(crate) fn scaled_sum(dtype: Dtype, scale: Arc<ScaleFn>) -> Option<Self> {
        let sum = Self::of(dtype, ReduceOp::PremulSum, 1)?;
        Some(Self { scale: Some(scale), ..sum })
    }

    /// Returns the kernel of a reduction by a function of the program.
    pub(crate) fn custom(function: Arc<ReductionFn>) -> Self {
        let reduce = ReduceImpl::Custom(function);
        Self { reduce, divide: None, world: 1, scale: None, f32_conversion: None }
    }

    /// Returns the function that multiplies this rank's own contribution before anything is added to it.
    pub(crate) fn scale(&self) -> Option<&ScaleFn> {
        self.scale.as_deref()
    }

    /// Returns whether contributions are combined as they are, without a factor for each and without wider elements.
    pub(crate) fn works_in_place(&self) -> bool {
        self.scale.is_none() && self.f32_conversion.is_none()
    }

    /// Returns the conversion to `f32`, if the kernel reduces half-precision elements as `f32`.
    pub(crate) fn f32_conversion(&self) -> Option<&'static F32Conversion> {
        self.f32_conversion
    }

    /// Combines the contribution `from` with `into`: `into[i] = into[i] op from[i]`, or `from[i] op into[i]`
    /// if `is_first` (the contribution is the left operand). After the `last` contribution, the sum of an
    /// average is divided by the number of ranks. Both slices have equal length, in whole elements.
    ///
    /// The error says how the program's reduction function failed.
    pub(crate) fn reduce(
        &self,
        into: &mut [u8],
        from: &[u8],
        is_first: bool,
        last: bool,
    ) -> Result<(), String> {
        match &self.reduce {
            ReduceImpl::Builtin(reduce) => reduce(into, from.into()),
            ReduceImpl::Custom(function) => function(into, from, is_first)?,
        }
        if let Some(divide) = self.divide.filter(|_| last) {
            divide(into, self.world);
        }
        Ok(())
    }

    /// Adds the received contribution `from` to `sums`, as `step` says. `contribution` is this rank's own and
    /// receives the result in the last step. If `sums` has wider elements than these two, `conversion`
    /// converts between them.
    ///
    /// The three slices hold equal numbers of elements.
    pub(crate) fn reduce_ordered(
        &self,
        step: OrderedReduceStep,
        conversion: Option<&F32Conversion>,
        sums: &mut [u8],
        from: &[u8],
        contribution: &mut [u8],
    ) -> Result<(), String> {
        let OrderedReduceStep { first, own, last } = step;
        let F32Conversion { widen, narrow } = *conversion.unwrap_or(&F32Conversion::IDENTITY);
        let mut memory = [0; CHUNK * ACCUMULATOR_BYTES];
        let chunk = CHUNK * conversion.map_or(ACCUMULATOR_BYTES, |_| F32Conversion::HALF_BYTES);
        let contributions = from.chunks(chunk).zip(contribution.chunks_mut(chunk));
        for (sums, (from, contribution)) in sums.chunks_mut(memory.len()).zip(contributions) {
            let next = &mut memory[..sums.len()];
            if first {
                widen(from, sums);
            } else {
                widen(from, next);
                self.reduce(sums, next, false, false)?;
            }
            if own {
                widen(contribution, next);
                self.reduce(sums, next, false, false)?;
            }
            if last {
                if let Some(divide) = self.divide {
                    divide(sums, self.world);
                }
                narrow(sums, contribution);
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").finish_non_exhaustive()
    }
}

type KernelFunctions = Option<(ReduceFn, Option<DivideFn>)>;

fn integers<T, const N: usize>(op: ReduceOp) -> KernelFunctions
where
    T: Arith<N> + BitAnd<Output = T> + BitOr<Output = T> + BitXor<Output = T>,
{
    let reduce: ReduceFn = match op {
        ReduceOp::Band => |into, from| zip_in_place(into, from, T::bitand),
        ReduceOp::Bor => |into, from| zip_in_place(into, from, T::bitor),
        ReduceOp::Bxor => |into, from| zip_in_place(into, from, T::bitxor),
        _ => return numbers::<T, N>(op),
    };
    Some((reduce, None))
}

fn numbers<T: Arith<N>, const N: usize>(op: ReduceOp) -> KernelFunctions {
    let reduce: ReduceFn = match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum => |into, from| zip_in_place(into, from, T::sum),
        ReduceOp::Min => |into, from| zip_in_place(into, from, T::min),
        ReduceOp::Max => |into, from| zip_in_place(into, from, T::max),
        ReduceOp::Product => product::<T, N>,
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor | ReduceOp::Custom => return None,
    };
    let divide: Option<DivideFn> = if op == ReduceOp::Avg { Some(divide::<T, N>) } else { None };
    Some((reduce, divide))
}

fn complex<T: Multiply<N>, const N: usize, R: Arith<M>, const M: usize>(op: ReduceOp) -> KernelFunctions {
    if op == ReduceOp::Product { Some((product::<T, N>, None)) } else { numbers::<R, M>(op) }
}

/// Truth values are the bytes 0 and 1. A peer may send other bytes, so neither this function nor the code
/// that stores the result (`buffer/borrowed.rs`) assumes one of them.
fn booleans(op: ReduceOp) -> KernelFunctions {
    integers::<u8, 1>(match op {
        ReduceOp::Sum | ReduceOp::Max => ReduceOp::Bor,
        ReduceOp::Product | ReduceOp::Min => ReduceOp::Band,
        other => other,
    })
}

fn product<T: Multiply<N>, const N: usize>(into: &mut [u8], from: SourceBytes<'_>) {
    zip_in_place(into, from, T::product);
}

fn divide<T: Arith<N>, const N: usize>(buf: &mut [u8], divisor: u32) {
    map_in_place(buf, |a: T| a.divided_by(divisor));
}

macro_rules! factors {
    ($($number:ty),*) => {$(
        impl Factor for $number {
            fn multiply(self, bytes: &mut [u8]) {
                map_in_place(bytes, |number: Self| number.product(self));
            }

            fn bytes(self) -> [u8; 16] {
                let mut bytes = [0; 16];
                bytes[..size_of::<Self>()].copy_from_slice(&<Self as NativeBytes<_>>::write(self));
                bytes
            }

            fn from_bytes(bytes: [u8; 16]) -> Option<Self> {
                Some(<Self as NativeBytes<_>>::read(*bytes.first_chunk()?))
            }
        }
    )*};
}

factors!(i8, u8, i16, u16, i32, u32, i64, u64, f32, f64, Complex<f32>, Complex<f64>);

impl Factor for Infallible {
    fn multiply(self, _: &mut [u8]) {
        match self {}
    }

    fn bytes(self) -> [u8; 16] {
        match self {}
    }

    fn from_bytes(_: [u8; 16]) -> Option<Self> {
        None
    }
}

#[cfg(test)]
mod tests;
