//! One rank of a program: it makes the groups, carries out the steps, and compares the results with the
//! model.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::{CommError, Dtype, Group, GroupOptions, SingleCopy, Store};

use super::calls;
use super::handles::{Callbacks, MAX_WAIT, PendingHandles, TestError};
use super::messages;
use super::model::{Case, case};
use super::objects;
use super::random_program::{Collective, NewGroups, ProgramOperation, RandomProgram, Termination};
use super::scope::{self, ScopedCollective, ScopedMessages, ScopedOperation};
use super::termination;
use super::values::{Value, digest, hash, with_type};
use crate::transport::links::fault_injection;
use convoke_testkit::Random;

/// The timeout of each operation: long, since an operation that times out is an error.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Most steps in one scope.
const MAX_SCOPE_STEPS: usize = 6;

/// The state that all ranks of a program share.
pub(crate) struct SharedState {
    pub(crate) program: RandomProgram,
    store: Arc<dyn Store>,
    /// The digest of the sums of each step, set by the first rank that has it.
    digests: Mutex<HashMap<usize, u64>>,
    pub(crate) current_steps: Mutex<CurrentSteps>,
}

/// The current step of each thread of each rank, to name those that hang.
#[derive(Debug)]
pub(crate) struct CurrentSteps {
    threads: HashMap<(usize, usize), String>,
    last_change: Instant,
    /// The longest time in which no thread began another step.
    pub(crate) longest_pause: Duration,
}

impl CurrentSteps {
    fn new() -> Self {
        Self { threads: HashMap::new(), last_change: Instant::now(), longest_pause: Duration::ZERO }
    }

    fn set_step(&mut self, rank: usize, thread: usize, what: String) {
        self.threads.insert((rank, thread), what);
        self.longest_pause = self.longest_pause.max(self.last_change.elapsed());
        self.last_change = Instant::now();
    }
}

impl SharedState {
    pub(crate) fn new(program: RandomProgram, store: Arc<dyn Store>) -> Self {
        Self { program, store, digests: Mutex::default(), current_steps: Mutex::new(CurrentSteps::new()) }
    }

    /// Checks the result of a collective. Sums that all ranks get must have equal bits everywhere.
    fn check<T: Value>(&self, number: usize, case: &Case<T>, send: &[T], recv: &[T]) -> Result<(), String> {
        case.check(send, recv).map_err(|what| format!("step {number}: {what}"))?;
        let ProgramOperation::Collective(call) = &self.program.steps[number].operation else { return Ok(()) };
        if !call.kind.is_all_reduce() {
            return Ok(());
        }
        let ours = digest(recv);
        let first = *self.digests.lock().expect("nobody panics with it").entry(number).or_insert(ours);
        if first == ours { Ok(()) } else { Err(format!("step {number}: the ranks differ in their bits")) }
    }
}

pub(crate) fn describe(error: &TestError) -> String {
    match error {
        TestError::WrongResult(what) => what.clone(),
        TestError::Failed(error) => format!("failed: {error}"),
    }
}

/// Runs the program as `rank`. Returns the error that it ended with, if it should fail.
pub(crate) fn run(shared: &Arc<SharedState>, rank: usize) -> Result<Option<String>, String> {
    let program = &shared.program;
    fault_injection::set_seed(program.faulty_links.then(|| hash(program.seed, rank, usize::MAX - 1)));
    let mut groups = groups(shared, rank).map_err(|error| format!("making groups: {error}"))?;
    let sequences: Vec<Vec<usize>> = match program.threads {
        true => (0..program.sequences.len()).map(|sequence| vec![sequence]).collect(),
        false => vec![(0..program.sequences.len()).collect()],
    };
    let spawn = |(number, sequences): (usize, Vec<usize>)| {
        let (shared, groups) = (Arc::clone(shared), groups.clone());
        std::thread::spawn(move || Thread::new(shared, rank, number).run(&groups, &sequences))
    };
    let threads: Vec<_> = sequences.into_iter().enumerate().map(spawn).collect();
    let mut calls = Vec::new();
    for thread in threads.into_iter().map(|thread| thread.join()).collect::<Vec<_>>() {
        calls.push(thread.map_err(|_| "a thread panicked".to_owned())??);
    }
    let ended = match &program.termination {
        Termination::HandlesDropped => Ok(None),
        Termination::Destroyed => termination::destroy_all(&groups).map(|()| None),
        Termination::Faulty(case) => {
            let random = Random::from_seed(hash(program.seed, rank, usize::MAX));
            termination::terminate_with_fault(&mut groups, *case, random)
        }
    };
    let ended = ended.map_err(|error| format!("termination: {}", describe(&error)))?;
    drop(groups);
    calls.into_iter().try_for_each(|calls| calls.check().map_err(|error| describe(&error)))?;
    Ok(ended)
}

/// Creates the groups that this rank is in.
fn groups(shared: &SharedState, rank: usize) -> Result<Vec<Option<Group>>, CommError> {
    let program = &shared.program;
    let options = GroupOptions::default().name("world").timeout(TIMEOUT).init_timeout(MAX_WAIT);
    // Half of the programs use shared memory.
    let options = options.shared_memory(hash(program.seed, 0, usize::MAX - 2).is_multiple_of(2));
    // Half of them copy once, if all ranks do. The root of a `scatter` decides alone.
    let differs = hash(program.seed, 0, usize::MAX - 3);
    let options = options.single_copy(match differs % 4 {
        0 | 1 => SingleCopy::Always,
        2 if rank == 0 => SingleCopy::Always,
        _ => SingleCopy::Auto,
    });
    let mut groups = vec![None; program.groups.len()];
    groups[0] = Some(Group::new(Arc::clone(&shared.store), rank, program.world(), options)?);
    for creation in &program.group_creations {
        let Some(parent) = groups[creation.parent].clone() else { continue };
        let made = match &creation.how {
            NewGroups::Subgroup(ranks) => parent.subgroup(ranks)?,
            NewGroups::Split(of_each) => {
                let (color, key) = of_each[parent.rank()];
                parent.split(color, key)?
            }
        };
        let place = creation.groups.clone().find(|&group| program.groups[group].contains(&rank));
        assert_eq!(made.is_some(), place.is_some(), "{creation:?}");
        if let (Some(made), Some(place)) = (made, place) {
            assert_eq!(made.global_ranks(), program.groups[place], "{creation:?}");
            groups[place] = Some(made);
        }
    }
    Ok(groups)
}

/// One thread of a rank.
struct Thread {
    shared: Arc<SharedState>,
    rank: usize,
    number: usize,
    random: Random,
    handles: PendingHandles,
}

/// The numbers of steps, with their groups.
type GroupSteps = [(usize, Group)];

impl Thread {
    fn new(shared: Arc<SharedState>, rank: usize, number: usize) -> Self {
        let seed = hash(shared.program.seed, rank, number);
        Self { shared, rank, number, random: Random::from_seed(seed), handles: PendingHandles::new(!seed) }
    }

    fn run(mut self, groups: &[Option<Group>], sequences: &[usize]) -> Result<Callbacks, String> {
        let shared = Arc::clone(&self.shared);
        let steps =
            shared.program.steps.iter().enumerate().filter(|(_, step)| sequences.contains(&step.sequence));
        let of_step = |(number, step): (usize, &super::random_program::ProgramStep)| {
            Some((number, groups[shared.program.sequences[step.sequence].group].clone()?))
        };
        let steps: Vec<(usize, Group)> = steps.filter_map(of_step).collect();
        let mut rest = &steps[..];
        while !rest.is_empty() {
            let done = self.run_some(rest).and_then(|done| self.handles.wait_for_some().map(|()| done));
            rest = &rest[done.map_err(|error| self.failed(&error, rest))?..];
        }
        if self.random.below(4) == 0 {
            self.handles.drop_all_but_receives();
        }
        self.set_step("waits for all that is left".to_owned());
        self.handles.wait_all().map_err(|error| self.failed(&error, rest))?;
        self.set_step("has ended".to_owned());
        Ok(self.handles.callbacks)
    }

    fn failed(&self, error: &TestError, rest: &GroupSteps) -> String {
        let step = rest.first().map(|(number, _)| (number, &self.shared.program.steps[*number]));
        format!("thread {} at {step:?}: {}", self.number, describe(error))
    }

    fn set_step(&self, what: String) {
        let mut current_steps = self.shared.current_steps.lock().expect("nobody panics with it");
        current_steps.set_step(self.rank, self.number, what);
    }

    /// Carries out the first step, or several. Returns how many.
    fn run_some(&mut self, steps: &GroupSteps) -> Result<usize, TestError> {
        let (number, group) = &steps[0];
        let shared = Arc::clone(&self.shared);
        let what = &shared.program.steps[*number].operation;
        let mode = self.random.below(10);
        self.set_step(format!("step {number} in mode {mode}: {what:?}"));
        let waits = mode < 3;
        match what {
            _ if mode >= 7 => {
                let done = self.run_in_scope(steps)?;
                if done > 0 {
                    return Ok(done);
                }
                return self.run_some(steps);
            }
            ProgramOperation::Objects(objects) => objects::exchange(group, objects)?,
            ProgramOperation::MonitoredBarrier => group.monitored_barrier(TIMEOUT)?,
            ProgramOperation::Collective(call) => {
                with_type!(call.dtype, T => self.collective::<T>(*number, group, call, waits))?;
            }
            ProgramOperation::Messages(what) if waits => {
                with_type!(what.dtype, T => messages::exchange::<T>(group, what, &mut self.random))?;
            }
            ProgramOperation::Messages(what) => {
                with_type!(what.dtype, T => messages::begin::<T>(group, what, &mut self.handles))?;
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
    ) -> Result<(), TestError> {
        let case = case::<T>(call, group.rank(), group.size());
        let (send, mut recv) = (case.send.clone(), case.recv.clone());
        if waits {
            calls::blocking(group, call, &send, &mut recv)?;
            return Ok(self.shared.check(number, &case, &send, &recv)?);
        }
        let shared = Arc::clone(&self.shared);
        let check = Box::new(move |send: &[T], recv: &[T]| shared.check(number, &case, send, recv));
        calls::begin::<T, _, _>(group, call, (send, recv), &mut self.handles, check)
    }

    /// Carries out the next steps of one group that can borrow their memory in one scope. Returns how many.
    fn run_in_scope(&mut self, steps: &GroupSteps) -> Result<usize, TestError> {
        let first = &steps[0].1;
        let most = 1 + self.random.below(MAX_SCOPE_STEPS);
        let same = steps.iter().take(most).take_while(|(_, group)| group.name() == first.name());
        let operations = same.map_while(|(number, group)| self.scoped_operation(*number, group));
        let mut operations: Vec<Box<dyn ScopedOperation>> = operations.collect();
        scope::run(first, &mut operations, &mut self.random)?;
        Ok(operations.len())
    }

    fn scoped_operation(&self, number: usize, group: &Group) -> Option<Box<dyn ScopedOperation>> {
        match &self.shared.program.steps[number].operation {
            ProgramOperation::Objects(_) | ProgramOperation::MonitoredBarrier => None,
            ProgramOperation::Collective(call) => with_type!(call.dtype, T => {
                let case = case::<T>(call, group.rank(), group.size());
                let (send, recv) = (case.send.clone(), case.recv.clone());
                let shared = Arc::clone(&self.shared);
                let check = Box::new(move |case: &Case<T>, send: &[T], recv: &[T]| {
                    shared.check(number, case, send, recv)
                });
                Some(Box::new(ScopedCollective { call: call.clone(), group: group.clone(), case, send, recv, check }))
            }),
            ProgramOperation::Messages(what) => with_type!(what.dtype, T => {
                ScopedMessages::<T>::new(what, group.rank()).map(|messages| Box::new(messages) as Box<dyn ScopedOperation>)
            }),
        }
    }
}
