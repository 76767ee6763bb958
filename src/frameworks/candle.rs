//! Data-parallel replicas of a candle model.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use convoke_comm::{CommError, Group};
use convoke_train::{Ddp, DdpOptions, ParameterId, Pass, TrainError};

/// An error of a call of this module.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ReplicaError {
    /// Communication or averaging failed.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// candle returned an error, for example because variables are not `f32`.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// Prints the text of [`Display`](std::fmt::Display), which appears when a `main` returns this error.
impl std::fmt::Debug for ReplicaError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl From<CommError> for ReplicaError {
    fn from(error: CommError) -> Self {
        Self::Train(error.into())
    }
}

/// The variables of a model, equal on all ranks, and the averages of their gradients. Variables must be
/// `f32`.
///
/// Variables that never get a gradient, such as the running means of a batch norm, require
/// [`DdpOptions::unused_parameters`].
#[derive(Debug)]
pub struct Replicas {
    variables: Vec<(String, Var, ParameterId)>,
    ddp: Ddp,
}

impl Replicas {
    /// Broadcasts rank 0's variables to all ranks of `group`. All ranks call this function before they
    /// create the optimizer, with models of equal structure.
    ///
    /// # Errors
    /// [`TrainError::Layout`] if the models differ. Otherwise the errors of [`Group::broadcast`].
    pub fn new(group: &Group, variables: &VarMap) -> Result<Self, ReplicaError> {
        Self::with_options(group, variables, DdpOptions::default())
    }

    /// Does what [`Self::new`] does, with options.
    ///
    /// # Errors
    /// Returns the errors of [`Self::new`].
    pub fn with_options(
        group: &Group,
        variables: &VarMap,
        options: DdpOptions,
    ) -> Result<Self, ReplicaError> {
        let data =
            variables.data().lock().map_err(|_| candle_core::Error::Msg("a thread panicked".to_owned()))?;
        let mut variables: Vec<(String, Var)> =
            data.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
        drop(data);
        // The iteration order of the map differs between ranks.
        variables.sort_by(|(a, _), (b, _)| a.cmp(b));
        let sizes = variables.iter().map(|(name, var)| (name.clone(), var.elem_count()));
        let (ddp, ids) = Ddp::with_options(group, sizes, options)?;
        for (_, var) in &variables {
            let mut values: Vec<f32> = var.flatten_all()?.to_vec1()?;
            group.broadcast(&mut values, 0)?;
            var.set(&Tensor::from_vec(values, var.shape(), var.device())?)?;
        }
        let variables = variables.into_iter().zip(ids).map(|((name, var), id)| (name, var, id)).collect();
        Ok(Self { variables, ddp })
    }

    /// Averages the gradients of `loss.backward()` over all ranks and returns the averages for the
    /// optimizer's step. A rank that has [no batch left](Ddp::join) passes `None`.
    ///
    /// # Errors
    /// Returns the errors of [`Pass::finish`].
    pub fn average(&mut self, gradients: Option<GradStore>) -> Result<GradStore, ReplicaError> {
        let pass = self.ddp.pass();
        // candle offers no way to create an empty `GradStore`.
        let nothing = || Tensor::zeros((), DType::F32, &Device::Cpu)?.backward();
        let mut gradients = gradients.map_or_else(nothing, Ok)?;
        add_gradients(pass, &self.variables, &gradients)?;
        for (_, var, id) in self.variables.iter().filter(|(.., id)| self.ddp.is_used(*id)) {
            gradients.insert(var, Tensor::from_slice(self.ddp.average(*id), var.shape(), var.device())?);
        }
        Ok(gradients)
    }

    /// Adds these gradients to this rank's sum, and sends nothing. The next [`Self::average`] sends
    /// the sum.
    ///
    /// # Errors
    /// [`ReplicaError::Candle`], for example if a gradient is not `f32`.
    pub fn accumulate(&mut self, gradients: &GradStore) -> Result<(), ReplicaError> {
        add_gradients(self.ddp.pass_no_sync(), &self.variables, gradients)
    }

    /// Names of the variables, in the order that all ranks use.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.variables.iter().map(|(name, ..)| name.as_str())
    }

    /// The `Ddp` that averages the gradients, for example to [join](Ddp::join).
    pub fn ddp(&mut self) -> &mut Ddp {
        &mut self.ddp
    }
}

fn add_gradients(
    mut pass: Pass<'_, f32>,
    variables: &[(String, Var, ParameterId)],
    own: &GradStore,
) -> Result<(), ReplicaError> {
    for (_, var, id) in variables.iter().rev() {
        if let Some(gradient) = own.get(var) {
            pass.add(*id, &gradient.flatten_all()?.to_vec1::<f32>()?)?;
        }
    }
    Ok(pass.finish()?)
}
