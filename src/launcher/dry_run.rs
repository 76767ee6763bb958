//! Implements `--dry-run`: prints which worker processes would start on this node, with their environment
//! variables. Pure, except for the names of this host.

use std::ffi::{OsStr, OsString};
use std::fmt::Write;

use convoke_env::vars;

use nix::sys::signal::Signal;

use crate::agent::{Variables, WorkerFiles, command_line, variables};
use crate::cli::VERSION;
use crate::config::{Config, Endpoint, FlightDir, LogDir, Orphans, Rendezvous, StreamChoice};
use crate::formatting::{address, count, ranges};
use crate::host_name::full_host_name;
use crate::rendezvous::Assignment;

type Env<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Returns the whole output of `--dry-run`.
pub(crate) fn text(config: &Config, env: Env<'_>) -> String {
    let mut out = format!("convoke {VERSION}, dry run: nothing is started\n\n");
    let (assignment, port_is_known) = assignment(config);
    let line = |out: &mut String, name: &str, value: &str| {
        let _ = writeln!(out, "{name:<10} {value}");
    };
    line(&mut out, "job", &job(config));
    for source in config.scheduled.iter().flat_map(|job| &job.sources) {
        line(&mut out, "scheduler", source);
    }
    line(&mut out, "node", &node(config, &assignment));
    line(&mut out, "workers", &workers(config, &assignment));
    line(&mut out, "output", &output(config));
    line(&mut out, "restarts", &format!("at most {}", config.max_restarts));
    line(&mut out, "signals", &signals(config));
    for note in &config.notes {
        line(&mut out, "note", note);
    }
    let mut each = Vec::new();
    for local_rank in 0..config.nproc_per_node {
        let flight = match &config.flight {
            FlightDir::Path(folder) => Some(folder.as_os_str()),
            FlightDir::LogFolder | FlightDir::Disabled => None,
        };
        let files = WorkerFiles { flight, ..WorkerFiles::default() };
        match variables(config, &assignment, local_rank, 0, &files, env) {
            Ok(variables) => {
                each.push((variables_as_text(config, variables, port_is_known), command(config, local_rank)))
            }
            Err(error) => {
                line(&mut out, "error", &error);
                return out;
            }
        }
    }
    let Some((first, command)) = each.first() else { return out };
    let shared: Vec<_> =
        first.iter().filter(|variable| each.iter().all(|(mine, _)| mine.contains(variable))).collect();
    let one_command = each.iter().all(|(_, other)| other == command);
    if one_command {
        line(&mut out, "command", command);
    }
    let _ = writeln!(out, "\nAll workers get the variables of this shell, and");
    for (name, value) in &shared {
        let _ = writeln!(out, "  {name}={value}");
    }
    for (local_rank, (variables, command)) in each.iter().enumerate() {
        let own: Vec<_> = variables.iter().filter(|variable| !shared.contains(variable)).collect();
        let mut own: Vec<_> = own.iter().map(|(name, value)| format!("{name}={value}")).collect();
        if let Some(cpus) = config.cpus.get(local_rank).filter(|cpus| !cpus.is_empty()) {
            own.push(format!("on CPUs {}", ranges(cpus)));
        }
        let command = if one_command { String::new() } else { format!("\n  {command}") };
        if own.is_empty() && command.is_empty() {
            continue;
        }
        let _ = writeln!(out, "\nlocal rank {local_rank}\n  {}{command}", own.join(" "));
    }
    out
}

/// Returns the assignment of this node, assuming that all nodes join with as many workers as this one. The
/// flag says whether the store's port is known now.
fn assignment(config: &Config) -> (Assignment, bool) {
    let alone = config.local_addr.clone().unwrap_or_else(|| "localhost".to_owned());
    let (node, host, port) = match &config.rendezvous {
        Rendezvous::Static { host, port, node_rank, .. } => (*node_rank, host.clone(), *port),
        Rendezvous::Standalone | Rendezvous::Elastic { .. } => (0, alone, 0),
    };
    (Assignment::of_equal_nodes(config, node, host, port), port != 0)
}

fn job(config: &Config) -> String {
    let how = match &config.rendezvous {
        Rendezvous::Standalone => "standalone: its store gets a free port of this host".to_owned(),
        Rendezvous::Static { host, port, timeout, .. } => format!(
            "static, {}: node 0 serves the store at {}; the nodes wait {} s for each other",
            nodes(config),
            address(host, *port),
            timeout.as_secs()
        ),
        Rendezvous::Elastic { endpoint, settings } => format!(
            "elastic, {}: their rendezvous is at {}; a node waits {} s for a round, and is lost after {} s without a heartbeat",
            nodes(config),
            match endpoint {
                Endpoint::Host { host, port, .. } => address(host, *port),
                Endpoint::File(path) => format!("the address that {} names", path.display()),
                Endpoint::Etcd(cluster) => format!("the address that {cluster} names"),
            },
            settings.join_timeout.as_secs(),
            settings.heartbeat_timeout.as_secs()
        ),
    };
    format!("run id \"{}\", {how}", config.run_id)
}

fn nodes(config: &Config) -> String {
    let (min, max) = (config.nodes.min, config.nodes.max);
    if min == max { count(max, "node") } else { format!("{min} to {max} nodes") }
}

fn node(config: &Config, assignment: &Assignment) -> String {
    let given = match &config.rendezvous {
        Rendezvous::Standalone | Rendezvous::Static { .. } => "",
        Rendezvous::Elastic { .. } => " (if it joins first: the rendezvous assigns the ranks)",
    };
    format!("{} of {}, on {}{given}", assignment.group_rank, assignment.group_world_size, full_host_name())
}

fn workers(config: &Config, assignment: &Assignment) -> String {
    let (base, count, world) = (assignment.base_rank, config.nproc_per_node, assignment.world_size);
    let ranks =
        if count == 1 { format!("rank {base}") } else { format!("ranks {base} to {}", base + count - 1) };
    let others = if config.nodes.max > 1 { ", if each node starts as many" } else { "" };
    format!("{count} of {world}{others}: {ranks}")
}

fn output(config: &Config) -> String {
    let logs = &config.logs;
    let some = |choice: &StreamChoice| match choice {
        StreamChoice::All(streams) => streams.stdout || streams.stderr,
        StreamChoice::Some(_) => true,
    };
    let streams = match (some(&logs.redirects), some(&logs.tee)) {
        (false, false) => "to the console",
        (true, false) => "redirected to files as --redirects says, else to the console",
        (false, true) => "to files and the console as --tee says, else to the console",
        (true, true) => "to files and the console as --redirects and --tee say",
    };
    let folder = match &logs.dir {
        LogDir::Temporary => {
            format!("log folder: a new one in {}", std::env::temp_dir().display())
        }
        LogDir::Path(path) => format!("log folder: a new one in {}", path.display()),
        LogDir::Disabled => "no log folder".to_owned(),
    };
    format!("{streams}; {folder}")
}

fn signals(config: &Config) -> String {
    let list = |signals: &[Signal]| {
        let names: Vec<_> = signals.iter().map(|signal| signal.as_str()).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    };
    let (stop, forward) = (list(&config.signals), list(&config.forward_signals));
    let orphans = match config.orphans {
        Orphans::Stop => "processes that outlive the workers are stopped",
        Orphans::Keep => "processes that outlive successful workers are left alone",
    };
    let seconds = config.shutdown_timeout.as_secs();
    format!(
        "{stop} go to the workers, SIGKILL after {seconds} s; {forward} to those that catch them; {orphans}"
    )
}

/// Formats a worker's environment variables. Values that are known only when the job runs are replaced by a
/// description.
fn variables_as_text(config: &Config, variables: Variables, port_is_known: bool) -> Vec<(String, String)> {
    let mut set = variables.set;
    set.push((vars::GENERATION.into(), OsString::new()));
    if config.logs.dir != LogDir::Disabled && config.flight == FlightDir::LogFolder {
        set.push((vars::FLIGHT_DIR.into(), OsString::new()));
    }
    let text = |(name, value): (OsString, OsString)| {
        let name = name.to_string_lossy().into_owned();
        let value = match name.as_str() {
            vars::GENERATION => "<new for each round>".to_owned(),
            vars::ERROR_FILE => "<the worker's log folder>/error.json".to_owned(),
            vars::FLIGHT_DIR if value.is_empty() => "<the launcher's log folder>/flight".to_owned(),
            vars::MASTER_PORT if !port_is_known => "<a free port>".to_owned(),
            _ => quoted(&value),
        };
        (name, value)
    };
    let mut out: Vec<_> = set.into_iter().map(text).collect();
    out.sort();
    out.dedup();
    out
}

fn command(config: &Config, local_rank: usize) -> String {
    command_line(config, local_rank).iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
}

/// Quotes a word for a shell.
fn quoted(word: &OsStr) -> String {
    let text = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.into_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Machine;
    use crate::config::testing::config_of;

    fn dry(line: &str) -> String {
        let words = ["convoke", "--dry-run"].into_iter().chain(line.split(' ')).map(OsString::from);
        let env = |name: &str| (name == "PATH").then(|| "/bin:/usr/bin".into());
        let config =
            config_of(words, &env, &Machine::detect()).unwrap_or_else(|error| panic!("{line}: {error}"));
        text(&config, &|_| None)
    }

    fn assert_shows(text: &str, lines: &[&str]) {
        for wanted in lines {
            assert!(text.lines().any(|line| line.trim_end() == *wanted), "no line {wanted:?} in:\n{text}");
        }
    }

    #[test]
    fn dry_run_marks_values_unknown_before_start() {
        let text = dry("--nproc-per-node=2 --no-python echo rank ${local_rank}");
        assert_shows(
            &text,
            &[
                "workers    2 of 2: ranks 0 to 1",
                "  MASTER_ADDR=localhost",
                "  MASTER_PORT=<a free port>",
                "  WORLD_SIZE=2",
                "  LOCAL_RANK=1 RANK=1 ROLE_RANK=1",
                "  echo rank 1",
            ],
        );
    }

    #[test]
    fn cpus_are_shown_as_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        assert!(dry("--bind=node --no-python echo").contains("on CPUs "));
    }

    #[test]
    fn dry_run_of_a_static_node_shows_its_global_ranks() {
        let text = dry(
            "--nnodes=3 --node-rank=1 --nproc-per-node=4 --master-addr=10.0.0.1 --master-port=29501 --no-python ./run it's",
        );
        assert_shows(
            &text,
            &[
                "workers    4 of 12, if each node starts as many: ranks 4 to 7",
                r"command    ./run 'it'\''s'",
                "  MASTER_PORT=29501",
                "  GROUP_RANK=1",
                "  GROUP_WORLD_SIZE=3",
            ],
        );
        assert!(!text.contains("echo"), "{text}");
    }
}
