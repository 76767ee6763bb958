//! A small call, carried out as its program says but without a list of steps, while its caller waits for it.

use super::layout::{INLINE_BYTES, SLOTS};
use super::moves::{self, Of, Plain, Spot};
use super::program::{Place, Program, Step, Whom};
use super::{Node, Numbered, Waits};
use crate::call::Call;
use crate::engine::buffer::Lent;
use crate::engine::streams::RunError;
use crate::fault::moment;
use crate::kernels::Kernel;

/// A call that this rank has given and announced, and whose results it has not taken.
#[derive(Debug)]
pub(crate) struct Small {
    pub(super) program: Program,
    pub(crate) seq: u64,
    pub(super) numbered: Numbered,
    pub(super) given: usize,
    inline: bool,
    /// Of those to meet, how many were met.
    met: usize,
}

impl Node {
    /// The program of a call that is small, if its slot is free.
    #[inline]
    pub(crate) fn small_program(&mut self, call: &Call) -> Option<Program> {
        let program = self.program(call);
        (program.is_small() && self.is_free_for_next()).then_some(program)
    }

    /// A call that is about to be made, by its [program](Self::small_program).
    #[inline(always)]
    pub(crate) fn small(&mut self, call: &Call, program: Program, seq: u64) -> Small {
        let (numbered, inline) = (self.count(call, seq, 0, 0), program.is_inline(INLINE_BYTES));
        Small { seq, program, numbered, given: 0, inline, met: 0 }
    }

    /// Gives and announces it. Who sleeps is not rung for.
    ///
    /// It stays where it is: to move what was just written would have to wait until the memory that others read is written.
    #[inline(always)]
    pub(crate) fn give_small(&mut self, small: &mut Small, lent: &mut Lent<'_>) {
        let (mut given, me, plain) = (0, self.me, Plain { lent, kernel: None });
        small.program.give_all(&mut |step| {
            if let Step::Give { row, place: Place::Slot, at } = step {
                given += moves::give(self, &plain, row, small.spot(me, at));
            }
        });
        small.given = given;
        self.announce(small.numbered.number, &small.numbered.header, None);
        moment("sent", small.seq, given);
    }

    /// Whether all have come that this rank needs something of.
    ///
    /// # Errors
    /// One of them made another call.
    #[inline]
    pub(crate) fn meet_small(&mut self, small: &mut Small) -> Result<bool, RunError> {
        let these = match small.program.sources() {
            None => return Ok(true),
            Some(Whom::One(rank)) => rank..rank + 1,
            Some(Whom::All) => 0..self.ranks.len(),
        };
        while let Some(rank) = these.clone().nth(small.met) {
            if rank != self.me
                && !self.meet(rank, small.numbered.number, &small.numbered.header, small.seq)?
            {
                return Ok(false);
            }
            small.met += 1;
        }
        Ok(true)
    }

    /// Whether a rank that shares this one's core should have it now: one that this rank waits for, or one that is as many
    /// calls behind as other ranks are on the core. Those that come later may need it, and to catch up it needs the core,
    /// with which this rank can do nothing now. Where it is less behind, a change of ranks costs more than it gains.
    pub(crate) fn yields_to_neighbour(&mut self, small: &Small) -> bool {
        self.tell_core();
        let (me, number) = (self.me, small.numbered.number);
        let awaited = match small.program.sources() {
            None => return false,
            Some(Whom::One(rank)) => rank..rank + 1,
            Some(Whom::All) => 0..self.ranks.len(),
        };
        let near: Waits =
            (0..self.ranks.len()).filter(|&place| place != me && self.shares_core(place)).collect();
        // Nobody is further behind than there are slots.
        let behind = number.wrapping_sub((near.len() as u32).saturating_sub(1).min(SLOTS - 2));
        near.into_iter()
            .any(|place| !self.has_begun(place, if awaited.contains(&place) { number } else { behind }))
    }

    /// Takes the results of a call for which all have come.
    ///
    /// # Errors
    /// How a function of the program failed.
    #[inline]
    pub(crate) fn end_small(
        &mut self,
        small: &Small,
        lent: &mut Lent<'_>,
        kernel: Option<&Kernel>,
    ) -> Result<(), RunError> {
        let (mut result, mut plain) = (Ok(()), Plain { lent, kernel });
        small.program.read_all(&mut |step| match step {
            Step::Take { from, at, row, .. } => {
                let bytes = moves::take(self, &mut plain, row, small.spot(from, at));
                moment("received", small.seq, bytes);
            }
            Step::AddUp { at, row, tells, .. } => {
                let added = moves::add_up(self, &mut plain, row, small.spot(0, at), tells);
                moment("received", small.seq, added.as_ref().map_or(0, |&bytes| bytes));
                result = added.map(drop).map_err(RunError::Function);
            }
            _ => {}
        });
        lent.copy_some(usize::MAX);
        result
    }
}

impl Small {
    /// Bytes that this rank gives, and that it takes or adds up.
    pub(crate) fn volume(&self) -> (u64, u64) {
        self.program.volume()
    }

    fn spot(&self, rank: usize, at: usize) -> Spot {
        Spot { rank, at, of: Of::Slot { number: self.numbered.number, inline: self.inline } }
    }
}
