//! Data-parallel training on process groups.
//!
//! ```
//! use convoke_train::{Ddp, Sampler};
//!
//! # fn main() -> Result<(), convoke_train::TrainError> {
//! let world = convoke_comm::init()?;
//! let mut weights = vec![0.5_f32; 3];
//! let (mut ddp, parameters) = Ddp::new(&world, [("weights", weights.len())])?;
//! let sampler = Sampler::new(1000, world.rank(), world.size()).shuffled(7);
//! for epoch in 0..2 {
//!     let mut examples = sampler.epoch(epoch);
//!     while let Some(batch) = examples.next_batch(64) {
//!         let mut pass = ddp.pass();
//!         let gradient = vec![batch.own().len() as f32; 3]; // ... of this rank's examples ...
//!         pass.add(parameters[0], &gradient)?; // on its way to the other ranks while the next one is computed
//!         pass.finish()?;
//!         for (weight, gradient) in weights.iter_mut().zip(ddp.average(parameters[0])) {
//!             *weight -= 0.01 * gradient;
//!         }
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! - [`Ddp`]: averages gradients in buckets, while the program computes the next ones.
//! - `DeviceDdp` (with the feature `nccl`): averages gradients on GPUs.
//! - [`Sampler`]: assigns examples to ranks; [`partition`]: splits a data set into parts of given sizes.
//! - [`first_on_each_host`], [`first_of_all`]: one rank prepares the data, the others wait for it.
//! - [`Trace`]: records a timeline of the ranks for a browser's trace viewer.
//!
//! The crate uses only the public API of `convoke-comm`.

mod bucket;
mod ddp;
#[cfg(feature = "nccl")]
mod device;
mod error;
mod first;
mod partition;
mod progress;
mod random;
mod sampler;
mod trace;

pub use ddp::{Ddp, DdpOptions, Gradient, Joined, Pass};
#[cfg(feature = "nccl")]
pub use device::{DeviceDdp, DevicePass};
pub use error::TrainError;
pub use first::{first_of_all, first_on_each_host};
pub use partition::partition;
pub use progress::ParameterId;
pub use random::Random;
pub use sampler::{Batch, Epoch, Sampler, Tail};
pub use trace::{Span, Trace};
