//! How the nodes meet: backend, endpoint, id and settings.

use std::time::Duration;

use super::build::{Numbers, count};
use super::{NodeRange, Rendezvous, conf, endpoint};
use crate::cli::{CliError, Given, Value, integer, suggest_choice};

const BACKENDS: &[&str] = &["static", "c10d", "etcd-v2", "etcd"];
const C10D_PORT: u16 = 29400;
const ETCD_PORT: u16 = 2379;
const STATIC_PORT: u16 = 29500;
const STATIC_TIMEOUT: Duration = Duration::from_secs(900);

/// The rendezvous, the job's id, how many nodes it has, and `--rdzv-conf`.
pub(super) type Meeting = (Rendezvous, String, NodeRange, Vec<(String, String)>);

/// Selects the backend as torchrun does and checks what it needs.
///
/// # Errors
/// A value that makes no sense: exit code 1.
pub(super) fn meeting(
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
    let check = |known: &conf::Known| {
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
