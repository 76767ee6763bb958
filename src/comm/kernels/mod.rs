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
use arith::{Arith, Bits};

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
        match dtype {
            Dtype::I8 => of_integers::<i8, 1>(op),
            Dtype::U8 => of_integers::<u8, 1>(op),
            Dtype::I16 => of_integers::<i16, 2>(op),
            Dtype::U16 => of_integers::<u16, 2>(op),
            Dtype::I32 => of_integers::<i32, 4>(op),
            Dtype::U32 => of_integers::<u32, 4>(op),
            Dtype::I64 => of_integers::<i64, 8>(op),
            Dtype::U64 => of_integers::<u64, 8>(op),
            Dtype::F32 => of_numbers::<f32, 4>(op),
            Dtype::F64 => of_numbers::<f64, 8>(op),
        }
    }
}

fn of_integers<T: Bits<N>, const N: usize>(op: ReduceOp) -> Option<Kernel> {
    let reduce: ReduceFn = match op {
        ReduceOp::Band => |into, from| zip(into, from, T::and),
        ReduceOp::Bor => |into, from| zip(into, from, T::or),
        ReduceOp::Bxor => |into, from| zip(into, from, T::xor),
        ReduceOp::Sum | ReduceOp::Min | ReduceOp::Max | ReduceOp::Product | ReduceOp::Avg => {
            return of_numbers::<T, N>(op);
        }
    };
    Some(Kernel { reduce, finish: None })
}

fn of_numbers<T: Arith<N>, const N: usize>(op: ReduceOp) -> Option<Kernel> {
    let reduce: ReduceFn = match op {
        ReduceOp::Sum | ReduceOp::Avg => |into, from| zip(into, from, T::sum),
        ReduceOp::Min => |into, from| zip(into, from, T::min),
        ReduceOp::Max => |into, from| zip(into, from, T::max),
        ReduceOp::Product => |into, from| zip(into, from, T::product),
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => return None,
    };
    let finish: Option<ScaleFn> = if op == ReduceOp::Avg { Some(divide::<T, N>) } else { None };
    Some(Kernel { reduce, finish })
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
