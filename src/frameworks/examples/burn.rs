//! Training with burn: `Ddp` averages the gradients over all ranks.
//!
//! ```text
//! $ convoke --nproc-per-node=2 burn
//! 2 ranks train 4 parameters with 4810 values
//! more than 90 % of the digits held out are right, and all ranks have equal parameters
//! ```

use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig, Relu};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use convoke_comm::{CommError, Group, ReduceOp, init};
use convoke_example_data::{CLASSES, Example, PIXELS};
use convoke_frameworks::burn::Replicas;
use convoke_train::Sampler;

const HIDDEN: usize = 64;
/// Number of examples in one training step, over all ranks.
const BATCH: usize = 64;

#[derive(Module, Debug)]
struct Model {
    hidden: Linear,
    activation: Relu,
    output: Linear,
}

impl Model {
    fn forward(&self, pixels: Tensor<2>) -> Tensor<2> {
        self.output.forward(self.activation.forward(self.hidden.forward(pixels)))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (world, data) = (init()?, convoke_example_data::load(1)?);
    let device = Device::flex().autodiff();
    let model = Model {
        hidden: LinearConfig::new(PIXELS, HIDDEN).init(&device),
        activation: Relu::new(),
        output: LinearConfig::new(HIDDEN, CLASSES).init(&device),
    };
    let (mut replicas, mut model) = Replicas::new(&world, model)?;
    if world.rank() == 0 {
        let parameters = replicas.ddp().parameters().len();
        println!("{} ranks train {parameters} parameters with {} values", world.size(), model.num_params());
    }

    let (mut optimizer, loss) = (SgdConfig::new().init(), CrossEntropyLossConfig::new().init(&device));
    let sampler = Sampler::new(data.training.len(), world.rank(), world.size()).shuffled(1);
    for epoch in 0..20 {
        let mut order = sampler.epoch(epoch);
        while let Some(batch) = order.next_batch(BATCH) {
            let own: Vec<&Example> = batch.own().iter().map(|&index| &data.training[index]).collect();
            let (pixels, labels) = tensors(&own, &device);
            let gradients = loss.forward(model.forward(pixels), labels).backward();
            let own = GradientsParams::from_grads(gradients, &model);
            let averages = replicas.average(&model, own)?;
            model = optimizer.step(0.5, model, averages);
        }
    }

    let own: Vec<&Example> = data.held_out.iter().skip(world.rank()).step_by(world.size()).collect();
    let (pixels, labels) = tensors(&own, &device);
    let hits = model.forward(pixels).argmax(1).flatten::<1>(0, 1).equal(labels).int().sum();
    let mut right = [hits.into_scalar::<i64>() as f32];
    world.all_reduce(&mut right, ReduceOp::Sum)?;
    let weights = |layer: &Linear| layer.weight.val().into_data_as::<f32>().try_to_vec::<f32>();
    let parameters = [weights(&model.hidden)?, weights(&model.output)?].concat();
    let equal = is_equal(&world, &parameters)?;
    let share = right[0] / data.held_out.len() as f32;
    if world.rank() == 0 && share > 0.9 && equal {
        println!("more than 90 % of the digits held out are right, and all ranks have equal parameters");
    }
    Ok(())
}

/// Returns true if `values` are equal on all ranks.
fn is_equal(world: &Group, values: &[f32]) -> Result<bool, CommError> {
    let (mut least, mut most) = (values.to_vec(), values.to_vec());
    world.all_reduce(&mut least, ReduceOp::Min)?;
    world.all_reduce(&mut most, ReduceOp::Max)?;
    Ok(least == most)
}

fn tensors(examples: &[&Example], device: &Device) -> (Tensor<2>, Tensor<1, Int>) {
    let pixels: Vec<f32> = examples.iter().flat_map(|example| example.pixels).collect();
    let labels: Vec<i32> = examples.iter().map(|example| example.label as i32).collect();
    let rows = examples.len();
    let pixels = Tensor::from_data(TensorData::new(pixels, [rows, PIXELS]), device);
    (pixels, Tensor::from_data(TensorData::new(labels, [rows]), device))
}
