//! Distributed data parallel training: overlapped gradient averaging, gradient accumulation, uneven inputs.
//!
//! ```text
//! $ convoke --nproc-per-node=2 ddp
//! 2 ranks, buckets of parameters [[3], [2, 1], [0]]
//! epoch 1 loss 0.043
//! epoch 2 loss 0.002
//! epoch 3 loss 0.001
//! ```

#![allow(clippy::print_stdout)]

use convoke_comm::{ReduceOp, init};
use convoke_train::{Ddp, DdpOptions, Joined, Random, Sampler, Tail, TrainError};

/// Number of units of the hidden layer. The network learns y = x1 x2.
const UNITS: usize = 32;
const RATE: f32 = 0.16;
/// Number of examples of all ranks in a backward pass, and number of passes in a step.
const BATCH: usize = 8;
const PASSES: usize = 2;

fn main() -> Result<(), TrainError> {
    let (world, mut random) = (init()?, Random::new(3, 0));
    let examples: Vec<[f32; 2]> = (0..4001).map(|_| [random.symmetric(1.0), random.symmetric(1.0)]).collect();
    // All ranks use one seed, so their initial parameters are equal.
    let mut parameters = [2 * UNITS, UNITS, UNITS, 1].map(|len| vec![0.0; len]);
    parameters[..3].iter_mut().for_each(|values| values.fill_with(|| random.symmetric(0.5)));

    // Names and sizes of parameters, in the order of the forward pass. Small limits give several buckets.
    let shapes = ["weights1", "bias1", "weights2", "bias2"].into_iter().zip(parameters.iter().map(Vec::len));
    let options = DdpOptions::default().first_bucket_bytes(4).bucket_bytes(200);
    let (mut ddp, ids) = Ddp::with_options(&world, shapes, options)?;
    if world.rank() == 0 {
        println!("{} ranks, buckets of parameters {:?}", world.size(), ddp.buckets());
    }
    // With this factor, averages over ranks become means over all examples of a step.
    let scale = world.size() as f32 / (BATCH * PASSES) as f32;
    let sampler = Sampler::new(examples.len(), world.rank(), world.size()).shuffled(4).tail(Tail::Uneven);
    for epoch in 1..=3 {
        let (mut order, mut loss) = (sampler.epoch(epoch), [0.0]);
        // Some ranks have fewer examples than others; `join` keeps them in the collectives until the end.
        let mut next_step = || {
            let batches: Vec<_> = std::iter::from_fn(|| order.next_batch(BATCH)).take(PASSES).collect();
            batches.iter().any(|batch| !batch.own().is_empty()).then_some(batches)
        };
        loop {
            let batches = match ddp.join(next_step())? {
                Joined::Batch(batches) => batches,
                Joined::Help => ddp.pass().finish().map(|()| Vec::new())?,
                Joined::Done => break,
            };
            for (index, batch) in batches.iter().enumerate() {
                // All passes of a step except the last only accumulate gradients.
                let mut pass = if index + 1 == batches.len() { ddp.pass() } else { ddp.pass_no_sync() };
                let own = batch.own().iter().map(|&index| examples[index]);
                let gradients = backward(&parameters, own, scale, &mut loss[0]);
                for parameter in (0..4).rev() {
                    pass.add(ids[parameter], &gradients[parameter])?;
                }
                pass.finish()?;
            }
            for (&id, values) in ids.iter().zip(&mut parameters) {
                values.iter_mut().zip(ddp.average(id)).for_each(|(value, slope)| *value -= RATE * slope);
            }
        }
        world.all_reduce(&mut loss, ReduceOp::Sum)?;
        if world.rank() == 0 {
            println!("epoch {epoch} loss {:.3}", loss[0] / examples.len() as f32);
        }
    }
    Ok(())
}

/// Returns the gradients of some examples, times `scale`. Adds the squared errors to `loss`.
fn backward(
    parameters: &[Vec<f32>; 4],
    batch: impl Iterator<Item = [f32; 2]>,
    scale: f32,
    loss: &mut f32,
) -> [Vec<f32>; 4] {
    let mut gradients = parameters.each_ref().map(|values| vec![0.0; values.len()]);
    for x in batch {
        let input = |unit: usize| parameters[0][2 * unit] * x[0] + parameters[0][2 * unit + 1] * x[1];
        let hidden: Vec<f32> = (0..UNITS).map(|unit| (input(unit) + parameters[1][unit]).tanh()).collect();
        let output: f32 = hidden.iter().zip(&parameters[2]).map(|(h, w)| h * w).sum();
        let error = output + parameters[3][0] - x[0] * x[1];
        *loss += error * error;
        let error = scale * error;
        gradients[3][0] += error;
        for unit in 0..UNITS {
            gradients[2][unit] += error * hidden[unit];
            let slope = error * parameters[2][unit] * (1.0 - hidden[unit] * hidden[unit]);
            gradients[1][unit] += slope;
            (0..2).for_each(|side| gradients[0][2 * unit + side] += slope * x[side]);
        }
    }
    gradients
}
