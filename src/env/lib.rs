//! What a launcher tells its workers, and how: the one contract between `convoke` and the runtime.
//!
//! - [`WorkerEnv`]: the environment variables of torchrun (RANK, WORLD_SIZE, ...), both directions; also
//!   what mpirun and srun say instead.
//! - [`Generation`]: which incarnation of the job this worker belongs to.
//! - [`AgentChannel`]: the inherited socket that carries what variables cannot: the job's token and
//!   the deaths of peers.
//! - [`error_file`]: how a worker tells the launcher why it failed.
//! - [`flight`]: what a worker was doing in its groups, written into shared memory so that it outlives the worker.

mod ancestor;
mod channel;
pub mod error_file;
pub mod flight;
mod generation;
mod placement;
mod scheduler;
pub mod vars;
mod worker_env;

pub use ancestor::ancestors;
pub use channel::{
    AgentChannel, ChannelError, ExitCause, MAX_MESSAGE_BYTES, MAX_TOKEN_BYTES, ToWorker, Token, TokenError,
};
pub use generation::{Generation, ParseGenerationError};
pub use scheduler::schedules_sessions;
pub use worker_env::{EnvError, Role, WorkerEnv};
