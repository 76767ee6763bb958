//! The reduction of a collective: a named operation, or one that the program defines.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::collectives::dtype::sealed::Factor;
use crate::collectives::dtype::{Dtype, Element, ReduceOp, with_element_type};
use crate::collectives::kernels::{Kernel, ReductionFn, ScaleFn, wrap_function};
use crate::error::CommError;

/// The reduction that combines the ranks' elements of type `T`: a [`ReduceOp`], or an operation of the
/// program.
///
/// ```
/// use convoke_comm::{ReduceOp, Reduction};
///
/// # fn main() -> Result<(), convoke_comm::CommError> {
/// # let world = convoke_comm::init()?;
/// let mut buf = [1.0_f32, -3.0];
/// world.all_reduce(&mut buf, ReduceOp::Max)?;
/// world.all_reduce(&mut buf, Reduction::premul_sum(0.5))?;
/// let farthest = Reduction::new(|into: &mut [f32], from: &[f32]| {
///     for (a, b) in into.iter_mut().zip(from) {
///         *a = a.abs().max(b.abs());
///     }
/// });
/// world.all_reduce(&mut buf, farthest)?;
/// # Ok(())
/// # }
/// ```
pub struct Reduction<T> {
    pub(crate) untyped: UntypedReduction,
    of: PhantomData<fn(T)>,
}

/// A [`Reduction`] without its element type, which the buffers have: for [untyped calls](crate::raw).
#[derive(Clone)]
pub struct UntypedReduction {
    op: ReduceOp,
    scale: Option<Arc<ScaleFn>>,
    /// The bytes of the factor in native order, for reductions on GPUs.
    #[cfg_attr(not(feature = "nccl"), allow(dead_code))]
    factor: Option<[u8; 16]>,
    function: Option<Arc<ReductionFn>>,
}

/// Converts the argument of a typed call.
#[inline]
pub(crate) fn untyped<T>(op: impl Into<Reduction<T>>) -> UntypedReduction {
    op.into().untyped
}

impl<T: Element> Reduction<T> {
    /// Returns a reduction to the sum of all ranks' elements, where this rank first multiplies its own by
    /// `factor`.
    ///
    /// Factors may differ between ranks. Products of 16-bit floats are not rounded before they are added.
    #[must_use]
    pub fn premul_sum(factor: T::Factor) -> Self {
        let scale: Arc<ScaleFn> = Arc::new(move |bytes: &mut [u8]| factor.multiply(bytes));
        let (scale, factor) = (Some(scale), Some(factor.bytes()));
        Self::of(UntypedReduction { scale, factor, ..ReduceOp::PremulSum.into() })
    }

    /// Makes a reduction from a function of two slices of equal length. The function replaces each element of
    /// the first slice by its combination with the element of the second slice at that index. All ranks pass
    /// the same function.
    ///
    /// Elements are combined in any order and grouping, so the function should be commutative and
    /// associative. In any case, all ranks get equal bits, and a rerun does too. If the function is not
    /// associative, results depend on the length of the buffer and the number of ranks.
    ///
    /// The function runs on a thread that has a call on the group in progress. The function must not use a
    /// group: every group call in it is refused. If the function panics, the group ends with
    /// [`CommError::Aborted`] on all ranks. The time limit of the call does not interrupt the function.
    #[must_use]
    pub fn new(combine: impl Fn(&mut [T], &[T]) + Send + Sync + 'static) -> Self {
        let function: Arc<ReductionFn> = Arc::new(wrap_function(combine));
        Self::of(UntypedReduction { function: Some(function), ..ReduceOp::Custom.into() })
    }
}

impl<T> Reduction<T> {
    fn of(untyped: UntypedReduction) -> Self {
        Self { untyped, of: PhantomData }
    }

    /// Returns the operation. The ranks compare it before they reduce.
    #[must_use]
    pub fn op(&self) -> ReduceOp {
        self.untyped.op
    }
}

impl UntypedReduction {
    /// Returns a reduction to the sum of all ranks' elements of type `dtype`, where this rank first
    /// multiplies its own by a factor; see [`Reduction::premul_sum`]. `factor` has the bytes of the factor in
    /// native order, which is an `f32` for the 16-bit floats and otherwise an element; the rest is ignored.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if the type has no factors, such as `bool`.
    pub fn premul_sum(dtype: Dtype, factor: [u8; 16]) -> Result<Self, CommError> {
        fn typed<T: Element>(factor: [u8; 16]) -> Option<UntypedReduction> {
            T::Factor::from_bytes(factor).map(|factor| Reduction::<T>::premul_sum(factor).untyped)
        }
        with_element_type!(dtype, T => typed::<T>(factor))
            .ok_or_else(|| CommError::InvalidArgument(format!("{dtype} has no factors")))
    }

    /// Makes a reduction from a function of two slices of bytes of equal length, which hold elements; see
    /// [`Reduction::new`]. The function gets whole elements of up to 16 bytes, which need not be aligned.
    #[must_use]
    pub fn new(combine: impl Fn(&mut [u8], &[u8]) + Send + Sync + 'static) -> Self {
        Reduction::<u8>::new(combine).untyped
    }

    /// Returns the operation. The ranks compare it before they reduce.
    #[must_use]
    pub fn op(&self) -> ReduceOp {
        self.op
    }

    /// Returns this rank's factor, as its bytes in native order.
    #[cfg(feature = "nccl")]
    pub(crate) fn factor(&self) -> Option<[u8; 16]> {
        self.factor
    }

    /// Returns the kernel that reduces over `world` ranks, or an error if the operation is not defined for
    /// the type.
    #[inline(always)]
    pub(crate) fn kernel(&self, dtype: Dtype, world: usize) -> Result<Kernel, CommError> {
        let Self { op, scale, function, .. } = self;
        let invalid = |needs: &str| Err(CommError::InvalidArgument(format!("{op} needs {needs}")));
        let kernel = match (op, scale, function) {
            (ReduceOp::PremulSum, Some(scale), _) => Kernel::scaled_sum(dtype, Arc::clone(scale)),
            (ReduceOp::Custom, _, Some(function)) => Some(Kernel::custom(Arc::clone(function))),
            (ReduceOp::PremulSum, ..) => return invalid("its factor: Reduction::premul_sum"),
            (ReduceOp::Custom, ..) => return invalid("its function: Reduction::new"),
            _ => Kernel::of(dtype, *op, world),
        };
        let undefined = || format!("{op} of {dtype} has no meaning: {}", alternative(*op));
        kernel.ok_or_else(|| CommError::InvalidArgument(undefined()))
    }
}

/// Returns advice on what to use instead of an operation that is not defined for a type.
fn alternative(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::Avg => {
            "an average need not be a whole number. Take ReduceOp::Sum and divide by Group::size, or send f32 or f64"
        }
        ReduceOp::Min | ReduceOp::Max => {
            "these numbers have no order. Reduce their absolute values or their parts"
        }
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => {
            "bits are combined of integers and bool only. Send their bits (to_bits) as integers"
        }
        ReduceOp::PremulSum => "there is no factor for it. Take ReduceOp::Sum, Bor or Band, or send integers",
        ReduceOp::Sum | ReduceOp::Product | ReduceOp::Custom => "take an operation that the type has",
    }
}

impl<T> From<ReduceOp> for Reduction<T> {
    fn from(op: ReduceOp) -> Self {
        Self::of(op.into())
    }
}

impl From<ReduceOp> for UntypedReduction {
    fn from(op: ReduceOp) -> Self {
        Self { op, scale: None, factor: None, function: None }
    }
}

/// Named reductions are equal if they are the same. A factor or function equals no other.
impl PartialEq for UntypedReduction {
    fn eq(&self, other: &Self) -> bool {
        self.op == other.op && !matches!(self.op, ReduceOp::PremulSum | ReduceOp::Custom)
    }
}

impl<T> Clone for Reduction<T> {
    fn clone(&self) -> Self {
        Self::of(self.untyped.clone())
    }
}

impl<T> fmt::Debug for Reduction<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reduction").field(&self.op()).finish()
    }
}

impl fmt::Debug for UntypedReduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("UntypedReduction").field(&self.op).finish()
    }
}
