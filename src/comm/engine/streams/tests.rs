//! Tests of plans over links with injected faults; all ranks run in one thread.

use std::collections::HashMap;

use convoke_env::Generation;
use half::{bf16, f16};

use super::*;
use crate::api::reduction::Reduction;
use crate::buffer::SendRecvBuffers;
use crate::collectives::call::CallKind;
use crate::collectives::dtype::{Dtype, Element, ReduceOp};
use crate::collectives::plan::algorithms::{AllReduce, Broadcast};
use crate::collectives::plan::{self, Algorithm, Input, Rounding, Stream, Topology};
use crate::transport::frame::{Frame, Kind};
use crate::transport::links::fake::{self, FaultScript};
use convoke_testkit::Random;

impl PeerConnections for HashMap<usize, Conn> {
    fn connection(&mut self, peer: usize) -> Option<&mut Conn> {
        self.get_mut(&peer)
    }
}

fn mesh(world: usize, script: &FaultScript) -> Vec<HashMap<usize, Conn>> {
    let mut connections: Vec<HashMap<usize, Conn>> = (0..world).map(|_| HashMap::new()).collect();
    for a in 0..world {
        for b in 0..a {
            let seed = script.seed.wrapping_add((a * world + b) as u64);
            let (x, y) = fake::pair(FaultScript { seed, ..script.clone() });
            connections[a].insert(b, Conn::new(Box::new(x)));
            connections[b].insert(a, Conn::new(Box::new(y)));
        }
    }
    connections
}

fn credentials() -> Credentials {
    Credentials::new(None, Generation::from_bytes([4; 16]), 0)
}

fn all_reduce_call(count: usize) -> Call {
    let (kind, dtype) = (CallKind::AllReduce, Dtype::F32);
    Call::new(kind, dtype, Some(ReduceOp::Sum), 0, count as u64)
}

/// The rank that makes a call, the number of ranks, and whether the rank uses a [`ShortExchange`] if it can.
type Caller = (usize, usize, bool);

fn run(
    call: Call,
    seq: u64,
    plan: Plan,
    memory: &mut [f32],
    (rank, world, short): Caller,
) -> Box<dyn Execution> {
    let kernel = call.op.and_then(|op| Kernel::of(call.dtype, op, world));
    run_with(kernel, call, seq, plan, memory, (rank, short))
}

#[allow(unsafe_code)]
fn run_with<T: Element>(
    kernel: Option<Kernel>,
    call: Call,
    seq: u64,
    plan: Plan,
    memory: &mut [T],
    (rank, short): (usize, bool),
) -> Box<dyn Execution> {
    let shape = Shape::of(&plan, call, &SendRecvBuffers::in_place((&mut *memory).into()), kernel.as_ref());
    // SAFETY: the tests keep the memory until the run is dropped and read it only after that.
    let buffer = unsafe { BorrowedBuffer::default().with_mut(0, memory).erase_lifetime() };
    if let Some(shape) = shape.filter(|_| short) {
        let exchange = ShortExchange::new(&credentials(), call, seq, shape, rank);
        return Box::new(QueuedExchange::new(exchange, buffer, kernel, false));
    }
    Box::new(Streams::new(&credentials(), call, seq, Arc::new(plan), buffer, kernel, rank))
}

fn poll(run: &mut dyn Execution, connections: &mut HashMap<usize, Conn>) -> Result<bool, ExecutionError> {
    run.poll(Paths { connections, memory: None })
}

fn flip(random: &mut Random) -> bool {
    random.below(2) == 0
}

fn all_reduce(algorithm: Algorithm, rank: usize, topology: &Topology, count: usize) -> Plan {
    let input = Input { rank, topology, rounding: Rounding::Stepwise, element_bytes: 4 };
    plan::all_reduce(algorithm, &input, count)
}

/// Makes progress in the collective of each rank, in random order, until all have finished or one fails.
fn drive(
    runs: &mut [Box<dyn Execution>],
    connections: &mut [HashMap<usize, Conn>],
    random: &mut Random,
) -> Result<(), ExecutionError> {
    let mut idle = 0;
    while runs.iter().any(|run| !run.is_finished()) {
        let rank = random.below(runs.len());
        let moved = poll(&mut *runs[rank], &mut connections[rank])?;
        idle = if moved { 0 } else { idle + 1 };
        assert!(idle < 20_000, "nothing moves any more");
    }
    Ok(())
}

fn scripts(random: &mut Random) -> [FaultScript; 3] {
    let seed = random.next();
    [
        FaultScript { seed, ..FaultScript::default() },
        // A link must hold at least one element.
        FaultScript { step: 1, capacity: 8, seed, ..FaultScript::default() },
        FaultScript { step: 700, capacity: 900, refuse: 3, interrupt: 5, seed, ..FaultScript::default() },
    ]
}

#[test]
fn sums_are_correct_and_equal_on_any_link() {
    let mut random = Random::new("sums_are_correct_and_equal_on_any_link");
    for world in 1..=6 {
        let hosts = Topology::new((0..world).map(|rank| rank / 2));
        for &algorithm in AllReduce::ALL {
            for script in scripts(&mut random) {
                let count = random.below(400);
                let mut memory: Vec<Vec<f32>> = (0..world)
                    .map(|rank| (0..count).map(|i| (i * 7 + rank) as f32 * 0.37).collect())
                    .collect();
                let want: Vec<f64> =
                    (0..count).map(|i| (0..world).map(|rank| f64::from(memory[rank][i])).sum()).collect();
                let mut connections = mesh(world, &script);
                // Two collectives run in a row, so that one may read ahead bytes of the next.
                for seq in 0..2 {
                    let start = memory.clone();
                    let mut runs: Vec<_> = (memory.iter_mut().enumerate())
                        .map(|(rank, memory)| {
                            let plan = all_reduce(algorithm, rank, &hosts, count);
                            run(all_reduce_call(count), seq, plan, memory, (rank, world, flip(&mut random)))
                        })
                        .collect();
                    drive(&mut runs, &mut connections, &mut random).unwrap();
                    drop(runs);
                    assert!(memory.iter().all(|values| *values == memory[0]), "ranks differ");
                    if seq == 0 {
                        for (got, want) in memory[0].iter().zip(&want) {
                            assert!((f64::from(*got) - want).abs() <= want * 1e-5, "{got} {want} {start:?}");
                        }
                    }
                }
            }
        }
    }
}

/// All-reduces `start` by `reduction` with `algorithm`. Returns the ranks' results.
fn reduce_with<T: Element>(
    algorithm: Algorithm,
    reduction: impl Fn(usize) -> Reduction<T>,
    start: &[Vec<T>],
    script: &FaultScript,
    random: &mut Random,
) -> Vec<Vec<T>> {
    let (world, count) = (start.len(), start[0].len());
    let hosts = Topology::new((0..world).map(|rank| rank / 2));
    let mut memory = start.to_vec();
    let mut connections = mesh(world, script);
    let mut runs: Vec<_> = (memory.iter_mut().enumerate())
        .map(|(rank, memory)| {
            let reduction = reduction(rank);
            let op = Some(reduction.op());
            let call = Call { dtype: T::DTYPE, op, ..all_reduce_call(count) };
            let (rounding, element_bytes) = (Rounding::of(&call), T::DTYPE.size_bytes());
            let input = Input { rank, topology: &hosts, rounding, element_bytes };
            let plan = plan::all_reduce(algorithm, &input, count);
            let kernel = reduction.untyped.kernel(T::DTYPE, world).ok();
            run_with(kernel, call, 0, plan, memory, (rank, flip(random)))
        })
        .collect();
    drive(&mut runs, &mut connections, random).unwrap();
    drop(runs);
    memory
}

#[test]
fn half_sums_follow_rank_order_and_round_once() {
    let mut random = Random::new("half_sums_follow_rank_order_and_round_once");
    for world in 2..=6 {
        for algorithm in [Algorithm::Flat, Algorithm::Direct] {
            for script in scripts(&mut random) {
                let count = random.below(400);
                let start: Vec<Vec<bf16>> = (0..world)
                    .map(|_| (0..count).map(|_| bf16::from_f32(random.below(4000) as f32 / 7.0)).collect())
                    .collect();
                let column = |i: usize| start.iter().map(move |values| f32::from(values[i]));
                let factor = |rank: usize| 1.0 / (rank + 3) as f32;
                let sum = |i: usize| column(i).reduce(|a, b| a + b).unwrap();
                let scaled =
                    |i: usize| column(i).enumerate().map(|(rank, x)| x * factor(rank)).reduce(|a, b| a + b);
                let check = |what: &str, got: Vec<Vec<bf16>>, want: &dyn Fn(usize) -> f32| {
                    let want: Vec<bf16> = (0..count).map(|i| bf16::from_f32(want(i))).collect();
                    assert!(got.iter().all(|got| *got == want), "{what} by {algorithm:?} of {world}");
                };
                let mut reduce = |reduction: &dyn Fn(usize) -> Reduction<bf16>| {
                    reduce_with(algorithm, reduction, &start, &script, &mut random)
                };
                check("sum", reduce(&|_| ReduceOp::Sum.into()), &sum);
                check("avg", reduce(&|_| ReduceOp::Avg.into()), &|i| sum(i) / world as f32);
                check("premul", reduce(&|rank| Reduction::premul_sum(factor(rank))), &|i| scaled(i).unwrap());
            }
        }
    }
}

#[test]
fn half_partial_sums_are_sent_unrounded() {
    let mut random = Random::new("half_partial_sums_are_sent_unrounded");
    for world in 2..=6 {
        for &algorithm in AllReduce::ALL {
            for script in scripts(&mut random) {
                // The sums are exact in f32 for every order of adding, but not in f16.
                let count = random.below(400);
                let start: Vec<Vec<f16>> = (0..world)
                    .map(|_| (0..count).map(|_| f16::from_f32(random.below(4096) as f32 / 64.0)).collect())
                    .collect();
                let want: Vec<f16> = (0..count)
                    .map(|i| f16::from_f32(start.iter().map(|values| f32::from(values[i])).sum()))
                    .collect();
                let got = reduce_with(algorithm, |_| ReduceOp::Sum.into(), &start, &script, &mut random);
                assert!(got.iter().all(|got| *got == want), "{algorithm:?} of {world}");
            }
        }
    }
}

#[test]
fn user_functions_receive_lower_rank_operands_first() {
    let mut random = Random::new("user_functions_receive_lower_rank_operands_first");
    for &algorithm in AllReduce::ALL {
        for world in 2..=6 {
            let count = 1 + random.below(300);
            let start: Vec<Vec<i32>> =
                (0..world).map(|_| (0..count).map(|_| random.next() as i32).collect()).collect();
            // Neither commutative nor associative: equal results need equal operands in equal order.
            let mixed = || {
                Reduction::new(|into: &mut [i32], from: &[i32]| {
                    for (a, b) in into.iter_mut().zip(from) {
                        *a = a.wrapping_mul(31) ^ b;
                    }
                })
            };
            let got = reduce_with(algorithm, |_| mixed(), &start, &FaultScript::default(), &mut random);
            assert!(got.iter().all(|values| *values == got[0]), "{algorithm:?} of {world}");
        }
    }
}

#[test]
fn broadcasts_are_delivered_on_any_link() {
    let mut random = Random::new("broadcasts_are_delivered_on_any_link");
    for world in 1..=6 {
        let hosts = Topology::new((0..world).map(|rank| rank % 2));
        for &algorithm in Broadcast::ALL {
            for script in scripts(&mut random) {
                let (count, root) = (random.below(5000), random.below(world));
                let mut memory: Vec<Vec<f32>> =
                    (0..world).map(|rank| vec![if rank == root { 3.0 } else { 2.0 }; count]).collect();
                let call = Call { kind: CallKind::Broadcast, op: None, ..all_reduce_call(count) };
                let mut connections = mesh(world, &script);
                let mut runs: Vec<_> = (memory.iter_mut().enumerate())
                    .map(|(rank, memory)| {
                        let (topology, rounding) = (&hosts, Rounding::Stepwise);
                        let input = Input { rank, topology, rounding, element_bytes: 4 };
                        let plan = plan::broadcast(algorithm, &input, count, root);
                        run(call, 9, plan, memory, (rank, world, flip(&mut random)))
                    })
                    .collect();
                drive(&mut runs, &mut connections, &mut random).unwrap();
                drop(runs);
                assert!(memory.iter().flatten().all(|&value| value == 3.0));
            }
        }
    }
}

#[test]
fn connection_closed_anywhere_is_reported_without_waiting() {
    let mut random = Random::new("a_connection_that_ends_anywhere_is_reported");
    for _ in 0..50 {
        let end_after = random.below(HEADER_BYTES + 4000);
        let script = FaultScript { end_after, capacity: 700, seed: random.next(), ..FaultScript::default() };
        let mut connections = mesh(2, &script);
        let (mut a, mut b) = (vec![1.0; 1000], vec![2.0; 1000]);
        let pair = Topology::one_host(2);
        let algorithm = if flip(&mut random) { Algorithm::Ring } else { Algorithm::Doubling };
        let mut run = |rank, memory| {
            let plan = all_reduce(algorithm, rank, &pair, 1000);
            run(all_reduce_call(1000), 0, plan, memory, (rank, 2, flip(&mut random)))
        };
        let mut runs = [run(0, &mut a[..]), run(1, &mut b[..])];
        let error = drive(&mut runs, &mut connections, &mut random).unwrap_err();
        assert!(matches!(error, ExecutionError::Broken { .. }), "{error:?}");
    }
}

#[test]
fn differing_call_is_a_mismatch_before_data_changes() {
    let mut random = Random::new("another_call_is_a_mismatch");
    let mine = all_reduce_call(100);
    let others = [
        (Call { dtype: Dtype::I32, ..mine }, 0),
        (Call { op: Some(ReduceOp::Max), ..mine }, 0),
        (mine.with_count(101), 0),
        (Call { kind: CallKind::Broadcast, op: None, ..mine }, 0),
        (mine, 1),
    ];
    for ((theirs, seq), short) in others.into_iter().flat_map(|other| [(other, false), (other, true)]) {
        let mut connections = mesh(2, &FaultScript::default());
        let (mut a, mut b) = (vec![1.0; 100], vec![2.0; 100]);
        let plan = |rank| all_reduce(Algorithm::Doubling, rank, &Topology::one_host(2), 100);
        let mut runs = [
            run(mine, 0, plan(0), &mut a, (0, 2, short)),
            run(theirs, seq, plan(1), &mut b, (1, 2, flip(&mut random))),
        ];
        let error = drive(&mut runs, &mut connections, &mut random).unwrap_err();
        assert!(matches!(error, ExecutionError::Mismatch { .. }), "{error:?}");
        drop(runs);
        assert!(a.iter().all(|&x| x == 1.0) && b.iter().all(|&x| x == 2.0));
    }
}

#[test]
fn garbage_instead_of_a_header_is_a_protocol_error() {
    let mut random = Random::new("garbage_instead_of_a_header");
    let good = Frame {
        kind: Kind::Data,
        credit: 0,
        generation: credentials().generation,
        group: 0,
        seq: 0,
        call: all_reduce_call(100).encode(),
        len: 400,
        address: 0,
    };
    let cases: [(&str, Frame); 5] = [
        ("another kind", Frame { kind: Kind::Eager, ..good }),
        ("another generation", Frame { generation: Generation::from_bytes([5; 16]), ..good }),
        ("another group", Frame { group: 7, ..good }),
        ("an unknown call", Frame { call: [0xEE; 16], ..good }),
        ("a length that is not that of the call", Frame { len: 404, ..good }),
    ];
    let mut bad: Vec<(&str, Vec<u8>)> = cases.map(|(name, frame)| (name, frame.encode().to_vec())).into();
    bad.push(("no frame at all", (0..HEADER_BYTES).map(|_| random.next() as u8).collect()));
    for ((name, bytes), short) in bad.into_iter().flat_map(|bad| [(bad.clone(), false), (bad, true)]) {
        let (mut peer, ours) = fake::pair(FaultScript::default());
        let mut connections = HashMap::from([(1, Conn::new(Box::new(ours)))]);
        crate::transport::links::Link::try_send(&mut peer, &[IoSlice::new(&bytes)]).unwrap();
        let mut memory = vec![1.0; 100];
        let plan = all_reduce(Algorithm::Doubling, 0, &Topology::one_host(2), 100);
        let mut run = run(all_reduce_call(100), 0, plan, &mut memory, (0, 2, short));
        let mut result = Ok(true);
        for _ in 0..10 {
            result = poll(&mut *run, &mut connections);
            if result.is_err() {
                break;
            }
        }
        assert!(matches!(result, Err(ExecutionError::Protocol { peer: 1, .. })), "{name}: {result:?}");
    }
}

#[test]
fn short_call_with_one_peer_needs_no_streams() {
    let is_short = |call: Call, plan: Plan| {
        let mut memory = vec![0_f32; plan.streams.iter().map(Stream::len).max().unwrap()];
        let buffers = SendRecvBuffers::in_place((&mut memory[..]).into());
        let kernel = call.op.and_then(|op| Kernel::of(call.dtype, op, 2));
        Shape::of(&plan, call, &buffers, kernel.as_ref()).is_some()
    };
    let sum = |ranks, count| {
        let plan = all_reduce(Algorithm::Doubling, 0, &Topology::one_host(ranks), count);
        is_short(all_reduce_call(count), plan)
    };
    assert!(sum(2, 0) && sum(2, 1) && sum(2, SHORT_BYTES / 4));
    assert!(!sum(2, SHORT_BYTES / 4 + 1) && !sum(4, 1));
    let broadcast = |rank| {
        let call = Call { kind: CallKind::Broadcast, op: None, ..all_reduce_call(9) };
        let topology = Topology::one_host(4);
        let input = Input { rank, topology: &topology, rounding: Rounding::Stepwise, element_bytes: 4 };
        is_short(call, plan::broadcast(Algorithm::Binomial, &input, 9, 0))
    };
    assert!(broadcast(3) && !broadcast(0), "a leaf has one peer, the root has two");
    let half = Call { dtype: Dtype::F16, ..all_reduce_call(9) };
    assert!(!is_short(half, all_reduce(Algorithm::Doubling, 0, &Topology::one_host(2), 9)), "wider sums");
}
