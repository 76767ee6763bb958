//! A small call, executed by its program without a list of steps, while its caller waits for it.

use super::layout::{INLINE_BYTES, SLOTS};
use super::moves::{self, Of, Plain, Spot};
use super::program::{Place, Program, Step, Whom};
use super::{Node, Numbered, Waits};
use crate::call::Call;
use crate::engine::buffer::Lent;
use crate::engine::streams::RunError;
use crate::fault::moment;
use crate::kernels::Kernel;

/// A call that this rank has published and announced, and whose results it has not fetched.
#[derive(Debug)]
pub(crate) struct Small {
    pub(super) program: Program,
    pub(crate) seq: u64,
    pub(super) numbered: Numbered,
    pub(super) given: usize,
    inline: bool,
    /// The number of ranks to meet that were met so far.
    met: usize,
}

impl Node {
    /// The program of a call, if it is small and its slot is free.
    #[inline]
    pub(crate) fn small_program(&mut self, call: &Call) -> Option<Program> {
        let program = self.program(call);
        (program.is_small() && self.is_free_for_next()).then_some(program)
    }

    /// Numbers a call that is about to be made by its [program](Self::small_program).
    #[inline(always)]
    pub(crate) fn small(&mut self, call: &Call, program: Program, seq: u64) -> Small {
        let (numbered, inline) = (self.count(call, seq, 0, 0), program.is_inline(INLINE_BYTES));
        Small { seq, program, numbered, given: 0, inline, met: 0 }
    }

    /// Publishes the data and announces the call. Sleeping ranks are not rung for.
    ///
    /// The argument is a reference, not moved: moving fresh data would have to wait until the preceding
    /// shared stores are done.
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

    /// Returns whether all ranks have made the call whose data this rank needs.
    ///
    /// # Errors
    ///
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

    /// Returns whether this rank should yield to a rank that shares its core. That is a rank that this one
    /// waits for, or one that is as many calls behind as the core has other ranks. Later ranks may need its
    /// data, and to catch up it needs the core, which this rank cannot use now. A rank that is less behind
    /// does not gain enough for a context switch.
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
        // No rank can be further behind than the number of slots.
        let behind = number.wrapping_sub((near.len() as u32).saturating_sub(1).min(SLOTS - 2));
        near.into_iter()
            .any(|place| !self.has_begun(place, if awaited.contains(&place) { number } else { behind }))
    }

    /// Fetches the results of a call that all ranks have made.
    ///
    /// # Errors
    ///
    /// The error of the program's reduction function.
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
    /// Bytes that this rank publishes, and that it fetches or adds up.
    pub(crate) fn volume(&self) -> (u64, u64) {
        self.program.volume()
    }

    fn spot(&self, rank: usize, at: usize) -> Spot {
        Spot { rank, at, of: Of::Slot { number: self.numbered.number, inline: self.inline } }
    }
}
