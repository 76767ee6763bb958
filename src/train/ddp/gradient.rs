//! Element types of gradients.

use std::ops::AddAssign;

use convoke_comm::{Element, bf16, f16};

mod sealed {
    pub trait Sealed {}
}

/// An element type of gradients: `f32`, `f64`, [`struct@f16`] or [`bf16`]. 16-bit types are averaged in `f32`
/// and rounded once.
pub trait Gradient: Element + AddAssign + sealed::Sealed {
    /// Zero.
    const ZERO: Self;

    /// The factor `1 / count`.
    #[doc(hidden)]
    fn reciprocal(count: usize) -> Self::Factor;
}

macro_rules! gradients {
    ($($type:ty, $zero:expr;)*) => {$(
        impl sealed::Sealed for $type {}

        impl Gradient for $type {
            const ZERO: Self = $zero;

            fn reciprocal(count: usize) -> Self::Factor {
                1.0 / count.max(1) as <Self as Element>::Factor
            }
        }
    )*};
}

gradients! {
    f32, 0.0;
    f64, 0.0;
    f16, f16::ZERO;
    bf16, bf16::ZERO;
}
