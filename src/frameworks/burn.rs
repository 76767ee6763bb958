//! Data-parallel replicas of a burn module.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};
use convoke_comm::Group;
use convoke_train::{Ddp, DdpOptions, ParameterId, Pass, TrainError};

/// Averages a module's gradients over all ranks. Parameters must be `f32`.
#[derive(Debug)]
pub struct Replicas {
    ddp: Ddp,
}

impl Replicas {
    /// Broadcasts rank 0's parameters to all ranks of `group`. All ranks call this function, with modules of
    /// equal structure.
    ///
    /// # Errors
    /// [`TrainError::Layout`] if the modules differ. Otherwise the errors of [`Group::broadcast`].
    pub fn new<M: Module>(group: &Group, module: M) -> Result<(Self, M), TrainError> {
        Self::with_options(group, module, DdpOptions::default())
    }

    /// Does what [`Self::new`] does, with options.
    ///
    /// # Errors
    /// Returns the errors of [`Self::new`].
    pub fn with_options<M: Module>(
        group: &Group,
        module: M,
        options: DdpOptions,
    ) -> Result<(Self, M), TrainError> {
        let mut sizes = CollectSizes::default();
        module.visit(&mut sizes);
        let (ddp, _) = Ddp::with_options(group, sizes.sizes, options)?;
        let mut broadcast = BroadcastParameters { group, result: Ok(()) };
        let module = module.map(&mut broadcast);
        broadcast.result?;
        Ok((Self { ddp }, module))
    }

    /// Averages these gradients of `module` over all ranks and returns the averages for the optimizer. A rank
    /// that has [no batch left](Ddp::join) passes `GradientsParams::new()`.
    ///
    /// # Errors
    /// Returns the errors of [`Pass::finish`].
    pub fn average<M: Module>(
        &mut self,
        module: &M,
        own: GradientsParams,
    ) -> Result<GradientsParams, TrainError> {
        let ids = self.ddp.parameters();
        add_gradients(self.ddp.pass(), &ids, module, own)?;
        let parameters = self.ddp.parameters().into_iter();
        let mut receive = CollectAverages { ddp: &self.ddp, averages: GradientsParams::new(), parameters };
        module.visit(&mut receive);
        Ok(receive.averages)
    }

    /// Adds these gradients to this rank's sum, and sends nothing. The next [`Self::average`] sends the sum.
    ///
    /// # Errors
    /// [`TrainError::InvalidArgument`] if the gradients are from another module.
    pub fn accumulate<M: Module>(&mut self, module: &M, own: GradientsParams) -> Result<(), TrainError> {
        let ids = self.ddp.parameters();
        add_gradients(self.ddp.pass_no_sync(), &ids, module, own)
    }

    /// The `Ddp` that averages the gradients, for example to [join](Ddp::join).
    pub fn ddp(&mut self) -> &mut Ddp {
        &mut self.ddp
    }
}

fn add_gradients<M: Module>(
    mut pass: Pass<'_, f32>,
    ids: &[ParameterId],
    module: &M,
    own: GradientsParams,
) -> Result<(), TrainError> {
    let mut collect = CollectGradients { own, gradients: Vec::new() };
    module.visit(&mut collect);
    if collect.gradients.len() != ids.len() {
        let (theirs, ours) = (collect.gradients.len(), ids.len());
        return Err(TrainError::InvalidArgument(format!("a module of {theirs} parameters, not {ours}")));
    }
    // The last parameter comes first, because buckets are filled from the last parameter to the first.
    for (&id, gradient) in ids.iter().zip(&collect.gradients).rev() {
        if let Some(gradient) = gradient {
            pass.add(id, gradient)?;
        }
    }
    pass.finish()
}

// All ranks visit a module in one fixed order, so the position of a parameter in that order identifies it.
// Parameters that need no gradients, such as the running means of a batch norm, have no position.

/// Collects names and sizes of the parameters.
#[derive(Default)]
struct CollectSizes {
    path: Vec<String>,
    sizes: Vec<(String, usize)>,
}

impl ModuleVisitor for CollectSizes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.val().is_require_grad() {
            // The visitor knows only the layer's name, so the number makes the name unique.
            let name = format!("{}.{}", self.path.join("."), self.sizes.len());
            self.sizes.push((name, param.lazy_shape().num_elements()));
        }
    }

    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
}

/// Broadcasts rank 0's parameters.
struct BroadcastParameters<'a> {
    group: &'a Group,
    result: Result<(), TrainError>,
}

impl ModuleMapper for BroadcastParameters<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.result.is_err() {
            return param;
        }
        param.map(|tensor| {
            let (device, shape, tracked) = (tensor.device(), tensor.shape(), tensor.is_require_grad());
            let mut values = floats(tensor);
            self.result = self.group.broadcast(&mut values, 0).map_err(TrainError::from);
            Tensor::from_data(TensorData::new(values, shape), &device).set_require_grad(tracked)
        })
    }
}

/// Collects this rank's gradients.
struct CollectGradients {
    own: GradientsParams,
    gradients: Vec<Option<Vec<f32>>>,
}

impl ModuleVisitor for CollectGradients {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.val().is_require_grad() {
            self.gradients.push(self.own.remove::<D>(param.id).map(floats));
        }
    }
}

/// Collects the averaged gradients for the optimizer.
struct CollectAverages<'a> {
    ddp: &'a Ddp,
    averages: GradientsParams,
    parameters: std::vec::IntoIter<ParameterId>,
}

impl ModuleVisitor for CollectAverages<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.val().is_require_grad() {
            return;
        }
        let id = self.parameters.next().expect("the module from which the replicas were made");
        if self.ddp.is_used(id) {
            let values = TensorData::new(self.ddp.average(id).to_vec(), param.lazy_shape());
            self.averages.register::<D>(param.id, Tensor::from_data(values, &param.lazy_device().inner()));
        }
    }
}

fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    let data = tensor.into_data_as::<f32>();
    data.as_slice().map(<[f32]>::to_vec).unwrap_or_default()
}
