//! Jobs on bare hosts (`--hosts`, `--hostfile`): a remote shell for each host, over which an agent starts the
//! launcher of that host.
//!
//! ```text
//! head ─ connection ─ ssh ─ agent ─ launcher ─ workers      on each host
//! ```

mod agent;
mod connection;
mod connection_queue;
mod flags;
mod frame;
mod head;
mod job;
mod list;
mod output;
mod signals;
mod ssh_error;

pub(crate) use agent::{AGENT_PID, end_with_agent, run as run_agent};
pub(crate) use flags::hosts_job;
pub(crate) use head::{Collected, run, run_and_collect};
