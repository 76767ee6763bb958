//! Ranks as a mesh with named axes, for parallelism in several dimensions.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use crate::error::CommError;
use crate::group::{Agreed, Group};
use crate::plan::fingerprint;

/// The ranks of a group as a mesh with named axes, and a group along each axis.
///
/// The last axis varies fastest: ranks that differ by one are neighbours along it. With the axes `dp` of 2 and `tp`
/// of 3:
///
/// ```text
///           tp 0  tp 1  tp 2
///     dp 0     0     1     2      group("tp") of rank 4: ranks 3, 4, 5
///     dp 1     3     4     5      group("dp") of rank 4: ranks 1, 4
/// ```
///
/// Tensor and data parallelism together: each layer is cut over `tp`, each replica of the whole takes other samples.
///
/// ```
/// use convoke_comm::{Mesh, ReduceOp};
///
/// # fn main() -> Result<(), convoke_comm::CommError> {
/// let world = convoke_comm::init()?;
/// let tp = if world.size().is_multiple_of(2) { 2 } else { 1 };
/// let mesh = Mesh::new(&world, &[("dp", world.size() / tp), ("tp", tp)])?;
///
/// // This rank has some rows of the weights, and the inputs that they meet.
/// let (inputs, outputs) = (12 / tp, 4);
/// let mut weights = vec![0.1_f32; inputs * outputs];
/// let sample = vec![1.0_f32; inputs];
///
/// // Forward: what the rows give is summed over those who have the others.
/// let mut activations: Vec<f32> = (0..outputs)
///     .map(|output| (0..inputs).map(|input| sample[input] * weights[input * outputs + output]).sum())
///     .collect();
/// mesh.group("tp")?.all_reduce(&mut activations, ReduceOp::Sum)?;
///
/// // Backward: gradients are averaged over those who have the same rows, and have seen other samples.
/// let mut gradients: Vec<f32> = sample.iter().flat_map(|x| activations.iter().map(move |a| a * x)).collect();
/// mesh.group("dp")?.all_reduce(&mut gradients, ReduceOp::Avg)?;
/// for (weight, gradient) in weights.iter_mut().zip(gradients) {
///     *weight -= 0.01 * gradient;
/// }
/// # Ok(())
/// # }
/// ```
///
/// Clones are the same mesh, and so are [submeshes](Self::submesh): they share its groups, which take leave when the
/// last is dropped. Mirrors `torch.distributed.device_mesh`.
#[derive(Clone)]
pub struct Mesh {
    whole: Arc<Whole>,
    /// The axes of the whole that this mesh has.
    axes: Vec<usize>,
}

/// The mesh of all ranks.
struct Whole {
    group: Group,
    names: Vec<String>,
    shape: Vec<usize>,
    /// Of this rank.
    coordinates: Vec<usize>,
    /// Along each axis, with this rank.
    along: Vec<Group>,
}

impl Mesh {
    /// Lays the ranks of `group` out along `axes`, each with its name and size, and makes a group along each.
    ///
    /// All ranks of `group` call it, with the same axes. The groups are made at once rather than when they are asked
    /// for, as making them takes all ranks, and who asks may depend on the rank. They are as those of
    /// [`Group::subgroup`], named after their axes.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no axis, two have one name, or the product of their sizes is not
    /// the number of ranks; on all ranks if they disagree about the axes. Else as [`Group::subgroup`].
    ///
    /// # Cost
    /// An all-gather of 24 bytes; then for each axis a new group of its size.
    #[doc(alias = "init_device_mesh")]
    pub fn new(group: &Group, axes: &[(&str, usize)]) -> Result<Self, CommError> {
        let invalid = |what: String| Err(CommError::InvalidArgument(format!("a mesh of {axes:?}: {what}")));
        let (names, shape): (Vec<String>, Vec<usize>) =
            axes.iter().map(|&(name, size)| (name.to_owned(), size)).unzip();
        if names.is_empty() {
            return invalid("it needs an axis".to_owned());
        }
        if let Some(name) = repeated(&names) {
            return invalid(format!("two axes are called {name:?}"));
        }
        let size = shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(size));
        if size != Some(group.size()) {
            let product = size.map_or_else(|| "too many".to_owned(), |size| size.to_string());
            return invalid(format!("it has {product} places for {} ranks", group.size()));
        }
        let call = group.in_parts();
        let agreed = call.agree(&format!("a mesh of {axes:?}"), mark(&names, &shape), [0; 2])?;
        let coordinates = coordinates(&shape, group.rank());
        let mut whole = Whole { group: group.clone(), names, shape, coordinates, along: Vec::new() };
        for axis in 0..axes.len() {
            let along = whole.form(&call, &agreed, &[axis])?;
            whole.along.push(along);
        }
        Ok(Self { whole: Arc::new(whole), axes: (0..axes.len()).collect() })
    }

    /// Names of the axes, in order.
    pub fn axes(&self) -> impl ExactSizeIterator<Item = &str> {
        self.axes.iter().map(|&axis| self.whole.names[axis].as_str())
    }

    /// Sizes of the axes, in order.
    #[must_use]
    pub fn shape(&self) -> Vec<usize> {
        self.axes.iter().map(|&axis| self.whole.shape[axis]).collect()
    }

    /// Number of ranks: the product of the shape.
    #[must_use]
    pub fn size(&self) -> usize {
        self.shape().iter().product()
    }

    /// Where this rank is, along each axis in order.
    #[must_use]
    #[doc(alias = "get_coordinate")]
    pub fn coordinates(&self) -> Vec<usize> {
        self.axes.iter().map(|&axis| self.whole.coordinates[axis]).collect()
    }

    /// Where this rank is along one axis: its rank in the group there.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no such axis.
    #[doc(alias = "get_local_rank")]
    pub fn local_rank(&self, axis: &str) -> Result<usize, CommError> {
        Ok(self.whole.coordinates[self.axis(axis)?])
    }

    /// The rank at these coordinates, one for each axis, in the group that the mesh was made from. Along axes that
    /// only the whole mesh has it is where this rank is.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no such place.
    pub fn rank_at(&self, coordinates: &[usize]) -> Result<usize, CommError> {
        let shape = self.shape();
        let fit =
            coordinates.len() == shape.len() && coordinates.iter().zip(&shape).all(|(at, size)| at < size);
        if !fit {
            let what = format!("no rank at {coordinates:?} in a mesh of the shape {shape:?}");
            return Err(CommError::InvalidArgument(what));
        }
        Ok(self.whole.rank_at(&self.axes, coordinates))
    }

    /// All ranks of the mesh, in the group that the whole was made from; those of a submesh are where this rank is
    /// along the other axes. The last axis varies fastest.
    #[must_use]
    pub fn ranks(&self) -> Vec<usize> {
        self.whole.ranks(&self.axes)
    }

    /// The group of ranks that differ only along `axis`, in the order of their coordinates there.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no such axis.
    #[doc(alias = "get_group")]
    pub fn group(&self, axis: &str) -> Result<&Group, CommError> {
        Ok(&self.whole.along[self.axis(axis)?])
    }

    /// The mesh of some axes, in this order: of ranks that differ only along them. No rank needs to do anything for
    /// it; its groups are those of the whole mesh.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no axis, one is unknown or named twice.
    #[doc(alias = "__getitem__")]
    pub fn submesh(&self, axes: &[&str]) -> Result<Self, CommError> {
        let invalid =
            |what: String| Err(CommError::InvalidArgument(format!("a submesh of {axes:?}: {what}")));
        if axes.is_empty() {
            return invalid("it needs an axis".to_owned());
        }
        if let Some(name) = repeated(axes) {
            return invalid(format!("it has {name:?} twice"));
        }
        let axes = axes.iter().map(|axis| self.axis(axis)).collect::<Result<_, _>>()?;
        Ok(Self { whole: Arc::clone(&self.whole), axes })
    }

    /// A new group of all ranks of this mesh, the last axis varying fastest: its axes as one.
    ///
    /// All ranks of the *whole* mesh call it, with the same axes, also where this is a submesh: as many groups come of
    /// it as there are such submeshes. Each call makes a new group.
    ///
    /// # Errors
    /// As [`Group::subgroup`].
    ///
    /// # Cost
    /// As [`Group::subgroup`].
    pub fn flatten(&self) -> Result<Group, CommError> {
        let Whole { group, names, shape, .. } = &*self.whole;
        let own: Vec<String> = self.axes().map(str::to_owned).collect();
        let mark = fingerprint(&[mark(names, shape) as usize, mark(&own, &self.shape()) as usize]);
        let call = group.in_parts();
        let agreed = call.agree(&format!("a group of the axes {own:?}"), mark, [0; 2])?;
        self.whole.form(&call, &agreed, &self.axes)
    }

    /// The axis of the whole mesh with this name, if this mesh has it.
    fn axis(&self, name: &str) -> Result<usize, CommError> {
        let known = self.axes.iter().copied().find(|&axis| self.whole.names[axis] == name);
        known.ok_or_else(|| {
            let names: Vec<_> = self.axes().collect();
            CommError::InvalidArgument(format!("no axis {name:?} in a mesh of {names:?}"))
        })
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mesh")
            .field("group", &self.whole.group.name())
            .field("axes", &self.axes().zip(self.shape()).collect::<Vec<_>>())
            .field("coordinates", &self.coordinates())
            .finish_non_exhaustive()
    }
}

impl Whole {
    /// Makes the group of the ranks that differ from this one only along `axes`, in the time of `call`.
    fn form(&self, call: &Group, agreed: &Agreed<'_>, axes: &[usize]) -> Result<Group, CommError> {
        let names: Vec<&str> = axes.iter().map(|&axis| self.names[axis].as_str()).collect();
        let group = call.with_subgroup_name(&names.join("+")).form(agreed, &self.ranks(axes))?;
        group.ok_or_else(|| CommError::InvalidArgument("this rank has no place in the mesh".to_owned()))
    }

    /// The rank at `coordinates` along `axes`, and where this rank is along the others.
    fn rank_at(&self, axes: &[usize], coordinates: &[usize]) -> usize {
        let mut place = self.coordinates.clone();
        for (&axis, &at) in axes.iter().zip(coordinates) {
            place[axis] = at;
        }
        place.iter().zip(&self.shape).fold(0, |rank, (at, size)| rank * size + at)
    }

    /// All ranks that differ from this one only along `axes`.
    fn ranks(&self, axes: &[usize]) -> Vec<usize> {
        let shape: Vec<usize> = axes.iter().map(|&axis| self.shape[axis]).collect();
        let places = (0..shape.iter().product()).map(|place| coordinates(&shape, place));
        places.map(|coordinates| self.rank_at(axes, &coordinates)).collect()
    }
}

/// Coordinates of the place with this number in a mesh of this shape, the last axis varying fastest.
fn coordinates(shape: &[usize], mut place: usize) -> Vec<usize> {
    let mut coordinates = vec![0; shape.len()];
    for (at, &size) in coordinates.iter_mut().zip(shape).rev() {
        (*at, place) = (place % size, place / size);
    }
    coordinates
}

/// Stands for the axes where ranks compare them.
fn mark(names: &[String], shape: &[usize]) -> u64 {
    let names = names.iter().flat_map(|name| name.bytes().map(usize::from).chain([usize::MAX]));
    fingerprint(&names.chain(shape.iter().copied()).collect::<Vec<_>>())
}

fn repeated<S: AsRef<str>>(names: &[S]) -> Option<&str> {
    let mut known = BTreeSet::new();
    names.iter().map(AsRef::as_ref).find(|name| !known.insert(*name))
}
