//! Carries out the program of a collective in shared memory. No clock and no waiting: [`Run::turn`] does what it can.

use std::ops::Range;

use super::layout::{Counter, DEPTH, INLINE_BYTES};
use super::program::{Place, Program, Step, Sum, Whom};
use super::segment::View;
use super::{Header, Node, Waits};
use crate::call::Call;
use crate::engine::buffer::{BytesMut, Lent};
use crate::engine::row::Row;
use crate::engine::streams::RunError;
use crate::fault::moment;
use crate::kernels::{Kernel, Shares};
use crate::plan::Plan;

/// A collective in progress.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) call: Call,
    pub(crate) seq: u64,
    row: Row<'static>,
    program: Program,
    /// Its number among all calls of the host's ranks in memory, and rounds before it.
    number: u32,
    base: u64,
    header: Header,
    batch: u64,
    steps: Vec<Step>,
    at: usize,
    more: bool,
    /// Of those to meet, how many were met.
    met: usize,
    finished: bool,
    /// Some elements may have been added already: not again.
    broken: bool,
    /// Whom it waits for.
    waits: Waits,
    given: u64,
    taken: u64,
}

impl Run {
    pub(crate) fn new(
        node: &mut Node,
        call: Call,
        seq: u64,
        lent: Lent<'static>,
        kernel: Option<Kernel>,
    ) -> Self {
        let row = Row::new(lent, kernel, call.dtype.size_bytes(), &Plan::default());
        let program = node.program(&call);
        let (number, base, header) = node.count(&call, seq, program.rounds());
        Self {
            call,
            seq,
            row,
            program,
            number,
            base,
            header,
            batch: 0,
            steps: std::mem::take(&mut node.steps),
            at: 0,
            more: true,
            met: 0,
            finished: false,
            broken: false,
            waits: Waits::new(),
            given: 0,
            taken: 0,
        }
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.finished
    }

    /// Bytes taken or added up, and in all.
    pub(crate) fn received(&self) -> (u64, u64) {
        (self.taken, self.program.volume().1)
    }

    /// Bytes given, and in all.
    pub(crate) fn sent(&self) -> (u64, u64) {
        (self.given, self.program.volume().0)
    }

    /// Whom it waits for.
    pub(crate) fn awaited(&self) -> impl Iterator<Item = usize> + '_ {
        self.waits.iter().copied()
    }

    /// Does what can be done now, at most one batch; whether that was anything.
    pub(crate) fn turn(&mut self, node: &mut Node) -> Result<bool, RunError> {
        self.row.begin();
        let mut any = false;
        while !self.finished && !self.broken {
            if self.at == self.steps.len() {
                if !self.more {
                    self.row.finish();
                    self.finished = true;
                    self.steps.clear();
                    node.steps = std::mem::take(&mut self.steps);
                    return Ok(true);
                }
                self.steps.clear();
                self.at = 0;
                self.more = self.program.batch(self.batch, &mut self.steps);
                self.batch += 1;
                if any && self.batch > 2 {
                    return Ok(true);
                }
            }
            // Not borrowed: a step changes the rest.
            let step = self.steps[self.at].clone();
            if !self.act(node, &step)? {
                return Ok(any || self.row.copy_some());
            }
            self.waits.clear();
            self.at += 1;
            any = true;
        }
        Ok(any)
    }

    /// Does one step; whether it could.
    fn act(&mut self, node: &mut Node, step: &Step) -> Result<bool, RunError> {
        match step {
            Step::Claim => {
                self.waits = node.late_for(self.number);
                return Ok(self.waits.is_empty());
            }
            Step::Announce => {
                node.announce(self.number, &self.header);
                moment("sent", self.seq, self.given as usize);
            }
            Step::Meet(whom) => return self.meet(node, *whom),
            Step::Room(round) => {
                let count = (self.base + round + 1).saturating_sub(DEPTH);
                return Ok(self.waits_for(node, Whom::All, Counter::Done, count));
            }
            Step::Await(counter, round, whom) => {
                return Ok(self.waits_for(node, *whom, *counter, self.base + round + 1));
            }
            Step::Publish(counter, round) => {
                node.publish(*counter, self.base + round + 1);
                if *counter == Counter::Given {
                    moment("sent", self.seq, self.given as usize);
                }
            }
            Step::Give { row, place, at } => self.give(node, row.clone(), *place, *at),
            Step::Take { from, place, at, row } => {
                self.take(node, *from, *place, *at, row.clone());
                moment("received", self.seq, self.taken as usize);
            }
            Step::AddUp { place, at, row, sum } => {
                if let Err(what) = self.add_up(node, *place, *at, row.clone(), *sum) {
                    self.broken = true;
                    return Err(RunError::Function(what));
                }
                moment("received", self.seq, self.taken as usize);
            }
        }
        Ok(true)
    }

    /// Whether they have counted so far; notes who has not.
    fn waits_for(&mut self, node: &mut Node, whom: Whom, counter: Counter, count: u64) -> bool {
        let behind = node.behind(whom, counter, count);
        self.waits.clear();
        self.waits.extend(behind.map(|place| node.ranks[place]));
        behind.is_none()
    }

    /// Compares the calls of those that have come; whether all have.
    fn meet(&mut self, node: &mut Node, whom: Whom) -> Result<bool, RunError> {
        self.waits.clear();
        let (me, ranks) = (node.me, node.ranks.len());
        let all = match whom {
            Whom::All => 0..ranks,
            Whom::One(place) => place..place + 1,
        };
        // Those that have come first are looked at once.
        for place in all.start + self.met..all.end {
            let comes = |node: &mut Node, place: usize| match node.header(place, self.number) {
                None => Ok(false),
                Some(theirs) if theirs == self.header => Ok(true),
                Some(theirs) => Err(self.differs(node, place, theirs)),
            };
            if place == me || comes(node, place)? {
                self.met += usize::from(self.waits.is_empty());
            } else {
                self.waits.push(node.ranks[place]);
            }
        }
        Ok(self.waits.is_empty())
    }

    /// What to say of a rank that made another call, now or before.
    fn differs(&self, node: &mut Node, place: usize, theirs: Header) -> RunError {
        let peer = node.ranks[place];
        let theirs = node.difference(place, self.number).unwrap_or(theirs);
        match Call::decode(theirs.call) {
            Ok(call) => {
                let seq = self.seq & !u64::from(u32::MAX) | u64::from(theirs.seq);
                RunError::Mismatch { peer, theirs: call, seq }
            }
            Err(what) => RunError::Protocol { peer, what },
        }
    }

    fn give(&mut self, node: &Node, mut row: Range<usize>, place: Place, mut at: usize) {
        while !row.is_empty() {
            let bytes = self.row.bytes(row.clone());
            if bytes.is_empty() {
                break;
            }
            self.spot(node.me, place, at).view(node, bytes.len()).put(bytes);
            (row.start, at) = (row.start + bytes.len(), at + bytes.len());
            self.given += bytes.len() as u64;
        }
    }

    fn take(&mut self, node: &Node, from: usize, place: Place, mut at: usize, mut row: Range<usize>) {
        while !row.is_empty() {
            let spot = self.spot(from, place, at);
            let mut into = self.row.bytes_mut(row.clone());
            let bytes = into.len();
            if bytes == 0 {
                break;
            }
            spot.view(node, bytes).take(&mut into);
            (row.start, at) = (row.start + bytes, at + bytes);
            self.taken += bytes as u64;
        }
    }

    fn add_up(
        &mut self,
        node: &mut Node,
        place: Place,
        mut at: usize,
        mut row: Range<usize>,
        sum: Sum,
    ) -> Result<(), String> {
        let mut scratch = std::mem::take(&mut node.scratch);
        let mut result = Ok(());
        while !row.is_empty() && result.is_ok() {
            let spot = self.spot(0, place, at);
            let (own, Some(kernel)) = self.row.summands(row.clone()) else { break };
            let bytes = own.len();
            if bytes == 0 {
                break;
            }
            let mut summands = Summands { node, spot, own, sum };
            result = kernel.add_up(node.ranks.len(), bytes, &mut scratch, &mut summands);
            (row.start, at) = (row.start + bytes, at + bytes);
            self.taken += bytes as u64;
        }
        node.scratch = scratch;
        result
    }

    /// Where `rank` gives what lies at `at` of a place.
    fn spot(&self, rank: usize, place: Place, at: usize) -> Spot {
        let (number, inline) = (self.number, self.program.is_inline(INLINE_BYTES));
        match place {
            Place::Slot => Spot { rank, at, of: Of::Slot { number, inline } },
            Place::Round(round) => Spot { rank, at, of: Of::Round(self.base + round) },
        }
    }
}

/// A place in shared memory.
#[derive(Debug, Clone, Copy)]
struct Spot {
    rank: usize,
    at: usize,
    of: Of,
}

#[derive(Debug, Clone, Copy)]
enum Of {
    Slot { number: u32, inline: bool },
    Round(u64),
}

impl Spot {
    fn view(self, node: &Node, bytes: usize) -> View<'_> {
        match self.of {
            Of::Slot { number, inline } => node.in_slot(self.rank, number, inline, self.at, bytes),
            Of::Round(round) => node.in_round(self.rank, round, self.at, bytes),
        }
    }

    fn of(self, rank: usize, further: usize) -> Self {
        Self { rank, at: self.at + further, of: self.of }
    }
}

/// The shares of all ranks: this one's in its row, the others' where they gave them.
struct Summands<'a> {
    node: &'a Node,
    spot: Spot,
    own: BytesMut<'a>,
    sum: Sum,
}

impl Shares for Summands<'_> {
    fn load(&mut self, rank: usize, at: usize, into: &mut [u8]) {
        if rank == self.node.me {
            into.copy_from_slice(&self.own[at..at + into.len()]);
        } else {
            self.spot.of(rank, at).view(self.node, into.len()).take(into);
        }
    }

    fn store(&mut self, at: usize, sums: &[u8]) {
        if self.sum != Sum::Row {
            self.spot.of(self.node.me, at).view(self.node, sums.len()).put(sums);
        }
        if self.sum != Sum::Memory {
            self.own[at..at + sums.len()].copy_from_slice(sums);
        }
    }
}
