//! Averages gradients over all ranks with `Ddp`, or by hand for comparison.

use convoke_comm::{ReduceOp, World};
use convoke_train::{Ddp, DdpOptions, ParameterId, Trace};

use crate::arguments::{Arguments, Gradients};
use crate::network::{Activations, Network};
use crate::train::TrainError;
use convoke_example_data::Example;

/// Gradients averaged over all ranks. The loss is an additional last parameter: it is computed and sent
/// first.
pub(crate) enum GradientAverages<'a> {
    Ddp(Box<Ddp>, Vec<ParameterId>),
    ByHand(&'a World, Vec<Vec<f32>>),
}

impl<'a> GradientAverages<'a> {
    pub(crate) fn new(
        arguments: &Arguments,
        world: &'a World,
        network: &Network,
        trace: &Trace,
    ) -> Result<Self, TrainError> {
        let Gradients::Ddp { overlap } = arguments.gradients else {
            let zeros = network.parameters.iter().cloned().chain([vec![0.0]]).collect();
            return Ok(Self::ByHand(world, zeros));
        };
        let parameters = network.shapes().chain([("loss".to_owned(), 1)]);
        let size = arguments.bucket_bytes;
        let options = DdpOptions::default().overlap(overlap).bucket_bytes(size).first_bucket_bytes(size);
        let options = options.trace(trace);
        let (ddp, ids) = Ddp::with_options(world, parameters, options)?;
        Ok(Self::Ddp(Box::new(ddp), ids))
    }

    /// Runs the backward pass over this rank's examples, and multiplies their gradients by `weight`.
    pub(crate) fn backward(
        &mut self,
        network: &Network,
        own: &[&Example],
        activations: Activations,
        weight: f32,
        trace: &Trace,
    ) -> Result<(), TrainError> {
        let span = trace.span("backward");
        match self {
            Self::Ddp(ddp, ids) => {
                let mut pass = ddp.pass();
                network.backward(own, activations, weight, |parameter, gradient| {
                    pass.add(ids[parameter], gradient)
                })?;
                span.end();
                let _span = trace.span("wait");
                Ok(pass.finish()?)
            }
            Self::ByHand(world, gradients) => {
                network.backward(own, activations, weight, |parameter, gradient| {
                    gradients[parameter].copy_from_slice(gradient);
                    Ok::<_, TrainError>(())
                })?;
                span.end();
                let _span = trace.span("wait");
                let mut flat = gradients.concat();
                world.all_reduce(&mut flat, ReduceOp::Avg)?;
                gradients.iter_mut().flatten().zip(flat).for_each(|(gradient, average)| *gradient = average);
                Ok(())
            }
        }
    }

    pub(crate) fn average(&self, parameter: usize) -> &[f32] {
        match self {
            Self::Ddp(ddp, ids) => ddp.average(ids[parameter]),
            Self::ByHand(_, gradients) => &gradients[parameter],
        }
    }
}
