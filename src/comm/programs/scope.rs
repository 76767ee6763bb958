//! Operations on borrowed memory.

use std::sync::Arc;

use crate::op::{self, Scope};
use crate::{CommError, Group};

use super::calls;
use super::handles::{ScopeHandles, TestError};
use super::model::{Case, arbitrary};
use super::random_program::{Collective, Message, Messages, Pattern};
use super::values::Value;
use convoke_testkit::Random;

/// An operation with memory that a scope borrows.
pub(crate) trait ScopedOperation {
    fn begin<'scope, 'env>(
        &'env mut self,
        scope: &Scope<'scope, 'env>,
        handles: &mut ScopeHandles<'scope>,
    ) -> Result<(), CommError>;

    /// Checks the memory when the scope is over.
    fn check(&self) -> Result<(), String>;
}

/// Carries out all operations in one scope.
pub(crate) fn run(
    group: &Group,
    operations: &mut [Box<dyn ScopedOperation>],
    random: &mut Random,
) -> Result<(), TestError> {
    let mut wrong = Ok(());
    group.scope(|scope| {
        let mut handles = ScopeHandles::default();
        for one in &mut *operations {
            one.begin(scope, &mut handles)?;
        }
        match handles.wait_some(random) {
            Err(TestError::Failed(error)) => return Err(error),
            other => wrong = other,
        }
        Ok(())
    })?;
    wrong?;
    Ok(operations.iter().try_for_each(|one| one.check())?)
}

/// Compares the buffers that an operation has sent and filled with the model.
type Check<T> = Box<dyn Fn(&Case<T>, &[T], &[T]) -> Result<(), String>>;

pub(crate) struct ScopedCollective<T> {
    pub(crate) call: Collective,
    pub(crate) group: Group,
    pub(crate) case: Case<T>,
    pub(crate) send: Vec<T>,
    pub(crate) recv: Vec<T>,
    /// Checks both buffers.
    pub(crate) check: Check<T>,
}

impl<T: Value> ScopedOperation for ScopedCollective<T> {
    fn begin<'scope, 'env>(
        &'env mut self,
        scope: &Scope<'scope, 'env>,
        handles: &mut ScopeHandles<'scope>,
    ) -> Result<(), CommError> {
        let memory = (&self.send[..], &mut self.recv[..]);
        let from = (&self.group, scope);
        match calls::begin::<T, _, _>(&from, &self.call, memory, handles, Box::new(|_, _| Ok(()))) {
            Err(TestError::Failed(error)) => Err(error),
            Ok(()) => Ok(()),
            Err(TestError::WrongResult(_)) => unreachable!("nothing is checked here"),
        }
    }

    fn check(&self) -> Result<(), String> {
        (self.check)(&self.case, &self.send, &self.recv)
    }
}

pub(crate) struct ScopedMessages<T> {
    what: Arc<Messages>,
    me: usize,
    /// The memory of each message of this rank.
    memory: Vec<Vec<T>>,
}

impl<T: Value> ScopedMessages<T> {
    /// `None` if only the waiter of a receive learns the sender.
    pub(crate) fn new(what: &Arc<Messages>, me: usize) -> Option<Self> {
        let memory = |(index, message): (usize, &Message)| {
            if message.from == me { what.content::<T>(index) } else { arbitrary(message.len) }
        };
        let memory = what.of_rank(me).map(memory).collect();
        (what.pattern != Pattern::AnySource).then(|| Self { what: Arc::clone(what), me, memory })
    }
}

impl<T: Value> ScopedOperation for ScopedMessages<T> {
    fn begin<'scope, 'env>(
        &'env mut self,
        scope: &Scope<'scope, 'env>,
        handles: &mut ScopeHandles<'scope>,
    ) -> Result<(), CommError> {
        for ((_, Message { from, to, tag, .. }), memory) in self.what.of_rank(self.me).zip(&mut self.memory) {
            if *from == self.me {
                handles.add(scope.start(op::send(&memory[..], *to).tag(*tag))?.into());
            } else {
                handles.add(scope.start(op::recv(&mut memory[..], *from).tag(*tag))?.into());
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        self.what
            .of_rank(self.me)
            .zip(&self.memory)
            .try_for_each(|((index, _), got)| self.what.check(index, got))
    }
}
