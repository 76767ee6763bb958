//! Reads the flags that start launchers on hosts: `--hosts`, `--hostfile` and those that go with them.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::time::Duration;

use super::connection::program_name;
use super::job::HostsJob;
use super::list::{Host, ListError, of_file, of_flag};
use crate::cli::{CliError, ParsedArgs};

const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Flags that only the head reads.
const OF_HEAD: &[&str] = &["hosts", "hostfile", "rsh", "start-timeout", "copy-binary", "env"];
/// Flags of `convoke check` that only the head reads. The launchers print JSON for it.
const OF_HEAD_OF_CHECK: &[&str] = &["json", "failed-hosts"];
/// Flags that describe nodes in another way.
const OTHER_NODES: &[&str] = &[
    "nnodes",
    "node-rank",
    "master-addr",
    "master-port",
    "rdzv-endpoint",
    "rdzv-backend",
    "standalone",
    "scheduler",
];
/// Variables that all hosts get, and begins of names of such variables.
const EXPORTED: &[&str] = &[
    "PATH",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CONDA",
    "PYTHON",
    "NCCL_",
    "TORCH",
    "OMP_",
    "HF_",
    "PET_",
    "CONVOKE_",
    "CUDA_VISIBLE_DEVICES",
];

/// Returns the job, or the check, on hosts that the flags ask for; `None` without such flags.
pub(crate) fn hosts_job(args: &ParsedArgs, is_check: bool) -> Result<Option<HostsJob>, CliError> {
    let hosts = match (args.get_nonempty("hosts"), args.get_nonempty("hostfile")) {
        (None, None) => {
            let useless =
                OF_HEAD.iter().find_map(|name| args.get(name).filter(|value| value.on_command_line));
            return match useless {
                Some(value) => Err(CliError::value(format!("{value} needs --hosts or --hostfile"))),
                None => Ok(None),
            };
        }
        (Some(value), None) => named(of_flag(value.as_str()?), &value.to_string())?,
        (None, Some(value)) => {
            let text = fs::read_to_string(&value.text)
                .map_err(|error| CliError::value(format!("{value}: cannot read it: {error}")))?;
            named(of_file(&text), &value.to_string())?
        }
        (Some(hosts), Some(file)) => {
            return Err(CliError::value(format!("{hosts} and {file} exclude each other")));
        }
    };
    if let Some(value) = OTHER_NODES.iter().find_map(|name| args.get(name)) {
        return Err(CliError::value(format!(
            "{value} describes the nodes as well; leave it out: each host is a node"
        )));
    }
    let shell: Vec<String> = args.text_or("rsh", "ssh")?.split_whitespace().map(str::to_owned).collect();
    if shell.is_empty() {
        return Err(args.error("rsh", "a program that runs a command on a host", "ssh"));
    }
    if program_name(&shell[0]) == "pbs_tmrsh" {
        let what = "it passes on neither input nor output, so it cannot connect launchers; leave --rsh out: PBS lets ssh reach the hosts of a job";
        return Err(args.error("rsh", what, "ssh"));
    }
    Ok(Some(HostsJob {
        hosts,
        shell,
        start_timeout: start_timeout(args)?,
        copies_program: args.is_on("copy-binary"),
        command: if is_check { vec!["check".into(), "--json".into()] } else { Vec::new() },
        arguments: args.words_without(&[OF_HEAD, OF_HEAD_OF_CHECK, &["dry-run"]].concat()),
        slots_count: !args.is_on("nproc-per-node"),
        variables: variables(args)?,
    }))
}

fn start_timeout(args: &ParsedArgs) -> Result<Duration, CliError> {
    let Some(value) = args.get("start-timeout") else { return Ok(START_TIMEOUT) };
    let seconds = value.float("60")?;
    if !(1.0..=86_400.0).contains(&seconds) {
        return Err(value.error("must be from 1 to 86400 seconds", "60"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

fn named(hosts: Result<Vec<Host>, ListError>, flag: &str) -> Result<Vec<Host>, CliError> {
    hosts.map_err(|error| CliError::value(format!("{flag}: {error}")))
}

/// Returns the variables that all hosts get: those that jobs usually need, and those of `--env`.
fn variables(args: &ParsedArgs) -> Result<Vec<(OsString, OsString)>, CliError> {
    let is_usual =
        |name: &OsString| EXPORTED.iter().any(|begin| name.as_bytes().starts_with(begin.as_bytes()));
    let mut variables: Vec<_> = std::env::vars_os().filter(|(name, _)| is_usual(name)).collect();
    let list = args.get("env").map(|value| value.text.clone()).unwrap_or_default();
    for entry in list.as_bytes().split(|&byte| byte == b',').filter(|entry| !entry.is_empty()) {
        let mut parts = entry.splitn(2, |&byte| byte == b'=');
        let name = OsString::from_vec(parts.next().expect("a split has a first part").to_vec());
        let value = match parts.next() {
            Some(value) => OsString::from_vec(value.to_vec()),
            None => std::env::var_os(&name).ok_or_else(|| {
                args.error("env", &format!("{} is not set here", name.display()), "NAME=VALUE")
            })?,
        };
        variables.retain(|(known, _)| *known != name);
        variables.push((name, value));
    }
    Ok(variables)
}
