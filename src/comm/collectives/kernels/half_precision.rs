//! Conversion of `f16` and `bf16` to `f32` and back, and their minimum and maximum.
//!
//! Sums of half-precision values are kept as `f32` and rounded once, to the nearest half-precision value,
//! ties to even. A minimum or maximum is one of the values, and is found by comparing bits.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::simd::{convert, zip_in_place};
use super::{CHUNK, KernelFunctions};
use crate::collectives::dtype::{Dtype, NativeBytes, ReduceOp};

/// Size of the elements (`f32`) in which half-precision values are added.
pub(crate) const ACCUMULATOR_BYTES: usize = size_of::<f32>();

/// The bits of infinity; those of a NaN without its sign are greater.
pub(super) const F16_INFINITY: u16 = 0x7C00;
pub(super) const BF16_INFINITY: u16 = 0x7F80;

/// The conversion of half-precision elements to `f32` and back.
#[derive(Debug)]
pub(crate) struct F32Conversion {
    /// Converts elements to as many `f32`.
    pub(crate) widen: fn(from: &[u8], into: &mut [u8]),
    /// Rounds `f32` values to as many elements.
    pub(crate) narrow: fn(from: &[u8], into: &mut [u8]),
}

impl F32Conversion {
    /// Size of a half-precision element.
    pub(crate) const HALF_BYTES: usize = size_of::<u16>();

    /// A conversion that only copies, for elements that are not widened.
    pub(super) const IDENTITY: Self = Self { widen: copy, narrow: copy };

    pub(super) fn of(dtype: Dtype) -> Option<&'static Self> {
        match dtype {
            Dtype::F16 => Some(&Self { widen: widen_f16, narrow: narrow_f16 }),
            Dtype::Bf16 => Some(&Self { widen: widen_bf16, narrow: narrow_bf16 }),
            _ => None,
        }
    }
}

fn copy(from: &[u8], into: &mut [u8]) {
    into.copy_from_slice(from);
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
    let (mut halves, mut floats) = ([f16::ZERO; CHUNK], [0.0; CHUNK]);
    for (from, into) in from.chunks(2 * CHUNK).zip(into.chunks_mut(ACCUMULATOR_BYTES * CHUNK)) {
        let (from, into) = (from.as_chunks().0, into.as_chunks_mut().0);
        let (halves, floats) = (&mut halves[..from.len()], &mut floats[..from.len()]);
        for (half, bytes) in halves.iter_mut().zip(from) {
            *half = f16::read(*bytes);
        }
        halves.convert_to_f32_slice(floats);
        for (bytes, float) in into.iter_mut().zip(floats) {
            *bytes = float.write();
        }
    }
}

fn narrow_f16(from: &[u8], into: &mut [u8]) {
    let (mut halves, mut floats) = ([f16::ZERO; CHUNK], [0.0; CHUNK]);
    for (from, into) in from.chunks(ACCUMULATOR_BYTES * CHUNK).zip(into.chunks_mut(2 * CHUNK)) {
        let (from, into) = (from.as_chunks().0, into.as_chunks_mut().0);
        let (halves, floats) = (&mut halves[..from.len()], &mut floats[..from.len()]);
        for (float, bytes) in floats.iter_mut().zip(from) {
            *float = f32::read(*bytes);
        }
        halves.convert_from_f32_slice(floats);
        for (bytes, half) in into.iter_mut().zip(halves) {
            *bytes = half.write();
        }
    }
}

/// Returns the functions for the minimum or maximum of the half-precision type whose infinity has the bits
/// `INFINITY`. `None` for other operations.
pub(super) fn min_max<const INFINITY: u16>(op: ReduceOp) -> KernelFunctions {
    match op {
        ReduceOp::Min => Some((|into, from| zip_in_place(into, from, less::<INFINITY>), None)),
        ReduceOp::Max => Some((|into, from| zip_in_place(into, from, greater::<INFINITY>), None)),
        _ => None,
    }
}

#[inline(always)]
fn less<const INFINITY: u16>(a: u16, b: u16) -> u16 {
    let number = if order_key(a) < order_key(b) { a } else { b };
    if is_nan::<INFINITY>(a) | is_nan::<INFINITY>(b) { nan::<INFINITY>() } else { number }
}

#[inline(always)]
fn greater<const INFINITY: u16>(a: u16, b: u16) -> u16 {
    let number = if order_key(a) > order_key(b) { a } else { b };
    if is_nan::<INFINITY>(a) | is_nan::<INFINITY>(b) { nan::<INFINITY>() } else { number }
}

/// Maps the bits of half-precision values to integers in the order of the values, -0 before +0.
#[inline(always)]
fn order_key(bits: u16) -> i16 {
    let bits = bits as i16;
    bits ^ (bits >> 15 & i16::MAX)
}

#[inline(always)]
fn is_nan<const INFINITY: u16>(bits: u16) -> bool {
    bits & 0x7FFF > INFINITY
}

/// Returns a quiet NaN: the first bit behind the exponent is set.
#[inline(always)]
fn nan<const INFINITY: u16>() -> u16 {
    INFINITY | (INFINITY & INFINITY.wrapping_neg()) >> 1
}
