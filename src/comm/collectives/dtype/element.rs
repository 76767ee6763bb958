//! The Rust types whose values can be moved and reduced, as traits.

use std::convert::Infallible;
use std::marker::PhantomData;

use half::{bf16, f16};
use num_complex::Complex;

use super::Dtype;

pub(crate) mod sealed {
    /// Conversion between the values of an [`super::Element`] type and their bytes in native order.
    pub trait Sealed: Copy {
        /// Returns the element whose bits are all zero.
        fn zero() -> Self;

        /// Replaces `values` by the elements in `bytes`, which need no alignment. Any bytes are valid
        /// elements.
        fn read(bytes: &[u8], values: &mut Vec<Self>);

        /// Replaces `bytes` by the bytes of `values`.
        fn write(values: &[Self], bytes: &mut [u8]);
    }

    /// A number by which elements can be multiplied.
    pub trait Factor: Copy + Send + Sync + 'static {
        /// Multiplies the elements in `bytes`, which have the type of this factor or, for `f32`, a 16-bit
        /// type.
        fn multiply(self, bytes: &mut [u8]);

        /// Returns the bytes of the number in native order, padded with zeros.
        fn bytes(self) -> [u8; 16];

        /// Returns the number with these bytes, as [`Self::bytes`] made them; `None` if the type has no
        /// factors.
        fn from_bytes(bytes: [u8; 16]) -> Option<Self>;
    }
}

/// A type whose values can be moved between ranks, for operations that do not reduce.
///
/// Every [`Element`] is one. Implement it for a type of plain data, so [`bytemuck::Pod`]: its values are the
/// bytes in memory, without padding or pointers. Ranks must run on processors of one byte order.
///
/// ```
/// use convoke_comm::{Transfer, TransferType};
///
/// #[derive(Clone, Copy)] // and bytemuck::{Pod, Zeroable}, with bytemuck's feature `derive`
/// #[repr(C)]
/// struct Particle {
///     position: [f32; 3],
///     charge: f32,
/// }
/// # // SAFETY: numbers without padding.
/// # unsafe impl bytemuck::Zeroable for Particle {}
/// # unsafe impl bytemuck::Pod for Particle {}
///
/// impl Transfer for Particle {
///     const TYPE: TransferType<Self> = TransferType::plain();
/// }
///
/// # fn main() -> Result<(), convoke_comm::CommError> {
/// # let world = convoke_comm::init()?;
/// let mut particles = [Particle { position: [1.0, 2.0, 3.0], charge: -1.0 }; 100];
/// world.broadcast(&mut particles, 0)?;
/// # Ok(())
/// # }
/// ```
///
/// Ranks compare such a buffer as the bytes (`u8`) that it has. So a rank may receive the values as `u8`.
///
/// A type with padding or pointers is refused:
///
/// ```compile_fail,E0277
/// # use convoke_comm::{Transfer, TransferType};
/// #[derive(Clone, Copy)]
/// struct Name(&'static str);
///
/// impl Transfer for Name {
///     const TYPE: TransferType<Self> = TransferType::plain();
/// }
/// ```
pub trait Transfer: Copy + Send + Sync + 'static {
    /// The form in which values are sent: [`TransferType::plain`] for types of the program.
    const TYPE: TransferType<Self>;
}

/// The form in which values of `T` are sent. A `T` has one only if any received bytes are a valid `T`, or are
/// made one.
#[derive(Debug, Clone, Copy)]
pub struct TransferType<T> {
    dtype: Dtype,
    of: PhantomData<fn() -> T>,
}

impl<T: bytemuck::Pod> TransferType<T> {
    /// Plain data, sent as the bytes in memory. Types of no bytes, and of 4 GiB and more, are refused when the
    /// program is compiled.
    #[must_use]
    pub const fn plain() -> Self {
        const { assert!(size_of::<T>() > 0, "a type of no bytes cannot be sent") };
        const { assert!(size_of::<T>() <= u32::MAX as usize, "a type of 4 GiB or more cannot be sent") };
        Self { dtype: Dtype::U8, of: PhantomData }
    }
}

impl<T> TransferType<T> {
    pub(crate) const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns how many elements of [`Self::dtype`] one `T` has.
    pub(crate) const fn units(&self) -> usize {
        size_of::<T>() / self.dtype.size_bytes()
    }
}

/// A type whose values can be moved and reduced. These are `f32`, `f64`, [`struct@f16`], [`bf16`],
/// [`Complex`] of `f32` and `f64`, the integers of 8 to 64 bits, and `bool`.
pub trait Element: Transfer + sealed::Sealed {
    /// The element type as a [`Dtype`].
    const DTYPE: Dtype;

    /// The type of factors of [`Reduction::premul_sum`](crate::Reduction::premul_sum): the element type
    /// itself, but `f32` for the 16-bit floats. For `bool` there is no factor.
    type Factor: sealed::Factor;
}

/// Conversion between an element and its bytes in native order.
pub(crate) trait NativeBytes<const N: usize>: Copy {
    fn read(bytes: [u8; N]) -> Self;
    fn write(self) -> [u8; N];
}

macro_rules! elements {
    ($($rust:ty, $dtype:ident, $factor:ty;)*) => {$(
        impl sealed::Sealed for $rust {
            fn zero() -> Self {
                <Self as NativeBytes<{ size_of::<Self>() }>>::read([0; size_of::<Self>()])
            }

            fn read(bytes: &[u8], values: &mut Vec<Self>) {
                values.clear();
                values.extend(bytes.as_chunks().0.iter().copied().map(<Self as NativeBytes<_>>::read));
            }

            fn write(values: &[Self], bytes: &mut [u8]) {
                for (bytes, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
                    *bytes = <Self as NativeBytes<_>>::write(*value);
                }
            }
        }

        impl Transfer for $rust {
            const TYPE: TransferType<Self> = TransferType { dtype: Dtype::$dtype, of: PhantomData };
        }

        impl Element for $rust {
            const DTYPE: Dtype = Dtype::$dtype;
            type Factor = $factor;
        }
    )*};
}

elements! {
    i8, I8, Self; u8, U8, Self; i16, I16, Self; u16, U16, Self; i32, I32, Self; u32, U32, Self;
    i64, I64, Self; u64, U64, Self; f32, F32, Self; f64, F64, Self; f16, F16, f32; bf16, Bf16, f32;
    bool, Bool, Infallible; Complex<f32>, ComplexF32, Self; Complex<f64>, ComplexF64, Self;
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl NativeBytes<{ size_of::<$number>() }> for $number {
            #[inline(always)]
            fn read(bytes: [u8; size_of::<$number>()]) -> Self {
                Self::from_ne_bytes(bytes)
            }
            #[inline(always)]
            fn write(self) -> [u8; size_of::<$number>()] {
                self.to_ne_bytes()
            }
        }
    )*};
}

numbers!(i8, u8, i16, u16, i32, u32, i64, u64, f32, f64, f16, bf16);

impl NativeBytes<1> for bool {
    /// Accepts any byte, since a peer may send values other than 0 and 1.
    fn read([byte]: [u8; 1]) -> Self {
        byte != 0
    }
    fn write(self) -> [u8; 1] {
        [u8::from(self)]
    }
}

macro_rules! complex {
    ($($float:ty),*) => {$(
        impl NativeBytes<{ 2 * size_of::<$float>() }> for Complex<$float> {
            #[inline(always)]
            fn read(bytes: [u8; 2 * size_of::<$float>()]) -> Self {
                let [re, im] = bytemuck::cast::<_, [$float; 2]>(bytes);
                Self::new(re, im)
            }
            #[inline(always)]
            fn write(self) -> [u8; 2 * size_of::<$float>()] {
                bytemuck::cast([self.re, self.im])
            }
        }
    )*};
}

complex!(f32, f64);

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;

    fn check_bytes<T: Element + PartialEq + fmt::Debug>(values: &[T], bytes: &[u8]) {
        assert_eq!((T::DTYPE.size_bytes(), size_of_val(values)), (size_of::<T>(), bytes.len()));
        let mut written = vec![0; bytes.len()];
        T::write(values, &mut written);
        assert_eq!(written, bytes);
        let mut read = vec![values[0]; 9];
        T::read(bytes, &mut read);
        assert_eq!(read, values);
    }

    #[test]
    fn elements_keep_their_memory_bytes() {
        check_bytes(&[-2_i16, 3], &[(-2_i16).to_ne_bytes(), 3_i16.to_ne_bytes()].concat());
        check_bytes(&[1.5_f64], &1.5_f64.to_ne_bytes());
        check_bytes(
            &[f16::from_f32(1.0), f16::from_bits(7)],
            &[0x3C00_u16, 7].map(u16::to_ne_bytes).concat(),
        );
        check_bytes(&[bf16::from_f32(1.0)], &0x3F80_u16.to_ne_bytes());
        check_bytes(&[true, false], &[1, 0]);
        check_bytes(&[Complex::new(1.0_f32, 2.0)], &[1.0_f32, 2.0].map(f32::to_ne_bytes).concat());
        check_bytes(&[Complex::new(1.0, -2.0)], &[1.0_f64, -2.0].map(f64::to_ne_bytes).concat());
    }

    #[test]
    fn any_byte_decodes_to_a_bool() {
        let mut read = Vec::new();
        <bool as sealed::Sealed>::read(&[0, 1, 2, 255], &mut read);
        assert_eq!(read, [false, true, true, true]);
    }
}
