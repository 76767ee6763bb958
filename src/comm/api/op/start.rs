//! Begins operations, or carries out several at once.

use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use super::Operation;
use super::buffers::OperationOutput;
use super::lists::Operations;
use super::sealed::{HostOperation, PreparedList};
use crate::api::group::Group;
use crate::api::group::work::Work;
use crate::engine::Completion;
use crate::error::CommError;

impl Group {
    /// Begins an operation that owns its buffers. It progresses without further calls: a thread that waits
    /// for any operation of the group drives them all, otherwise a background thread does, which the first
    /// `start` starts.
    ///
    /// Collectives run in the order in which they were started, together with the blocking collectives. The
    /// time limit counts from the start.
    ///
    /// The module [`op`](crate::op) has an example. An operation that borrows its buffers needs a
    /// [scope](Self::scope), which waits for it. Otherwise the buffers could be freed while the operation
    /// uses them:
    ///
    /// ```compile_fail,E0597
    /// # use convoke_comm::{ReduceOp, op};
    /// # let world = convoke_comm::init().unwrap();
    /// let mut buf = [1.0_f32; 4];
    /// std::mem::forget(world.start(op::all_reduce(&mut buf[..], ReduceOp::Sum)));
    /// ```
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if the arguments are invalid; nothing is begun. [`CommError::System`]
    /// if the background thread cannot be started. [`Work::wait`] returns the errors of the operation itself.
    pub fn start<O: Operation>(&self, operation: O) -> Result<Work<O::Output>, CommError>
    where
        O::Output: 'static,
    {
        begin(self, operation, None)
    }

    /// Carries out several operations at once, and waits for all of them; see [`Operations`]. Returns their
    /// buffers, and the [`Status`](crate::Status) of each receive. Operations may borrow their buffers.
    ///
    /// ```
    /// # use convoke_comm::op;
    /// # fn main() -> Result<(), convoke_comm::CommError> {
    /// # let world = convoke_comm::init()?;
    /// // Passes a number around a ring, like `MPI_Sendrecv`.
    /// let (rank, size) = (world.rank(), world.size());
    /// let (mine, mut left) = ([rank as u64], [0_u64]);
    /// world.run((op::send(&mine, (rank + 1) % size), op::recv(&mut left, (rank + size - 1) % size)))?;
    /// assert_eq!(left[0] as usize, (rank + size - 1) % size);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if the arguments of an operation are invalid; nothing is begun.
    /// Otherwise the first error in the order of the list, after all operations are done.
    pub fn run<L: Operations>(&self, operations: L) -> Result<L::Output, CommError> {
        let mut parts = operations.into_parts();
        let mut prepared = PreparedList { group: self, operations: Vec::new() };
        L::prepare(&mut parts, &mut prepared)?;
        let statuses = match self.shared() {
            Some(shared) => shared.call_all(prepared.operations, self.limit())?,
            None => Vec::new(),
        };
        Ok(L::finish(parts, &mut statuses.into_iter()))
    }

    /// Calls `body` with a scope that begins operations which may borrow their buffers. Then waits for all
    /// operations that `body` began. These operations progress concurrently.
    ///
    /// ```
    /// # #![deny(warnings)]
    /// # use convoke_comm::{CommError, ReduceOp, op};
    /// # fn main() -> Result<(), CommError> {
    /// let world = convoke_comm::init()?;
    /// let (mut loss, mut weights) = ([0.5_f64], vec![1.0_f32; 1000]);
    /// world.scope(|scope| {
    ///     scope.start(op::all_reduce(&mut weights, ReduceOp::Avg))?;
    ///     scope.start(op::all_reduce(&mut loss, ReduceOp::Avg))?;
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The error of `body`, else the first error of an operation whose handle was dropped.
    ///
    /// # Panics
    /// If `body` panics; the group is aborted first, so that the started operations end at once.
    pub fn scope<'env, R>(
        &self,
        body: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<R, CommError>,
    ) -> Result<R, CommError> {
        let scope = Scope { group: self.clone(), completions: Mutex::default(), lifetimes: PhantomData };
        let result = catch_unwind(AssertUnwindSafe(|| body(&scope)));
        if result.is_err() {
            self.abort("a thread panicked in a scope of operations");
        }
        let completions =
            std::mem::take(&mut *scope.completions.lock().unwrap_or_else(PoisonError::into_inner));
        let mut first = Ok(());
        for completion in completions {
            while !completion.is_done() {
                self.wait_for(std::slice::from_ref(&completion), None);
            }
            // If the program has kept the handle of the operation, only that handle returns the result.
            let outcome = completion.take_if_detached().map_or(Ok(()), |outcome| outcome.map(drop));
            first = first.and(outcome);
        }
        match result {
            Ok(result) => result.and_then(|value| first.map(|()| value)),
            Err(panic) => resume_unwind(panic),
        }
    }
}

/// Begins operations that may borrow their buffers; from [`Group::scope`].
///
/// A borrowed buffer cannot be accessed or dropped before the scope ends:
///
/// ```compile_fail,E0499
/// # use convoke_comm::op;
/// # let world = convoke_comm::init().unwrap();
/// let mut buf = [1.0_f32; 4];
/// world.scope(|scope| {
///     scope.start(op::broadcast(&mut buf[..], 0))?;
///     scope.start(op::broadcast(&mut buf[..], 0))?; // borrowed already
///     Ok(())
/// });
/// ```
///
/// ```compile_fail,E0597
/// # use convoke_comm::op;
/// # let world = convoke_comm::init().unwrap();
/// world.scope(|scope| {
///     let mut buf = [1.0_f32; 4]; // ends before the scope
///     scope.start(op::broadcast(&mut buf[..], 0))?;
///     Ok(())
/// });
/// ```
pub struct Scope<'scope, 'env: 'scope> {
    group: Group,
    completions: Completions,
    /// Makes both lifetimes invariant: neither may be shortened or extended.
    lifetimes: PhantomData<(&'scope mut &'scope (), &'env mut &'env ())>,
}

/// The operations that were begun in a scope.
type Completions = Mutex<Vec<Arc<Completion>>>;

impl<'scope> Scope<'scope, '_> {
    /// Begins an operation, for which the scope waits if the program does not.
    ///
    /// # Errors
    /// The errors of [`Group::start`].
    pub fn start<O: Operation>(&self, operation: O) -> Result<ScopedWork<O::Output>, CommError>
    where
        O::Output: 'scope,
    {
        begin(&self.group, operation, Some(&self.completions)).map(ScopedWork)
    }
}

impl fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("group", &self.group).finish_non_exhaustive()
    }
}

/// The [`Work`] of an operation in a [scope](Group::scope), which waits for it if this handle is dropped.
/// `.await` and [`Work::from`] turn it into a [`Work`].
#[derive(Debug)]
pub struct ScopedWork<T: OperationOutput>(Work<T>);

impl<T: OperationOutput> ScopedWork<T> {
    /// Waits until the operation is done.
    ///
    /// # Errors
    /// The errors of the blocking call.
    pub fn wait(self) -> Result<T, CommError> {
        self.0.wait()
    }
}

impl<T: OperationOutput> Deref for ScopedWork<T> {
    type Target = Work<T>;

    fn deref(&self) -> &Work<T> {
        &self.0
    }
}

impl<T: OperationOutput> DerefMut for ScopedWork<T> {
    fn deref_mut(&mut self) -> &mut Work<T> {
        &mut self.0
    }
}

impl<T: OperationOutput> From<ScopedWork<T>> for Work<T> {
    fn from(work: ScopedWork<T>) -> Self {
        work.0
    }
}

impl<T: OperationOutput> IntoFuture for ScopedWork<T> {
    type Output = Result<T, CommError>;
    type IntoFuture = Work<T>;

    fn into_future(self) -> Work<T> {
        self.0
    }
}

/// Begins an operation, and adds it to the operations of its scope, if it is begun in one.
#[allow(unsafe_code)]
fn begin<O: HostOperation>(
    group: &Group,
    operation: O,
    scope: Option<&Completions>,
) -> Result<Work<O::Output>, CommError> {
    let (memory, arguments) = operation.into_parts();
    let ready = |prepared| match group.shared() {
        Some(shared) => {
            let started = shared.ensure_background().map(|()| prepared);
            started.map_err(|error| CommError::system("cannot start the background thread", error))
        }
        None => Ok(prepared),
    };
    let mut memory = MaybeUninit::new(memory);
    // SAFETY: initialised above.
    let prepared = match O::prepare(group, unsafe { memory.assume_init_mut() }, &arguments).and_then(ready) {
        Ok(prepared) => prepared,
        Err(error) => {
            // SAFETY: initialised, and not used afterwards.
            unsafe { memory.assume_init_drop() };
            return Err(error);
        }
    };
    let mut completion = None;
    if let (Some(shared), Some(operation)) = (group.shared(), prepared) {
        let pending = Arc::new(Completion::nonblocking(group.limit(), Arc::clone(shared.callback_queue())));
        // SAFETY: until the completion is done, the elements that `memory` owns are neither moved nor
        // freed. The handle keeps them, and the completion if the handle is dropped (`Work::drop`);
        // `mem::forget` frees nothing. Elements that it borrows live for 'scope. That is forever, or
        // until `Group::scope` has waited for the completion, which is registered here.
        unsafe { shared.begin(operation, &pending) };
        if let Some(completions) = scope {
            let mut completions = completions.lock().unwrap_or_else(PoisonError::into_inner);
            if completions.len() == completions.capacity() {
                completions.retain(|completion| !completion.is_taken());
            }
            completions.push(Arc::clone(&pending));
        }
        shared.poll_once();
        completion = Some(pending);
    }
    Ok(Work::new(group.clone(), completion, memory))
}
