//! The training loop: where the ranks meet.

use std::io::{self, Write};
use std::path::Path;

use convoke_comm::{CommError, ReduceOp, World};
use nix::sys::signal::{Signal, raise};

use crate::arguments::Arguments;
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::data::{self, DataError, Example};
use crate::network::{Network, PARAMETERS};
use crate::random::fnv1a;
use crate::sampler::Sampler;

const MOMENTUM: f32 = 0.9;
/// The rank that reads, writes and prints.
const CHIEF: usize = 0;

/// Why a worker gives up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrainError {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error("--die-at names rank {rank}, the ranks here are 0 to {}", world.saturating_sub(1))]
    NoSuchRank { rank: usize, world: usize },
    #[error("the ranks ended with different parameters: hashes from {least:016x} to {most:016x}")]
    Diverged { least: i64, most: i64 },
    #[error("cannot print: {0}")]
    Output(#[from] io::Error),
}

/// Trains to the end; every rank of the job calls this.
pub(crate) fn train(arguments: &Arguments, world: &World) -> Result<(), TrainError> {
    let (rank, size) = (world.rank(), world.size());
    if let Some(at) = arguments.die_at.filter(|at| at.rank >= size) {
        return Err(TrainError::NoSuchRank { rank: at.rank, world: size });
    }
    let data = data::load(arguments.seed)?;
    let (mut network, done) = start(arguments, world)?;
    let mut sampler = Sampler::new(data.training.len(), arguments.batch, arguments.seed);
    if rank == CHIEF {
        say(format_args!(
            "{size} {}, {} images to train on, {} held out, {PARAMETERS} parameters, batch {}",
            if size == 1 { "worker" } else { "workers" },
            data.training.len(),
            data.held_out.len(),
            arguments.batch
        ))?;
        if done > 0 {
            say(format_args!(
                "going on after epoch {done}, from {}",
                shown(arguments.checkpoint.as_deref())
            ))?;
        }
    }

    for epoch in done + 1..=arguments.epochs {
        sampler.set_epoch(u64::from(epoch));
        let loss = train_epoch(arguments, world, &mut network, &sampler, &data.training, epoch)?;
        let accuracy = accuracy(world, &network, &data.held_out)?;
        if rank == CHIEF {
            // First the state, then the line that says so.
            if let Some(path) = &arguments.checkpoint {
                Checkpoint { epoch, seed: arguments.seed, network: network.clone() }.write(path)?;
            }
            if epoch % arguments.print_every == 0 || epoch == arguments.epochs {
                say(format_args!("epoch {epoch:3}   loss {loss:.4}   accuracy {:.2} %", 100.0 * accuracy))?;
            }
        }
    }
    finish(world, &network, &data.held_out)
}

/// The state to begin with, the same on all ranks: the chief's. And how many epochs it has behind it.
fn start(arguments: &Arguments, world: &World) -> Result<(Network, u32), TrainError> {
    let mut network = Network::empty();
    let mut done = [0i64];
    if world.rank() == CHIEF {
        // If this fails the chief ends here, and the others with `PeerLost` that names it.
        let saved = match &arguments.checkpoint {
            Some(path) => Checkpoint::read(path, arguments.seed)?,
            None => None,
        };
        (network, done[0]) = match saved {
            Some(saved) => (saved.network, i64::from(saved.epoch)),
            None => (Network::initial(arguments.seed), 0),
        };
    }
    world.broadcast(&mut done, CHIEF)?;
    world.broadcast(&mut network.parameters, CHIEF)?;
    world.broadcast(&mut network.velocity, CHIEF)?;
    // It was a u32 at the chief.
    Ok((network, done[0] as u32))
}

/// One pass over the training images; the mean loss over all of them.
fn train_epoch(
    arguments: &Arguments,
    world: &World,
    network: &mut Network,
    sampler: &Sampler,
    examples: &[Example],
    epoch: u32,
) -> Result<f64, TrainError> {
    let (rank, size) = (world.rank(), world.size());
    let mut total_loss = 0.0;
    // The gradient of all parameters, then the loss: one all_reduce a step.
    let mut buffer = vec![0.0f32; PARAMETERS + 1];
    for step in 0..sampler.steps() {
        if step == sampler.steps() / 2 {
            die_if_asked(arguments, world, epoch);
        }
        buffer.fill(0.0);
        let (gradient, loss) = buffer.split_at_mut(PARAMETERS);
        for index in sampler.examples_of(step, rank, size) {
            loss[0] += network.accumulate(&examples[index], gradient);
        }
        // The mean over ranks of (sum over a rank's examples) x size / (examples of all ranks) is the mean
        // over examples, also where a rank has fewer of them, or none.
        let weight = size as f32 / sampler.examples_in(step) as f32;
        buffer.iter_mut().for_each(|value| *value *= weight);
        world.all_reduce(&mut buffer, ReduceOp::Avg)?;
        network.descend(&buffer[..PARAMETERS], arguments.learning_rate, MOMENTUM);
        total_loss += f64::from(buffer[PARAMETERS]) * sampler.examples_in(step) as f64;
    }
    Ok(total_loss / examples.len() as f64)
}

/// The share of these images that the network names rightly; each rank looks at some of them.
fn accuracy(world: &World, network: &Network, examples: &[Example]) -> Result<f64, CommError> {
    let own = examples.iter().skip(world.rank()).step_by(world.size());
    let mut right = [own.filter(|example| network.predict(example) == example.label).count() as i64];
    world.all_reduce(&mut right, ReduceOp::Sum)?;
    Ok(right[0] as f64 / examples.len() as f64)
}

/// All ranks compare what they ended with.
fn finish(world: &World, network: &Network, held_out: &[Example]) -> Result<(), TrainError> {
    let accuracy = accuracy(world, network, held_out)?;
    // Any 64 bits are an i64.
    let hash = fnv1a(network.parameters.iter().flat_map(|value| value.to_le_bytes())) as i64;
    let (mut least, mut most) = ([hash], [hash]);
    world.all_reduce(&mut least, ReduceOp::Min)?;
    world.all_reduce(&mut most, ReduceOp::Max)?;
    if least != most {
        return Err(TrainError::Diverged { least: least[0], most: most[0] });
    }
    if world.rank() == CHIEF {
        say(format_args!(
            "done: accuracy {:.2} %, parameter hash {hash:016x} on {1} of {1} ranks",
            100.0 * accuracy,
            world.size()
        ))?;
    }
    Ok(())
}

fn die_if_asked(arguments: &Arguments, world: &World, epoch: u32) {
    let asked = arguments.die_at.is_some_and(|at| at.epoch == epoch && at.rank == world.rank());
    if asked && world.restart_count() == 0 {
        // Nobody can prepare for SIGKILL, as for a power failure. It cannot fail for oneself.
        let _ = raise(Signal::SIGKILL);
    }
}

fn shown(path: Option<&Path>) -> String {
    path.map_or_else(String::new, |path| path.display().to_string())
}

fn say(text: std::fmt::Arguments<'_>) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "digits: {text}")?;
    out.flush()
}
