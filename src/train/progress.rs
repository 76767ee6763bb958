//! Progress of a backward pass: which gradients are ready, and which buckets can be sent.
//!
//! Pure: no clock, no I/O. It is generic over the buckets, in host or device memory.

use std::ops::Range;

use crate::bucket::{Layout, Location};
use crate::error::TrainError;

/// Number of parameters that an error lists by name.
const MAX_NAMES: usize = 8;

/// A parameter of a [`Ddp`](crate::Ddp) or `DeviceDdp`, which returned it when it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParameterId(pub(crate) usize);

impl ParameterId {
    /// Returns the index of the parameter among those that the program passed.
    #[must_use]
    pub fn index(self) -> usize {
        self.0
    }
}

/// The content of a parameter's gradient memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GradientState {
    /// The average of an earlier pass, or initial zeros; the next gradient overwrites it.
    Average,
    /// The sum of this rank's gradients since the last average.
    Own,
    /// The complete sum of this rank's gradients, to which this pass adds nothing more.
    Ready,
}

/// The buckets `B` of a network, and the progress of the pass that fills them.
#[derive(Debug)]
pub(crate) struct Progress<B> {
    pub(crate) layout: Layout,
    pub(crate) buckets: Vec<B>,
    states: Vec<GradientState>,
    /// For each bucket, the number of parameters whose gradients are not ready in this pass.
    missing: Vec<usize>,
    /// True if the pass sends its buckets; false if it only accumulates gradients on this rank.
    pub(crate) sync: bool,
    /// Number of buckets sent so far. All ranks send buckets in the same order.
    sent: usize,
}

impl<B> Progress<B> {
    pub(crate) fn new(layout: Layout, buckets: Vec<B>) -> Self {
        let states = vec![GradientState::Average; layout.len()];
        let missing = layout.buckets.iter().map(Vec::len).collect();
        Self { layout, buckets, states, missing, sync: false, sent: 0 }
    }

    /// Returns the parameters in the order in which the program passed them.
    pub(crate) fn parameters(&self) -> Vec<ParameterId> {
        (0..self.layout.len()).map(ParameterId).collect()
    }

    /// Begins a pass.
    pub(crate) fn begin(&mut self, sync: bool) {
        (self.sync, self.sent) = (sync, 0);
    }

    /// Marks all gradients as averages, so that the next gradients overwrite them.
    pub(crate) fn reset(&mut self) {
        self.discard();
        self.missing = self.layout.buckets.iter().map(Vec::len).collect();
    }

    /// Marks all gradients as averages, without an end of the pass.
    pub(crate) fn discard(&mut self) {
        self.states.fill(GradientState::Average);
    }

    /// Returns whether passes without sending have left sums.
    pub(crate) fn has_sums(&self) -> bool {
        self.states.contains(&GradientState::Own)
    }

    /// Returns bucket and range of a parameter's gradient, and its state; an error if there is no such
    /// parameter, it is ready, or it does not have `len` elements.
    pub(crate) fn gradient(
        &mut self,
        parameter: ParameterId,
        len: Option<usize>,
    ) -> Result<(&mut B, Range<usize>, &mut GradientState), TrainError> {
        let Self { layout, buckets, states, .. } = self;
        let what = match states.get_mut(parameter.0) {
            None => format!("no parameter {}: there are {}", parameter.0, layout.len()),
            Some(GradientState::Ready) => {
                format!("{} already has its gradient in this pass", layout.name(parameter.0))
            }
            Some(state) => {
                let Location { bucket, range } = &layout.locations[parameter.0];
                let (name, ours) = (layout.name(parameter.0), range.len());
                match len.filter(|&len| len != ours) {
                    Some(len) => format!("a gradient of {len} elements for {name}, which has {ours}"),
                    None => return Ok((&mut buckets[*bucket], range.clone(), state)),
                }
            }
        };
        Err(TrainError::InvalidArgument(what))
    }

    /// Marks the gradient of a parameter, which is not ready yet, as ready. Nothing changes in a pass without
    /// sending.
    pub(crate) fn mark_ready(&mut self, parameter: ParameterId) {
        if self.sync {
            self.states[parameter.0] = GradientState::Ready;
            self.missing[self.layout.locations[parameter.0].bucket] -= 1;
        }
    }

    /// Returns the parameters that are not ready.
    pub(crate) fn not_ready(&self) -> Vec<ParameterId> {
        let parameters = self.parameters().into_iter();
        parameters.filter(|parameter| self.states[parameter.0] != GradientState::Ready).collect()
    }

    /// Returns for each parameter whether this pass, or an earlier one without sending, had a gradient.
    pub(crate) fn used(&self) -> Vec<bool> {
        self.states.iter().map(|state| *state != GradientState::Average).collect()
    }

    /// Returns the error of a pass on rank `rank` that ends without some gradients; `None` if it has all.
    pub(crate) fn unused(&self, rank: usize) -> Option<TrainError> {
        let unused = self.used().into_iter().enumerate().filter(|(_, used)| !used);
        let mut names: Vec<String> = unused.map(|(index, _)| self.layout.name(index).to_owned()).collect();
        let more = names.len().saturating_sub(MAX_NAMES);
        names.truncate(MAX_NAMES);
        (!names.is_empty()).then_some(TrainError::Unused { rank, names, more })
    }

    /// Returns the index of the bucket to send next, if all of its gradients are ready.
    pub(crate) fn next_complete(&self) -> Option<usize> {
        (self.sync && self.missing.get(self.sent) == Some(&0)).then_some(self.sent)
    }

    /// Records that the bucket from [`Self::next_complete`] is sent.
    pub(crate) fn mark_sent(&mut self) {
        self.sent += 1;
    }

    /// Returns the names of the parameters in a bucket.
    pub(crate) fn names(&self, bucket: usize) -> impl Iterator<Item = &str> {
        self.layout.buckets[bucket].iter().map(|&parameter| self.layout.name(parameter))
    }
}
