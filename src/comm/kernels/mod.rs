//! Arithmetic on buffers: one table from (type, operation) to a function, looked up once per call.
//!
//! Kernels work in place on bytes: `into = into op from`, element by element in native byte order.
//! Bytes on both sides make them safe and free of alignment, and `chunks_exact` with `zip` still
//! becomes wide vector loads: the two slices cannot overlap, so no scalar fall-back is compiled.
//!
//! Every operation is commutative to the last bit (NaN payloads excepted), which is what lets both
//! ends of an exchange compute the same result from swapped operands.

mod arith;

use crate::dtype::{Dtype, ReduceOp};
use arith::Arith;

/// `into[i] = into[i] op from[i]`; both slices have the same length, a multiple of the element size.
pub(crate) type ReduceFn = fn(into: &mut [u8], from: &[u8]);

/// `buf[i] = buf[i] / divisor`.
pub(crate) type ScaleFn = fn(buf: &mut [u8], divisor: u32);

/// What a reduction does to the bytes that arrive.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel {
    /// Adds a contribution.
    pub(crate) reduce: ReduceFn,
    /// Ends the reduction of an element, after its last contribution.
    pub(crate) finish: Option<ScaleFn>,
}

impl Kernel {
    /// The kernel of `op` on `dtype`; `None` if the pair has no meaning.
    pub(crate) fn of(dtype: Dtype, op: ReduceOp) -> Option<Self> {
        if !op.accepts(dtype) {
            return None;
        }
        Some(match dtype {
            Dtype::I8 => table::<i8, 1>(op),
            Dtype::U8 => table::<u8, 1>(op),
            Dtype::I16 => table::<i16, 2>(op),
            Dtype::U16 => table::<u16, 2>(op),
            Dtype::I32 => table::<i32, 4>(op),
            Dtype::U32 => table::<u32, 4>(op),
            Dtype::I64 => table::<i64, 8>(op),
            Dtype::U64 => table::<u64, 8>(op),
            Dtype::F32 => table::<f32, 4>(op),
            Dtype::F64 => table::<f64, 8>(op),
        })
    }
}

fn table<T: Arith<N>, const N: usize>(op: ReduceOp) -> Kernel {
    let plain = |reduce| Kernel { reduce, finish: None };
    match op {
        ReduceOp::Sum => plain(|into, from| zip(into, from, T::sum)),
        ReduceOp::Min => plain(|into, from| zip(into, from, T::min)),
        ReduceOp::Max => plain(|into, from| zip(into, from, T::max)),
        ReduceOp::Product => plain(|into, from| zip(into, from, T::product)),
        ReduceOp::Avg => {
            Kernel { reduce: |into, from| zip(into, from, T::sum), finish: Some(divide::<T, N>) }
        }
    }
}

#[inline(always)]
fn zip<T: Arith<N>, const N: usize>(into: &mut [u8], from: &[u8], op: impl Fn(T, T) -> T) {
    debug_assert_eq!(into.len(), from.len());
    debug_assert_eq!(into.len() % N, 0);
    let (into, _) = into.as_chunks_mut::<N>();
    let (from, _) = from.as_chunks::<N>();
    for (a, b) in into.iter_mut().zip(from) {
        *a = op(T::read(*a), T::read(*b)).write();
    }
}

fn divide<T: Arith<N>, const N: usize>(buf: &mut [u8], divisor: u32) {
    let (buf, _) = buf.as_chunks_mut::<N>();
    for a in buf {
        *a = T::read(*a).divided_by(divisor).write();
    }
}

#[cfg(test)]
mod tests;
