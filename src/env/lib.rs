//! The contract between a launcher and its workers. `convoke` and the runtime both use it.
//!
//! - [`WorkerEnv`]: the environment variables of torchrun (RANK, WORLD_SIZE, ...), in both directions.
//!   It also reads the variables of mpirun and srun.
//! - [`LocalWorld`]: these variables for ranks that a program starts by itself.
//! - [`Generation`]: the identity of one incarnation of the job.
//! - [`AgentChannel`]: the inherited socket that carries the job's token and the exits of peers.
//! - [`error_file`]: the file in which a worker reports its error to the launcher.
//! - [`slurm`]: the lists in Slurm's variables.
//! - [`host`]: facts about this host that launcher and runtime both read.

/// Implements `Debug` for an error of this project.
#[doc(hidden)]
#[macro_export]
macro_rules! debug_as_display {
    ($Error:ty) => {
        /// Prints the text of `Display`, because a `main` that returns the error prints `Debug`.
        impl ::std::fmt::Debug for $Error {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> std::fmt::Result {
                ::std::fmt::Display::fmt(self, f)
            }
        }
    };
}

mod ancestor;
mod channel;
mod error;
pub mod error_file;
mod generation;
pub mod host;
mod local_world;
mod placement;
pub mod slurm;

pub mod vars;
mod worker_env;

pub use ancestor::ancestors;
pub use channel::{
    AgentChannel, ChannelError, ExitCause, MAX_MESSAGE_BYTES, MAX_TOKEN_BYTES, ToWorker, Token, TokenError,
};
pub use error::EnvError;
pub use generation::{Generation, ParseGenerationError};
pub use local_world::LocalWorld;
pub use placement::job_ports;
pub use worker_env::{Role, WorkerEnv};
