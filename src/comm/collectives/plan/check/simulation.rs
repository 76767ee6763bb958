//! A simulation that runs all ranks' plans together, one element at a time.

use std::collections::VecDeque;

use super::{EMPTY, Value, mix};
use crate::collectives::kernels::OrderedReduceStep;
use crate::collectives::plan::{Apply, Direction, Plan};

/// The ranks with their memory, and the elements on the way between them.
pub(super) struct Simulation<'a> {
    plans: &'a [Plan],
    memory: Vec<Vec<Value>>,
    /// Each rank's window of sums of an ordered reduction.
    sums: Vec<Vec<Value>>,
    /// The number of elements that each stream of each rank has moved.
    progress: Vec<Vec<usize>>,
    wires: Vec<Wire>,
    /// Most elements on one wire.
    capacity: usize,
    seed: u64,
}

/// One direction of one pair of ranks.
struct Wire {
    from: usize,
    to: usize,
    /// Remaining moves at each end: (stream, element, what to do), in the order of the plan.
    sends: VecDeque<(usize, usize)>,
    recvs: VecDeque<(usize, usize, Apply)>,
    queue: VecDeque<Value>,
}

impl<'a> Simulation<'a> {
    pub(super) fn new(plans: &'a [Plan], memory: Vec<Vec<Value>>) -> Self {
        let progress = plans.iter().map(|plan| vec![0; plan.streams.len()]).collect();
        let sums = plans.iter().map(|plan| vec![EMPTY; plan.window]).collect();
        let seed = mix(plans.len() as u64 + 7);
        let mut simulation = Self { plans, memory, sums, progress, wires: wires(plans), capacity: 0, seed };
        simulation.capacity = 1 + simulation.random(4);
        simulation
    }

    /// Runs all plans to their end. Returns every rank's memory.
    pub(super) fn run(mut self) -> Vec<Vec<Value>> {
        while self.step(None) {}
        assert!(self.wires.is_empty(), "the ranks wait for each other in a circle");
        self.memory
    }

    /// Lets all ranks but `late` go on as far as they can. Returns the ranks that ended.
    pub(super) fn ended_without(mut self, late: usize) -> Vec<usize> {
        while self.step(Some(late)) {}
        let busy = |rank: usize| {
            let left = |wire: &Wire| {
                wire.from == rank && !wire.sends.is_empty() || wire.to == rank && !wire.recvs.is_empty()
            };
            rank == late || self.wires.iter().any(left)
        };
        (0..self.plans.len()).filter(|&rank| !busy(rank)).collect()
    }

    /// Moves one element anywhere but at rank `late`. Returns whether there was one.
    fn step(&mut self, late: Option<usize>) -> bool {
        let start = self.random(self.wires.len());
        for offset in 0..self.wires.len() {
            let index = (start + offset) % self.wires.len();
            let wire = &self.wires[index];
            let (front, back) = (wire.sends.front(), wire.recvs.front());
            let may_send = late != Some(wire.from)
                && wire.queue.len() < self.capacity
                && front.is_some_and(|&(stream, _)| self.is_ready(wire.from, stream));
            let may_recv = late != Some(wire.to)
                && !wire.queue.is_empty()
                && back.is_some_and(|&(stream, ..)| self.is_ready(wire.to, stream));
            if may_send && (!may_recv || self.random(2) == 0) {
                self.send(index);
            } else if may_recv {
                self.recv(index);
            } else {
                continue;
            }
            let wire = &self.wires[index];
            if wire.sends.is_empty() && wire.recvs.is_empty() {
                assert!(wire.queue.is_empty());
                self.wires.swap_remove(index);
            }
            return true;
        }
        false
    }

    fn send(&mut self, index: usize) {
        let wire = &mut self.wires[index];
        let (stream, element) = wire.sends.pop_front().unwrap();
        wire.queue.push_back(self.memory[wire.from][element]);
        self.progress[wire.from][stream] += 1;
    }

    fn recv(&mut self, index: usize) {
        let wire = &mut self.wires[index];
        let (stream, element, apply) = wire.recvs.pop_front().unwrap();
        let value = wire.queue.pop_front().unwrap();
        let into = &mut self.memory[wire.to][element];
        match apply {
            Apply::Copy => *into = value,
            Apply::Reduce => *into = into.plus(value, false),
            Apply::ReduceLast => *into = into.plus(value, true),
            Apply::ReduceOrdered(OrderedReduceStep { first, own, last }) => {
                let slot = self.progress[wire.to][stream] % self.plans[wire.to].window;
                let sum = &mut self.sums[wire.to][slot];
                // A share that comes too early finds the sum of another element and is added to that.
                *sum = if first { value } else { sum.plus(value, last && !own) };
                *sum = if own { sum.plus(*into, last) } else { *sum };
                *into = if last { *sum } else { *into };
            }
        }
        self.progress[wire.to][stream] += 1;
    }

    fn is_ready(&self, rank: usize, stream: usize) -> bool {
        let moved = |stream: usize| self.progress[rank][stream].cast_signed();
        let dependency = self.plans[rank].streams[stream].dependency;
        dependency.is_none_or(|dependency| moved(stream) < dependency.lead + moved(dependency.stream))
    }

    fn random(&mut self, below: usize) -> usize {
        self.seed = mix(self.seed.wrapping_add(0x9E37_79B9_7F4A_7C15));
        (self.seed % below.max(1) as u64) as usize
    }
}

fn wires(plans: &[Plan]) -> Vec<Wire> {
    let mut wires = Vec::new();
    for from in 0..plans.len() {
        for to in 0..plans.len() {
            let of = |rank: usize, peer: usize, direction: Direction| {
                let streams = plans[rank].streams.iter().enumerate();
                streams.filter(move |(_, stream)| stream.peer == peer && stream.direction == direction)
            };
            let sends: VecDeque<_> = of(from, to, Direction::Send)
                .flat_map(|(index, stream)| {
                    stream.parts.iter().flat_map(move |part| {
                        assert_eq!(part.apply, Apply::Copy);
                        part.range.clone().map(move |element| (index, element))
                    })
                })
                .collect();
            let recvs: VecDeque<_> = of(to, from, Direction::Recv)
                .flat_map(|(index, stream)| {
                    stream.parts.iter().flat_map(move |part| {
                        let apply = part.apply;
                        part.range.clone().map(move |element| (index, element, apply))
                    })
                })
                .collect();
            let ends = (of(from, to, Direction::Send).count(), of(to, from, Direction::Recv).count());
            assert_eq!(ends.0 > 0, ends.1 > 0, "{from} to {to}: only one end knows of it");
            assert_eq!(sends.len(), recvs.len(), "{from} to {to}: the ends disagree on the length");
            if !sends.is_empty() {
                wires.push(Wire { from, to, sends, recvs, queue: VecDeque::new() });
            }
        }
    }
    wires
}
