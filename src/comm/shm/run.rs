//! Executes the program of a collective in shared memory. It reads no clock and never blocks: [`Run::turn`]
//! does all steps that are possible now.

use super::allocations::{Direct, Offer, Told};
use super::layout::{Counter, DEPTH, INLINE_BYTES};
use super::moves::{self, Of, Spot};
use super::program::{Place, Program, Step, Whom};
use super::small::Small;
use super::{Node, Numbered, Waits};
use crate::call::Call;
use crate::engine::buffer::Lent;
use crate::engine::row::Row;
use crate::engine::streams::RunError;
use crate::fault::moment;
use crate::kernels::Kernel;
use crate::plan::Plan;

/// A collective in progress.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) call: Call,
    pub(crate) seq: u64,
    row: Row<'static>,
    program: Program,
    numbered: Numbered,
    batch: u64,
    steps: Vec<Step>,
    at: usize,
    more: bool,
    /// The number of ranks to meet that were met so far.
    met: usize,
    finished: bool,
    /// If set, some elements may have been added already and must not be added again.
    broken: bool,
    /// The location of this rank's elements while they are lent; then the locations of all ranks' elements.
    offer: Option<Offer>,
    direct: Option<Direct>,
    /// The ranks that the run waits for.
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
        let program = node.program(&call);
        let numbered = node.count(&call, seq, program.rounds(), program.round_bytes());
        let mut run = Self::with(node, (call, seq), (lent, kernel), program, numbered);
        let offered = run.row.whole().filter(|_| run.program.may_be_direct());
        run.offer = offered.and_then(|(address, bytes)| node.allocations.offer(address, bytes));
        run
    }

    /// Continues a call that was begun as a small one. `broken` if its results cannot be taken.
    pub(crate) fn of(
        node: &mut Node,
        call: Call,
        small: &Small,
        lent: Lent<'static>,
        kernel: Option<Kernel>,
        broken: bool,
    ) -> Self {
        let mut run =
            Self::with(node, (call, small.seq), (lent, kernel), small.program.clone(), small.numbered);
        run.more = run.program.batch(0, &mut run.steps);
        run.batch = 1;
        let announced = run.steps.iter().position(|step| *step == Step::Announce);
        run.at = announced.map_or(0, |index| index + 1);
        (run.given, run.broken) = (small.given as u64, broken);
        run
    }

    fn with(
        node: &mut Node,
        (call, seq): (Call, u64),
        (lent, kernel): (Lent<'static>, Option<Kernel>),
        program: Program,
        numbered: Numbered,
    ) -> Self {
        Self {
            row: Row::new(lent, kernel, call.dtype.size_bytes(), &Plan::default()),
            call,
            seq,
            program,
            numbered,
            batch: 0,
            steps: std::mem::take(&mut node.steps),
            at: 0,
            more: true,
            met: 0,
            finished: false,
            broken: false,
            offer: None,
            direct: None,
            waits: Waits::new(),
            given: 0,
            taken: 0,
        }
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.finished
    }

    /// Bytes fetched or added up so far, and in total.
    pub(crate) fn received(&self) -> (u64, u64) {
        (self.taken, self.program.volume().1)
    }

    /// Bytes published so far, and in total.
    pub(crate) fn sent(&self) -> (u64, u64) {
        (self.given, self.program.volume().0)
    }

    /// The ranks that the run waits for.
    pub(crate) fn awaited(&self) -> impl Iterator<Item = usize> + '_ {
        self.waits.iter().copied()
    }

    /// Makes all progress that is possible now, at most one batch. Returns whether there was any.
    pub(crate) fn turn(&mut self, node: &mut Node) -> Result<bool, RunError> {
        self.row.begin();
        let mut any = false;
        while !self.finished && !self.broken {
            if self.at == self.steps.len() {
                if !self.more {
                    if let Some(direct) = &mut self.direct {
                        direct.take_back();
                    }
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
            // Cloned, since a step changes the rest of `self`.
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

    /// Does one step. Returns whether it could.
    fn act(&mut self, node: &mut Node, step: &Step) -> Result<bool, RunError> {
        match step {
            Step::Claim => {
                self.waits = node.late_for(self.numbered.number);
                return Ok(self.waits.is_empty());
            }
            Step::Announce => {
                let told = self.offer.as_ref().map_or(Told::default(), Offer::told);
                node.announce(
                    self.numbered.number,
                    &self.numbered.header,
                    self.program.may_be_direct().then_some(told),
                );
                node.ring();
                moment("sent", self.seq, self.given as usize);
            }
            Step::Meet(whom) => return self.meet(node, *whom),
            Step::Decide => self.decide(node)?,
            Step::Room(round) => {
                let count = (self.numbered.rounds + round + 1).saturating_sub(DEPTH);
                return Ok(self.waits_for(node, Whom::All, Counter::Done, count));
            }
            Step::Await(counter, round, whom) => {
                return Ok(self.waits_for(node, *whom, *counter, self.numbered.rounds + round + 1));
            }
            Step::Publish(counter, round) => {
                node.publish(*counter, self.numbered.rounds + round + 1);
                if *counter == Counter::Given {
                    moment("sent", self.seq, self.given as usize);
                }
            }
            Step::Give { row, place, at } => {
                self.given +=
                    moves::give(node, &self.row, row.clone(), self.spot(node.me, *place, *at)) as u64;
            }
            Step::Take { from, place, at, row } => {
                let spot = self.spot(*from, *place, *at);
                self.taken += moves::take(node, &mut self.row, row.clone(), spot) as u64;
                moment("received", self.seq, self.taken as usize);
            }
            Step::AddUpDirect { row } => {
                let Some(direct) = &self.direct else { return Ok(true) };
                let added = moves::add_up_direct(node, &mut self.row, row.clone(), direct);
                self.given += added.as_ref().map_or(0, |&bytes| bytes as u64);
                moment("sent", self.seq, self.given as usize);
                self.added(added)?;
            }
            Step::AddUp { place, at, row, tells } => {
                let spot = self.spot(node.me, *place, *at);
                let added = moves::add_up(node, &mut self.row, row.clone(), spot, *tells);
                self.added(added)?;
            }
        }
        Ok(true)
    }

    fn added(&mut self, added: Result<usize, String>) -> Result<(), RunError> {
        match added {
            Ok(bytes) => self.taken += bytes as u64,
            Err(what) => {
                self.broken = true;
                return Err(RunError::Function(what));
            }
        }
        moment("received", self.seq, self.taken as usize);
        Ok(())
    }

    /// Checks whether all ranks have published the location of their elements. All ranks decide alike.
    fn decide(&mut self, node: &Node) -> Result<(), RunError> {
        let Some(offer) = self.offer.take() else { return Ok(()) };
        let told: Vec<_> =
            (0..node.ranks.len()).map(|place| node.told(place, self.numbered.number)).collect();
        self.direct = offer.with(&told).map_err(|place| RunError::Protocol {
            peer: node.ranks[place],
            what: "it offers memory that it does not have".to_owned(),
        })?;
        if self.direct.is_some() {
            self.program.make_direct();
        }
        Ok(())
    }

    /// Returns whether the counters of `whom` have reached `count`; notes a rank whose counter has not.
    fn waits_for(&mut self, node: &mut Node, whom: Whom, counter: Counter, count: u64) -> bool {
        let behind = node.behind(whom, counter, count);
        self.waits.clear();
        self.waits.extend(behind.map(|place| node.ranks[place]));
        behind.is_none()
    }

    /// Compares the calls of the ranks that have made theirs. Returns whether all have.
    fn meet(&mut self, node: &mut Node, whom: Whom) -> Result<bool, RunError> {
        self.waits.clear();
        let (me, ranks) = (node.me, node.ranks.len());
        let all = match whom {
            Whom::All => 0..ranks,
            Whom::One(place) => place..place + 1,
        };
        // Ranks that were met already are not checked again.
        for place in all.start + self.met..all.end {
            if place == me || node.meet(place, self.numbered.number, &self.numbered.header, self.seq)? {
                self.met += usize::from(self.waits.is_empty());
            } else {
                self.waits.push(node.ranks[place]);
            }
        }
        Ok(self.waits.is_empty())
    }

    /// The spot at which `rank` publishes the byte `at` of a place.
    fn spot(&self, rank: usize, place: Place, at: usize) -> Spot {
        let of = match place {
            Place::Slot => {
                Of::Slot { number: self.numbered.number, inline: self.program.is_inline(INLINE_BYTES) }
            }
            Place::Round(round) => Of::Round(self.numbered.position + round * self.numbered.round_bytes),
        };
        Spot { rank, at, of }
    }
}
