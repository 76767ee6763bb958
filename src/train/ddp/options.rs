//! What can be chosen.

use crate::trace::Trace;

/// Options of a [`Ddp`](crate::Ddp), the same on all ranks but for the trace: they are compared.
#[derive(Debug, Clone)]
#[must_use]
pub struct DdpOptions {
    pub(crate) bucket_bytes: usize,
    pub(crate) first_bucket_bytes: usize,
    pub(crate) unused_parameters: bool,
    pub(crate) overlap: bool,
    pub(super) divide_by_world: bool,
    pub(crate) trace: Option<Trace>,
}

impl Default for DdpOptions {
    /// Buckets of 25 MiB, the first of 1 MiB, sent as soon as they are full; no parameter may be left out.
    fn default() -> Self {
        Self {
            bucket_bytes: 25 << 20,
            first_bucket_bytes: 1 << 20,
            unused_parameters: false,
            overlap: true,
            divide_by_world: false,
            trace: None,
        }
    }
}

impl DdpOptions {
    /// What ranks must have alike beside the buckets, in words.
    pub(crate) fn compared(&self) -> String {
        let Self { unused_parameters, divide_by_world, .. } = self;
        format!("unused_parameters({unused_parameters}) and divide_by_world({divide_by_world})")
    }

    /// A bucket is full when it has so many bytes. With fewer, the ranks begin to communicate earlier and more is done
    /// side by side; with more, there are fewer calls.
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.bucket_bytes = bytes;
        self
    }

    /// The same for the bucket that is sent first.
    pub fn first_bucket_bytes(mut self, bytes: usize) -> Self {
        self.first_bucket_bytes = bytes;
        self
    }

    /// Allows passes in which some parameters get no gradient, other ones on each rank perhaps. They count as zero, and
    /// [`Ddp::is_used`](crate::Ddp::is_used) tells which no rank has used. Costs one more `all_reduce` in each pass, of a
    /// byte for each parameter. Without it such a pass is an error, since it is a mistake as a rule.
    #[doc(alias = "find_unused_parameters")]
    pub fn unused_parameters(mut self, allowed: bool) -> Self {
        self.unused_parameters = allowed;
        self
    }

    /// Whether a bucket is sent as soon as it is full, while the program goes on; else all are sent when the pass is
    /// finished. Where all cores compute and nothing but memory lies between the ranks, there is little to gain.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// With [`Ddp::join`](crate::Ddp::join): whether sums are divided by the number of all ranks also when some have
    /// nothing to add, as torch does if it is not told otherwise. By default they are divided by the number of those that
    /// have.
    #[doc(alias = "divide_by_initial_world_size")]
    pub fn divide_by_world(mut self, divide: bool) -> Self {
        self.divide_by_world = divide;
        self
    }

    /// Notes when which bucket is on its way.
    pub fn trace(mut self, trace: &Trace) -> Self {
        self.trace = Some(trace.clone());
        self
    }
}
