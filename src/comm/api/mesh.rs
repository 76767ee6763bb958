//! Device meshes: ranks along named axes, for parallelism in several dimensions.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use crate::api::group::{Group, SubgroupAgreement};
use crate::collectives::plan::fingerprint;
use crate::error::{CommError, require};

/// The ranks of a group as a mesh with named axes, and a group along each axis.
///
/// The last axis varies fastest: consecutive ranks are neighbours along it. With the axes `dp` of 2 and
/// `tp` of 3:
///
/// ```text
///           tp 0  tp 1  tp 2
///     dp 0     0     1     2      group("tp") of rank 4: ranks 3, 4, 5
///     dp 1     3     4     5      group("dp") of rank 4: ranks 1, 4
/// ```
///
/// An example with tensor and data parallelism: layers are split along `tp`, and each replica along `dp`
/// takes other samples.
///
/// ```
/// use convoke_comm::{Mesh, ReduceOp};
///
/// # fn main() -> Result<(), convoke_comm::CommError> {
/// let world = convoke_comm::init()?;
/// let tp = if world.size().is_multiple_of(2) { 2 } else { 1 };
/// let mesh = Mesh::new(&world, &[("dp", world.size() / tp), ("tp", tp)])?;
///
/// // This rank has some rows of the weight matrix, and the inputs that are multiplied by these rows.
/// let (inputs, outputs) = (12 / tp, 4);
/// let mut weights = vec![0.1_f32; inputs * outputs];
/// let sample = vec![1.0_f32; inputs];
///
/// // Forward: each rank has the outputs of its rows; they are summed over the ranks with the other rows.
/// let mut activations: Vec<f32> = (0..outputs)
///     .map(|output| (0..inputs).map(|input| sample[input] * weights[input * outputs + output]).sum())
///     .collect();
/// mesh.group("tp")?.all_reduce(&mut activations, ReduceOp::Sum)?;
///
/// // Backward: gradients are averaged over the ranks that have the same rows and saw other samples.
/// let mut gradients: Vec<f32> =
///     sample.iter().flat_map(|x| activations.iter().map(move |a| a * x)).collect();
/// mesh.group("dp")?.all_reduce(&mut gradients, ReduceOp::Avg)?;
/// for (weight, gradient) in weights.iter_mut().zip(gradients) {
///     *weight -= 0.01 * gradient;
/// }
/// # Ok(())
/// # }
/// ```
///
/// Clones and [submeshes](Self::submesh) share the groups of one mesh. This rank leaves these groups when the
/// last clone or submesh is dropped. Counterpart of `torch.distributed.device_mesh`.
#[derive(Clone)]
pub struct Mesh {
    inner: Arc<MeshInner>,
    /// The axes of this mesh or submesh, as indices among the axes of the whole mesh.
    axes: Vec<usize>,
}

/// The mesh of all ranks, which clones and submeshes share.
struct MeshInner {
    group: Group,
    names: Vec<String>,
    shape: Vec<usize>,
    coordinates: Vec<usize>,
    /// For each axis, the group along it that contains this rank.
    axis_groups: Vec<Group>,
}

impl Mesh {
    /// Arranges the ranks of `group` along `axes`, each with name and size, and makes a group along each
    /// axis.
    ///
    /// All ranks of `group` call `new` with equal axes. It makes the groups of all axes at once, because all
    /// ranks must take part in making them, while only some may use a group later. The groups have the
    /// properties described at [`Group::subgroup`], and are named after their axes.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no axis, two axes have the same name, or the sizes do not
    /// multiply to the number of ranks. Also on all ranks if their axes differ. Otherwise the errors of
    /// [`Group::subgroup`].
    ///
    /// # Cost
    /// An all-gather of 24 bytes; then for each axis a new group of its size.
    #[doc(alias = "init_device_mesh")]
    pub fn new(group: &Group, axes: &[(&str, usize)]) -> Result<Self, CommError> {
        let mesh = format!("a mesh of {axes:?}");
        let (names, shape): (Vec<String>, Vec<usize>) =
            axes.iter().map(|&(name, size)| (name.to_owned(), size)).unzip();
        require(!names.is_empty(), || format!("{mesh}: it needs an axis"))?;
        if let Some(name) = first_duplicate(&names) {
            return Err(CommError::InvalidArgument(format!("{mesh}: two axes are called {name:?}")));
        }
        let size = shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(size));
        require(size == Some(group.size()), || {
            let product = size.map_or_else(|| "too many".to_owned(), |size| size.to_string());
            format!("{mesh}: its axes hold {product} ranks, and the group has {} ranks", group.size())
        })?;
        let call = group.with_fixed_deadline();
        let agreed = call.agree(&mesh, axes_fingerprint(&names, &shape), [0; 2])?;
        let coordinates = coordinates(&shape, group.rank());
        let mut inner =
            MeshInner { group: group.clone(), names, shape, coordinates, axis_groups: Vec::new() };
        let along = |axis| inner.new_group(&call, &agreed, &[axis]);
        inner.axis_groups = (0..axes.len()).map(along).collect::<Result<_, _>>()?;
        Ok(Self { inner: Arc::new(inner), axes: (0..axes.len()).collect() })
    }

    /// Returns the names of the axes, in order.
    pub fn axes(&self) -> impl ExactSizeIterator<Item = &str> {
        self.axes.iter().map(|&axis| self.inner.names[axis].as_str())
    }

    /// Returns the sizes of the axes, in order.
    #[must_use]
    pub fn shape(&self) -> Vec<usize> {
        self.axes.iter().map(|&axis| self.inner.shape[axis]).collect()
    }

    /// Returns the number of ranks: the product of the shape.
    #[must_use]
    pub fn size(&self) -> usize {
        self.shape().iter().product()
    }

    /// Returns the coordinates of this rank, one for each axis in order.
    #[must_use]
    #[doc(alias = "get_coordinate")]
    pub fn coordinates(&self) -> Vec<usize> {
        self.axes.iter().map(|&axis| self.inner.coordinates[axis]).collect()
    }

    /// Returns the coordinate of this rank along `axis`, which is its rank in the group along that axis.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no such axis.
    #[doc(alias = "get_local_rank")]
    pub fn local_rank(&self, axis: &str) -> Result<usize, CommError> {
        Ok(self.inner.coordinates[self.axis(axis)?])
    }

    /// Returns the rank at these coordinates, one for each axis, in the group of the whole mesh. Along axes
    /// that a submesh lacks, the coordinates of this rank apply.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if the coordinates are outside the shape.
    pub fn rank_at(&self, coordinates: &[usize]) -> Result<usize, CommError> {
        let shape = self.shape();
        let fit =
            coordinates.len() == shape.len() && coordinates.iter().zip(&shape).all(|(at, size)| at < size);
        require(fit, || format!("no rank at {coordinates:?} in a mesh of the shape {shape:?}"))?;
        Ok(self.inner.rank_at(&self.axes, coordinates))
    }

    /// Returns all ranks of the mesh, as ranks in the group of the whole mesh; the last axis varies fastest.
    /// The ranks of a submesh have this rank's coordinates along the axes that the submesh lacks.
    #[must_use]
    pub fn ranks(&self) -> Vec<usize> {
        self.inner.ranks(&self.axes)
    }

    /// Returns the group of ranks that differ only along `axis`, in the order of their coordinates.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no such axis.
    #[doc(alias = "get_group")]
    pub fn group(&self, axis: &str) -> Result<&Group, CommError> {
        Ok(&self.inner.axis_groups[self.axis(axis)?])
    }

    /// Returns a submesh with only these axes, in the given order: the ranks whose coordinates differ from
    /// this rank's only along them. It needs no communication; it uses the groups of the whole mesh.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if `axes` is empty, or an axis is unknown or named twice.
    #[doc(alias = "__getitem__")]
    pub fn submesh(&self, axes: &[&str]) -> Result<Self, CommError> {
        require(!axes.is_empty(), || format!("a submesh of {axes:?}: it needs an axis"))?;
        if let Some(name) = first_duplicate(axes) {
            return Err(CommError::InvalidArgument(format!("a submesh of {axes:?}: it has {name:?} twice")));
        }
        let axes = axes.iter().map(|axis| self.axis(axis)).collect::<Result<_, _>>()?;
        Ok(Self { inner: Arc::clone(&self.inner), axes })
    }

    /// Makes a new group of all ranks of this mesh; the last axis varies fastest.
    ///
    /// All ranks of the *whole* mesh call it with equal axes, also on a submesh: it makes one group for each
    /// submesh along these axes. Each call makes a new group.
    ///
    /// # Errors
    /// The errors of [`Group::subgroup`].
    ///
    /// # Cost
    /// The cost of [`Group::subgroup`].
    pub fn flatten(&self) -> Result<Group, CommError> {
        let MeshInner { group, names, shape, .. } = &*self.inner;
        let own: Vec<String> = self.axes().map(str::to_owned).collect();
        let marks = [axes_fingerprint(names, shape), axes_fingerprint(&own, &self.shape())];
        let mark = fingerprint(&marks.map(|mark| mark as usize));
        let call = group.with_fixed_deadline();
        let agreed = call.agree(&format!("a group of the axes {own:?}"), mark, [0; 2])?;
        self.inner.new_group(&call, &agreed, &self.axes)
    }

    /// Returns the index in the whole mesh of the axis with this name, if this mesh has it.
    fn axis(&self, name: &str) -> Result<usize, CommError> {
        let known = self.axes.iter().copied().find(|&axis| self.inner.names[axis] == name);
        known.ok_or_else(|| {
            let names: Vec<_> = self.axes().collect();
            CommError::InvalidArgument(format!("no axis {name:?} in a mesh of {names:?}"))
        })
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mesh")
            .field("group", &self.inner.group.name())
            .field("axes", &self.axes().zip(self.shape()).collect::<Vec<_>>())
            .field("coordinates", &self.coordinates())
            .finish_non_exhaustive()
    }
}

impl MeshInner {
    /// Makes the group of the ranks whose coordinates differ from this rank's only along `axes`, within the
    /// time limit of the handle `call`.
    fn new_group(
        &self,
        call: &Group,
        agreed: &SubgroupAgreement<'_>,
        axes: &[usize],
    ) -> Result<Group, CommError> {
        let names: Vec<&str> = axes.iter().map(|&axis| self.names[axis].as_str()).collect();
        let group = call.with_subgroup_name(&names.join("+")).form(agreed, &self.ranks(axes))?;
        group.ok_or_else(|| CommError::InvalidArgument("this rank is not in the mesh".to_owned()))
    }

    /// Returns the rank at `coordinates` along `axes`, and at this rank's coordinates along the other axes.
    fn rank_at(&self, axes: &[usize], coordinates: &[usize]) -> usize {
        let mut place = self.coordinates.clone();
        for (&axis, &at) in axes.iter().zip(coordinates) {
            place[axis] = at;
        }
        place.iter().zip(&self.shape).fold(0, |rank, (at, size)| rank * size + at)
    }

    /// Returns all ranks whose coordinates differ from this rank's only along `axes`.
    fn ranks(&self, axes: &[usize]) -> Vec<usize> {
        let shape: Vec<usize> = axes.iter().map(|&axis| self.shape[axis]).collect();
        let places = (0..shape.iter().product()).map(|place| coordinates(&shape, place));
        places.map(|coordinates| self.rank_at(axes, &coordinates)).collect()
    }
}

/// Returns the coordinates of position `place` in a mesh of this shape; the last axis varies fastest.
fn coordinates(shape: &[usize], mut place: usize) -> Vec<usize> {
    let mut coordinates = vec![0; shape.len()];
    for (at, &size) in coordinates.iter_mut().zip(shape).rev() {
        (*at, place) = (place % size, place / size);
    }
    coordinates
}

/// Returns a hash of the axes' names and sizes, by which ranks check that their axes are equal.
fn axes_fingerprint(names: &[String], shape: &[usize]) -> u64 {
    let names = names.iter().flat_map(|name| name.bytes().map(usize::from).chain([usize::MAX]));
    fingerprint(&names.chain(shape.iter().copied()).collect::<Vec<_>>())
}

fn first_duplicate<S: AsRef<str>>(names: &[S]) -> Option<&str> {
    let mut known = BTreeSet::new();
    names.iter().map(AsRef::as_ref).find(|name| !known.insert(*name))
}
