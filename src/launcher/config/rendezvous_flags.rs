//! Reads the flags for the rendezvous: backend, endpoint, id and timeouts.

use std::path::PathBuf;
use std::time::Duration;

use super::endpoint::EndpointError;
use super::etcd::EtcdCluster;
use super::numeric_flags::{suggestion, whole_number};
use super::rdzv_conf::KnownKeys;
use super::settings::{ElasticSettings, Endpoint, NodeRange, Rendezvous};
use super::{endpoint, rdzv_conf};
use crate::cli::{CliError, ParsedArgs, Value, integer};
use crate::formatting::count;
use crate::scheduler::ScheduledJob;

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
pub(super) fn rendezvous_config(
    args: &ParsedArgs,
    nodes: NodeRange,
    scheduled: Option<&ScheduledJob>,
    warnings: &mut Vec<String>,
) -> Result<RendezvousConfig, CliError> {
    let backend = args.text_or("rdzv-backend", "static")?;
    let endpoint_text = args.text("rdzv-endpoint")?.trim();
    let conf = rdzv_conf::split(args.text("rdzv-conf")?)
        .map_err(|what| args.error("rdzv-conf", &what, "KEY=VALUE,KEY=VALUE"))?;
    let conf_name = args.get("rdzv-conf").map_or("--rdzv-conf", |value| value.name.as_str());
    // Checks the values of the keys in `known`, and warns of keys that the `reader` does not `read`.
    let check_conf = |known: &KnownKeys, read: &KnownKeys, reader: &str, warnings: &mut Vec<String>| {
        let message = |what| format!("{conf_name}: {what}");
        rdzv_conf::check(&conf, known).map_err(|what| CliError::value(message(what)))?;
        warnings.extend(rdzv_conf::ignored(&conf, read, reader).map(message));
        Ok::<_, CliError>(())
    };
    if let Some(job) = scheduled {
        let (rendezvous, nodes) = of_scheduled_job(job, args.is_on("nnodes").then_some(nodes), &conf);
        let (known, name) = match rendezvous {
            Rendezvous::Elastic { .. } => (rdzv_conf::C10D, "c10d"),
            Rendezvous::Static { .. } | Rendezvous::Standalone => (rdzv_conf::STATIC, "static"),
        };
        check_conf(known, known, name, warnings)?;
        let run_id = args.get_nonempty("rdzv-id").map(Value::as_str).transpose()?.unwrap_or(&job.id);
        return Ok((rendezvous, run_id.to_owned(), nodes, conf));
    }
    let is_single_node =
        backend == "static" && endpoint_text.is_empty() && !args.is_on("master-port") && nodes.max == 1;
    if args.is_on("standalone") || is_single_node {
        if nodes.min > 1 {
            return Err(CliError::value(format!(
                "--standalone is one node, but --nnodes asks for {}; remove --standalone and name an --rdzv-endpoint, \
                 or remove --nnodes",
                nodes.min
            )));
        }
        check_conf(rdzv_conf::C10D, rdzv_conf::ANY, "convoke", warnings)?;
        warn_ignored_by_standalone(args, warnings);
        return Ok((Rendezvous::Standalone, random_uuid()?, NodeRange { min: 1, max: 1 }, conf));
    }
    let rendezvous = match backend {
        "static" => {
            check_conf(rdzv_conf::STATIC, rdzv_conf::STATIC, backend, warnings)?;
            static_rendezvous(args, nodes, endpoint_text, &conf)?
        }
        "c10d" => {
            check_conf(rdzv_conf::C10D, rdzv_conf::C10D, backend, warnings)?;
            warn_ignored_by_dynamic(args, warnings);
            let endpoint = if value(&conf, "store_type") == Some("file") {
                Endpoint::File(shared_file(args, endpoint_text)?)
            } else {
                let (host, port) = parse_endpoint(args, endpoint_text, Some(C10D_PORT), nodes.min == 1)?;
                let is_host = value(&conf, "is_host").and_then(rdzv_conf::parse_bool);
                Endpoint::Host { host, port, is_host }
            };
            Rendezvous::Elastic { endpoint, settings: settings(&conf) }
        }
        "etcd" | "etcd-v2" => {
            check_conf(rdzv_conf::ETCD, rdzv_conf::ETCD, backend, warnings)?;
            warn_ignored_by_dynamic(args, warnings);
            let member = |text| parse_endpoint(args, text, Some(ETCD_PORT), false);
            let members: Result<_, CliError> = endpoint_text.split(',').map(member).collect();
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
        other => return Err(args.error("rdzv-backend", "no such backend", &suggestion(other, BACKENDS))),
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

/// Returns the rendezvous of a job that the scheduler describes: elastic if `nodes`, the user's `--nnodes`, is
/// a range.
fn of_scheduled_job(
    job: &ScheduledJob,
    nodes: Option<NodeRange>,
    conf: &[(String, String)],
) -> (Rendezvous, NodeRange) {
    let (host, port) = (job.node_0.name.clone(), job.node_0.ports[0]);
    match nodes.filter(|nodes| nodes.min < nodes.max) {
        Some(nodes) => {
            let endpoint = Endpoint::Host { host, port, is_host: None };
            (Rendezvous::Elastic { endpoint, settings: settings(conf) }, nodes)
        }
        None if job.nodes == 1 => (Rendezvous::Standalone, NodeRange { min: 1, max: 1 }),
        None => {
            let search = Some(job.node_0.clone());
            let timeout = seconds(conf, "timeout").unwrap_or(STATIC_TIMEOUT);
            let nodes = NodeRange { min: job.nodes, max: job.nodes };
            (Rendezvous::Static { host, port, node_rank: job.node, search, timeout }, nodes)
        }
    }
}

/// Reads the flags of the `static` backend: an endpoint, or `--master-addr` and `--master-port`.
fn static_rendezvous(
    args: &ParsedArgs,
    nodes: NodeRange,
    endpoint_text: &str,
    conf: &[(String, String)],
) -> Result<Rendezvous, CliError> {
    let (host, port) = if endpoint_text.is_empty() {
        let host = args.get("master-addr").map(|value| host_without_port(value, Some("master-port")));
        let host = host.transpose()?.unwrap_or_else(|| "127.0.0.1".to_owned());
        let port = match whole_number(args, "master-port", "29500")? {
            None => STATIC_PORT,
            Some((value, number)) => u16::try_from(number)
                .ok()
                .filter(|&port| port > 0)
                .ok_or_else(|| value.error("a port is a number from 1 to 65535", "29500"))?,
        };
        (host, port)
    } else {
        parse_endpoint(args, endpoint_text, None, false)?
    };
    let node_rank = match whole_number(args, "node-rank", "0")? {
        None => 0,
        Some((value, number)) => {
            usize::try_from(number).ok().filter(|&rank| rank < nodes.max).ok_or_else(|| {
                let last = nodes.max - 1;
                let what = format!("with {} there are node ranks 0 to {last} only", count(nodes.max, "node"));
                value.error(&what, &format!("{last}, or raise --nnodes"))
            })?
        }
    };
    let timeout = seconds(conf, "timeout").unwrap_or(STATIC_TIMEOUT);
    Ok(Rendezvous::Static { host, port, node_rank, search: None, timeout })
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
            Err(value.error("a port does not belong here", &format!("{host}{port}")))
        }
        Err(EndpointError::Scheme { scheme, rest }) => {
            let what = format!("a host, without {scheme}://");
            let host = endpoint::parse(&rest).map_or(rest, |(host, _)| host);
            Err(value.error(&what, &host))
        }
        Ok(_) | Err(_) => Err(value.error("neither a host name nor an address", "10.0.0.1")),
    }
}

/// Parses the endpoint for `store_type=file`, which is a path.
fn shared_file(args: &ParsedArgs, text: &str) -> Result<PathBuf, CliError> {
    const WHAT: &str = "with store_type=file it is the path of a file that all nodes share";
    match args.get("rdzv-endpoint") {
        _ if !text.is_empty() => Ok(PathBuf::from(text)),
        Some(value) => Err(value.error(WHAT, "/shared/job")),
        None => Err(CliError::value(format!(
            "--rdzv-endpoint is missing: {WHAT}; write --rdzv-endpoint=/shared/job"
        ))),
    }
}

/// Parses host and port of a node, or of one member of an etcd cluster.
fn parse_endpoint(
    args: &ParsedArgs,
    text: &str,
    default_port: Option<u16>,
    is_zero_allowed: bool,
) -> Result<(String, u16), CliError> {
    let wrong = |what: &str, example: &str| args.error("rdzv-endpoint", what, example);
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
        Some(0) if !is_zero_allowed => {
            Err(wrong("port 0 cannot be known to other nodes", "HOST:29500, or --standalone for one node"))
        }
        Some(port) => Ok((host, port)),
        None => Err(wrong("the static backend needs a port", EXAMPLE)),
    }
}

/// Returns a line about the flag that is the likely reason if the nodes do not meet. The flag gives a
/// loopback address for several nodes. `None` otherwise.
pub(super) fn rendezvous_hint(
    args: &ParsedArgs,
    nodes: NodeRange,
    rendezvous: &Rendezvous,
) -> Option<String> {
    let (hosts, what, flag) = match rendezvous {
        Rendezvous::Static { host, .. } => (vec![host], "node 0", "master-addr"),
        Rendezvous::Elastic { endpoint: Endpoint::Host { host, .. }, .. } => {
            (vec![host], "the rendezvous", "rdzv-endpoint")
        }
        Rendezvous::Elastic { endpoint: Endpoint::Etcd(cluster), .. } => {
            (cluster.endpoints.iter().map(|(host, _)| host).collect(), "etcd", "rdzv-endpoint")
        }
        Rendezvous::Elastic { endpoint: Endpoint::File(_), .. } | Rendezvous::Standalone => return None,
    };
    let is_here = hosts.iter().all(|host| endpoint::is_loopback(host));
    let host = hosts.first().filter(|_| is_here && nodes.max > 1)?;
    let by_endpoint = args.get_nonempty("rdzv-endpoint").is_some();
    let flag = if by_endpoint { "rdzv-endpoint" } else { flag };
    let example = if flag == "master-addr" { "10.0.0.1" } else { "10.0.0.1:PORT" };
    Some(format!(
        "--{flag} is {host}, by which every host reaches itself: nodes on other hosts do not find {what}; give all nodes \
         its address, such as --{flag}={example}"
    ))
}

/// Warns about flags that a job of one node ignores.
fn warn_ignored_by_standalone(args: &ParsedArgs, warnings: &mut Vec<String>) {
    let (why, names): (_, &[&str]) = if args.is_on("standalone") {
        ("--standalone", &["rdzv-backend", "rdzv-endpoint", "rdzv-id", "master-addr", "master-port"])
    } else {
        ("one node without --rdzv-endpoint or --master-port", &["rdzv-id"])
    };
    warn_ignored(args, names, why, warnings);
    if args.get("node-rank").is_some_and(|value| value.text != "0") {
        warn_ignored(args, &["node-rank"], why, warnings);
    }
}

/// Warns about flags that only the static backend reads, since another backend is used.
fn warn_ignored_by_dynamic(args: &ParsedArgs, warnings: &mut Vec<String>) {
    let names = ["node-rank", "master-addr", "master-port"];
    warn_ignored(args, &names, "only the static backend reads it", warnings);
}

fn warn_ignored(args: &ParsedArgs, names: &[&str], why: &str, warnings: &mut Vec<String>) {
    let given = names.iter().filter_map(|name| args.get(name)).filter(|value| value.on_command_line);
    warnings.extend(given.map(|value| format!("{value} is ignored: {why}")));
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
