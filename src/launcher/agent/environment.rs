//! Builds the environment variables and command line of each worker. Pure.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use convoke_env::{Role, WorkerEnv, vars};

use crate::config::{Config, substitute, visible_devices};
use crate::hosts::AGENT_PID;
use crate::rendezvous::Assignment;
use crate::scheduler::HOSTS_JOB;

/// Environment variables to set for a worker, and those of the launcher that it must not inherit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Variables {
    pub(crate) set: Vec<(OsString, OsString)>,
    pub(crate) unset: Vec<OsString>,
}

/// Files and folders that a worker and its launcher share.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WorkerFiles<'a> {
    /// The file to which the worker writes its error.
    pub(crate) error: Option<&'a Path>,
    /// The folder in which the worker saves its flight recording.
    pub(crate) flight: Option<&'a OsStr>,
    /// The file that announces a drain.
    pub(crate) drain: Option<&'a Path>,
}

/// Returns the environment variables of the worker with this local rank. `parent` reads the launcher's own
/// environment.
///
/// # Errors
/// `--virtual-local-rank` with fewer devices than workers. The error is a line for the user.
pub(crate) fn variables(
    config: &Config,
    assignment: &Assignment,
    local_rank: usize,
    restarts: u32,
    files: &WorkerFiles<'_>,
    parent: &dyn Fn(&str) -> Option<OsString>,
) -> Result<Variables, String> {
    let worker = WorkerEnv {
        rank: assignment.base_rank + local_rank,
        world_size: assignment.world_size,
        local_rank: if config.virtual_local_rank { 0 } else { local_rank },
        local_world_size: config.nproc_per_node,
        group_rank: assignment.group_rank,
        group_world_size: assignment.group_world_size,
        role: Role {
            name: config.role.clone(),
            rank: assignment.base_role_rank + local_rank,
            world_size: assignment.role_world_size,
        },
        master_addr: assignment.master_addr.clone(),
        master_port: assignment.master_port,
        restart_count: restarts,
        max_restarts: config.max_restarts,
        run_id: config.run_id.clone(),
        use_agent_store: assignment.use_agent_store,
        error_file: files.error.map(|path| path.to_string_lossy().into_owned()),
        generation: assignment.generation,
    };
    let mut set: Vec<(OsString, OsString)> =
        worker.to_vars().into_iter().map(|(name, value)| (name.into(), value.into())).collect();
    set.push(("TORCHELASTIC_SIGNALS_TO_HANDLE".into(), config.signals_text.clone().into()));
    if parent("TORCH_NCCL_ASYNC_ERROR_HANDLING").is_none() {
        set.push(("TORCH_NCCL_ASYNC_ERROR_HANDLING".into(), "1".into()));
    }
    if let Some(threads) = config.omp_num_threads {
        set.push(("OMP_NUM_THREADS".into(), threads.to_string().into()));
    }
    if let Some(job) = &config.scheduled {
        set.push((vars::SCHEDULED_JOB.into(), job.id.clone().into()));
    }
    if config.as_gloo {
        set.push(("CONVOKE_AS_GLOO".into(), "1".into()));
    }
    if config.virtual_local_rank {
        let text = |name: &str| parent(name).map(|value| value.to_string_lossy().into_owned());
        let devices = visible_devices(&text, local_rank).map_err(|error| error.to_string())?;
        set.extend(devices.into_iter().map(|(name, value)| (name.into(), value.into())));
    }
    let (variable, gpus) = &config.gpus;
    if let Some(own) = gpus.get(local_rank) {
        set.push(("CUDA_VISIBLE_DEVICES".into(), own.into()));
        if *variable != "CUDA_VISIBLE_DEVICES" {
            set.push(((*variable).into(), own.into()));
        }
    }
    // The credentials for etcd belong to the launcher alone.
    let mut unset: Vec<OsString> =
        [vars::ETCD_USER, vars::ETCD_PASSWORD, vars::ETCD_PASSWORD_FILE, HOSTS_JOB, AGENT_PID]
            .map(Into::into)
            .into();
    // If this launcher is itself a worker, its own generation must not reach its workers.
    if assignment.generation.is_none() {
        unset.push(vars::GENERATION.into());
    }
    if let Some(file) = files.drain {
        set.push((vars::DRAIN_FILE.into(), file.into()));
    }
    match files.flight {
        Some(folder) => set.push((vars::FLIGHT_DIR.into(), folder.into())),
        None => unset.push(vars::FLIGHT_DIR.into()),
    }
    Ok(Variables { set, unset })
}

/// Returns the command line of the worker with this local rank. Macros such as the local rank are replaced.
pub(crate) fn command_line(config: &Config, local_rank: usize) -> Vec<OsString> {
    let mut argv: Vec<_> = config.program.argv.iter().map(|word| substitute(word, local_rank)).collect();
    if let Some(argument) = &config.program.local_rank_argument {
        let dash = argument.dash.then(|| format!("--local-rank={local_rank}").into());
        let underscore = argument.underscore.then(|| format!("--local_rank={local_rank}").into());
        argv.splice(argument.index..argument.index, dash.into_iter().chain(underscore));
    }
    argv
}
