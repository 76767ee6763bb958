//! Decides, by `--scheduler` and the other flags, whether the cluster's scheduler describes the job.

use std::io::IsTerminal;

use convoke_env::host::kernel_file;
use convoke_env::vars;

use super::numeric_flags::{SCHEDULERS, choice};
use super::settings::NodeRange;
use crate::cli::{CliError, Env, ParsedArgs};
use crate::formatting::count;
use crate::host_name::full_host_name;
use crate::scheduler::{HOSTS_JOB, ScheduledJob, SlurmError, SlurmStartContext, kubernetes_job, slurm_job};

/// Flags by which the user describes the job, so that the scheduler is not asked.
const OWN_DESCRIPTION: &[&str] =
    &["node-rank", "master-addr", "master-port", "rdzv-endpoint", "rdzv-backend", "standalone"];

/// Returns the job as the scheduler describes it; `None` if there is no scheduler, or the user describes the
/// job.
pub(super) fn scheduled_job(
    args: &ParsedArgs,
    nodes: NodeRange,
    env: Env<'_>,
) -> Result<Option<ScheduledJob>, CliError> {
    let asked = choice(args, "scheduler", SCHEDULERS)?.unwrap_or("auto");
    let get = |name: &str| env(name).map(|value| value.to_string_lossy().into_owned());
    // The head of a job on hosts has started this launcher.
    if let Some(json) = get(HOSTS_JOB)
        && let Ok(job) = serde_json::from_str::<ScheduledJob>(&json)
        && get(vars::SCHEDULED_JOB).as_ref() != Some(&job.id)
    {
        return Ok(Some(job));
    }
    let is_required = asked != "auto";
    if asked == "none" || (!is_required && args.is_called_torchrun) {
        return Ok(None);
    }
    if let Some(given) = OWN_DESCRIPTION.iter().find_map(|name| args.get(name)) {
        return match is_required {
            true => Err(args.error("scheduler", &format!("{given} describes the job as well"), "none")),
            false => Ok(None),
        };
    }
    // One job for each launcher, as torchrun's users write it.
    if !is_required && args.is_on("nnodes") && nodes.max == 1 {
        return Ok(None);
    }
    let found = match asked {
        "slurm" => from_slurm(&get, false)?,
        "k8s" => from_kubernetes(&get, nodes)?,
        _ => match from_slurm(&get, is_interactive())? {
            Some(job) => Some(job),
            None => from_kubernetes(&get, nodes)?,
        },
    };
    let Some(job) = found else {
        return match asked {
            "slurm" => {
                Err(args.error("scheduler", "this is no job of Slurm: SLURM_JOB_ID is not set", "auto"))
            }
            "k8s" => {
                Err(args.error("scheduler", "this is no pod of an indexed job with --nnodes above 1", "auto"))
            }
            _ => Ok(None),
        };
    };
    // A worker of this job may start a launcher for a job of its own.
    if get(vars::SCHEDULED_JOB).as_ref() == Some(&job.id) {
        return Ok(None);
    }
    check_nodes(args, nodes, &job)?;
    Ok(Some(job))
}

fn from_slurm(
    get: &dyn Fn(&str) -> Option<String>,
    is_interactive: bool,
) -> Result<Option<ScheduledJob>, CliError> {
    slurm_job(get, SlurmStartContext { is_interactive }).map_err(|error| match error {
        SlurmError::SeveralTasksReported => CliError { text: String::new(), code: 1, is_of_host: false },
        error => CliError::value(error.to_string()),
    })
}

/// Reads an indexed job of Kubernetes. Its pods do not know their number, so `--nnodes` must give it.
fn from_kubernetes(
    get: &dyn Fn(&str) -> Option<String>,
    nodes: NodeRange,
) -> Result<Option<ScheduledJob>, CliError> {
    if nodes.max == 1 || nodes.min < nodes.max {
        return Ok(None);
    }
    kubernetes_job(get, &full_host_name, nodes.max).map_err(|error| CliError::value(error.to_string()))
}

/// Checks `--nnodes`, if the user has set it, against the number of nodes that the scheduler gives.
fn check_nodes(args: &ParsedArgs, nodes: NodeRange, job: &ScheduledJob) -> Result<(), CliError> {
    let Some(value) = args.get("nnodes") else { return Ok(()) };
    let fits = if nodes.min == nodes.max { nodes.max == job.nodes } else { job.nodes >= nodes.min };
    if fits {
        return Ok(());
    }
    let what = format!("{} has {}", job.label, count(job.nodes, "node"));
    Err(value.error(&what, &format!("{}, or leave it out", job.nodes)))
}

/// Returns true if a user types at the shell that started this process.
fn is_interactive() -> bool {
    let parent = kernel_file::process_name(std::os::unix::process::parent_id().cast_signed());
    std::io::stdin().is_terminal() && parent != "slurmstepd"
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::config::testing::config_of;
    use crate::config::{Config, Endpoint, Machine, Rendezvous};

    const STEP: &[(&str, &str)] = &[
        ("SLURM_JOB_ID", "42"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NUM_NODES", "4"),
        ("SLURM_NODEID", "1"),
        ("SLURM_STEP_NODELIST", "h[1-4]"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x4)"),
        ("SLURM_CPUS_PER_TASK", "1"),
    ];

    /// The configuration of a program under this name, with these flags, in a step of 4 nodes.
    fn config_as(name: &str, flags: &[&str], more: &[(&str, &str)]) -> Result<Config, CliError> {
        let words = [&[name], flags, &["--no-python", "true"]].concat();
        let env = |name: &str| {
            let set = more.iter().chain(STEP).find(|(known, _)| *known == name);
            set.map(|(_, value)| OsString::from(value))
        };
        config_of(words.into_iter().map(OsString::from), &env, &Machine::detect())
    }

    fn config(flags: &[&str]) -> Config {
        config_as("convoke", flags, &[]).unwrap_or_else(|error| panic!("{flags:?}: {error}"))
    }

    fn refused(flags: &[&str]) -> String {
        config_as("convoke", flags, &[]).unwrap_err().text
    }

    #[test]
    fn nodes_and_address_come_from_slurm_without_flags() {
        for flags in [&["--scheduler=auto"][..], &["--nnodes=4"], &["--scheduler=slurm"]] {
            let config = config(flags);
            let Rendezvous::Static { host, node_rank, search: Some(search), .. } = &config.rendezvous else {
                panic!("{flags:?}: {:?}", config.rendezvous)
            };
            assert_eq!((host.as_str(), *node_rank, config.nodes.max), ("h1", 1, 4), "{flags:?}");
            assert_eq!((config.run_id.as_str(), search.ports.len()), ("slurm-42.0.0", 8));
            assert_eq!((config.nproc_per_node, config.omp_num_threads), (1, Some(1)));
        }
        let Rendezvous::Elastic { endpoint: Endpoint::Host { host, .. }, .. } =
            config(&["--nnodes=3:4"]).rendezvous
        else {
            panic!("a range of nodes is elastic")
        };
        assert_eq!(host, "h1");
        assert_eq!(config(&["--rdzv-id=mine"]).run_id, "mine");
    }

    #[test]
    fn flags_of_the_user_win_over_slurm() {
        for flags in [
            &["--scheduler=none"][..],
            &["--nnodes=1"],
            &["--standalone"],
            &["--nnodes=2", "--node-rank=1"],
            &["--nnodes=2", "--rdzv-endpoint=h:1"],
            &["--nnodes=2", "--master-addr=h"],
        ] {
            assert_eq!(config(flags).scheduled, None, "{flags:?}");
        }
        assert_eq!(config_as("/bin/torchrun", &[], &[]).unwrap().scheduled, None);
        let inner = [(vars::SCHEDULED_JOB, "slurm-42.0.0")];
        assert_eq!(config_as("convoke", &[], &inner).unwrap().scheduled, None, "a launcher in a worker");
    }

    #[test]
    fn contradiction_to_slurm_is_refused() {
        let text = refused(&["--nnodes=8"]);
        assert!(text.contains("--nnodes=8: slurm job 42.0 has 4 nodes; write --nnodes=4"), "{text}");
        assert!(refused(&["--nnodes=5:6"]).contains("has 4 nodes"));
        let text = refused(&["--scheduler=slurm", "--node-rank=1"]);
        assert!(text.contains("--node-rank=1 describes the job as well"), "{text}");
    }
}
