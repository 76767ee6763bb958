//! Handles of operations under way, and all the ways to wait for them.

use std::any::Any;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use crate::op::OperationOutput;
use crate::{CommError, Work, wait_all, wait_any};
use nix::poll::{PollFd, PollFlags, PollTimeout};

use super::calls::{HandleSink, OutputCheck};
use convoke_testkit::Random;

/// The reason why a rank stops.
#[derive(Debug)]
pub(crate) enum TestError {
    /// A result differs from the model.
    WrongResult(String),
    /// An operation failed.
    Failed(CommError),
}

impl From<CommError> for TestError {
    fn from(error: CommError) -> Self {
        Self::Failed(error)
    }
}

impl From<String> for TestError {
    fn from(what: String) -> Self {
        Self::WrongResult(what)
    }
}

/// The longest wait for anything that should happen.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(100);
/// The number of pending handles from which on some of them are waited for.
const MAX_PENDING: usize = 40;

/// A way to wait for a single handle.
#[derive(Debug, Clone, Copy)]
enum WaitMethod {
    Wait,
    Test,
    Timeout,
    Await,
    Descriptor,
    Callback,
}

const WAIT_METHODS: [WaitMethod; 6] = [
    WaitMethod::Wait,
    WaitMethod::Test,
    WaitMethod::Timeout,
    WaitMethod::Await,
    WaitMethod::Descriptor,
    WaitMethod::Callback,
];

fn wait<M: OperationOutput>(mut work: Work<M>, method: WaitMethod) -> Result<M, TestError> {
    match method {
        WaitMethod::Wait => {}
        WaitMethod::Test => loop {
            if let Some(output) = work.try_wait()? {
                return Ok(output);
            }
            std::thread::yield_now();
        },
        WaitMethod::Timeout => loop {
            if let Some(output) = work.wait_for(Duration::from_micros(200))? {
                return Ok(output);
            }
        },
        WaitMethod::Await => return Ok(pollster::block_on(work)?),
        WaitMethod::Descriptor => {
            if let Some(descriptor) = work.descriptor()? {
                let mut fds = [PollFd::new(descriptor, PollFlags::POLLIN)];
                let timeout = PollTimeout::try_from(MAX_WAIT).expect("fits");
                if nix::poll::poll(&mut fds, timeout) != Ok(1) {
                    return Err("the descriptor of an operation says nothing".to_owned().into());
                }
            }
        }
        WaitMethod::Callback => {
            let (sender, receiver) = mpsc::channel();
            work.on_complete(move || {
                let _ = sender.send(());
            });
            if receiver.recv_timeout(MAX_WAIT).is_err() {
                return Err("the callback of an operation is not called".to_owned().into());
            }
        }
    }
    Ok(work.wait()?)
}

/// Handles of one type, in the order in which they were added.
struct HandleList<M: OperationOutput> {
    handles: Vec<Work<M>>,
    checks: Vec<OutputCheck<'static, M>>,
}

trait AnyHandleList: Send {
    fn as_any(&mut self) -> &mut dyn Any;
    fn len(&self) -> usize;
    /// Waits for one handle or more, or drops one, unless they are handles of receives.
    fn wait_some(&mut self, receives: bool, random: &mut Random) -> Result<(), TestError>;
    /// Waits for all handles; each must fail.
    fn expect_failures(&mut self, random: &mut Random, errors: &mut Vec<CommError>) -> Result<(), TestError>;
}

impl<M: OperationOutput + 'static> AnyHandleList for HandleList<M> {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }

    fn len(&self) -> usize {
        self.handles.len()
    }

    fn wait_some(&mut self, receives: bool, random: &mut Random) -> Result<(), TestError> {
        match random.below(10) {
            0 if !receives => {
                let index = random.below(self.handles.len());
                drop((self.handles.remove(index), self.checks.remove(index)));
            }
            1..4 => {
                if let Some((index, output)) = wait_any(&mut self.handles)? {
                    self.checks.remove(index)(output)?;
                }
            }
            4 => {
                let outputs = wait_all(std::mem::take(&mut self.handles))?;
                for (check, output) in std::mem::take(&mut self.checks).into_iter().zip(outputs) {
                    check(output)?;
                }
            }
            _ => {
                let index = random.below(self.handles.len());
                let output =
                    wait(self.handles.remove(index), WAIT_METHODS[random.below(WAIT_METHODS.len())])?;
                self.checks.remove(index)(output)?;
            }
        }
        Ok(())
    }

    fn expect_failures(&mut self, random: &mut Random, errors: &mut Vec<CommError>) -> Result<(), TestError> {
        while !self.handles.is_empty() {
            let result = if random.below(3) == 0 {
                wait_any(&mut self.handles).map(drop).map_err(TestError::Failed)
            } else {
                let index = random.below(self.handles.len());
                wait(self.handles.remove(index), WAIT_METHODS[random.below(WAIT_METHODS.len())]).map(drop)
            };
            match result {
                Err(TestError::Failed(error)) => errors.push(error),
                Err(wrong) => return Err(wrong),
                Ok(()) => return Err("an operation has ended well that cannot".to_owned().into()),
            }
        }
        Ok(())
    }
}

/// Callbacks that were registered, and the channel on which they report that they ran.
pub(crate) struct Callbacks {
    registered: usize,
    sender: Sender<()>,
    receiver: Receiver<()>,
}

impl Callbacks {
    pub(crate) fn new() -> Self {
        let (sender, receiver) = mpsc::channel();
        Self { registered: 0, sender, receiver }
    }

    fn register<M: OperationOutput>(&mut self, work: &Work<M>) {
        let sender = self.sender.clone();
        self.registered += 1;
        work.on_complete(move || {
            let _ = sender.send(());
        });
    }

    /// Checks that each callback ran once. Those of dropped handles may run a little later.
    pub(crate) fn check(self) -> Result<(), TestError> {
        let Self { registered, sender, receiver } = self;
        for called in 0..registered {
            if receiver.recv_timeout(MAX_WAIT).is_err() {
                return Err(format!("{called} of {registered} callbacks were called").into());
            }
        }
        // Every sender is gone when all callbacks have been dropped, called or not.
        drop(sender);
        match receiver.recv_timeout(MAX_WAIT) {
            Ok(()) => Err("a callback was called twice".to_owned().into()),
            Err(_) => Ok(()),
        }
    }
}

/// Handles that nobody has waited for yet, of receives and of others.
pub(crate) struct PendingHandles {
    lists: Vec<(bool, Box<dyn AnyHandleList>)>,
    pub(crate) random: Random,
    pub(crate) callbacks: Callbacks,
}

impl HandleSink<'static> for PendingHandles {
    fn add_handle<M: OperationOutput + 'static>(&mut self, work: Work<M>, check: OutputCheck<'static, M>) {
        self.insert(false, work, check);
    }
}

impl PendingHandles {
    /// Keeps the handle of a receive, which is never dropped early: a rank that leaves would cancel it and
    /// report that to the sender.
    pub(crate) fn add_receive<M: OperationOutput + 'static>(
        &mut self,
        work: Work<M>,
        check: OutputCheck<'static, M>,
    ) {
        self.insert(true, work, check);
    }

    fn insert<M: OperationOutput + 'static>(
        &mut self,
        receives: bool,
        work: Work<M>,
        check: OutputCheck<'static, M>,
    ) {
        if self.random.below(5) == 0 {
            self.callbacks.register(&work);
        }
        let alike = self.lists.iter_mut().filter(|(other, _)| *other == receives);
        let known =
            alike.map(|(_, list)| list).find_map(|list| list.as_any().downcast_mut::<HandleList<M>>());
        match known {
            Some(list) => {
                list.handles.push(work);
                list.checks.push(check);
            }
            None => {
                self.lists
                    .push((receives, Box::new(HandleList { handles: vec![work], checks: vec![check] })));
            }
        }
    }

    pub(crate) fn new(seed: u64) -> Self {
        Self { lists: Vec::new(), random: Random::from_seed(seed), callbacks: Callbacks::new() }
    }

    fn len(&self) -> usize {
        self.lists.iter().map(|(_, list)| list.len()).sum()
    }

    /// Waits for some handles now and then, and for more until at most [`MAX_PENDING`] are left.
    pub(crate) fn wait_for_some(&mut self) -> Result<(), TestError> {
        let now = self.random.below(3) == 0;
        for _ in 0..if now { self.random.below(6) } else { 0 } {
            self.wait_some_of_one_list()?;
        }
        while self.len() > MAX_PENDING {
            self.wait_some_of_one_list()?;
        }
        Ok(())
    }

    fn wait_some_of_one_list(&mut self) -> Result<(), TestError> {
        self.lists.retain(|(_, list)| list.len() > 0);
        if self.lists.is_empty() {
            return Ok(());
        }
        let index = self.random.below(self.lists.len());
        let (receives, list) = &mut self.lists[index];
        list.wait_some(*receives, &mut self.random)
    }

    /// Waits for all handles, sometimes on another thread than the one that began them.
    pub(crate) fn wait_all(&mut self) -> Result<(), TestError> {
        if self.random.below(4) == 0 {
            let mut moved = Self::new(self.random.next());
            moved.lists = std::mem::take(&mut self.lists);
            let thread = std::thread::spawn(move || moved.wait_all_here());
            return thread
                .join()
                .map_err(|_| TestError::WrongResult("a waiting thread panicked".to_owned()))?;
        }
        self.wait_all_here()
    }

    /// Drops all handles but those of receives.
    pub(crate) fn drop_all_but_receives(&mut self) {
        self.lists.retain(|(receives, _)| *receives);
    }

    fn wait_all_here(&mut self) -> Result<(), TestError> {
        while self.len() > 0 {
            self.wait_some_of_one_list()?;
        }
        Ok(())
    }

    /// Waits for all handles, each of which must fail. Returns the errors.
    pub(crate) fn expect_failures(&mut self) -> Result<Vec<CommError>, TestError> {
        let mut errors = Vec::new();
        for (_, list) in &mut self.lists {
            list.expect_failures(&mut self.random, &mut errors)?;
        }
        Ok(errors)
    }
}

/// Handles of a scope. Their results are checked when the scope is over.
#[derive(Default)]
pub(crate) struct ScopeHandles<'s> {
    handles: Vec<Box<dyn WaitHandle + 's>>,
}

trait WaitHandle {
    fn wait_with(self: Box<Self>, method: WaitMethod) -> Result<(), TestError>;
}

impl<M: OperationOutput> WaitHandle for Work<M> {
    fn wait_with(self: Box<Self>, method: WaitMethod) -> Result<(), TestError> {
        wait(*self, method).map(drop)
    }
}

impl<'s> HandleSink<'s> for ScopeHandles<'s> {
    fn add_handle<M: OperationOutput + 's>(&mut self, work: Work<M>, _: OutputCheck<'s, M>) {
        self.add(work);
    }
}

impl<'s> ScopeHandles<'s> {
    pub(crate) fn add<M: OperationOutput + 's>(&mut self, work: Work<M>) {
        self.handles.push(Box::new(work));
    }

    /// Waits for some handles, and leaves the others to the scope.
    pub(crate) fn wait_some(mut self, random: &mut Random) -> Result<(), TestError> {
        while !self.handles.is_empty() {
            let work = self.handles.remove(random.below(self.handles.len()));
            if random.below(3) > 0 {
                work.wait_with(WAIT_METHODS[random.below(WAIT_METHODS.len())])?;
            }
        }
        Ok(())
    }
}
