//! Handles of operations under way, and all the ways to wait for them.

use std::any::Any;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use crate::{CommError, Memory, Work, wait_all, wait_any};
use nix::poll::{PollFd, PollFlags, PollTimeout};

use super::calls::{Keeper, Look};
use convoke_testkit::Random;

/// The reason why a rank stops.
#[derive(Debug)]
pub(crate) enum Stop {
    /// A result differs from the model.
    Wrong(String),
    /// An operation failed.
    Failed(CommError),
}

impl From<CommError> for Stop {
    fn from(error: CommError) -> Self {
        Self::Failed(error)
    }
}

impl From<String> for Stop {
    fn from(what: String) -> Self {
        Self::Wrong(what)
    }
}

/// The longest wait for anything that should happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(100);
/// The number of handles on a shelf from which on some of them are waited for.
const FULL: usize = 40;

/// A way to wait for a single handle.
#[derive(Debug, Clone, Copy)]
enum Way {
    Wait,
    Test,
    Timeout,
    Await,
    Descriptor,
    Callback,
}

const WAYS: [Way; 6] = [Way::Wait, Way::Test, Way::Timeout, Way::Await, Way::Descriptor, Way::Callback];

fn wait<M: Memory>(mut work: Work<M>, way: Way) -> Result<M::Output, Stop> {
    match way {
        Way::Wait => {}
        Way::Test => loop {
            match work.test()? {
                Ok(output) => return Ok(output),
                Err(same) => work = same,
            }
            std::thread::yield_now();
        },
        Way::Timeout => loop {
            match work.wait_timeout(Duration::from_micros(200))? {
                Ok(output) => return Ok(output),
                Err(same) => work = same,
            }
        },
        Way::Await => return Ok(pollster::block_on(work)?),
        Way::Descriptor => {
            if let Some(descriptor) = work.descriptor()? {
                let mut fds = [PollFd::new(descriptor, PollFlags::POLLIN)];
                let timeout = PollTimeout::try_from(PATIENCE).expect("fits");
                if nix::poll::poll(&mut fds, timeout) != Ok(1) {
                    return Err("the descriptor of an operation says nothing".to_owned().into());
                }
            }
        }
        Way::Callback => {
            let (tell, told) = mpsc::channel();
            work.on_complete(move || {
                let _ = tell.send(());
            });
            if told.recv_timeout(PATIENCE).is_err() {
                return Err("the callback of an operation is not called".to_owned().into());
            }
        }
    }
    Ok(work.wait()?)
}

/// Handles of one type, in the order in which they were added.
struct Shelf<M: Memory> {
    works: Vec<Work<M>>,
    looks: Vec<Look<'static, M>>,
}

trait AnyShelf: Send {
    fn as_any(&mut self) -> &mut dyn Any;
    fn len(&self) -> usize;
    /// Waits for one handle or more, or drops one.
    fn settle(&mut self, random: &mut Random) -> Result<(), Stop>;
    /// Waits for all handles; each must fail.
    fn fail(&mut self, random: &mut Random, errors: &mut Vec<CommError>) -> Result<(), Stop>;
}

impl<M: Memory + Send + 'static> AnyShelf for Shelf<M> {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }

    fn len(&self) -> usize {
        self.works.len()
    }

    fn settle(&mut self, random: &mut Random) -> Result<(), Stop> {
        match random.below(10) {
            0 => {
                let index = random.below(self.works.len());
                drop((self.works.remove(index), self.looks.remove(index)));
            }
            1..4 => {
                if let Some((index, output)) = wait_any(&mut self.works)? {
                    self.looks.remove(index)(output)?;
                }
            }
            4 => {
                let outputs = wait_all(std::mem::take(&mut self.works))?;
                for (look, output) in std::mem::take(&mut self.looks).into_iter().zip(outputs) {
                    look(output)?;
                }
            }
            _ => {
                let index = random.below(self.works.len());
                let output = wait(self.works.remove(index), WAYS[random.below(WAYS.len())])?;
                self.looks.remove(index)(output)?;
            }
        }
        Ok(())
    }

    fn fail(&mut self, random: &mut Random, errors: &mut Vec<CommError>) -> Result<(), Stop> {
        while !self.works.is_empty() {
            let result = if random.below(3) == 0 {
                wait_any(&mut self.works).map(drop).map_err(Stop::Failed)
            } else {
                let index = random.below(self.works.len());
                wait(self.works.remove(index), WAYS[random.below(WAYS.len())]).map(drop)
            };
            match result {
                Err(Stop::Failed(error)) => errors.push(error),
                Err(wrong) => return Err(wrong),
                Ok(()) => return Err("an operation has ended well that cannot".to_owned().into()),
            }
        }
        Ok(())
    }
}

/// Callbacks that were registered, and the channel on which they report that they ran.
pub(crate) struct Calls {
    asked: usize,
    tell: Sender<()>,
    told: Receiver<()>,
}

impl Calls {
    pub(crate) fn new() -> Self {
        let (tell, told) = mpsc::channel();
        Self { asked: 0, tell, told }
    }

    fn ask<M: Memory>(&mut self, work: &Work<M>) {
        let tell = self.tell.clone();
        self.asked += 1;
        work.on_complete(move || {
            let _ = tell.send(());
        });
    }

    /// Checks that each callback ran once. Those of dropped handles may run a little later.
    pub(crate) fn check(self) -> Result<(), Stop> {
        let Self { asked, tell, told } = self;
        for called in 0..asked {
            if told.recv_timeout(PATIENCE).is_err() {
                return Err(format!("{called} of {asked} callbacks were called").into());
            }
        }
        // Every sender is gone when all callbacks have been dropped, called or not.
        drop(tell);
        match told.recv_timeout(PATIENCE) {
            Ok(()) => Err("a callback was called twice".to_owned().into()),
            Err(_) => Ok(()),
        }
    }
}

/// Handles that nobody has waited for yet, of receives and of others.
pub(crate) struct Shelves {
    shelves: Vec<(bool, Box<dyn AnyShelf>)>,
    pub(crate) random: Random,
    pub(crate) calls: Calls,
}

impl Keeper<'static> for Shelves {
    fn keep<M: Memory + Send + 'static>(&mut self, work: Work<M>, look: Look<'static, M>) {
        self.put(false, work, look);
    }
}

impl Shelves {
    /// Keeps the handle of a receive, which is never dropped early: a rank that leaves would cancel it and
    /// report that to the sender.
    pub(crate) fn keep_receive<M: Memory + Send + 'static>(&mut self, work: Work<M>, look: Look<'static, M>) {
        self.put(true, work, look);
    }

    fn put<M: Memory + Send + 'static>(&mut self, receives: bool, work: Work<M>, look: Look<'static, M>) {
        if self.random.below(5) == 0 {
            self.calls.ask(&work);
        }
        let alike = self.shelves.iter_mut().filter(|(other, _)| *other == receives);
        let known = alike.map(|(_, shelf)| shelf).find_map(|shelf| shelf.as_any().downcast_mut::<Shelf<M>>());
        match known {
            Some(shelf) => {
                shelf.works.push(work);
                shelf.looks.push(look);
            }
            None => {
                self.shelves.push((receives, Box::new(Shelf { works: vec![work], looks: vec![look] })));
            }
        }
    }

    pub(crate) fn new(seed: u64) -> Self {
        Self { shelves: Vec::new(), random: Random::from_seed(seed), calls: Calls::new() }
    }

    fn len(&self) -> usize {
        self.shelves.iter().map(|(_, shelf)| shelf.len()).sum()
    }

    /// Waits for some handles now and then, and for more until at most [`FULL`] are left.
    pub(crate) fn tidy(&mut self) -> Result<(), Stop> {
        let now = self.random.below(3) == 0;
        for _ in 0..if now { self.random.below(6) } else { 0 } {
            self.settle_one()?;
        }
        while self.len() > FULL {
            self.settle_one()?;
        }
        Ok(())
    }

    fn settle_one(&mut self) -> Result<(), Stop> {
        self.shelves.retain(|(_, shelf)| shelf.len() > 0);
        if self.shelves.is_empty() {
            return Ok(());
        }
        let index = self.random.below(self.shelves.len());
        self.shelves[index].1.settle(&mut self.random)
    }

    /// Waits for all handles, sometimes on another thread than the one that began them.
    pub(crate) fn settle(&mut self) -> Result<(), Stop> {
        if self.random.below(4) == 0 {
            let mut moved = Self::new(self.random.next());
            moved.shelves = std::mem::take(&mut self.shelves);
            let thread = std::thread::spawn(move || moved.settle_here());
            return thread.join().map_err(|_| Stop::Wrong("a waiting thread panicked".to_owned()))?;
        }
        self.settle_here()
    }

    /// Drops all handles but those of receives.
    pub(crate) fn let_go(&mut self) {
        self.shelves.retain(|(receives, _)| *receives);
    }

    fn settle_here(&mut self) -> Result<(), Stop> {
        while self.len() > 0 {
            self.settle_one()?;
        }
        Ok(())
    }

    /// Waits for all handles, each of which must fail. Returns the errors.
    pub(crate) fn fail(&mut self) -> Result<Vec<CommError>, Stop> {
        let mut errors = Vec::new();
        for (_, shelf) in &mut self.shelves {
            shelf.fail(&mut self.random, &mut errors)?;
        }
        Ok(errors)
    }
}

/// Handles of a scope. Their results are checked when the scope is over.
#[derive(Default)]
pub(crate) struct OfScope<'s> {
    works: Vec<Box<dyn Settle + 's>>,
}

trait Settle {
    fn settle(self: Box<Self>, way: Way) -> Result<(), Stop>;
}

impl<M: Memory> Settle for Work<M> {
    fn settle(self: Box<Self>, way: Way) -> Result<(), Stop> {
        wait(*self, way).map(drop)
    }
}

impl<'s> Keeper<'s> for OfScope<'s> {
    fn keep<M: Memory + Send + 's>(&mut self, work: Work<M>, _: Look<'s, M>) {
        self.add(work);
    }
}

impl<'s> OfScope<'s> {
    pub(crate) fn add<M: Memory + 's>(&mut self, work: Work<M>) {
        self.works.push(Box::new(work));
    }

    /// Waits for some handles, and leaves the others to the scope.
    pub(crate) fn settle(mut self, random: &mut Random) -> Result<(), Stop> {
        while !self.works.is_empty() {
            let work = self.works.remove(random.below(self.works.len()));
            if random.below(3) > 0 {
                work.settle(WAYS[random.below(WAYS.len())])?;
            }
        }
        Ok(())
    }
}
