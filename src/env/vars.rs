//! Names of the environment variables: those of torchrun, then those of convoke.

/// Global rank, from 0 to WORLD_SIZE - 1.
pub const RANK: &str = "RANK";
/// Number of workers in the job.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Index of the worker on its node.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Number of workers on this node.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// Rank of the node.
pub const GROUP_RANK: &str = "GROUP_RANK";
/// Number of nodes in this rendezvous round.
pub const GROUP_WORLD_SIZE: &str = "GROUP_WORLD_SIZE";
/// Role of the worker (`--role`).
pub const ROLE_NAME: &str = "ROLE_NAME";
/// Rank among the workers of the same role.
pub const ROLE_RANK: &str = "ROLE_RANK";
/// Number of workers of the same role.
pub const ROLE_WORLD_SIZE: &str = "ROLE_WORLD_SIZE";
/// Host of the key-value store for the workers.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// Port of the key-value store for the workers.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// Number of restarts that this agent has used up.
pub const RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";
/// Value of `--max-restarts`.
pub const MAX_RESTARTS: &str = "TORCHELASTIC_MAX_RESTARTS";
/// Job id.
pub const RUN_ID: &str = "TORCHELASTIC_RUN_ID";
/// `True` if the agent serves the store at MASTER_ADDR:MASTER_PORT.
pub const USE_AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// Path of the file to which the worker writes its error.
pub const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";
/// Generation of the rendezvous round (a random number that all its workers share), 32 hexadecimal
/// digits.
pub const GENERATION: &str = "CONVOKE_GENERATION";
/// Number of the file descriptor of the agent channel, the socket over which the launcher sends to the
/// worker.
pub const AGENT_FD: &str = "CONVOKE_AGENT_FD";
/// Secret of the job (token), with which workers authenticate to each other.
pub const TOKEN: &str = "CONVOKE_TOKEN";
/// File that holds the secret of the job.
pub const TOKEN_FILE: &str = "CONVOKE_TOKEN_FILE";
/// User name with which the launcher authenticates to etcd. Workers do not get this variable.
pub const ETCD_USER: &str = "CONVOKE_ETCD_USER";
/// Password for [`ETCD_USER`]. Workers do not get this variable.
pub const ETCD_PASSWORD: &str = "CONVOKE_ETCD_PASSWORD";
/// File with the password for [`ETCD_USER`]. Workers do not get this variable.
pub const ETCD_PASSWORD_FILE: &str = "CONVOKE_ETCD_PASSWORD_FILE";
/// File that the launcher creates when the job is drained: workers then stop at their next step.
pub const DRAIN_FILE: &str = "CONVOKE_DRAIN_FILE";
/// Id of the scheduler's job whose nodes this launcher's job uses. A launcher that a worker starts finds it
/// and does not join that job again.
pub const SCHEDULED_JOB: &str = "CONVOKE_SCHEDULED_JOB";
/// Folder for the recordings of the flight recorder. If unset or empty, none are written.
pub const FLIGHT_DIR: &str = "CONVOKE_FLIGHT_DIR";
