//! Nonblocking operations.

mod methods;

use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use super::buffers::{Buffer, BufferMut, OperationBuffers};
use super::work::Work;
use super::{CommError, Group, Prepared};
use crate::engine::Completion;

impl Group {
    /// Returns the nonblocking form of this group's operations. An operation owns its buffers until it is
    /// done.
    ///
    /// ```
    /// # use convoke_comm::{CommError, ReduceOp};
    /// # fn main() -> Result<(), CommError> {
    /// let world = convoke_comm::init()?;
    /// let work = world.nonblocking().all_reduce(vec![1.0_f32; 1000], ReduceOp::Sum)?;
    /// // ... compute something else ...
    /// let sums = work.wait()?;
    /// assert_eq!(sums[0], world.size() as f32);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn nonblocking(&self) -> Nonblocking<'static, 'static> {
        Nonblocking { group: self.clone(), scope: None, lifetimes: PhantomData }
    }

    /// Calls `body` with the nonblocking form of this group's operations, which may borrow their buffers.
    /// Then it waits for all operations that `body` started. These operations progress concurrently.
    ///
    /// ```
    /// # use convoke_comm::{CommError, ReduceOp};
    /// # fn main() -> Result<(), CommError> {
    /// let world = convoke_comm::init()?;
    /// let (mut loss, mut weights) = ([0.5_f64], vec![1.0_f32; 1000]);
    /// world.scope(|scope| {
    ///     scope.all_reduce(&mut weights[..], ReduceOp::Avg)?;
    ///     scope.all_reduce(&mut loss[..], ReduceOp::Avg)?;
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
        body: impl for<'scope> FnOnce(&'scope Nonblocking<'scope, 'env>) -> Result<R, CommError>,
    ) -> Result<R, CommError> {
        let completions = Arc::new(Mutex::default());
        let scope = Nonblocking {
            group: self.clone(),
            scope: Some(Arc::clone(&completions)),
            lifetimes: PhantomData,
        };
        let result = catch_unwind(AssertUnwindSafe(|| body(&scope)));
        if result.is_err() {
            self.abort("a thread panicked in a scope of nonblocking operations");
        }
        let completions: Vec<Arc<Completion>> =
            std::mem::take(&mut completions.lock().unwrap_or_else(PoisonError::into_inner));
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

    /// Starts a send; short for [`Nonblocking::send`] of [`Self::nonblocking`].
    ///
    /// # Errors
    /// The errors of [`Self::send`].
    pub fn isend<B: Buffer + 'static>(&self, buf: B, to: usize, tag: u32) -> Result<Work<B>, CommError> {
        self.nonblocking().send(buf, to, tag)
    }

    /// Starts a receive; short for [`Nonblocking::recv`] of [`Self::nonblocking`].
    ///
    /// # Errors
    /// The errors of [`Self::recv`].
    pub fn irecv<B: BufferMut + 'static>(&self, buf: B, from: usize, tag: u32) -> Result<Work<B>, CommError> {
        self.nonblocking().recv(buf, from, tag)
    }
}

/// The operations of a group in nonblocking form.
///
/// [`Group::nonblocking`] returns operations that own their buffers, [`Group::scope`] operations that may
/// borrow them. Each method has the arguments, meaning, errors and cost of the [`Group`] method of the same
/// name. Only the buffers are moved in, and returned by the [`Work`]. Collectives run in the order in which
/// they were started, together with the blocking collectives. The time limit of an operation counts from its
/// start.
///
/// A borrowed buffer cannot be accessed or dropped before the scope ends:
///
/// ```compile_fail,E0499
/// # let world = convoke_comm::init().unwrap();
/// let mut buf = [1.0_f32; 4];
/// world.scope(|scope| {
///     scope.broadcast(&mut buf[..], 0)?;
///     scope.broadcast(&mut buf[..], 0)?; // borrowed already
///     Ok(())
/// });
/// ```
///
/// ```compile_fail,E0597
/// # let world = convoke_comm::init().unwrap();
/// world.scope(|scope| {
///     let mut buf = [1.0_f32; 4]; // ends before the scope
///     scope.broadcast(&mut buf[..], 0)?;
///     Ok(())
/// });
/// ```
///
/// Operations progress without further calls. A thread that waits for any operation of the group drives
/// them all; otherwise a background thread does, which the first nonblocking operation starts.
pub struct Nonblocking<'scope, 'env: 'scope> {
    group: Group,
    /// The operations started in a scope; `None` outside a scope.
    scope: Option<Arc<Mutex<Vec<Arc<Completion>>>>>,
    /// Makes both lifetimes invariant: neither may be shortened or extended.
    lifetimes: PhantomData<(&'scope mut &'scope (), &'env mut &'env ())>,
}

impl<'scope> Nonblocking<'scope, '_> {
    /// Starts the operation that `prepare` makes from the buffers `memory`.
    #[allow(unsafe_code)]
    pub(super) fn begin<M: OperationBuffers + 'scope>(
        &self,
        memory: M,
        prepare: impl for<'a> FnOnce(&Group, &'a mut M) -> Prepared<'a>,
    ) -> Result<Work<M>, CommError> {
        let group = &self.group;
        let ready = |prepared| match group.inner.shared() {
            Some(shared) => {
                let started = shared.ensure_background().map(|()| prepared);
                started.map_err(|error| CommError::system("cannot start the background thread", error))
            }
            None => Ok(prepared),
        };
        let mut memory = MaybeUninit::new(memory);
        // SAFETY: initialised above.
        let prepared = match prepare(group, unsafe { memory.assume_init_mut() }).and_then(ready) {
            Ok(prepared) => prepared,
            Err(error) => {
                // SAFETY: initialised, and not used afterwards.
                unsafe { memory.assume_init_drop() };
                return Err(error);
            }
        };
        let mut completion = None;
        if let (Some(shared), Some(operation)) = (group.inner.shared(), prepared) {
            let pending =
                Arc::new(Completion::nonblocking(self.group.limit(), Arc::clone(shared.callback_queue())));
            // SAFETY: until the completion is done, the elements that `memory` owns are neither moved nor
            // freed. The handle keeps them, and the completion if the handle is dropped (`Work::drop`);
            // `mem::forget` frees nothing. Elements that it borrows live for 'scope. That is forever, or
            // until `Group::scope` has waited for the completion, which is registered here.
            unsafe { shared.begin(operation, &pending) };
            if let Some(completions) = &self.scope {
                let mut completions = completions.lock().unwrap_or_else(PoisonError::into_inner);
                if completions.len() == completions.capacity() {
                    completions.retain(|completion| !completion.is_taken());
                }
                completions.push(Arc::clone(&pending));
            }
            shared.poll_once();
            completion = Some(pending);
        }
        Ok(Work::new(self.group.clone(), completion, memory))
    }
}

impl fmt::Debug for Nonblocking<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nonblocking").field("group", &self.group).finish_non_exhaustive()
    }
}
