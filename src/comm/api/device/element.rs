//! Element types that can be sent from devices.

use crate::collectives::dtype::{Dtype, Element};
use crate::nccl::DataType;

pub use float8::{F8E4M3, F8E5M2};

/// Seals [`DeviceElement`]: this module is private.
pub trait HasElementType {
    /// The type as a value.
    const ELEMENT_TYPE: ElementType;
}

/// A type whose values can be sent from devices and reduced there: every [`Element`], and the floating-point
/// numbers of 8 bits, `F8E4M3` and `F8E5M2`, which NCCL adds from 2.24 on.
pub trait DeviceElement: HasElementType + Send + Sync + 'static {}

impl<T: Element> HasElementType for T {
    const ELEMENT_TYPE: ElementType = ElementType { dtype: T::DTYPE, float8: None };
}

impl<T: Element> DeviceElement for T {}

macro_rules! float8 {
    ($($rust:ty, $of:ident;)*) => {$(
        impl HasElementType for $rust {
            const ELEMENT_TYPE: ElementType = ElementType { dtype: Dtype::U8, float8: Some(DataType::$of) };
        }

        impl DeviceElement for $rust {}
    )*};
}

float8! { F8E4M3, F8E4M3; F8E5M2, F8E5M2; }

/// The type of an element, as a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementType {
    /// The element type; for an 8-bit float, another type of the same size.
    pub(crate) dtype: Dtype,
    /// NCCL's type of an 8-bit float, which exists only on devices; `None` for other types.
    pub(crate) float8: Option<DataType>,
}

impl ElementType {
    /// Bytes of an element.
    pub(crate) const fn size_bytes(self) -> usize {
        self.dtype.size_bytes()
    }

    pub(crate) const fn name(self) -> &'static str {
        match self.float8 {
            Some(DataType::F8E4M3) => "f8e4m3",
            Some(_) => "f8e5m2",
            None => self.dtype.name(),
        }
    }
}
