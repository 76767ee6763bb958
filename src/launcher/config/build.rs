//! From flags to [`Config`]: all checks of values.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::conf;
use super::machine::{Machine, Vendor};
use super::{
    Config, EventHandler, LogConfig, LogDir, NodeRange, NumaBinding, Orphans, Rendezvous, StreamChoice,
    devices, endpoint, program,
};
use crate::cli::{CliError, Given, Value, integer, streams, substrings, suggest_choice};

type Env<'a> = &'a dyn Fn(&str) -> Option<OsString>;

const BACKENDS: &[&str] = &["static", "c10d", "etcd-v2", "etcd"];
const C10D_PORT: u16 = 29400;
const ETCD_PORT: u16 = 2379;
const STATIC_PORT: u16 = 29500;
const STATIC_TIMEOUT: Duration = Duration::from_secs(900);
const MONITOR_INTERVAL_MAX_SECONDS: f64 = 86_400.0;
const SHUTDOWN_TIMEOUT_SECONDS: u64 = 30;
const SIGNALS: &str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";
const PREFIX_TEMPLATE: &str = "[${role_name}${local_rank}]:";

/// Checks all values and decides what they leave open.
///
/// # Errors
/// The first value that cannot be read (exit code 2) or makes no sense (exit code 1).
pub(crate) fn config(given: &Given, env: Env<'_>, machine: &Machine) -> Result<Config, CliError> {
    let numbers = Numbers::read(given)?;
    let mut warnings = Vec::new();

    let nodes = nodes(given)?;
    let max_restarts = at_least_zero(given, "max-restarts", numbers.max_restarts, "3")?.unwrap_or(0);
    let monitor_interval = monitor_interval(given, numbers.monitor_interval)?;
    let shutdown_timeout = shutdown_timeout(given, numbers.shutdown_timeout, env)?;
    let nproc_per_node = nproc_per_node(given, env, machine)?;
    let logs = logs(given, env, nproc_per_node, &mut warnings)?;
    let events = events(given, env)?;
    let program = program::program(given, env)?;
    let (rendezvous, run_id, nodes, rendezvous_conf) = rendezvous(given, &numbers, nodes, &mut warnings)?;
    let signals_text =
        if given.is_on("signals-to-handle") { given.text("signals-to-handle")? } else { SIGNALS };
    let signals = signals(signals_text, &mut warnings);
    let virtual_local_rank = given.is_on("virtual-local-rank");
    if virtual_local_rank {
        let parent = |name: &str| env(name).map(|value| value.to_string_lossy().into_owned());
        devices::visible_devices(&parent, nproc_per_node - 1).map_err(|error| {
            CliError::value(format!(
                "--virtual-local-rank: {error}; lower --nproc-per-node or extend the list"
            ))
        })?;
    }
    let numa_binding = numa_binding(given, env, machine)?;
    if given.is_on("logs-specs") {
        let name = given.text("logs-specs")?;
        return Err(CliError::value(format!(
            "--logs-specs={name}: there are no Python plug-ins here; leave it out, and see --redirects, --tee and --log-dir"
        )));
    }
    if devices::omp_num_threads(env("OMP_NUM_THREADS").is_some(), nproc_per_node).is_some() {
        warnings.push(
            "Setting OMP_NUM_THREADS=1 for each worker, so that they do not overload the machine; set it yourself to tune it"
                .to_owned(),
        );
    }
    if log_level(env) > WARNING {
        warnings.clear();
    }
    Ok(Config {
        nodes,
        nproc_per_node,
        rendezvous,
        run_id,
        rendezvous_conf,
        local_addr: given
            .get("local-addr")
            .map(Value::as_str)
            .transpose()?
            .filter(|addr| !addr.is_empty())
            .map(str::to_owned),
        max_restarts,
        monitor_interval,
        role: role(given)?,
        program,
        logs,
        events,
        signals,
        signals_text: signals_text.to_owned(),
        shutdown_timeout,
        virtual_local_rank,
        numa_binding,
        orphans: orphans(given)?,
        share_store: env("TORCH_DISABLE_SHARE_RDZV_TCP_STORE").is_none_or(|value| value != "1"),
        warnings,
    })
}

/// The values that argparse converts itself: what cannot be converted is a usage error, before all else.
struct Numbers {
    max_restarts: Option<i128>,
    node_rank: Option<i128>,
    master_port: Option<i128>,
    shutdown_timeout: Option<i128>,
    monitor_interval: Option<f64>,
}

impl Numbers {
    fn read(given: &Given) -> Result<Self, CliError> {
        let integer =
            |name: &str, example: &str| given.get(name).map(|value| value.integer(example)).transpose();
        let numbers = Self {
            max_restarts: integer("max-restarts", "3")?,
            node_rank: integer("node-rank", "0")?,
            master_port: integer("master-port", "29500")?,
            shutdown_timeout: integer("shutdown-timeout", "30")?,
            monitor_interval: given.get("monitor-interval").map(|value| value.float("0.1")).transpose()?,
        };
        choice(given, "start-method", &["spawn", "fork", "forkserver"])?;
        choice(given, "numa-binding", &["node", "socket", "exclusive", "core-complex"])?;
        choice(given, "orphans", &["stop", "keep"])?;
        Ok(numbers)
    }
}

/// Checks a flag with fixed choices: others are usage errors.
fn choice<'a>(given: &'a Given, name: &str, choices: &[&str]) -> Result<Option<&'a str>, CliError> {
    let Some(value) = given.get(name) else { return Ok(None) };
    match value.text.to_str() {
        Some(text) if choices.contains(&text) => Ok(Some(text)),
        text => {
            let example = text
                .and_then(|text| suggest_choice(text, choices))
                .map_or_else(|| choices.join("|"), str::to_owned);
            Err(CliError::usage(value.wrong("no such choice", &example)))
        }
    }
}

/// A number that must not be negative; `None` if the flag was not given.
fn at_least_zero<T: TryFrom<i128>>(
    given: &Given,
    name: &str,
    number: Option<i128>,
    example: &str,
) -> Result<Option<T>, CliError> {
    let (Some(value), Some(number)) = (given.get(name), number) else { return Ok(None) };
    if number < 0 {
        return Err(CliError::value(value.wrong("must not be negative", example)));
    }
    T::try_from(number).map(Some).map_err(|_| CliError::value(value.wrong("too large", example)))
}

fn nodes(given: &Given) -> Result<NodeRange, CliError> {
    let Some(value) = given.get("nnodes") else { return Ok(NodeRange { min: 1, max: 1 }) };
    let text = value.as_str()?;
    let wrong = |what: &str, example: &str| Err(CliError::value(value.wrong(what, example)));
    let count = |text: &str| integer(text).map(|number| usize::try_from(number.max(0)).unwrap_or(usize::MAX));
    let parts: Option<Vec<usize>> = text.split(':').map(count).collect();
    let (min, max) = match parts.as_deref() {
        Some(&[both]) => (both, both),
        Some(&[min, max]) => (min, max),
        Some(_) => return wrong("one number or two, not more", "1:4"),
        None => return wrong("neither a number of nodes nor a range", "2, or MIN:MAX such as 1:4"),
    };
    if min == 0 {
        return wrong("there must be at least one node", "1");
    }
    if min > max {
        return wrong("the minimum is above the maximum", &format!("{max}:{min}"));
    }
    if max > 1_000_000 {
        return wrong("too many nodes", "1000000 or fewer");
    }
    Ok(NodeRange { min, max })
}

fn nproc_per_node(given: &Given, env: Env<'_>, machine: &Machine) -> Result<usize, CliError> {
    let Some(value) = given.get("nproc-per-node") else { return Ok(1) };
    let wrong = |what: &str, example: &str| Err(CliError::value(value.wrong(what, example)));
    let text = value.as_str()?;
    if let Some(number) = integer(text) {
        return match usize::try_from(number) {
            Ok(0) | Err(_) => wrong("there must be at least one worker", "1"),
            Ok(number) if number > 65_536 => wrong("too many workers", "65536 or fewer"),
            Ok(number) => Ok(number),
        };
    }
    let gpus = || match machine.devices(Vendor::Nvidia, env) {
        0 => machine.devices(Vendor::Amd, env),
        count => count,
    };
    match text {
        "cpu" => Ok(machine.cpu_count),
        "auto" => Ok(match gpus() {
            0 => machine.cpu_count,
            count => count,
        }),
        "gpu" => match gpus() {
            0 => wrong(
                "no GPU was found (no /dev/nvidia0, no /dev/kfd, or the variables hide all)",
                "cpu, or a number",
            ),
            count => Ok(count),
        },
        "xpu" => match machine.devices(Vendor::Intel, env) {
            0 => wrong("no Intel GPU was found (no /dev/dri/renderD128 of Intel)", "cpu, or a number"),
            count => Ok(count),
        },
        _ => wrong(
            "neither a number nor cpu, gpu, xpu or auto",
            suggest_choice(text, &["cpu", "gpu", "xpu", "auto"]).unwrap_or("2"),
        ),
    }
}

fn monitor_interval(given: &Given, seconds: Option<f64>) -> Result<Option<Duration>, CliError> {
    let (Some(value), Some(seconds)) = (given.get("monitor-interval"), seconds) else { return Ok(None) };
    if !(0.0..=MONITOR_INTERVAL_MAX_SECONDS).contains(&seconds) {
        return Err(CliError::value(value.wrong("must be from 0 to 86400 seconds", "0.1")));
    }
    Ok(Some(Duration::from_secs_f64(seconds)))
}

fn shutdown_timeout(given: &Given, number: Option<i128>, env: Env<'_>) -> Result<Duration, CliError> {
    const VARIABLE: &str = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT";
    if let Some(seconds) = at_least_zero::<u32>(given, "shutdown-timeout", number, "30")? {
        return Ok(Duration::from_secs(u64::from(seconds)));
    }
    let Some(text) = env(VARIABLE) else { return Ok(Duration::from_secs(SHUTDOWN_TIMEOUT_SECONDS)) };
    let seconds = text.to_str().and_then(integer).and_then(|number| u32::try_from(number).ok());
    match seconds {
        Some(seconds) => Ok(Duration::from_secs(u64::from(seconds))),
        None => Err(CliError::value(format!(
            "{VARIABLE}={}: must be a whole number of seconds, 0 or more; write {VARIABLE}=30",
            text.display()
        ))),
    }
}

type Meeting = (Rendezvous, String, NodeRange, Vec<(String, String)>);

fn rendezvous(
    given: &Given,
    numbers: &Numbers,
    nodes: NodeRange,
    warnings: &mut Vec<String>,
) -> Result<Meeting, CliError> {
    let backend = if given.is_on("rdzv-backend") { given.text("rdzv-backend")? } else { "static" };
    let endpoint_text = given.text("rdzv-endpoint")?.trim();
    let conf_value = given.get("rdzv-conf");
    let conf = conf::split(given.text("rdzv-conf")?).map_err(|what| {
        CliError::value(conf_value.map_or(what.clone(), |value| value.wrong(&what, "KEY=VALUE,KEY=VALUE")))
    })?;
    let check = |known| {
        conf::check(&conf, known).map_err(|what| {
            CliError::value(format!(
                "{}: {what}",
                conf_value.map_or("--rdzv-conf", |value| value.name.as_str())
            ))
        })
    };
    let alone =
        backend == "static" && endpoint_text.is_empty() && numbers.master_port.is_none() && nodes.max == 1;
    if given.is_on("standalone") || alone {
        if nodes.min > 1 {
            return Err(CliError::value(format!(
                "--standalone is one node, but --nnodes asks for {}; remove --standalone and name an --rdzv-endpoint, \
                 or remove --nnodes",
                nodes.min
            )));
        }
        check(conf::C10D)?;
        ignored_when_alone(given, warnings);
        return Ok((Rendezvous::Standalone, random_uuid()?, NodeRange { min: 1, max: 1 }, conf));
    }
    let endpoint = |default_port: Option<u16>| parse_endpoint(given, endpoint_text, default_port);
    let rendezvous = match backend {
        "static" => {
            check(conf::STATIC)?;
            fixed(given, numbers, nodes, endpoint_text, &conf)?
        }
        "c10d" => {
            check(conf::C10D)?;
            ignored_without_static(given, warnings);
            let (host, port) = endpoint(Some(C10D_PORT))?;
            Rendezvous::C10d { host, port }
        }
        "etcd" | "etcd-v2" => {
            check(if backend == "etcd" { conf::ETCD } else { conf::ETCD_V2 })?;
            ignored_without_static(given, warnings);
            Rendezvous::Etcd { endpoints: vec![endpoint(Some(ETCD_PORT))?] }
        }
        other => {
            let example = suggest_choice(other, BACKENDS).map_or_else(|| BACKENDS.join("|"), str::to_owned);
            let value = given
                .get("rdzv-backend")
                .map_or_else(String::new, |value| value.wrong("no such backend", &example));
            return Err(CliError::value(value));
        }
    };
    not_yet(given, &rendezvous, nodes, &conf)?;
    let run_id = match given.get("rdzv-id") {
        None => "none".to_owned(),
        Some(value) if value.text.is_empty() => u128::from_be_bytes(random_uuid_bytes()?).to_string(),
        Some(value) => value.as_str()?.to_owned(),
    };
    Ok((rendezvous, run_id, nodes, conf))
}

/// `static`: an endpoint, or `--master-addr` and `--master-port`; both need a port.
fn fixed(
    given: &Given,
    numbers: &Numbers,
    nodes: NodeRange,
    endpoint_text: &str,
    conf: &[(String, String)],
) -> Result<Rendezvous, CliError> {
    let (host, port) = if endpoint_text.is_empty() {
        let host = given.get("master-addr").map(Value::as_str).transpose()?.map_or("127.0.0.1", str::trim);
        if let Some(value) = given.get("master-addr") {
            let plain = endpoint::parse(&format!("{host}:1"));
            if host.is_empty() || plain.is_err() {
                return Err(CliError::value(value.wrong("neither a host name nor an address", "10.0.0.1")));
            }
        }
        let port = match (given.get("master-port"), numbers.master_port) {
            (Some(value), Some(number)) => match u16::try_from(number) {
                Ok(port) if port > 0 => port,
                _ => return Err(CliError::value(value.wrong("a port is a number from 1 to 65535", "29500"))),
            },
            _ => STATIC_PORT,
        };
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        (bare.to_owned(), port)
    } else {
        match parse_endpoint(given, endpoint_text, None)? {
            (_, 0) => {
                let value = given.get("rdzv-endpoint").map_or_else(String::new, |value| {
                    value.wrong(
                        "port 0 cannot be known to other nodes",
                        "HOST:29500, or --standalone for one node",
                    )
                });
                return Err(CliError::value(value));
            }
            found => found,
        }
    };
    let node_rank = match (given.get("node-rank"), numbers.node_rank) {
        (Some(value), Some(number)) => match usize::try_from(number) {
            Ok(rank) if rank < nodes.max => rank,
            _ => {
                let last = nodes.max - 1;
                let what = format!("with {} there are node ranks 0 to {last} only", count(nodes.max, "node"));
                return Err(CliError::value(value.wrong(&what, &format!("{last}, or raise --nnodes"))));
            }
        },
        _ => 0,
    };
    let seconds = conf.iter().find(|(key, _)| key == "timeout").and_then(|(_, value)| integer(value));
    let timeout = seconds.map_or(STATIC_TIMEOUT, |seconds| {
        Duration::from_secs(u64::from(u32::try_from(seconds).unwrap_or(u32::MAX)))
    });
    Ok(Rendezvous::Static { host, port, node_rank, timeout })
}

fn count(number: usize, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

fn parse_endpoint(given: &Given, text: &str, default_port: Option<u16>) -> Result<(String, u16), CliError> {
    let wrong = |what: &str| {
        let value = given
            .get("rdzv-endpoint")
            .map_or_else(String::new, |value| value.wrong(what, "HOST:PORT, such as 10.0.0.1:29500"));
        CliError::value(value)
    };
    let (host, port) = endpoint::parse(text).map_err(|error| wrong(&error.to_string()))?;
    match port.or(default_port) {
        Some(port) => Ok((host, port)),
        None => Err(wrong("the static backend needs a port")),
    }
}

/// What this version cannot do yet, and what to use instead.
fn not_yet(
    given: &Given,
    rendezvous: &Rendezvous,
    nodes: NodeRange,
    conf: &[(String, String)],
) -> Result<(), CliError> {
    let is_host = |(key, value): &(String, String)| (key == "is_host").then(|| conf::switch(value)).flatten();
    let file_store = || conf.iter().any(|(key, value)| key == "store_type" && value == "file");
    const STATIC: &str =
        "use --rdzv-backend=static with --nnodes, --node-rank, --master-addr and --master-port";
    let advice = match rendezvous {
        Rendezvous::Standalone | Rendezvous::Static { .. } => return Ok(()),
        Rendezvous::Etcd { .. } => format!("etcd is not built in yet; {STATIC}"),
        Rendezvous::C10d { .. } if file_store() => {
            "store_type=file is not built in yet; remove it, or use --standalone".to_owned()
        }
        Rendezvous::C10d { .. } if nodes.max > 1 => {
            format!("more than one node is not built in yet; {STATIC}")
        }
        Rendezvous::C10d { .. } if conf.iter().find_map(is_host) == Some(false) => {
            "is_host=false, so nobody serves the only node; remove it".to_owned()
        }
        Rendezvous::C10d { .. } => return Ok(()),
    };
    let backend = given.get("rdzv-backend").map_or_else(String::new, ToString::to_string);
    Err(CliError::value(format!("{backend}: {advice}")))
}

/// Says which flags a job of one node ignores.
fn ignored_when_alone(given: &Given, warnings: &mut Vec<String>) {
    let standalone = given.is_on("standalone");
    let why = if standalone { "--standalone" } else { "one node without --rdzv-endpoint or --master-port" };
    let names: &[&str] = if standalone {
        &["rdzv-backend", "rdzv-endpoint", "rdzv-id", "master-addr", "master-port"]
    } else {
        &["rdzv-id"]
    };
    for value in names.iter().filter_map(|name| given.get(name)).filter(|value| value.on_command_line) {
        warnings.push(format!("{value} is ignored: {why}"));
    }
    if let Some(value) = given.get("node-rank").filter(|value| value.on_command_line && value.text != "0") {
        warnings.push(format!("{value} is ignored: {why}"));
    }
}

/// Says which flags only the static backend reads.
fn ignored_without_static(given: &Given, warnings: &mut Vec<String>) {
    let names = ["node-rank", "master-addr", "master-port"];
    for value in names.iter().filter_map(|name| given.get(name)).filter(|value| value.on_command_line) {
        warnings.push(format!("{value} is ignored: only the static backend reads it"));
    }
}

fn random_uuid_bytes() -> Result<[u8; 16], CliError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| CliError::value(format!("no random numbers for the job id: {error}")))?;
    bytes[6] = bytes[6] & 0x0f | 0x40; // version 4, random
    bytes[8] = bytes[8] & 0x3f | 0x80; // variant of RFC 9562
    Ok(bytes)
}

fn random_uuid() -> Result<String, CliError> {
    let hex = format!("{:032x}", u128::from_be_bytes(random_uuid_bytes()?));
    Ok([&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-"))
}

fn logs(
    given: &Given,
    env: Env<'_>,
    nproc_per_node: usize,
    warnings: &mut Vec<String>,
) -> Result<LogConfig, CliError> {
    let redirects = stream_choice(given, "redirects", nproc_per_node, warnings)?;
    let tee = stream_choice(given, "tee", nproc_per_node, warnings)?;
    let dir = match given.get("log-dir").map(|value| &value.text) {
        None => LogDir::Temporary,
        Some(text) if text.is_empty() => LogDir::Temporary,
        Some(text) if text == "/dev/null" => LogDir::Nothing,
        Some(text) => LogDir::Path(PathBuf::from(text)),
    };
    let template = |text: OsString| text.to_string_lossy().into_owned();
    let from_flag = given.get("log-line-prefix-template").map(|value| template(value.text.clone()));
    let from_variable = || env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE").map(template);
    let prefix_template =
        from_flag.filter(|text| !text.is_empty()).or_else(from_variable).filter(|text| !text.is_empty());
    Ok(LogConfig {
        role: role(given)?,
        dir,
        redirects,
        tee,
        prefix_template: prefix_template.unwrap_or_else(|| PREFIX_TEMPLATE.to_owned()),
        local_ranks_filter: local_ranks_filter(given, nproc_per_node, warnings)?,
        duplicate_stdout: substrings(given.text("duplicate-stdout-filters")?),
        duplicate_stderr: substrings(given.text("duplicate-stderr-filters")?),
    })
}

fn stream_choice(
    given: &Given,
    name: &str,
    nproc_per_node: usize,
    warnings: &mut Vec<String>,
) -> Result<StreamChoice, CliError> {
    let Some(value) = given.get(name) else { return Ok(StreamChoice::All(super::Streams::default())) };
    let choice = streams(value.as_str()?).ok_or_else(|| {
        CliError::value(value.wrong(
            "neither 0 (none), 1 (stdout), 2 (stderr) or 3 (both), nor a list of rank:digit with ranks 0 to 9",
            "3, or 0:3,1:2",
        ))
    })?;
    if let StreamChoice::Some(of_rank) = &choice {
        warn_of_absent_ranks(value, of_rank.keys().copied(), nproc_per_node, warnings);
    }
    Ok(choice)
}

fn local_ranks_filter(
    given: &Given,
    nproc_per_node: usize,
    warnings: &mut Vec<String>,
) -> Result<Option<BTreeSet<usize>>, CliError> {
    let Some(value) = given.get("local-ranks-filter").filter(|value| !value.text.is_empty()) else {
        return Ok(None);
    };
    let rank = |text: &str| integer(text).and_then(|number| usize::try_from(number).ok());
    let ranks: Option<BTreeSet<usize>> = value.as_str()?.split(',').map(rank).collect();
    let ranks = ranks.ok_or_else(|| CliError::value(value.wrong("not a list of local ranks", "0,2")))?;
    warn_of_absent_ranks(value, ranks.iter().copied(), nproc_per_node, warnings);
    Ok(Some(ranks))
}

fn warn_of_absent_ranks(
    value: &Value,
    ranks: impl Iterator<Item = usize>,
    nproc_per_node: usize,
    warnings: &mut Vec<String>,
) {
    if let Some(rank) = ranks.into_iter().find(|&rank| rank >= nproc_per_node) {
        let workers = count(nproc_per_node, "worker");
        warnings.push(format!("{value} names local rank {rank}, but this node has {workers}"));
    }
}

fn events(given: &Given, env: Env<'_>) -> Result<EventHandler, CliError> {
    const INFO: i128 = 20;
    let Some(value) = given.get("event-log-handler") else { return Ok(EventHandler::Null) };
    match value.text.to_str() {
        Some("null") => Ok(EventHandler::Null),
        // Unlike other messages, events are shown unless LOGLEVEL asks for less.
        Some("console") if env("LOGLEVEL").is_some() && log_level(env) > INFO => Ok(EventHandler::Null),
        Some("console") => Ok(EventHandler::Console),
        _ => Err(CliError::value(value.wrong("no such handler", "console"))),
    }
}

const WARNING: i128 = 30;

/// LOGLEVEL as Python's logging numbers it; WARNING by default.
fn log_level(env: Env<'_>) -> i128 {
    let Some(text) = env("LOGLEVEL") else { return WARNING };
    let text = text.to_string_lossy().to_uppercase();
    match text.trim() {
        "CRITICAL" | "FATAL" => 50,
        "ERROR" => 40,
        "WARNING" | "WARN" => WARNING,
        "INFO" => 20,
        "DEBUG" => 10,
        "NOTSET" => 0,
        other => integer(other).unwrap_or(WARNING),
    }
}

/// Signals by name. What no process can handle, or what the launcher lives by, is left out with a warning.
fn signals(text: &str, warnings: &mut Vec<String>) -> Vec<Signal> {
    use Signal::{SIGCHLD, SIGFPE, SIGILL, SIGKILL, SIGSEGV, SIGSTOP};
    let mut out = Vec::new();
    for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        match name.parse::<Signal>() {
            Ok(signal @ (SIGCHLD | SIGFPE | SIGILL | SIGKILL | SIGSEGV | SIGSTOP)) => {
                warnings.push(format!("--signals-to-handle: {signal} cannot be handled; it is left out"));
            }
            Ok(signal) if out.contains(&signal) => {}
            Ok(signal) => out.push(signal),
            Err(_) => {
                let full = format!("SIG{}", name.to_uppercase().trim_start_matches("SIG"));
                let advice = full
                    .parse::<Signal>()
                    .map_or(String::new(), |signal| format!("; did you mean {signal}?"));
                warnings
                    .push(format!("--signals-to-handle: no signal is called {name}; it is left out{advice}"));
            }
        }
    }
    out
}

fn role(given: &Given) -> Result<String, CliError> {
    Ok(if given.is_on("role") { given.text("role")?.to_owned() } else { "default".to_owned() })
}

fn orphans(given: &Given) -> Result<Orphans, CliError> {
    Ok(match given.text("orphans")? {
        "keep" => Orphans::Keep,
        _ => Orphans::Stop,
    })
}

fn numa_binding(given: &Given, env: Env<'_>, machine: &Machine) -> Result<Option<NumaBinding>, CliError> {
    let Some(value) = given.get("numa-binding") else { return Ok(None) };
    let _binding = match value.text.to_str() {
        Some("node") => NumaBinding::Node,
        Some("socket") => NumaBinding::Socket,
        Some("exclusive") => NumaBinding::Exclusive,
        _ => NumaBinding::CoreComplex,
    };
    let devices =
        [Vendor::Nvidia, Vendor::Amd].iter().map(|vendor| machine.devices(*vendor, env)).sum::<usize>();
    let why = if devices == 0 { "there is no accelerator to bind to" } else { "not built in yet" };
    Err(CliError::value(format!("{value}: {why}; leave it out, or run convoke under numactl or taskset")))
}
