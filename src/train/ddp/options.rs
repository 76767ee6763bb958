//! Options of `Ddp`.

use crate::trace::Trace;

/// Options of a [`Ddp`](crate::Ddp). The ranks compare them: all but the trace must be equal on all ranks.
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
    /// Returns the default: buckets of 25 MiB, the first of 1 MiB, each sent when it is full. Every parameter
    /// needs a gradient.
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
    /// The options besides bucket sizes that all ranks must set alike, as text.
    pub(crate) fn comparison_text(&self) -> String {
        let Self { unused_parameters, divide_by_world, .. } = self;
        format!("unused_parameters({unused_parameters}) and divide_by_world({divide_by_world})")
    }

    /// Sets the size in bytes at which a bucket is full. Smaller buckets start communication earlier and
    /// overlap more; larger buckets need fewer calls.
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.bucket_bytes = bytes;
        self
    }

    /// Sets the size in bytes of the bucket that is sent first.
    pub fn first_bucket_bytes(mut self, bytes: usize) -> Self {
        self.first_bucket_bytes = bytes;
        self
    }

    /// Allows passes in which some parameters get no gradient, possibly different ones on each rank. A
    /// missing gradient counts as zero. [`Ddp::is_used`](crate::Ddp::is_used) reports the parameters that no
    /// rank has used.
    ///
    /// This costs one more `all_reduce` in each pass, of one byte for each parameter. By default a missing
    /// gradient is an error, since it is usually a mistake.
    #[doc(alias = "find_unused_parameters")]
    pub fn unused_parameters(mut self, allowed: bool) -> Self {
        self.unused_parameters = allowed;
        self
    }

    /// Sets whether a bucket is sent as soon as it is full, while the program computes further gradients.
    /// Otherwise all buckets are sent when the pass is finished. Overlap gains little if all cores compute
    /// and the ranks share one host's memory.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// Sets the divisor after [`Ddp::join`](crate::Ddp::join) when some ranks have no gradients. If true,
    /// sums are divided by the number of all ranks, as torch does by default. If false (the default here),
    /// only ranks that have gradients count.
    #[doc(alias = "divide_by_initial_world_size")]
    pub fn divide_by_world(mut self, divide: bool) -> Self {
        self.divide_by_world = divide;
        self
    }

    /// Records in `trace` the time during which each bucket is in flight.
    pub fn trace(mut self, trace: &Trace) -> Self {
        self.trace = Some(trace.clone());
        self
    }
}
