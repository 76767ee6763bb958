//! Averages gradients over all ranks in buckets, while the program computes the next gradients.

mod gradient;
mod join;
mod options;
mod pass;

use convoke_comm::{CommError, Element, Group, ReduceOp, Reduction, SharedBuffer, Work};

use crate::bucket::{Layout, Location, Sizes};
use crate::error::TrainError;
use crate::progress::{ParameterId, Progress};
pub use gradient::Gradient;
use join::JoinState;
pub use join::Joined;
pub use options::DdpOptions;
pub use pass::Pass;

/// Methods of both `Ddp` and `DeviceDdp`.
macro_rules! shared_methods {
    () => {
        /// Discards the sums of passes without sending on this rank, to skip a step.
        pub fn discard(&mut self) {
            self.progress.discard();
        }

        /// The parameters, in the order in which they were passed.
        #[must_use]
        pub fn parameters(&self) -> Vec<ParameterId> {
            self.progress.parameters()
        }

        /// The indexes of the parameters in each bucket, in the order in which buckets are sent.
        #[must_use]
        pub fn buckets(&self) -> &[Vec<usize>] {
            &self.progress.layout.buckets
        }

        /// The group whose ranks train together.
        #[must_use]
        pub fn group(&self) -> &Group {
            &self.group
        }
    };
}

#[cfg(feature = "nccl")]
pub(crate) use shared_methods;

/// Distributed data parallel training: holds the gradients of a network and averages them over all ranks.
///
/// Every rank has the whole network and computes gradients on its own examples. In a backward
/// [pass](Self::pass) the program hands over the gradient of each parameter as soon as it is computed.
/// Several parameters make a bucket. A complete bucket is sent to the other ranks while the program computes
/// the next gradients. [`Pass::finish`] waits for the remaining buckets. [`Self::average`] is then bitwise
/// identical on all ranks, so parameters that began equal stay equal.
///
/// ```
/// use convoke_train::Ddp;
///
/// # fn main() -> Result<(), convoke_train::TrainError> {
/// let world = convoke_comm::init()?;
/// // Names and numbers of elements, in the order of the forward pass.
/// let (mut ddp, parameters) = Ddp::new(&world, [("hidden", 4096), ("output", 640)])?;
/// let mut pass = ddp.pass();
/// pass.add(parameters[1], &[0.5; 640])?; // the backward pass comes to the output first
/// pass.add(parameters[0], &[0.25; 4096])?;
/// pass.finish()?;
/// assert_eq!(ddp.average(parameters[0])[0], 0.25);
/// # Ok(())
/// # }
/// ```
///
/// The collectives of a `Ddp` are ordinary calls on the group. The ranks must make other calls on that group
/// between passes, or at the same point of a pass on every rank. Alternatively, give the `Ddp` its own group
/// (`group.subgroup`).
///
/// `Ddp` corresponds to torch's `DistributedDataParallel`, but holds gradients only. The program itself makes
/// the initial parameters equal, with [`Group::broadcast`].
#[derive(Debug)]
pub struct Ddp<T: Gradient = f32> {
    group: Group,
    progress: Progress<Bucket<T>>,
    /// For each parameter, whether any rank had a gradient in the last pass. Empty if unused parameters are
    /// not allowed.
    used: Vec<bool>,
    joined: Option<JoinState>,
    options: DdpOptions,
}

/// The panic message for a bucket without memory. While the bucket's reduction runs, the memory belongs to
/// the operation. A pass that is finished or dropped takes the memory back, a leaked pass does not.
const LEAKED: &str = "a pass that was leaked (mem::forget) has never returned these gradients";

/// The gradients of some parameters, which one collective reduces together.
#[derive(Debug)]
struct Bucket<T: Element> {
    /// `None` while the bucket's operation is in flight. Ranks of one host reduce this memory without a copy.
    memory: Option<SharedBuffer<T>>,
    work: Option<Work<SharedBuffer<T>>>,
}

impl<T: Gradient> Ddp<T> {
    /// Allocates gradients for these parameters, and returns their ids in the same order. Each parameter has
    /// a name, used in errors, and a number of elements. All ranks of `group` pass the same parameters in the
    /// same order, preferably the order of the forward pass.
    ///
    /// # Errors
    /// [`TrainError::Layout`] on all ranks if the parameters differ between ranks; the group stays usable.
    /// [`TrainError::InvalidArgument`] if there are no parameters. Otherwise the errors of
    /// [`Group::all_gather`].
    ///
    /// # Cost
    /// An all-gather of 8 bytes, and one [`Group::alloc`] for each bucket. The memory holds one gradient of
    /// the whole network.
    pub fn new<N: Into<String>>(
        group: &Group,
        parameters: impl IntoIterator<Item = (N, usize)>,
    ) -> Result<(Self, Vec<ParameterId>), TrainError> {
        Self::with_options(group, parameters, DdpOptions::default())
    }

    /// Does what [`Self::new`] does, with options. All ranks must pass equal options.
    ///
    /// # Errors
    /// Returns the errors of [`Self::new`].
    pub fn with_options<N: Into<String>>(
        group: &Group,
        parameters: impl IntoIterator<Item = (N, usize)>,
        options: DdpOptions,
    ) -> Result<(Self, Vec<ParameterId>), TrainError> {
        let layout = agree::<T, _>(group, parameters, &options)?;
        let buckets = (0..layout.buckets.len()).map(|index| {
            let memory = group.alloc(layout.bucket_len(index))?;
            Ok(Bucket { memory: Some(memory), work: None })
        });
        let buckets = buckets.collect::<Result<_, CommError>>()?;
        let progress = Progress::new(layout, buckets);
        let parameters = progress.parameters();
        Ok((Self { group: group.clone(), progress, used: Vec::new(), joined: None, options }, parameters))
    }

    /// Begins a backward pass. Its gradients are averaged over all ranks, together with the sums that [passes
    /// without sending](Self::pass_no_sync) have left. All ranks of the group call this function.
    pub fn pass(&mut self) -> Pass<'_, T> {
        Pass::new(self, true)
    }

    /// Begins a backward pass that only accumulates gradients on this rank. Nothing is sent.
    ///
    /// The next pass that [is sent](Self::pass) averages everything added since the previous sent pass. The
    /// sum is divided by the number of ranks only. To get a mean over passes, divide by the number of passes.
    #[doc(alias = "no_sync")]
    pub fn pass_no_sync(&mut self) -> Pass<'_, T> {
        Pass::new(self, false)
    }

    /// The gradient of a parameter. After a finished pass with sending, this is the average over all ranks;
    /// after a pass without sending, the sum of this rank. After an error the content is unspecified.
    ///
    /// # Panics
    /// If there is no such parameter, or if the last pass was leaked (`mem::forget`) and its averages never
    /// arrived.
    #[must_use]
    pub fn average(&self, parameter: ParameterId) -> &[T] {
        let Location { bucket, range } = &self.progress.layout.locations[parameter.0];
        &self.progress.buckets[*bucket].memory.as_ref().expect(LEAKED)[range.clone()]
    }

    /// Mutable access to [`Self::average`], for example to clip it. All ranks must make equal changes.
    ///
    /// # Panics
    /// As [`Self::average`].
    pub fn average_mut(&mut self, parameter: ParameterId) -> &mut [T] {
        let Location { bucket, range } = &self.progress.layout.locations[parameter.0];
        &mut self.progress.buckets[*bucket].memory.as_mut().expect(LEAKED)[range.clone()]
    }

    /// Returns whether any rank had a gradient for this parameter in the last pass. Always `true` if [unused
    /// parameters](DdpOptions::unused_parameters) are not allowed.
    ///
    /// # Panics
    /// If there is no such parameter.
    #[must_use]
    pub fn is_used(&self, parameter: ParameterId) -> bool {
        assert!(parameter.0 < self.progress.layout.len(), "no parameter {}", parameter.0);
        self.used.get(parameter.0).copied().unwrap_or(true)
    }

    shared_methods!();

    /// The reduction that turns the ranks' sums into the average.
    fn reduction(&self) -> Reduction<T> {
        match &self.joined {
            Some(joined) if joined.contributing < self.group.size() && !self.options.divide_by_world => {
                Reduction::premul_sum(T::reciprocal(joined.contributing))
            }
            Some(_) | None => ReduceOp::Avg.into(),
        }
    }
}

/// Lays out the parameters in buckets, and compares the layouts of all ranks.
pub(crate) fn agree<T: Gradient, N: Into<String>>(
    group: &Group,
    parameters: impl IntoIterator<Item = (N, usize)>,
    options: &DdpOptions,
) -> Result<Layout, TrainError> {
    let parameters: Vec<_> = parameters.into_iter().map(|(name, count)| (name.into(), count)).collect();
    let (dtype, bytes) = (T::DTYPE.to_string(), T::DTYPE.size_bytes());
    let sizes = Sizes { first: options.first_bucket_bytes, others: options.bucket_bytes };
    let mut layout = Layout::new(parameters, &dtype, bytes, sizes);
    layout.settings = options.comparison_text();
    // The comparison comes first, so that all ranks get an error if only some have no parameters.
    let mut fingerprints = vec![0; group.size()];
    group.all_gather(&[layout.fingerprint()], &mut fingerprints)?;
    if let Some(rank) = fingerprints.iter().position(|&other| other != fingerprints[0]) {
        // All ranks have compared the same fingerprints, so all of them reach this call.
        let layouts = group.all_gather_object(&layout)?;
        let difference = layouts[rank].difference(&layouts[0]);
        let difference = difference.unwrap_or_else(|| "their fingerprints differ".to_owned());
        return Err(TrainError::Layout { rank, with: 0, difference });
    }
    if layout.len() == 0 {
        return Err(TrainError::InvalidArgument("the network has no parameters".to_owned()));
    }
    Ok(layout)
}
