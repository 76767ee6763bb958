//! Element types that can be sent from devices.

use crate::dtype::{Dtype, Element};
use crate::nccl::Type;

pub use float8::{F8E4M3, F8E5M2};

pub(crate) mod sealed {
    use super::Of;

    pub trait Sealed {
        /// The type as a value.
        const OF: Of;
    }
}

/// A type whose values can be sent from devices and reduced there: every [`Element`], and the floating-point
/// numbers of 8 bits, `F8E4M3` and `F8E5M2`, which NCCL adds from 2.24 on.
pub trait DeviceElement: sealed::Sealed + Send + Sync + 'static {}

impl<T: Element> sealed::Sealed for T {
    const OF: Of = Of { dtype: T::DTYPE, eight: None };
}

impl<T: Element> DeviceElement for T {}

macro_rules! eight {
    ($($rust:ty, $of:ident;)*) => {$(
        impl sealed::Sealed for $rust {
            const OF: Of = Of { dtype: Dtype::U8, eight: Some(Type::$of) };
        }

        impl DeviceElement for $rust {}
    )*};
}

eight! { F8E4M3, F8E4M3; F8E5M2, F8E5M2; }

/// The type of an element, as a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Of {
    /// The type, or one of the same size.
    pub(crate) dtype: Dtype,
    /// The type, if only devices have it.
    pub(crate) eight: Option<Type>,
}

impl Of {
    /// Bytes of an element.
    pub(crate) const fn size_bytes(self) -> usize {
        self.dtype.size_bytes()
    }

    pub(crate) const fn name(self) -> &'static str {
        match self.eight {
            Some(Type::F8E4M3) => "f8e4m3",
            Some(_) => "f8e5m2",
            None => self.dtype.name(),
        }
    }
}
