//! The configuration of the launcher, from the command line and PET_* variables. All values have been
//! checked.

mod accelerators;
mod binding;
pub(crate) mod build;
mod devices;
mod drain_flags;
mod endpoint;
mod etcd;
mod file;
mod machine;
mod macros;
mod numeric_flags;
mod output;
pub(crate) mod package;
mod program;
mod rdzv_conf;
mod rendezvous_flags;
mod scheduler_flags;
mod settings;
mod signal_list;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod topology;

pub(crate) use devices::visible_devices;
pub(crate) use endpoint::is_loopback;
pub(crate) use etcd::EtcdCluster;
pub(crate) use file::FileKind;
pub(crate) use machine::{Machine, Vendor, in_path, is_executable};
pub(crate) use macros::{expand, substitute};
pub(crate) use output::is_quiet;
pub(crate) use rendezvous_flags::is_named;
#[cfg(test)]
pub(crate) use settings::NodeRange;
pub(crate) use settings::{
    Config, DrainConfig, ElasticSettings, Endpoint, EventHandler, ExitCodes, FlightDir, LogConfig, LogDir,
    OnDrained, Orphans, Rendezvous, ReportFormat, StreamChoice, Streams,
};
