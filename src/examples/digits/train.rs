//! The training loop of `digits` and its communication.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use convoke_comm::{CommError, ReduceOp, World, op};
use convoke_train::{Sampler, Tail, Trace, TrainError as DdpError};
use nix::sys::signal::{Signal, raise};

use crate::arguments::{Arguments, ComputeDevice};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::device::DeviceTraining;
use crate::gradient_averages::GradientAverages;
use crate::hash::fnv1a;
use crate::network::Network;
use convoke_example_data::{self as data, DataError, Example};

const MOMENTUM: f32 = 0.9;
/// The rank that reads and writes the checkpoint and prints results.
const ROOT: usize = 0;

#[derive(Debug, thiserror::Error)]
pub(crate) enum TrainError {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Ddp(#[from] DdpError),
    #[error("cannot write the trace {}: {source}", path.display())]
    Trace { path: PathBuf, source: io::Error },
    #[error("--die-at names rank {rank}, the ranks here are 0 to {}", world.saturating_sub(1))]
    NoSuchRank { rank: usize, world: usize },
    #[error("the ranks ended with different parameters: hashes from {least:016x} to {most:016x}")]
    Diverged { least: i64, most: i64 },
    #[error(
        "a batch of {batch} for layers of up to {units} units is too large for a GPU; lower --batch or --hidden"
    )]
    TooLarge { batch: usize, units: usize },
    #[error("cannot print: {0}")]
    Output(#[from] io::Error),
}

/// The way in which training ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Finished,
    /// The job is being drained. The checkpoint has the state, and another run continues there.
    Drained,
}

/// A place in the training: completed epochs, completed steps of the next epoch, and their losses.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    epochs: u32,
    steps: u32,
    total_loss: f64,
}

/// Trains the network for all epochs. Every rank of the job calls this function.
pub(crate) fn train(arguments: &Arguments, world: &World) -> Result<Outcome, TrainError> {
    let (rank, size) = (world.rank(), world.size());
    if let Some(at) = arguments.die_at.filter(|at| at.rank >= size) {
        return Err(TrainError::NoSuchRank { rank: at.rank, world: size });
    }
    if let Some(path) = arguments.trace.as_ref().filter(|_| rank == ROOT) {
        // The path of the trace is tested here, so that an unwritable path fails before training, not after
        // it.
        File::create(path).map_err(|source| TrainError::Trace { path: path.clone(), source })?;
    }
    let data = data::load(arguments.seed)?;
    let (network, done) = start(arguments, world)?;
    if rank == ROOT {
        print_line(format_args!(
            "{size} {}, {} images to train on, {} held out, {} parameters, batch {}",
            if size == 1 { "worker" } else { "workers" },
            data.training.len(),
            data.held_out.len(),
            network.len(),
            arguments.batch
        ))?;
        if let Some(path) = arguments.checkpoint.as_ref().filter(|_| done.epochs + done.steps > 0) {
            let steps = if done.steps > 0 { format!(" and {} steps", done.steps) } else { String::new() };
            print_line(format_args!("going on after epoch {}{steps}, from {}", done.epochs, path.display()))?;
        }
    }
    // Each example is used once per epoch. If a rank has one example less, its contribution weighs less.
    let sampler = Sampler::new(data.training.len(), rank, size).shuffled(arguments.seed).tail(Tail::Uneven);
    let trace = if arguments.trace.is_some() { Trace::default() } else { Trace::off() };
    let backend = match arguments.device {
        ComputeDevice::Cpu => Backend::Host(GradientAverages::new(arguments, world, &network, &trace)?),
        ComputeDevice::Cuda | ComputeDevice::Staged => {
            let device_training =
                DeviceTraining::new(arguments, world, &network, &data.training, &trace, MOMENTUM)?;
            Backend::Device(Box::new(device_training))
        }
    };
    let mut training = Training { backend, trace, network, arguments, world };
    let mut times = Vec::new();
    let mut resume = done;
    for epoch in done.epochs + 1..=arguments.epochs {
        let begin = Instant::now();
        let (progress, is_drained) =
            training.epoch(&sampler, &data.training, std::mem::take(&mut resume), epoch)?;
        if is_drained {
            if rank == ROOT {
                let Progress { steps, total_loss, .. } = progress;
                if let Some(path) = &arguments.checkpoint {
                    let (network, seed) = (training.network.clone(), arguments.seed);
                    Checkpoint { epoch: epoch - 1, step: steps, total_loss, seed, network }.write(path)?;
                }
                print_line(format_args!("drained after epoch {} and {steps} steps", epoch - 1))?;
            }
            // No rank ends before the checkpoint is complete.
            world.barrier()?;
            return Ok(Outcome::Drained);
        }
        let loss = progress.total_loss / data.training.len() as f64;
        times.push(begin.elapsed() / progress.steps.max(1));
        let network = &training.network;
        let accuracy = accuracy(world, network, &data.held_out)?;
        if rank == ROOT {
            // The checkpoint is written before the line that reports the epoch.
            if let Some(path) = &arguments.checkpoint {
                let (network, seed) = (network.clone(), arguments.seed);
                Checkpoint { epoch, step: 0, total_loss: 0.0, seed, network }.write(path)?;
            }
            if epoch % arguments.print_every == 0 || epoch == arguments.epochs {
                print_line(format_args!(
                    "epoch {epoch:3}   loss {loss:.4}   accuracy {:.2} %",
                    100.0 * accuracy
                ))?;
            }
        }
    }
    if let Some(path) = &arguments.trace {
        training.trace.write(world, path)?;
    }
    finish(world, &training.network, &data.held_out, times)?;
    Ok(Outcome::Finished)
}

/// Returns rank 0's initial state and its progress on all ranks.
fn start(arguments: &Arguments, world: &World) -> Result<(Network, Progress), TrainError> {
    let hidden = &arguments.hidden;
    let mut network = Network::empty(hidden);
    let (mut done, mut total_loss) = ([0_u32; 2], [0.0_f64]);
    if world.rank() == ROOT {
        // If reading the checkpoint fails, rank 0 ends here, and the other ranks end with a `PeerLost` error
        // that names it.
        let path = arguments.checkpoint.as_deref();
        let saved = path.map(|path| Checkpoint::read(path, arguments.seed, hidden)).transpose()?.flatten();
        network = match saved {
            Some(saved) => {
                (done, total_loss) = ([saved.epoch, saved.step], [saved.total_loss]);
                saved.network
            }
            None => Network::initial(hidden, arguments.seed),
        };
    }
    world.broadcast(&mut done, ROOT)?;
    world.broadcast(&mut total_loss, ROOT)?;
    let buffers = network.parameters.iter_mut().chain(&mut network.velocity);
    world.run(buffers.map(|buffer| op::broadcast(buffer, ROOT)).collect::<Vec<_>>())?;
    Ok((network, Progress { epochs: done[0], steps: done[1], total_loss: total_loss[0] }))
}

struct Training<'a> {
    arguments: &'a Arguments,
    world: &'a World,
    /// The network. With a GPU, this is a copy from the end of the last epoch.
    network: Network,
    backend: Backend<'a>,
    trace: Trace,
}

enum Backend<'a> {
    Host(GradientAverages<'a>),
    Device(Box<DeviceTraining>),
}

impl Training<'_> {
    /// Runs one epoch, from the steps of `done` on. Returns the steps with their losses, and true if the job is
    /// being drained. The epoch is then not complete.
    fn epoch(
        &mut self,
        sampler: &Sampler,
        examples: &[Example],
        done: Progress,
        epoch: u32,
    ) -> Result<(Progress, bool), TrainError> {
        let Progress { mut total_loss, mut steps, .. } = done;
        let mut order = sampler.epoch(u64::from(epoch)).resumed_at(steps as usize * self.arguments.batch);
        let mut is_drained = false;
        while let Some(batch) = order.next_batch(self.arguments.batch) {
            if order.position() > examples.len() / 2 {
                self.die_if_requested(epoch);
            }
            // The mean over ranks of (sum over a rank's examples) x size / (examples of all ranks) is the
            // mean over examples. This holds even if a rank has fewer examples, or none.
            let weight = self.world.size() as f32 / batch.examples() as f32;
            match &mut self.backend {
                Backend::Host(averages) => {
                    let own: Vec<&Example> = batch.own().iter().map(|&index| &examples[index]).collect();
                    let rate = self.arguments.learning_rate;
                    let loss = step(averages, &mut self.network, &own, weight, rate, &self.trace)?;
                    total_loss += f64::from(loss) * batch.examples() as f64;
                }
                Backend::Device(device_training) => {
                    device_training.step(batch.own(), weight, batch.examples())?
                }
            }
            steps += 1;
            // All ranks get one answer, so they stop after one step.
            is_drained = order.position() < examples.len() && self.world.drain()?;
            if is_drained {
                break;
            }
        }
        if let Backend::Device(device_training) = &mut self.backend {
            total_loss += device_training.end_epoch(&mut self.network)?;
        }
        Ok((Progress { epochs: epoch - 1, steps, total_loss }, is_drained))
    }

    fn die_if_requested(&self, epoch: u32) {
        let (rank, first) = (self.world.rank(), self.world.restart_count() == 0);
        if first && self.arguments.die_at.is_some_and(|at| at.epoch == epoch && at.rank == rank) {
            // SIGKILL cannot be caught, so it acts like a power failure. A signal to the own process cannot
            // fail.
            let _ = raise(Signal::SIGKILL);
        }
    }
}

/// Runs one step on the host. `own` are this rank's examples of the batch. Returns the mean loss.
fn step(
    averages: &mut GradientAverages<'_>,
    network: &mut Network,
    own: &[&Example],
    weight: f32,
    rate: f32,
    trace: &Trace,
) -> Result<f32, TrainError> {
    let span = trace.span("forward");
    let activations = network.forward(own);
    span.end();
    averages.backward(network, own, activations, weight, trace)?;
    let _span = trace.span("step");
    let loss = network.parameters.len();
    for parameter in 0..loss {
        network.sgd_step(parameter, averages.average(parameter), rate, MOMENTUM);
    }
    Ok(averages.average(loss)[0])
}

/// Returns the share of correctly classified images. Each rank classifies a part of them.
fn accuracy(world: &World, network: &Network, examples: &[Example]) -> Result<f64, CommError> {
    let own = examples.iter().skip(world.rank()).step_by(world.size());
    let mut right = [own.filter(|example| network.predict(example) == example.label).count() as i64];
    world.all_reduce(&mut right, ReduceOp::Sum)?;
    Ok(right[0] as f64 / examples.len() as f64)
}

/// Verifies that all ranks have equal parameters. Rank 0 prints the accuracy and the hash of the parameters.
fn finish(
    world: &World,
    network: &Network,
    held_out: &[Example],
    mut times: Vec<Duration>,
) -> Result<(), TrainError> {
    let accuracy = accuracy(world, network, held_out)?;
    // The conversion of the hash to `i64` keeps all 64 bits.
    let hash = fnv1a(network.parameters.iter().flatten().flat_map(|value| value.to_le_bytes())) as i64;
    let (mut least, mut most) = ([hash], [hash]);
    world.all_reduce(&mut least, ReduceOp::Min)?;
    world.all_reduce(&mut most, ReduceOp::Max)?;
    if least != most {
        return Err(TrainError::Diverged { least: least[0], most: most[0] });
    }
    if world.rank() == ROOT {
        times.sort_unstable();
        if let Some(time) = times.get(times.len() / 2) {
            print_line(format_args!("{:.0} µs a step, median over the epochs", time.as_secs_f64() * 1e6))?;
        }
        print_line(format_args!(
            "done: accuracy {:.2} %, parameter hash {hash:016x} on {1} of {1} ranks",
            100.0 * accuracy,
            world.size()
        ))?;
    }
    Ok(())
}

fn print_line(text: std::fmt::Arguments<'_>) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "digits: {text}")?;
    out.flush()
}
