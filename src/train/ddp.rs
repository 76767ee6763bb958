//! Gradients averaged over all ranks, in buckets, while the next ones are computed.

mod gradient;
mod join;
mod options;
mod pass;

use convoke_comm::{CommError, Element, Group, ReduceOp, Reduction, SharedBuffer, Work};

use crate::bucket::{Layout, Place, Sizes};
use crate::error::TrainError;
pub use gradient::Gradient;
use join::Joined;
pub use options::DdpOptions;
pub use pass::Pass;

/// Most parameters that an error names.
pub(crate) const NAMED: usize = 8;

/// The gradients of a network, and what makes them the average over all ranks: distributed data parallel training.
///
/// Every rank has the whole network and computes gradients on examples of its own. In a backward [pass](Self::pass) it
/// hands over the gradient of each parameter as soon as it has it; several together make a bucket, and a bucket that
/// is complete is on its way to the other ranks while the program computes the next. [`Pass::finish`] waits for the
/// rest; then [`Self::average`] is the same on all ranks to the last bit, so parameters that began equal stay equal.
///
/// ```
/// use convoke_train::Ddp;
///
/// # fn main() -> Result<(), convoke_train::TrainError> {
/// let world = convoke_comm::init()?;
/// // Names and numbers of elements, in the order of the forward pass.
/// let mut ddp = Ddp::new(&world, [("hidden", 4096), ("output", 640)])?;
/// let mut pass = ddp.pass();
/// pass.add(1, &[0.5; 640])?; // the backward pass comes to the output first
/// pass.add(0, &[0.25; 4096])?;
/// pass.finish()?;
/// assert_eq!(ddp.average(0)[0], 0.25);
/// # Ok(())
/// # }
/// ```
///
/// Its collectives are calls of the group like any other: what else the ranks do in that group they do between passes,
/// or in the same places of a pass; or they give it a group of its own (`group.subgroup`).
///
/// The twin of torch's `DistributedDataParallel`. It holds gradients only; parameters that must begin equal are the
/// program's to send (`group.broadcast_coalesced`).
#[derive(Debug)]
pub struct Ddp<T: Gradient = f32> {
    group: Group,
    layout: Layout,
    buckets: Vec<Bucket<T>>,
    shares: Vec<Share>,
    /// Which parameters any rank had a gradient for in the last pass; empty if unused ones are not allowed.
    used: Vec<bool>,
    joined: Option<Joined>,
    options: DdpOptions,
}

/// Gradients that are reduced together.
#[derive(Debug)]
struct Bucket<T: Element> {
    /// Empty while they are on their way. Inside a host nothing of it is copied.
    memory: SharedBuffer<T>,
    /// Parameters whose gradients are not ready in this pass.
    missing: usize,
    work: Option<Work<SharedBuffer<T>>>,
}

/// What the memory of a parameter holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Share {
    /// The average of an earlier pass, or nothing yet: the next gradient takes its place.
    Average,
    /// What this rank has added up since then.
    Own,
    /// The same, and this pass adds no more.
    Ready,
}

impl<T: Gradient> Ddp<T> {
    /// Gradients for these parameters: a name, for errors, and the number of elements of each. All ranks of `group`
    /// pass the same, in the same order, best that in which the forward pass uses them.
    ///
    /// # Errors
    /// [`TrainError::Layout`] on all ranks if they do not; the group goes on. [`TrainError::InvalidArgument`] without
    /// any parameter. Else as [`Group::all_gather`].
    ///
    /// # Cost
    /// An all-gather of 8 bytes, and what [`Group::alloc`] costs for each bucket. Memory for one gradient of the whole
    /// network.
    pub fn new<N: Into<String>>(
        group: &Group,
        parameters: impl IntoIterator<Item = (N, usize)>,
    ) -> Result<Self, TrainError> {
        Self::with_options(group, parameters, DdpOptions::default())
    }

    /// As [`Self::new`], with options, which are the same on all ranks.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_options<N: Into<String>>(
        group: &Group,
        parameters: impl IntoIterator<Item = (N, usize)>,
        options: DdpOptions,
    ) -> Result<Self, TrainError> {
        let parameters: Vec<_> = parameters.into_iter().map(|(name, count)| (name.into(), count)).collect();
        let (dtype, bytes) = (T::DTYPE.to_string(), T::DTYPE.size_bytes());
        let sizes = Sizes { first: options.first_bucket_bytes, others: options.bucket_bytes };
        let layout = Layout::new(parameters, &dtype, bytes, sizes).with_settings(&options.compared());
        // First, so that ranks which differ in whether they have any parameters all learn of it.
        compare(group, &layout)?;
        if layout.len() == 0 {
            return Err(TrainError::InvalidArgument("a network without parameters".to_owned()));
        }
        let buckets = layout.buckets().iter().enumerate().map(|(index, parameters)| {
            let memory = group.alloc(layout.bucket_len(index))?;
            Ok(Bucket { memory, missing: parameters.len(), work: None })
        });
        Ok(Self {
            group: group.clone(),
            buckets: buckets.collect::<Result<_, CommError>>()?,
            shares: vec![Share::Average; layout.len()],
            used: Vec::new(),
            joined: None,
            layout,
            options,
        })
    }

    /// Begins a backward pass, whose gradients are averaged over all ranks together with what
    /// [passes without](Self::pass_no_sync) have left. All ranks of the group do.
    pub fn pass(&mut self) -> Pass<'_, T> {
        Pass::new(self, true)
    }

    /// Begins a backward pass whose gradients are only added up here: gradient accumulation. Nothing is sent.
    ///
    /// The average of the next pass that [is sent](Self::pass) is of all that was added since the one before, divided
    /// by the number of ranks only: who wants a mean over passes divides by their number.
    #[doc(alias = "no_sync")]
    pub fn pass_no_sync(&mut self) -> Pass<'_, T> {
        Pass::new(self, false)
    }

    /// The gradient of a parameter: the average over all ranks, once a pass that is sent is finished; after a pass
    /// without sending, what this rank has added up. After an error it is unspecified.
    ///
    /// # Panics
    /// If there is no such parameter.
    #[must_use]
    pub fn average(&self, parameter: usize) -> &[T] {
        let Place { bucket, range } = self.layout.place(parameter);
        self.buckets[*bucket].memory.get(range.clone()).unwrap_or_default()
    }

    /// As [`Self::average`], to change it, such as to clip it. All ranks change theirs alike.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn average_mut(&mut self, parameter: usize) -> &mut [T] {
        let Place { bucket, range } = self.layout.place(parameter);
        self.buckets[*bucket].memory.get_mut(range.clone()).unwrap_or_default()
    }

    /// Forgets what passes without sending have added up on this rank: to skip a step.
    pub fn discard(&mut self) {
        self.shares.fill(Share::Average);
    }

    /// Whether any rank had a gradient for this parameter in the last pass. `true` for all of them where
    /// [unused parameters](DdpOptions::unused_parameters) are not allowed.
    ///
    /// # Panics
    /// If there is no such parameter.
    #[must_use]
    pub fn is_used(&self, parameter: usize) -> bool {
        assert!(parameter < self.layout.len(), "no parameter {parameter}");
        self.used.get(parameter).copied().unwrap_or(true)
    }

    /// Number of parameters.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.layout.len()
    }

    /// The parameters of each bucket, in the order in which buckets are sent.
    #[must_use]
    pub fn buckets(&self) -> &[Vec<usize>] {
        self.layout.buckets()
    }

    /// The group whose ranks train together.
    #[must_use]
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// How shares become the average.
    fn reduction(&self) -> Reduction<T> {
        match &self.joined {
            Some(joined) if joined.giving < self.group.size() && !self.options.divide_by_world => {
                Reduction::premul_sum(T::one_of(joined.giving))
            }
            Some(_) | None => ReduceOp::Avg.into(),
        }
    }
}

/// Compares what the ranks want to train.
pub(crate) fn compare(group: &Group, layout: &Layout) -> Result<(), TrainError> {
    let mut fingerprints = vec![0; group.size()];
    group.all_gather(&[layout.fingerprint()], &mut fingerprints)?;
    if fingerprints.iter().all(|&other| other == fingerprints[0]) {
        return Ok(());
    }
    // All ranks have seen the same, so all come here.
    let layouts = group.all_gather_object(layout)?;
    let differs =
        layouts.iter().enumerate().find_map(|(rank, other)| Some((rank, other.difference(&layouts[0])?)));
    let (rank, difference) = differs.unwrap_or_else(|| (0, "their fingerprints differ".to_owned()));
    Err(TrainError::Layout { rank, with: 0, difference })
}
