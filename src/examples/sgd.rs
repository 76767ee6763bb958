//! Distributed SGD by averaging: each rank has a part of the data and averages its gradients by hand.
//!
//! ```text
//! $ convoke --nproc-per-node=3 sgd
//! 3 ranks have [300, 300, 300] of 1000 examples, 100 are held out
//! y = 2.00 x1 - 3.00 x2 + 0.50, mean squared error 0.0001
//! ```

#![allow(clippy::print_stdout)]

use convoke_comm::{ReduceOp, init};
use convoke_train::{Random, TrainError, partition};

const EXAMPLES: usize = 1000;
const HELD_OUT: f64 = 0.1;
const RATE: f64 = 0.2;

/// Returns examples of two inputs and one output with a little noise: y = 2 x1 - 3 x2 + 0.5.
fn examples() -> Vec<([f64; 2], f64)> {
    let mut random = Random::new(1, 0);
    let mut draw = |bound: f32| f64::from(random.symmetric(bound));
    let example = |_| {
        let (x1, x2) = (draw(1.0), draw(1.0));
        ([x1, x2], 2.0 * x1 - 3.0 * x2 + 0.5 + draw(0.02))
    };
    (0..EXAMPLES).map(example).collect()
}

fn main() -> Result<(), TrainError> {
    let world = init()?;
    let examples = examples();

    // With one seed, all ranks compute the same partition: one part for each rank, and one held out.
    let share = (1.0 - HELD_OUT) / world.size() as f64;
    let fractions: Vec<f64> = std::iter::repeat_n(share, world.size()).chain([HELD_OUT]).collect();
    let parts = partition(EXAMPLES, &fractions, 7)?;
    let (mine, held_out) = (&parts[world.rank()], &parts[world.size()]);
    if world.rank() == 0 {
        let lens: Vec<usize> = parts[..world.size()].iter().map(Vec::len).collect();
        println!(
            "{} ranks have {lens:?} of {EXAMPLES} examples, {} are held out",
            world.size(),
            held_out.len()
        );
    }

    // Parameters start equal and change by equal averages, so they stay equal on all ranks.
    let mut parameters = [0.0; 3];
    let mut random = Random::new(2, world.rank() as u64);
    for _ in 0..2000 {
        let mut gradient = [0.0; 3];
        for _ in 0..16 {
            let (x, y) = examples[mine[random.below(mine.len())]];
            let error = value(&parameters, x) - y;
            let slopes = [error * x[0], error * x[1], error];
            gradient.iter_mut().zip(slopes).for_each(|(sum, slope)| *sum += slope / 16.0);
        }
        world.all_reduce(&mut gradient, ReduceOp::Avg)?;
        parameters.iter_mut().zip(gradient).for_each(|(parameter, slope)| *parameter -= RATE * slope);
    }

    let errors =
        held_out.iter().map(|&index| (value(&parameters, examples[index].0) - examples[index].1).powi(2));
    let error = errors.sum::<f64>() / held_out.len() as f64;
    if world.rank() == 0 {
        let [a, b, c] = parameters;
        println!("y = {a:.2} x1 - {:.2} x2 + {c:.2}, mean squared error {error:.4}", -b);
    }
    Ok(())
}

fn value([a, b, c]: &[f64; 3], [x1, x2]: [f64; 2]) -> f64 {
    a * x1 + b * x2 + c
}
