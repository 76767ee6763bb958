//! Conversion of `f16` and `bf16` to `f32` and back, and their minimum and maximum.
//!
//! Sums of half-precision values are kept as `f32` and rounded once, to the nearest half-precision value,
//! ties to even. A minimum or maximum is one of the values, and is found by comparing bits.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::simd::{convert, zip_in_place};
use super::{CHUNK, KernelFunctions, SourceBytes};
use crate::collectives::dtype::{Dtype, NativeBytes, ReduceOp};

/// Size of the elements (`f32`) in which half-precision values are added.
pub(crate) const ACCUMULATOR_BYTES: usize = size_of::<f32>();

/// The bits of infinity; those of a NaN without its sign are greater.
pub(super) const F16_INFINITY: u16 = 0x7C00;
pub(super) const BF16_INFINITY: u16 = 0x7F80;

/// The conversion of half-precision elements to `f32` and back.
#[derive(Debug)]
pub(crate) struct F32Conversion {
    pub(crate) widen: fn(from: &[u8], into: &mut [u8]),
    /// Rounds `f32` values to elements.
    pub(crate) narrow: fn(from: &[u8], into: &mut [u8]),
}

impl F32Conversion {
    /// Size of a half-precision element.
    pub(crate) const HALF_BYTES: usize = size_of::<u16>();

    /// A conversion that only copies, for elements that are not widened.
    pub(crate) const IDENTITY: Self = Self { widen: copy, narrow: copy };

    pub(super) fn of(dtype: Dtype) -> Option<&'static Self> {
        match dtype {
            Dtype::F16 => Some(&Self { widen: widen_f16, narrow: narrow_f16 }),
            Dtype::Bf16 => Some(&Self { widen: widen_bf16, narrow: narrow_bf16 }),
            _ => None,
        }
    }
}

fn copy(from: &[u8], into: &mut [u8]) {
    SourceBytes::from(from).copy_to(into);
}

fn widen_bf16(from: &[u8], into: &mut [u8]) {
    convert(from, into, |half: u16| u32::from(half) << 16);
}

/// Rounds by adding half of the last kept digit (a little less if that digit is even) and cutting the lower
/// digits off. That would turn a NaN into a number, so a NaN is handled apart. There is no branch, so that
/// the compiler vectorizes the loop.
fn narrow_bf16(from: &[u8], into: &mut [u8]) {
    convert(from, into, |number: f32| {
        let bits = number.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1));
        let bits = if number.is_nan() { bf16::NAN.to_bits().into() } else { rounded >> 16 };
        bits as u16
    });
}

fn widen_f16(from: &[u8], into: &mut [u8]) {
    convert_slices(from, into, |halves: &[f16], floats: &mut [f32]| halves.convert_to_f32_slice(floats));
}

fn narrow_f16(from: &[u8], into: &mut [u8]) {
    convert_slices(from, into, |floats: &[f32], halves: &mut [f16]| halves.convert_from_f32_slice(floats));
}

/// Converts elements by a function of two slices.
fn convert_slices<F, T, const N: usize, const M: usize>(
    from: &[u8],
    into: &mut [u8],
    convert: impl Fn(&[F], &mut [T]),
) where
    F: NativeBytes<N> + Default,
    T: NativeBytes<M> + Default,
{
    let (mut sources, mut results) = ([F::default(); CHUNK], [T::default(); CHUNK]);
    for (from, into) in from.chunks(N * CHUNK).zip(into.chunks_mut(M * CHUNK)) {
        let (from, into) = (from.as_chunks::<N>().0, into.as_chunks_mut::<M>().0);
        let (sources, results) = (&mut sources[..from.len()], &mut results[..from.len()]);
        for (source, bytes) in sources.iter_mut().zip(from) {
            *source = F::read(*bytes);
        }
        convert(sources, results);
        for (bytes, result) in into.iter_mut().zip(results) {
            *bytes = result.write();
        }
    }
}

/// Returns the functions for the minimum or maximum of the half-precision type whose infinity has the bits
/// `INFINITY`. `None` for other operations.
pub(super) fn min_max<const INFINITY: u16>(op: ReduceOp) -> KernelFunctions {
    match op {
        ReduceOp::Min => Some((|into, from| zip_in_place(into, from, min::<INFINITY>), None)),
        ReduceOp::Max => Some((|into, from| zip_in_place(into, from, max::<INFINITY>), None)),
        _ => None,
    }
}

#[inline(always)]
fn min<const INFINITY: u16>(a: u16, b: u16) -> u16 {
    number_or_nan::<INFINITY>(a, b, order_key(a) < order_key(b))
}

#[inline(always)]
fn max<const INFINITY: u16>(a: u16, b: u16) -> u16 {
    number_or_nan::<INFINITY>(a, b, order_key(a) > order_key(b))
}

/// Returns `a` if `first`, else `b`. If one of them is NaN, returns a quiet NaN: the first bit behind the
/// exponent is set.
#[inline(always)]
fn number_or_nan<const INFINITY: u16>(a: u16, b: u16, first: bool) -> u16 {
    let is_nan = |bits: u16| bits & 0x7FFF > INFINITY;
    let nan = INFINITY | (INFINITY & INFINITY.wrapping_neg()) >> 1;
    let number = if first { a } else { b };
    if is_nan(a) | is_nan(b) { nan } else { number }
}

/// Maps the bits of half-precision values to integers in the order of the values, -0 before +0.
#[inline(always)]
fn order_key(bits: u16) -> i16 {
    let bits = bits as i16;
    bits ^ (bits >> 15 & i16::MAX)
}
