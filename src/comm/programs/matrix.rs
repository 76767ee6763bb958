//! The matrix: each collective with each type, each meaningful operation, each number of ranks and lengths of
//! all kinds, compared with the model.
//!
//! A second test runs the cases of each collective with each algorithm that can be chosen for it.
//!
//! [`cases`] is the table. The short form has fewer numbers of ranks, and lengths around the lower thresholds
//! only. Each case takes some of all lengths, and the next case takes others. Values with more digits are in
//! `tests/reductions.rs`.

use std::sync::Arc;
use std::time::Duration;

use convoke_store::{MemoryStore, Store};

use super::calls;
use super::handles::{PendingHandles, TestError};
use super::model::case;
use super::random_program::{Collective, CollectiveKind, KINDS};
use super::rank::describe;
use super::values::{TYPES, Value, hash, with_any_type, with_type};
use crate::algorithms::Algorithms;
use crate::{Dtype, Group, GroupOptions, ReduceOp, SingleCopy};

const TIMEOUT: Duration = Duration::from_secs(60);
/// The numbers of ranks of the short and of the full form.
const WORLDS: [&[usize]; 2] = [&[1, 2, 3, 5], &[1, 2, 3, 4, 5, 6, 7, 8, 16, 17]];
/// Lengths in elements.
const SHORT_LENS: [usize; 5] = [0, 1, 3, 7, 77];
/// Total lengths in bytes at which algorithms, small messages and chunks change. Each is tried exactly, with
/// one element less, and with one more.
const THRESHOLDS: [&[usize]; 2] = [
    &[4 << 10, 8 << 10, 12 << 10, 16 << 10],
    &[4 << 10, 8 << 10, 12 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10],
];

/// Each case takes one in this many lengths.
const LEN_STRIDE: usize = 11;

/// Returns whether the reduction of this many values gives one result in every order.
fn is_exact(dtype: Dtype, op: ReduceOp, ranks: usize) -> bool {
    use {Dtype as D, ReduceOp as Op};
    let most = match (dtype, op) {
        (_, Op::Min | Op::Max) => usize::MAX,
        (D::F16 | D::Bf16, _) => 5,
        (D::ComplexF32, Op::Product) => 3,
        (D::F32 | D::F64 | D::ComplexF64, Op::Product) => 8,
        _ => usize::MAX,
    };
    ranks <= most
}

/// All cases for `world` ranks.
fn cases(world: usize, thresholds: &[usize]) -> Vec<Collective> {
    let mut cases = Vec::new();
    for dtype in Dtype::ALL {
        for kind in KINDS {
            let has_meaning = |op: &ReduceOp| {
                op.accepts(dtype) && is_exact(dtype, *op, world) && !(kind.is_scan() && *op == ReduceOp::Avg)
            };
            let ops = if kind.reduces() { &ReduceOp::ALL[..] } else { &[ReduceOp::Sum] };
            for op in ops.iter().copied().filter(has_meaning) {
                let (buffers, times) = kind.shape(world, 3);
                let bytes = dtype.size_bytes() * buffers.max(1) * times;
                let around =
                    |threshold: &usize| (threshold / bytes).saturating_sub(1)..=threshold / bytes + 1;
                let lens = SHORT_LENS.into_iter().chain(thresholds.iter().flat_map(around));
                for (index, len) in lens.enumerate().skip(cases.len() % LEN_STRIDE).step_by(LEN_STRIDE) {
                    // Neighbouring lengths differ, and some are 0.
                    let unequal = (0..buffers).map(|place| len.saturating_sub(place % 3)).collect();
                    let (root, seed) = ((cases.len() + index) % world, cases.len() as u64);
                    cases.push(Collective { kind, dtype, op, root, lens: unequal, rounded: false, seed });
                }
            }
        }
    }
    cases
}

/// Runs the blocking form.
fn wait<T: Value>(group: &Group, call: &Collective) -> Result<(), TestError> {
    let case = case::<T>(call, group.rank(), group.size());
    let (send, mut recv) = (case.send.clone(), case.recv.clone());
    calls::blocking(group, call, &send, &mut recv)?;
    Ok(case.check(&send, &recv)?)
}

/// Begins the nonblocking form.
fn begin<T: Value>(group: &Group, call: &Collective, handles: &mut PendingHandles) -> Result<(), TestError> {
    let case = case::<T>(call, group.rank(), group.size());
    let memory = (case.send.clone(), case.recv.clone());
    let check = Box::new(move |send: &[T], recv: &[T]| case.check(send, recv));
    calls::begin::<T, _, _>(group, call, memory, handles, check)
}

fn run(group: &Group, cases: &[Collective]) {
    let fail = |call: &Collective, error: &TestError| -> ! {
        panic!("{call:?} on rank {} of {}: {}", group.rank(), group.size(), describe(error))
    };
    let mut handles = PendingHandles::new(hash(0, group.rank(), 0));
    for call in cases {
        with_any_type!(call.dtype, T => wait::<T>(group, call)).unwrap_or_else(|error| fail(call, &error));
        if TYPES.contains(&call.dtype) {
            let begun = with_type!(call.dtype, T => begin::<T>(group, call, &mut handles));
            begun.and_then(|()| handles.wait_for_some()).unwrap_or_else(|error| fail(call, &error));
        }
    }
    handles.wait_all().unwrap_or_else(|error| fail(&cases[0], &error));
}

#[test]
fn every_collective_type_operation_and_world_size() {
    let full = std::env::var_os("CONVOKE_FULL").is_some_and(|value| value == "1");
    for &world in WORLDS[usize::from(full)] {
        let cases = cases(world, THRESHOLDS[usize::from(full)]);
        let ways = [(true, SingleCopy::Never), (true, SingleCopy::Always), (false, SingleCopy::Never)];
        for (in_memory, single_copy) in ways {
            let options = GroupOptions::default().shared_memory(in_memory).single_copy(single_copy);
            run_group(world, &cases, |_| options.clone());
        }
    }
}

/// Runs the cases on `world` ranks.
fn run_group(world: usize, cases: &[Collective], options: impl Fn(usize) -> GroupOptions) {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    std::thread::scope(|scope| {
        for rank in 0..world {
            let options = options(rank).timeout(TIMEOUT).init_timeout(TIMEOUT);
            let store = Arc::clone(&store);
            scope.spawn(move || {
                let group = Group::new(store, rank, world, options);
                run(&group.unwrap_or_else(|error| panic!("rank {rank}: {error}")), cases);
            });
        }
    });
}

/// Returns whether calls of this kind use the choice of algorithms for `collective`.
fn uses_choice(kind: CollectiveKind, collective: &str) -> bool {
    let name = format!("{kind:?}");
    let form = ["InPlace", "Into", "List", "V"].iter().find_map(|form| name.strip_suffix(form));
    form.unwrap_or(&name).to_lowercase() == collective.replace('_', "")
}

#[test]
fn every_algorithm_that_can_be_chosen() {
    let full = std::env::var_os("CONVOKE_FULL").is_some_and(|value| value == "1");
    let types = if full { &Dtype::ALL[..] } else { &[Dtype::F32, Dtype::Bf16] };
    for (collective, algorithm) in Algorithms::choices() {
        let algorithms: Algorithms = format!("{collective}:{algorithm}").parse().unwrap();
        for world in [4, 5] {
            let mut cases = cases(world, THRESHOLDS[1]);
            cases.retain(|call| uses_choice(call.kind, collective) && types.contains(&call.dtype));
            assert!(!cases.is_empty(), "{collective}");
            run_group(world, &cases, |rank| {
                GroupOptions::default().algorithms(algorithms).locality_domain((rank / 2).to_string())
            });
        }
    }
}
