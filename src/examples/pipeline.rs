//! Model parallelism over two groups: each of two stages has half of the network and several ranks.
//!
//! ```text
//! $ convoke --nproc-per-node=4 pipeline
//! 2 stages of 2 ranks; rank 0 is stage 0 and works with rank 2
//! step   1 loss 0.332
//! step 300 loss 0.000
//! ```
//!
//! The network y = w2 (w1 x) learns y = x. Stage 0 holds w1, stage 1 holds w2. A batch is split into parts,
//! so that both stages compute concurrently (GPipe, Huang et al. 2019, arXiv:1811.06965).

#![allow(clippy::print_stdout)]

use std::collections::VecDeque;

use convoke_comm::{CommError, Group, Mesh, ReduceOp, init, op};
use convoke_train::Random;

const STAGES: usize = 2;
/// Number of parts of a batch, and number of examples in each part.
const PARTS: usize = 4;
const EXAMPLES: usize = 64;
const STEPS: usize = 300;
const RATE: f32 = 0.2;
/// Tags of messages forward and backward.
const ACTIVATION: u32 = 0;
const GRADIENT: u32 = 1;

fn main() -> Result<(), CommError> {
    let world = init()?;
    // Ranks along "pp" are the stages of one pipeline; ranks along "dp" hold copies of a stage.
    let mesh = Mesh::new(&world, &[("pp", STAGES), ("dp", world.size() / STAGES)])?;
    let (pipeline, copies, stage) = (mesh.group("pp")?, mesh.group("dp")?, mesh.local_rank("pp")?);
    if world.rank() == 0 {
        let other = pipeline.global_ranks()[1];
        println!(
            "{STAGES} stages of {} ranks; rank 0 is stage {stage} and works with rank {other}",
            copies.size()
        );
    }
    // Each pipeline draws different examples. All stages of a pipeline draw equal examples.
    let mut random = Random::new(5, copies.rank() as u64);
    let mut weight = if stage == 1 { 0.5 } else { 0.0 };
    for step in 1..=STEPS {
        let parts: Vec<Vec<f32>> =
            (0..PARTS).map(|_| (0..EXAMPLES).map(|_| random.symmetric(1.0)).collect()).collect();
        let run_stage = if stage == 0 { first_stage } else { last_stage };
        let (slope, loss) = run_stage(pipeline, weight, &parts)?;

        // Averages each part of the network over its copies. The groups of both stages run concurrently.
        let mut shared = [slope, loss];
        copies.all_reduce(&mut shared, ReduceOp::Avg)?;
        weight -= RATE * shared[0];

        // Only the last stage knows the loss.
        let mut loss = [shared[1]];
        pipeline.broadcast(&mut loss, STAGES - 1)?;
        if world.rank() == 0 && (step == 1 || step == STEPS) {
            println!("step {step:3} loss {:.3}", loss[0]);
        }
    }
    Ok(())
}

/// Stage 0: sends the activations of all parts to stage 1, and then receives their gradients.
fn first_stage(pipeline: &Group, weight: f32, parts: &[Vec<f32>]) -> Result<(f32, f32), CommError> {
    let mut sending = VecDeque::new();
    for part in parts {
        let activation: Vec<f32> = part.iter().map(|x| weight * x).collect();
        // The rank does not wait for the send, and computes the next part while the message is sent.
        sending.push_back(pipeline.start(op::send(activation, 1).tag(ACTIVATION))?);
    }
    let mut slope = 0.0;
    for part in parts {
        let mut gradient = vec![0.0; part.len()];
        pipeline.recv(&mut gradient, 1, GRADIENT)?;
        slope += gradient.iter().zip(part).map(|(gradient, x)| gradient * x).sum::<f32>();
    }
    sending.into_iter().try_for_each(|work| work.wait().map(drop))?;
    Ok((slope, 0.0))
}

/// Stage 1: computes the loss of each part, and sends the gradient of the part back to stage 0 at once.
fn last_stage(pipeline: &Group, weight: f32, parts: &[Vec<f32>]) -> Result<(f32, f32), CommError> {
    let (mut slope, mut loss, count) = (0.0, 0.0, (parts.len() * EXAMPLES) as f32);
    for part in parts {
        let mut activation = vec![0.0; part.len()];
        pipeline.recv(&mut activation, 0, ACTIVATION)?;
        let errors: Vec<f32> = activation.iter().zip(part).map(|(a, target)| weight * a - target).collect();
        loss += errors.iter().map(|error| error * error).sum::<f32>() / count;
        slope += errors.iter().zip(&activation).map(|(error, a)| error * a).sum::<f32>() / count;
        let gradient: Vec<f32> = errors.iter().map(|error| error * weight / count).collect();
        pipeline.send(&gradient, 0, GRADIENT)?;
    }
    Ok((slope, loss))
}
