//! Elastic training: after a failure the job resumes from a checkpoint, with the available number of ranks.
//!
//! ```text
//! $ convoke --nproc-per-node=2 --max-restarts=1 elastic state.txt --die-at=6
//! attempt 0: 2 ranks, from example 0
//! attempt 1: 2 ranks, from example 2048
//! done: 4096 examples, weight 2.998
//! ```
//!
//! Rank 1 is killed in step 6 of the first attempt. For several nodes, which may join and leave, put the file
//! on shared storage. Then run `convoke --nnodes=1:4 --rdzv-backend=c10d --rdzv-endpoint=node0:29400` on each
//! node, followed by `--nproc-per-node=2 elastic state.txt`.

#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::path::{Path, PathBuf};
use std::process::abort;

use convoke_comm::{World, init};
use convoke_train::{Ddp, Random, Sampler, Tail, TrainError};

const EXAMPLES: usize = 4096;
/// Number of examples of all ranks in a step, and number of steps between two checkpoints.
const BATCH: usize = 512;
const STEPS: usize = 2;
const RATE: f64 = 0.9;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = PathBuf::from(arguments.next().ok_or("usage: elastic CHECKPOINT [--die-at=STEP]")?);
    let die_at = arguments.next().and_then(|word| word.strip_prefix("--die-at=")?.parse().ok());
    // A restarted worker is a new process. All its state comes from the launcher and the checkpoint.
    Ok(train(&init()?, &path, die_at)?)
}

fn train(world: &World, path: &Path, die_at: Option<usize>) -> Result<(), TrainError> {
    let (rank, size) = (world.rank(), world.size());
    let mut random = Random::new(1, 0);
    let examples: Vec<f64> = (0..EXAMPLES).map(|_| f64::from(random.symmetric(1.0))).collect();

    // One rank reads and broadcasts the state. All ranks then have the same state, even if only rank 0's host
    // has the file, or if the file changes.
    let saved = if rank == 0 { Some(read(path)) } else { None };
    let (position, mut weight): (usize, f64) = world.broadcast_object(saved, 0)?;
    if rank == 0 {
        println!("attempt {}: {size} ranks, from example {position}", world.restart_count());
    }

    // The order of examples depends only on the seed, and the position counts examples of all ranks. A run
    // that resumes with any number of ranks therefore uses each example once.
    let mut order =
        Sampler::new(EXAMPLES, rank, size).shuffled(2).tail(Tail::Uneven).epoch(0).resumed_at(position);
    let ((mut ddp, ids), mut step) = (Ddp::new(world, [("weight", 1)])?, position / BATCH);
    while let Some(batch) = order.next_batch(BATCH) {
        step += 1;
        if die_at == Some(step) && rank == 1 && world.restart_count() == 0 {
            abort();
        }
        let slopes = batch.own().iter().map(|&index| (weight - 3.0) * examples[index] * examples[index]);
        let mut pass = ddp.pass();
        // With this factor, the average over ranks is the mean over the batch, even if ranks have unequal
        // shares.
        pass.add(ids[0], &[slopes.sum::<f64>() * size as f64 / batch.examples() as f64])?;
        pass.finish()?;
        weight -= RATE * 2.0 * ddp.average(ids[0])[0];
        if rank == 0 && step % STEPS == 0 {
            write(path, order.position(), weight);
        }
    }
    if rank == 0 {
        println!("done: {} examples, weight {weight:.3}", order.position());
    }
    Ok(())
}

/// Reads a checkpoint: the position in the order of examples, and the weight.
fn read(path: &Path) -> (usize, f64) {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut words = text.split_whitespace();
    let saved =
        words.next().and_then(|word| word.parse().ok()).zip(words.next().and_then(|word| word.parse().ok()));
    saved.unwrap_or_default()
}

/// Replaces the checkpoint file atomically. If the rank dies during the write, the previous checkpoint
/// remains.
fn write(path: &Path, position: usize, weight: f64) {
    let partial = path.with_extension("partial");
    let written = std::fs::write(&partial, format!("{position} {weight}\n"));
    if let Err(error) = written.and_then(|()| std::fs::rename(partial, path)) {
        eprintln!("elastic: no checkpoint: {error}");
    }
}
