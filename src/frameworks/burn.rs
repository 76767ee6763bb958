//! Replicas of a burn module.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};
use convoke_comm::Group;
use convoke_train::{Ddp, DdpOptions, Pass, TrainError};

/// The average of a module's gradients over all ranks. Parameters are `f32`.
#[derive(Debug)]
pub struct Replicas {
    ddp: Ddp,
}

impl Replicas {
    /// Gives all ranks of `group` the parameters that rank 0 has. All call it, with modules that are made alike.
    ///
    /// # Errors
    /// [`TrainError::Layout`] if the modules differ. Else as [`Group::broadcast`].
    pub fn new<M: Module>(group: &Group, module: M) -> Result<(Self, M), TrainError> {
        Self::with_options(group, module, DdpOptions::default())
    }

    /// As [`Self::new`], with options.
    ///
    /// # Errors
    /// As there.
    pub fn with_options<M: Module>(
        group: &Group,
        module: M,
        options: DdpOptions,
    ) -> Result<(Self, M), TrainError> {
        let mut sizes = Sizes(Vec::new());
        module.visit(&mut sizes);
        let ddp = Ddp::with_options(group, sizes.0, options)?;
        let mut equal = Equal { group, result: Ok(()) };
        let module = module.map(&mut equal);
        equal.result?;
        Ok((Self { ddp }, module))
    }

    /// The averages over all ranks of these gradients of `module`, for the optimizer.
    ///
    /// # Errors
    /// As [`Pass::finish`].
    pub fn average<M: Module>(
        &mut self,
        module: &M,
        own: GradientsParams,
    ) -> Result<GradientsParams, TrainError> {
        let sent = {
            let mut send = Send { pass: self.ddp.pass(), own, index: 0, result: Ok(()) };
            module.visit(&mut send);
            let Send { pass, result, .. } = send;
            result.and_then(|()| pass.finish())
        };
        sent?;
        let mut receive = Receive { ddp: &self.ddp, averages: GradientsParams::new(), index: 0 };
        module.visit(&mut receive);
        Ok(receive.averages)
    }

    /// What averages them: to [join](Ddp::join), for example.
    pub fn ddp(&mut self) -> &mut Ddp {
        &mut self.ddp
    }
}

// A module is visited in the same order each time, on all ranks: a parameter is known by its place in it.

struct Sizes(Vec<(String, usize)>);

impl ModuleVisitor for Sizes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push((format!("parameter {}", self.0.len()), param.lazy_shape().num_elements()));
    }
}

/// Gives all ranks what rank 0 has.
struct Equal<'a> {
    group: &'a Group,
    result: Result<(), TrainError>,
}

impl ModuleMapper for Equal<'_> {
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

/// Hands over this rank's gradients.
struct Send<'a> {
    pass: Pass<'a, f32>,
    own: GradientsParams,
    index: usize,
    result: Result<(), TrainError>,
}

impl ModuleVisitor for Send<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let (Some(gradient), Ok(())) = (self.own.remove::<D>(param.id), &self.result) {
            self.result = self.pass.add(self.index, &floats(gradient));
        }
        self.index += 1;
    }
}

/// Takes the averages.
struct Receive<'a> {
    ddp: &'a Ddp,
    averages: GradientsParams,
    index: usize,
}

impl ModuleVisitor for Receive<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.ddp.is_used(self.index) {
            let values = TensorData::new(self.ddp.average(self.index).to_vec(), param.lazy_shape());
            self.averages.register::<D>(param.id, Tensor::from_data(values, &param.lazy_device().inner()));
        }
        self.index += 1;
    }
}

fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    let data = tensor.into_data_as::<f32>();
    data.as_slice().map(<[f32]>::to_vec).unwrap_or_default()
}
