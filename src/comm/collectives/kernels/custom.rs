//! Reductions by a function of the program.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::collectives::dtype::Element;

/// A reduction function of the program, as a kernel calls it: the arguments are the bytes to reduce into and
/// the bytes of a contribution. The flag says that the contribution is the left operand. The error says how
/// the function failed.
pub(crate) type ReductionFn = dyn Fn(&mut [u8], &[u8], bool) -> Result<(), String> + Send + Sync;

/// Most elements that one call of the program's function gets.
const ELEMENTS: usize = 4096;

thread_local! {
    static IN_REDUCTION_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether the engine has called a reduction function of the program on this thread, in which the
/// thread must not wait for the engine.
pub(crate) fn is_in_reduction_function() -> bool {
    IN_REDUCTION_FUNCTION.get()
}

/// Wraps a reduction function of the program, which takes elements, as a [`ReductionFn`], which takes bytes.
///
/// The function works on copies, because received bytes need not be aligned, and a function that panics must
/// not leave a partial result.
pub(crate) fn wrap_function<T: Element>(
    function: impl Fn(&mut [T], &[T]) + Send + Sync + 'static,
) -> impl Fn(&mut [u8], &[u8], bool) -> Result<(), String> + Send + Sync + 'static {
    move |into, from, from_is_first| {
        let (mut mine, mut theirs) = (Vec::new(), Vec::new());
        let bytes = ELEMENTS * size_of::<T>();
        for (into, from) in into.chunks_mut(bytes).zip(from.chunks(bytes)) {
            T::read(into, &mut mine);
            T::read(from, &mut theirs);
            if from_is_first {
                std::mem::swap(&mut mine, &mut theirs);
            }
            IN_REDUCTION_FUNCTION.set(true);
            let result = catch_unwind(AssertUnwindSafe(|| function(&mut mine, &theirs)));
            IN_REDUCTION_FUNCTION.set(false);
            result.map_err(|panic| format!("the reduction function panicked: {}", message(&*panic)))?;
            T::write(&mine, into);
        }
        Ok(())
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}
