//! Replicas of a candle model.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use convoke_comm::{CommError, Group};
use convoke_train::{Ddp, DdpOptions, Pass, TrainError};

/// Why a call failed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ReplicaError {
    /// The ranks could not do it together.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// candle refuses: variables that are not `f32`, for example.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// As [`Display`](std::fmt::Display): what a `main` prints that returns it.
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

/// The variables of a model, the same on all ranks, and the average of their gradients. Variables are `f32`.
///
/// Those that never get a gradient, such as the running means of a batch norm, need
/// [`DdpOptions::unused_parameters`].
#[derive(Debug)]
pub struct Replicas {
    variables: Vec<(String, Var)>,
    ddp: Ddp,
}

impl Replicas {
    /// Gives all ranks of `group` the variables that rank 0 has. All call it, with models that are made alike, before the
    /// optimizer is made.
    ///
    /// # Errors
    /// [`TrainError::Layout`] if the models differ. Else as [`Group::broadcast`].
    pub fn new(group: &Group, variables: &VarMap) -> Result<Self, ReplicaError> {
        Self::with_options(group, variables, DdpOptions::default())
    }

    /// As [`Self::new`], with options.
    ///
    /// # Errors
    /// As there.
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
        // A map has another order on each rank.
        variables.sort_by(|(a, _), (b, _)| a.cmp(b));
        let sizes = variables.iter().map(|(name, var)| (name.clone(), var.elem_count()));
        let ddp = Ddp::with_options(group, sizes, options)?;
        for (_, var) in &variables {
            let mut values: Vec<f32> = var.flatten_all()?.to_vec1()?;
            group.broadcast(&mut values, 0)?;
            var.set(&Tensor::from_vec(values, var.shape(), var.device())?)?;
        }
        Ok(Self { variables, ddp })
    }

    /// The averages over all ranks of these gradients, as `loss.backward()` gives them: for the step of the optimizer.
    /// `None` on a rank that has [no batch left](Ddp::join).
    ///
    /// # Errors
    /// As [`Pass::finish`].
    pub fn average(&mut self, gradients: Option<GradStore>) -> Result<GradStore, ReplicaError> {
        let pass = self.ddp.pass();
        // candle makes no empty one.
        let nothing = || Tensor::zeros((), DType::F32, &Device::Cpu)?.backward();
        let mut gradients = gradients.map_or_else(nothing, Ok)?;
        hand_over(pass, &self.variables, &gradients)?;
        for (index, (_, var)) in
            self.variables.iter().enumerate().filter(|(index, _)| self.ddp.is_used(*index))
        {
            gradients.insert(var, Tensor::from_slice(self.ddp.average(index), var.shape(), var.device())?);
        }
        Ok(gradients)
    }

    /// Only adds these gradients up on this rank; the next [`Self::average`] sends the sum.
    ///
    /// # Errors
    /// [`ReplicaError::Candle`].
    pub fn accumulate(&mut self, gradients: &GradStore) -> Result<(), ReplicaError> {
        hand_over(self.ddp.pass_no_sync(), &self.variables, gradients)
    }

    /// Names of the variables, in the order in which all ranks have them.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.variables.iter().map(|(name, _)| name.as_str())
    }

    /// What averages them: to [join](Ddp::join), for example.
    pub fn ddp(&mut self) -> &mut Ddp {
        &mut self.ddp
    }
}

fn hand_over(
    mut pass: Pass<'_, f32>,
    variables: &[(String, Var)],
    own: &GradStore,
) -> Result<(), ReplicaError> {
    for (index, (_, var)) in variables.iter().enumerate().rev() {
        if let Some(gradient) = own.get(var) {
            pass.add(index, &gradient.flatten_all()?.to_vec1::<f32>()?)?;
        }
    }
    Ok(pass.finish()?)
}
