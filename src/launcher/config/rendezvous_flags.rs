//! Reads the flags for the rendezvous: backend, endpoint, id and timeouts.

use std::path::PathBuf;
use std::time::Duration;

use super::endpoint::EndpointError;
use super::etcd::EtcdCluster;
use super::numeric_flags::NumericFlags;
use super::settings::{ElasticSettings, Endpoint, NodeRange, Rendezvous};
use super::{endpoint, rdzv_conf};
use crate::cli::{CliError, ParsedArgs, Value, integer, suggest_choice};
use crate::formatting::count;

const BACKENDS: &[&str] = &["static", "c10d", "etcd-v2", "etcd"];
const C10D_PORT: u16 = 29400;
const ETCD_PORT: u16 = 2379;
const STATIC_PORT: u16 = 29500;
const LAST_CALL: Duration = Duration::from_secs(30);
const JOIN_TIMEOUT: Duration = Duration::from_secs(600);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Heartbeat timeout by default: a node that sends no heartbeat for longer is lost.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(3);
const MAX_HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// torchrun's defaults for interval and attempts, used if the user sets only one of the two.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEP_ALIVE_ATTEMPTS: u32 = 3;
const STATIC_TIMEOUT: Duration = Duration::from_secs(900);
/// The run id if the command line has none, the same as torchrun's.
const NO_RUN_ID: &str = "none";

/// Returns whether the user has given this run id.
pub(crate) fn is_named(run_id: &str) -> bool {
    run_id != NO_RUN_ID
}

/// The rendezvous, the run id, the number of nodes, and the settings of `--rdzv-conf`.
pub(super) type RendezvousConfig = (Rendezvous, String, NodeRange, Vec<(String, String)>);

/// Selects the rendezvous backend as torchrun does, and checks the values that the backend needs.
///
/// # Errors
/// A value that makes no sense: exit code 1.
pub(super) fn rendezvous_config(
    args: &ParsedArgs,
    numbers: &NumericFlags,
    nodes: NodeRange,
    warnings: &mut Vec<String>,
) -> Result<RendezvousConfig, CliError> {
    let backend = if args.is_on("rdzv-backend") { args.text("rdzv-backend")? } else { "static" };
    let endpoint_text = args.text("rdzv-endpoint")?.trim();
    let conf_value = args.get("rdzv-conf");
    let conf = rdzv_conf::split(args.text("rdzv-conf")?).map_err(|what| {
        CliError::value(conf_value.map_or(what.clone(), |value| value.wrong(&what, "KEY=VALUE,KEY=VALUE")))
    })?;
    let conf_name = conf_value.map_or("--rdzv-conf", |value| value.name.as_str());
    let check = |known: &rdzv_conf::KnownKeys| {
        rdzv_conf::check(&conf, known).map_err(|what| CliError::value(format!("{conf_name}: {what}")))
    };
    let warn_ignored = |known: &rdzv_conf::KnownKeys, reader: &str, warnings: &mut Vec<String>| {
        warnings.extend(rdzv_conf::ignored(&conf, known, reader).map(|what| format!("{conf_name}: {what}")));
    };
    let is_single_node =
        backend == "static" && endpoint_text.is_empty() && numbers.master_port.is_none() && nodes.max == 1;
    if args.is_on("standalone") || is_single_node {
        if nodes.min > 1 {
            return Err(CliError::value(format!(
                "--standalone is one node, but --nnodes asks for {}; remove --standalone and name an --rdzv-endpoint, \
                 or remove --nnodes",
                nodes.min
            )));
        }
        check(rdzv_conf::C10D)?;
        warn_ignored(rdzv_conf::ANY, "convoke", warnings);
        warn_ignored_by_standalone(args, warnings);
        return Ok((Rendezvous::Standalone, random_uuid()?, NodeRange { min: 1, max: 1 }, conf));
    }
    let endpoint = |default_port: Option<u16>| parse_endpoint(args, endpoint_text, default_port);
    let rendezvous = match backend {
        "static" => {
            check(rdzv_conf::STATIC)?;
            warn_ignored(rdzv_conf::STATIC, backend, warnings);
            static_rendezvous(args, numbers, nodes, endpoint_text, &conf)?
        }
        "c10d" => {
            check(rdzv_conf::C10D)?;
            warn_ignored(rdzv_conf::C10D, backend, warnings);
            warn_ignored_by_dynamic(args, warnings);
            let endpoint = if value(&conf, "store_type") == Some("file") {
                Endpoint::File(shared_file(args, endpoint_text)?)
            } else {
                let (host, port) = endpoint(Some(C10D_PORT))?;
                let is_host = value(&conf, "is_host").and_then(rdzv_conf::parse_bool);
                if port == 0 && nodes.min > 1 {
                    return Err(port_zero_error(args));
                }
                Endpoint::Host { host, port, is_host }
            };
            Rendezvous::Elastic { endpoint, settings: settings(&conf) }
        }
        "etcd" | "etcd-v2" => {
            check(rdzv_conf::ETCD)?;
            warn_ignored(rdzv_conf::ETCD, backend, warnings);
            warn_ignored_by_dynamic(args, warnings);
            let members: Result<_, CliError> =
                endpoint_text.split(',').map(|text| parse_member(args, text)).collect();
            let cluster = EtcdCluster::new(members?, |key| value(&conf, key).map(str::to_owned));
            let cluster = cluster.map_err(|what| CliError::value(format!("--rdzv-conf: {what}")))?;
            if let (false, Some(backend)) = (EtcdCluster::IS_BUILT_IN, args.get("rdzv-backend")) {
                return Err(CliError::value(format!("{backend}: {}", EtcdCluster::MISSING)));
            }
            let mut settings = settings(&conf);
            if let (Some(timeout), None) = (seconds(&conf, "timeout"), value(&conf, "join_timeout")) {
                settings.join_timeout = timeout;
            }
            Rendezvous::Elastic { endpoint: Endpoint::Etcd(cluster), settings }
        }
        other => {
            let example = suggest_choice(other, BACKENDS).map_or_else(|| BACKENDS.join("|"), str::to_owned);
            let value = args
                .get("rdzv-backend")
                .map_or_else(String::new, |value| value.wrong("no such backend", &example));
            return Err(CliError::value(value));
        }
    };
    let run_id = match args.get("rdzv-id") {
        None => NO_RUN_ID.to_owned(),
        Some(value) if value.text.is_empty() => u128::from_be_bytes(random_uuid_bytes()?).to_string(),
        Some(value) => value.as_str()?.to_owned(),
    };
    Ok((rendezvous, run_id, nodes, conf))
}

fn value<'a>(conf: &'a [(String, String)], key: &str) -> Option<&'a str> {
    conf.iter().find(|(known, _)| known == key).map(|(_, value)| value.as_str())
}

/// Returns a number of seconds whose value has been checked before.
fn seconds(conf: &[(String, String)], key: &str) -> Option<Duration> {
    let number = integer(value(conf, key)?)?;
    Some(Duration::from_secs(u64::from(u32::try_from(number).unwrap_or(u32::MAX))))
}

fn settings(conf: &[(String, String)]) -> ElasticSettings {
    let (interval, attempts) = (seconds(conf, "keep_alive_interval"), value(conf, "keep_alive_max_attempt"));
    let attempts = attempts.and_then(integer).map(|number| u32::try_from(number).unwrap_or(u32::MAX));
    let heartbeat_timeout = if interval.is_some() || attempts.is_some() {
        interval.unwrap_or(KEEP_ALIVE_INTERVAL).saturating_mul(attempts.unwrap_or(KEEP_ALIVE_ATTEMPTS))
    } else {
        HEARTBEAT_TIMEOUT
    };
    ElasticSettings {
        last_call: seconds(conf, "last_call_timeout").unwrap_or(LAST_CALL),
        join_timeout: seconds(conf, "join_timeout").unwrap_or(JOIN_TIMEOUT),
        close_timeout: seconds(conf, "close_timeout").unwrap_or(CLOSE_TIMEOUT),
        heartbeat_timeout: heartbeat_timeout.min(MAX_HEARTBEAT_TIMEOUT),
        job_budget: value(conf, "restart_budget") == Some("job"),
    }
}

/// Reads the flags of the `static` backend: an endpoint, or `--master-addr` and `--master-port`.
fn static_rendezvous(
    args: &ParsedArgs,
    numbers: &NumericFlags,
    nodes: NodeRange,
    endpoint_text: &str,
    conf: &[(String, String)],
) -> Result<Rendezvous, CliError> {
    let (host, port) = if endpoint_text.is_empty() {
        let host =
            args.get("master-addr").map(|value| host_without_port(value, Some("master-port"))).transpose()?;
        let host = host.unwrap_or_else(|| "127.0.0.1".to_owned());
        let port = match (args.get("master-port"), numbers.master_port) {
            (Some(value), Some(number)) => match u16::try_from(number) {
                Ok(port) if port > 0 => port,
                _ => return Err(CliError::value(value.wrong("a port is a number from 1 to 65535", "29500"))),
            },
            _ => STATIC_PORT,
        };
        (host, port)
    } else {
        match parse_endpoint(args, endpoint_text, None)? {
            (_, 0) => return Err(port_zero_error(args)),
            found => found,
        }
    };
    let node_rank = match (args.get("node-rank"), numbers.node_rank) {
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
    let timeout = seconds(conf, "timeout").unwrap_or(STATIC_TIMEOUT);
    Ok(Rendezvous::Static { host, port, node_rank, timeout })
}

/// Parses a host and rejects a port. `port_flag` is the flag for the port, if there is one, which the error
/// then suggests.
pub(super) fn host_without_port(value: &Value, port_flag: Option<&str>) -> Result<String, CliError> {
    let text = value.as_str()?.trim();
    let inner = text.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(text);
    if endpoint::is_v6(inner) {
        return Ok(inner.to_owned());
    }
    match endpoint::parse(text) {
        Ok((host, None)) if !text.is_empty() => Ok(host),
        Ok((host, Some(port))) => {
            let port = port_flag.map_or(String::new(), |flag| match value.on_command_line {
                true => format!(" --{flag}={port}"),
                false => format!(" PET_{}={port}", flag.replace('-', "_").to_uppercase()),
            });
            Err(CliError::value(value.wrong("a port does not belong here", &format!("{host}{port}"))))
        }
        Err(EndpointError::Scheme { scheme, rest }) => {
            let what = format!("a host, without {scheme}://");
            let host = endpoint::parse(&rest).map_or(rest, |(host, _)| host);
            Err(CliError::value(value.wrong(&what, &host)))
        }
        Ok(_) | Err(_) => Err(CliError::value(value.wrong("neither a host name nor an address", "10.0.0.1"))),
    }
}

fn port_zero_error(args: &ParsedArgs) -> CliError {
    let what = "port 0 cannot be known to other nodes";
    let wrong = |value: &Value| value.wrong(what, "HOST:29500, or --standalone for one node");
    CliError::value(args.get("rdzv-endpoint").map_or_else(String::new, wrong))
}

/// Parses the endpoint for `store_type=file`, which is a path.
fn shared_file(args: &ParsedArgs, text: &str) -> Result<PathBuf, CliError> {
    if text.is_empty() {
        let what = "with store_type=file it is the path of a file that all nodes share";
        let missing = || format!("--rdzv-endpoint is missing: {what}; write --rdzv-endpoint=/shared/job");
        let value = args.get("rdzv-endpoint").map_or_else(missing, |value| value.wrong(what, "/shared/job"));
        return Err(CliError::value(value));
    }
    Ok(PathBuf::from(text))
}

fn parse_endpoint(
    args: &ParsedArgs,
    text: &str,
    default_port: Option<u16>,
) -> Result<(String, u16), CliError> {
    let wrong = |what: &str, example: &str| {
        let value = args.get("rdzv-endpoint").map_or_else(String::new, |value| value.wrong(what, example));
        CliError::value(value)
    };
    const EXAMPLE: &str = "HOST:PORT, such as 10.0.0.1:29500";
    let (host, port) = endpoint::parse(text).map_err(|error| {
        let what = error.to_string();
        match error {
            EndpointError::Scheme { scheme, .. } => {
                // The advice covers all members of an etcd cluster, not only this one.
                let members = args.text("rdzv-endpoint").unwrap_or_default().split(',');
                let plain = members.map(|member| match endpoint::parse(member) {
                    Err(EndpointError::Scheme { rest, .. }) => rest,
                    _ => member.trim().to_owned(),
                });
                let is_etcd = args.text("rdzv-backend").is_ok_and(|backend| backend.starts_with("etcd"));
                let https = scheme == "https" && is_etcd;
                let more = if https { ", and protocol=https in --rdzv-conf" } else { "" };
                wrong(&what, &(plain.collect::<Vec<_>>().join(",") + more))
            }
            EndpointError::Bare { whole, split } => {
                let port = default_port.unwrap_or(STATIC_PORT);
                let split = split.map_or(String::new(), |split| format!("{split}, or "));
                wrong(&what, &format!("{split}{whole}:{port}"))
            }
            EndpointError::Port | EndpointError::Host => wrong(&what, EXAMPLE),
        }
    })?;
    match port.or(default_port) {
        Some(port) => Ok((host, port)),
        None => Err(wrong("the static backend needs a port", EXAMPLE)),
    }
}

/// Parses host and port of one member of an etcd cluster.
fn parse_member(args: &ParsedArgs, text: &str) -> Result<(String, u16), CliError> {
    match parse_endpoint(args, text, Some(ETCD_PORT))? {
        (_, 0) => Err(port_zero_error(args)),
        member => Ok(member),
    }
}

/// Returns a line about the flag that is the likely reason if the nodes do not meet. The flag gives a
/// loopback address for several nodes. `None` otherwise.
pub(super) fn rendezvous_hint(
    args: &ParsedArgs,
    nodes: NodeRange,
    rendezvous: &Rendezvous,
) -> Option<String> {
    let is_here = |host: &String| endpoint::is_loopback(host);
    let (host, what, flag) = match rendezvous {
        Rendezvous::Static { host, .. } => (Some(host).filter(|host| is_here(host)), "node 0", "master-addr"),
        Rendezvous::Elastic { endpoint: Endpoint::Host { host, .. }, .. } => {
            (Some(host).filter(|host| is_here(host)), "the rendezvous", "rdzv-endpoint")
        }
        Rendezvous::Elastic { endpoint: Endpoint::Etcd(cluster), .. } => {
            let all = cluster.endpoints.iter().all(|(host, _)| is_here(host));
            (cluster.endpoints.first().map(|(host, _)| host).filter(|_| all), "etcd", "rdzv-endpoint")
        }
        Rendezvous::Elastic { endpoint: Endpoint::File(_), .. } | Rendezvous::Standalone => return None,
    };
    let host = host.filter(|_| nodes.max > 1)?;
    let by_endpoint = args.get("rdzv-endpoint").is_some_and(|value| !value.text.is_empty());
    let flag = if by_endpoint { "rdzv-endpoint" } else { flag };
    let example = if flag == "master-addr" { "10.0.0.1" } else { "10.0.0.1:PORT" };
    Some(format!(
        "--{flag} is {host}, by which every host reaches itself: nodes on other hosts do not find {what}; give all nodes \
         its address, such as --{flag}={example}"
    ))
}

/// Warns about flags that a job of one node ignores.
fn warn_ignored_by_standalone(args: &ParsedArgs, warnings: &mut Vec<String>) {
    let standalone = args.is_on("standalone");
    let why = if standalone { "--standalone" } else { "one node without --rdzv-endpoint or --master-port" };
    let names: &[&str] = if standalone {
        &["rdzv-backend", "rdzv-endpoint", "rdzv-id", "master-addr", "master-port"]
    } else {
        &["rdzv-id"]
    };
    for value in names.iter().filter_map(|name| args.get(name)).filter(|value| value.on_command_line) {
        warnings.push(format!("{value} is ignored: {why}"));
    }
    if let Some(value) = args.get("node-rank").filter(|value| value.on_command_line && value.text != "0") {
        warnings.push(format!("{value} is ignored: {why}"));
    }
}

/// Warns about flags that only the static backend reads, since another backend is used.
fn warn_ignored_by_dynamic(args: &ParsedArgs, warnings: &mut Vec<String>) {
    let names = ["node-rank", "master-addr", "master-port"];
    for value in names.iter().filter_map(|name| args.get(name)).filter(|value| value.on_command_line) {
        warnings.push(format!("{value} is ignored: only the static backend reads it"));
    }
}

fn random_uuid_bytes() -> Result<[u8; 16], CliError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| CliError::value(format!("cannot get random numbers for the job id: {error}")))?;
    bytes[6] = bytes[6] & 0x0f | 0x40; // version 4, random
    bytes[8] = bytes[8] & 0x3f | 0x80; // variant of RFC 9562
    Ok(bytes)
}

fn random_uuid() -> Result<String, CliError> {
    let hex = format!("{:032x}", u128::from_be_bytes(random_uuid_bytes()?));
    Ok([&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-"))
}
