//! One rank of a program: it makes the groups, carries out the steps, and compares the results with the
//! model.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::{CommError, Dtype, Group, GroupOptions, Store};

use super::calls;
use super::ending;
use super::messages;
use super::model::{Case, case};
use super::objects;
use super::program::{Collective, Ending, How, Program, What};
use super::scope::{self, Lent, OfCollective, OfMessages};
use super::values::{Value, digest, hash, with_type};
use super::works::{Calls, PATIENCE, Shelves, Stop};
use crate::links::rough;
use convoke_testkit::Random;

/// The timeout of each operation: long, since an operation that times out is an error.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Most steps in one scope.
const SCOPE: usize = 6;

/// The state that all ranks of a program share.
pub(crate) struct Common {
    pub(crate) program: Program,
    store: Arc<dyn Store>,
    /// The digest of the sums of each step, set by the first rank that has it.
    digests: Mutex<HashMap<usize, u64>>,
    pub(crate) doing: Mutex<Doing>,
}

/// The current step of each thread of each rank, to name those that hang.
#[derive(Debug)]
pub(crate) struct Doing {
    threads: HashMap<(usize, usize), String>,
    last_change: Instant,
    /// The longest time in which no thread began another step.
    pub(crate) longest_pause: Duration,
}

impl Doing {
    fn new() -> Self {
        Self { threads: HashMap::new(), last_change: Instant::now(), longest_pause: Duration::ZERO }
    }

    fn note(&mut self, rank: usize, thread: usize, what: String) {
        self.threads.insert((rank, thread), what);
        self.longest_pause = self.longest_pause.max(self.last_change.elapsed());
        self.last_change = Instant::now();
    }
}

impl Common {
    pub(crate) fn new(program: Program, store: Arc<dyn Store>) -> Self {
        Self { program, store, digests: Mutex::default(), doing: Mutex::new(Doing::new()) }
    }

    /// Checks the result of a collective. Sums that all ranks get must have equal bits everywhere.
    fn check<T: Value>(&self, number: usize, case: &Case<T>, send: &[T], recv: &[T]) -> Result<(), String> {
        case.check(send, recv).map_err(|what| format!("step {number}: {what}"))?;
        let What::Collective(call) = &self.program.steps[number].what else { return Ok(()) };
        if !call.kind.is_all_reduce() {
            return Ok(());
        }
        let ours = digest(recv);
        let first = *self.digests.lock().expect("nobody panics with it").entry(number).or_insert(ours);
        if first == ours { Ok(()) } else { Err(format!("step {number}: the ranks differ in their bits")) }
    }
}

pub(crate) fn text(stop: &Stop) -> String {
    match stop {
        Stop::Wrong(what) => what.clone(),
        Stop::Failed(error) => format!("failed: {error}"),
    }
}

/// Runs the program as `rank`. Returns the error that it ended with, if it should fail.
pub(crate) fn run(common: &Arc<Common>, rank: usize) -> Result<Option<String>, String> {
    let program = &common.program;
    rough::on(program.rough.then(|| hash(program.seed, rank, usize::MAX - 1)));
    let mut groups = groups(common, rank).map_err(|error| format!("making groups: {error}"))?;
    let lanes: Vec<Vec<usize>> = match program.threads {
        true => (0..program.lanes.len()).map(|lane| vec![lane]).collect(),
        false => vec![(0..program.lanes.len()).collect()],
    };
    let spawn = |(number, lanes): (usize, Vec<usize>)| {
        let (common, groups) = (Arc::clone(common), groups.clone());
        std::thread::spawn(move || Thread::new(common, rank, number).run(&groups, &lanes))
    };
    let threads: Vec<_> = lanes.into_iter().enumerate().map(spawn).collect();
    let mut calls = Vec::new();
    for thread in threads.into_iter().map(|thread| thread.join()).collect::<Vec<_>>() {
        calls.push(thread.map_err(|_| "a thread panicked".to_owned())??);
    }
    let ended = match &program.ending {
        Ending::Well => Ok(None),
        Ending::Destroyed => ending::destroyed(&groups).map(|()| None),
        Ending::Badly(badly) => {
            let random = Random::from_seed(hash(program.seed, rank, usize::MAX));
            ending::badly(&mut groups, *badly, random)
        }
    };
    let ended = ended.map_err(|stop| format!("ending: {}", text(&stop)))?;
    drop(groups);
    calls.into_iter().try_for_each(|calls| calls.check().map_err(|stop| text(&stop)))?;
    Ok(ended)
}

/// Creates the groups that this rank is in.
fn groups(common: &Common, rank: usize) -> Result<Vec<Option<Group>>, CommError> {
    let program = &common.program;
    let options = GroupOptions::default().name("world").timeout(TIMEOUT).init_timeout(PATIENCE);
    // Half of the programs use shared memory.
    let options = options.shared_memory(hash(program.seed, 0, usize::MAX - 2).is_multiple_of(2));
    let mut groups = vec![None; program.groups.len()];
    groups[0] = Some(Group::new(Arc::clone(&common.store), rank, program.world(), options)?);
    for make in &program.makes {
        let Some(parent) = groups[make.parent].clone() else { continue };
        let made = match &make.how {
            How::Subgroup(ranks) => parent.subgroup(ranks)?,
            How::Split(of_each) => {
                let (color, key) = of_each[parent.rank()];
                parent.split(color, key)?
            }
        };
        let place = make.groups.clone().find(|&group| program.groups[group].contains(&rank));
        assert_eq!(made.is_some(), place.is_some(), "{make:?}");
        if let (Some(made), Some(place)) = (made, place) {
            assert_eq!(made.global_ranks(), program.groups[place], "{make:?}");
            groups[place] = Some(made);
        }
    }
    Ok(groups)
}

/// One thread of a rank.
struct Thread {
    common: Arc<Common>,
    rank: usize,
    number: usize,
    random: Random,
    shelves: Shelves,
}

/// The numbers of steps, with their groups.
type Steps = [(usize, Group)];

impl Thread {
    fn new(common: Arc<Common>, rank: usize, number: usize) -> Self {
        let seed = hash(common.program.seed, rank, number);
        Self { common, rank, number, random: Random::from_seed(seed), shelves: Shelves::new(!seed) }
    }

    fn run(mut self, groups: &[Option<Group>], lanes: &[usize]) -> Result<Calls, String> {
        let common = Arc::clone(&self.common);
        let steps = common.program.steps.iter().enumerate().filter(|(_, step)| lanes.contains(&step.lane));
        let of_step = |(number, step): (usize, &super::program::Step)| {
            Some((number, groups[common.program.lanes[step.lane].group].clone()?))
        };
        let steps: Vec<(usize, Group)> = steps.filter_map(of_step).collect();
        let mut rest = &steps[..];
        while !rest.is_empty() {
            let done = self.some(rest).and_then(|done| self.shelves.tidy().map(|()| done));
            rest = &rest[done.map_err(|stop| self.failed(&stop, rest))?..];
        }
        if self.random.below(4) == 0 {
            self.shelves.let_go();
        }
        self.note("waits for all that is left".to_owned());
        self.shelves.settle().map_err(|stop| self.failed(&stop, rest))?;
        self.note("has ended".to_owned());
        Ok(self.shelves.calls)
    }

    fn failed(&self, stop: &Stop, rest: &Steps) -> String {
        let step = rest.first().map(|(number, _)| (number, &self.common.program.steps[*number]));
        format!("thread {} at {step:?}: {}", self.number, text(stop))
    }

    fn note(&self, what: String) {
        let mut doing = self.common.doing.lock().expect("nobody panics with it");
        doing.note(self.rank, self.number, what);
    }

    /// Carries out the first step, or several. Returns how many.
    fn some(&mut self, steps: &Steps) -> Result<usize, Stop> {
        let (number, group) = &steps[0];
        let common = Arc::clone(&self.common);
        let what = &common.program.steps[*number].what;
        let mode = self.random.below(10);
        self.note(format!("step {number} in mode {mode}: {what:?}"));
        let waits = mode < 3;
        match what {
            _ if mode >= 7 => {
                let done = self.in_a_scope(steps)?;
                if done > 0 {
                    return Ok(done);
                }
                return self.some(steps);
            }
            What::Objects(objects) => objects::exchange(group, objects)?,
            What::MonitoredBarrier => group.monitored_barrier(TIMEOUT)?,
            What::Collective(call) => {
                with_type!(call.dtype, T => self.collective::<T>(*number, group, call, waits))?;
            }
            What::Messages(what) if waits => {
                with_type!(what.dtype, T => messages::exchange::<T>(group, what, &mut self.random))?;
            }
            What::Messages(what) => {
                with_type!(what.dtype, T => messages::begin::<T>(group, what, &mut self.shelves))?;
            }
        }
        Ok(1)
    }

    fn collective<T: Value>(
        &mut self,
        number: usize,
        group: &Group,
        call: &Collective,
        waits: bool,
    ) -> Result<(), Stop> {
        let case = case::<T>(call, group.rank(), group.size());
        let (send, mut recv) = (case.send.clone(), case.recv.clone());
        if waits {
            calls::blocking(group, call, &send, &mut recv)?;
            return Ok(self.common.check(number, &case, &send, &recv)?);
        }
        let common = Arc::clone(&self.common);
        let check = Box::new(move |send: &[T], recv: &[T]| common.check(number, &case, send, recv));
        let (from, what) = (group.nonblocking(), (call, group.rank(), group.size()));
        Ok(calls::begin::<T, _, _>(&from, what, (send, recv), &mut self.shelves, check)?)
    }

    /// Carries out the next steps of one group that can borrow their memory in one scope. Returns how many.
    fn in_a_scope(&mut self, steps: &Steps) -> Result<usize, Stop> {
        let first = &steps[0].1;
        let most = 1 + self.random.below(SCOPE);
        let same = steps.iter().take(most).take_while(|(_, group)| group.name() == first.name());
        let lent = same.map_while(|(number, group)| self.lent(*number, group));
        let mut lent: Vec<Box<dyn Lent>> = lent.collect();
        scope::carry_out(first, &mut lent, &mut self.random)?;
        Ok(lent.len())
    }

    fn lent(&self, number: usize, group: &Group) -> Option<Box<dyn Lent>> {
        let place = (group.rank(), group.size());
        match &self.common.program.steps[number].what {
            What::Objects(_) | What::MonitoredBarrier => None,
            What::Collective(call) => with_type!(call.dtype, T => {
                let case = case::<T>(call, place.0, place.1);
                let (send, recv) = (case.send.clone(), case.recv.clone());
                let common = Arc::clone(&self.common);
                let check = Box::new(move |case: &Case<T>, send: &[T], recv: &[T]| {
                    common.check(number, case, send, recv)
                });
                Some(Box::new(OfCollective { call: call.clone(), place, case, send, recv, check }))
            }),
            What::Messages(what) => with_type!(what.dtype, T => {
                OfMessages::<T>::new(what, place.0).map(|lent| Box::new(lent) as Box<dyn Lent>)
            }),
        }
    }
}
