//! One rank makes a call that differs in one property: all ranks are told, and no rank gets data.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{CommError, Group, ReduceOp, run_on_hosts, run_ranks};
use convoke_comm::Element;
use convoke_comm::op::{self, Operation};
use convoke_testkit::Random;

/// A collective, as one rank calls it.
#[derive(Debug, Clone, PartialEq)]
struct TestCall {
    name: &'static str,
    floats: bool,
    op: ReduceOp,
    root: usize,
    /// Lengths of the buffers of a list or of the ranks' blocks; other calls use the first.
    lens: Vec<usize>,
}

/// The properties of a call that can differ, besides its name and type.
const OP: u8 = 1;
const LENS: u8 = 2;
/// Another call or root is not among them. If no rank reads the data of the differing rank, only a later call
/// that reads from that rank finds the difference. `gather_v` and `scatter_v` are left out, since they are
/// messages.
const CALLS: [(&str, u8); 18] = [
    ("all_reduce", OP),
    ("all_reduce_into", OP),
    ("broadcast", 0),
    ("reduce", OP),
    ("scan", OP),
    ("exclusive_scan", OP),
    ("all_gather", 0),
    ("reduce_scatter", OP),
    ("gather", 0),
    ("scatter", 0),
    ("all_to_all", 0),
    ("all_gather_v", LENS),
    ("reduce_scatter_v", OP | LENS),
    ("all_to_all_v", LENS),
    ("list of all_reduce", OP | LENS),
    ("list of broadcast", LENS),
    ("list of reduce", OP | LENS),
    ("list of all_gather", LENS),
];

fn random_call(random: &mut Random, world: usize) -> TestCall {
    let longest = [9, 5_000, 200_000][random.below(3)];
    let first = 1 + random.below(longest);
    TestCall {
        name: CALLS[random.below(CALLS.len())].0,
        floats: random.below(2) == 0,
        op: [ReduceOp::Sum, ReduceOp::Max][random.below(2)],
        root: random.below(world),
        // All lengths differ, so that swapping two changes both.
        lens: (0..world.max(2)).map(|place| first + 3 * place).collect(),
    }
}

/// A call that differs from `made` in one thing that all ranks must agree on.
fn differing_call(made: &TestCall, random: &mut Random) -> TestCall {
    let (_, differs) = CALLS.into_iter().find(|(name, _)| *name == made.name).unwrap();
    loop {
        let mut other = made.clone();
        match random.below(4) {
            0 => other.floats = !made.floats,
            1 if differs & OP > 0 => other.op = ReduceOp::Min,
            // The total stays equal.
            2 if differs & LENS > 0 => other.lens.rotate_left(1),
            3 => other.lens.iter_mut().for_each(|len| *len += 1),
            _ => {}
        }
        if other != *made {
            return other;
        }
    }
}

/// Carries out the operations as a list.
fn run<O: Operation>(group: &Group, operations: impl Iterator<Item = O>) -> Result<(), CommError> {
    group.run(operations.collect::<Vec<_>>()).map(drop)
}

fn make_call<T: Element + Default + From<u8>>(group: &Group, made: &TestCall) -> Result<(), CommError> {
    let TestCall { name, op, root, ref lens, .. } = *made;
    let (rank, size, len) = (group.rank(), group.size(), lens[0]);
    let buf = |len: usize| vec![T::from(1); len];
    let list = || lens.iter().map(|&len| buf(len)).collect::<Vec<_>>();
    let all: usize = lens.iter().sum();
    match name {
        "all_reduce" => group.all_reduce(&mut buf(len), op),
        "all_reduce_into" => group.all_reduce_into(&buf(len), &mut buf(len), op),
        "broadcast" => group.broadcast(&mut buf(len), root),
        "reduce" => group.reduce(&mut buf(len), op, root),
        "scan" => group.scan(&mut buf(len), op),
        "exclusive_scan" => group.exclusive_scan(&mut buf(len), op),
        "all_gather" => group.all_gather(&buf(len), &mut buf(len * size)),
        "reduce_scatter" => group.reduce_scatter(&buf(len * size), &mut buf(len), op),
        "gather" => group.gather(&buf(len), &mut buf(len * size), root),
        "scatter" => group.scatter(&buf(len * size), &mut buf(len), root),
        "all_to_all" => group.all_to_all(&buf(len * size), &mut buf(len * size)),
        "all_gather_v" => group.all_gather_v(&buf(lens[rank]), &mut buf(all), lens),
        "reduce_scatter_v" => group.reduce_scatter_v(&buf(all), &mut buf(lens[rank]), lens, op),
        "all_to_all_v" => {
            let between = |other: usize| lens[(rank + other) % size];
            let lens: Vec<usize> = (0..size).map(between).collect();
            group.all_to_all_v((&buf(lens.iter().sum()), &lens), (&mut buf(lens.iter().sum()), &lens))
        }
        "list of all_reduce" => run(group, list().into_iter().map(|buf| op::all_reduce(buf, op))),
        "list of broadcast" => run(group, list().into_iter().map(|buf| op::broadcast(buf, root))),
        "list of reduce" => run(group, list().into_iter().map(|buf| op::reduce(buf, op, root))),
        "list of all_gather" => run(
            group,
            list().into_iter().map(|send| {
                let recv = buf(send.len() * size);
                op::all_gather(send, recv)
            }),
        ),
        name => panic!("no such call: {name}"),
    }
}

#[test]
fn any_differing_setting_of_one_rank_is_reported_to_all() {
    let mut random = Random::new("any_differing_setting_of_one_rank_is_reported_to_all");
    for round in 0..if common::is_full_test_run() { 2000 } else { 150 } {
        let world = 2 + random.below(3);
        let (even, who) = (random_call(&mut random, world), random.below(world));
        let odd = differing_call(&even, &mut random);
        let story = format!("round {round}, rank {who} of {world}: {odd:?}, the others: {even:?}");
        let body = |group: Group| {
            // Another rank may pass the barrier and make its call before this one does.
            let together = group.barrier();
            let made = if group.rank() == who { &odd } else { &even };
            let make =
                || if made.floats { make_call::<f32>(&group, made) } else { make_call::<i32>(&group, made) };
            let result = together.and_then(|()| make());
            // A rank that has returned already, such as a root, hears of it with its next call.
            result.and_then(|()| group.barrier()).and_then(|()| group.barrier()).err()
        };
        // Shared memory, or connections.
        let errors = match random.below(2) {
            0 => run_ranks(world, body),
            _ => run_on_hosts(&(0..world).collect::<Vec<_>>(), "", body),
        };
        for error in errors {
            let told = match &error {
                Some(CommError::Mismatch { rank, by, .. }) => *rank == who || *by == who,
                // Blocks whose lengths only one of two ranks knows.
                Some(CommError::Protocol { what, .. }) => {
                    odd.name == even.name && what.contains(" bytes for ")
                }
                _ => false,
            };
            assert!(told, "{story}: {error:?}");
        }
    }
}
