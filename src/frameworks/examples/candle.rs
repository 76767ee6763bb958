//! Training with candle: `Ddp` averages the gradients over all ranks.
//!
//! ```text
//! $ convoke --nproc-per-node=2 candle
//! 2 ranks train hidden.bias hidden.weight output.bias output.weight
//! more than 90 % of the digits held out are right, and all ranks have equal parameters
//! ```

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, Optimizer, SGD, VarBuilder, VarMap, linear, loss};
use convoke_comm::{CommError, Group, ReduceOp, init};
use convoke_example_data::{CLASSES, Example, PIXELS};
use convoke_frameworks::candle::Replicas;
use convoke_train::Sampler;

const HIDDEN: usize = 64;
/// Number of examples in one training step, over all ranks.
const BATCH: usize = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (world, device) = (init()?, Device::Cpu);
    let data = convoke_example_data::load(1)?;
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::F32, &device);
    let model =
        [linear(PIXELS, HIDDEN, builder.pp("hidden"))?, linear(HIDDEN, CLASSES, builder.pp("output"))?];
    let mut replicas = Replicas::new(&world, &variables)?;
    let mut optimizer = SGD::new(variables.all_vars(), 0.5)?;
    if world.rank() == 0 {
        println!("{} ranks train {}", world.size(), replicas.names().collect::<Vec<_>>().join(" "));
    }

    let sampler = Sampler::new(data.training.len(), world.rank(), world.size()).shuffled(1);
    for epoch in 0..20 {
        let mut order = sampler.epoch(epoch);
        while let Some(batch) = order.next_batch(BATCH) {
            let own: Vec<&Example> = batch.own().iter().map(|&index| &data.training[index]).collect();
            let (pixels, labels) = tensors(&own, &device)?;
            let gradients = loss::cross_entropy(&forward(&model, &pixels)?, &labels)?.backward()?;
            optimizer.step(&replicas.average(Some(gradients))?)?;
        }
    }

    let own: Vec<&Example> = data.held_out.iter().skip(world.rank()).step_by(world.size()).collect();
    let (pixels, labels) = tensors(&own, &device)?;
    let hits = forward(&model, &pixels)?.argmax(1)?.eq(&labels)?.to_dtype(DType::F32)?.sum_all()?;
    let mut right = [hits.to_scalar::<f32>()?];
    world.all_reduce(&mut right, ReduceOp::Sum)?;
    let mut parameters: Vec<f32> = model[0].weight().flatten_all()?.to_vec1()?;
    parameters.extend(model[1].weight().flatten_all()?.to_vec1::<f32>()?);
    let equal = is_equal(&world, &parameters)?;
    let share = right[0] / data.held_out.len() as f32;
    if world.rank() == 0 && share > 0.9 && equal {
        println!("more than 90 % of the digits held out are right, and all ranks have equal parameters");
    }
    Ok(())
}

fn forward([hidden, output]: &[Linear; 2], pixels: &Tensor) -> candle_core::Result<Tensor> {
    output.forward(&hidden.forward(pixels)?.relu()?)
}

/// Returns true if `values` are equal on all ranks.
fn is_equal(world: &Group, values: &[f32]) -> Result<bool, CommError> {
    let (mut least, mut most) = (values.to_vec(), values.to_vec());
    world.all_reduce(&mut least, ReduceOp::Min)?;
    world.all_reduce(&mut most, ReduceOp::Max)?;
    Ok(least == most)
}

fn tensors(examples: &[&Example], device: &Device) -> candle_core::Result<(Tensor, Tensor)> {
    let pixels: Vec<f32> = examples.iter().flat_map(|example| example.pixels).collect();
    let labels: Vec<u32> = examples.iter().map(|example| example.label as u32).collect();
    let rows = examples.len();
    Ok((Tensor::from_vec(pixels, (rows, PIXELS), device)?, Tensor::from_vec(labels, rows, device)?))
}
