//! Splits `--rdzv-conf` into settings, and checks the values of the keys that a backend knows. Pure.

use crate::cli::{float, integer, suggest_choice};

/// Splits `k=v,k=v` at commas, then at the first `=`, and trims both sides. If a key is repeated, its last
/// value counts.
pub(crate) fn split(text: &str) -> Result<Vec<(String, String)>, String> {
    let mut out: Vec<(String, String)> = Vec::new();
    if text.trim().is_empty() {
        return Ok(out);
    }
    for item in text.trim().split(',') {
        let (key, value) = item.split_once('=').unwrap_or((item, ""));
        let (key, value) = (key.trim(), value.trim());
        if key.is_empty() {
            return Err("a setting without a key".to_owned());
        }
        if value.is_empty() {
            return Err(format!("{key} has no value"));
        }
        match out.iter_mut().find(|(known, _)| known == key) {
            Some((_, old)) => value.clone_into(old),
            None => out.push((key.to_owned(), value.to_owned())),
        }
    }
    Ok(out)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValueKind {
    /// A positive whole number, mostly of seconds.
    Positive,
    /// A number of seconds, 0 or more.
    Seconds,
    /// A boolean: `1/true/t/yes/y` or `0/false/f/no/n`.
    Switch,
    Choice(&'static [&'static str]),
    Text,
}

/// The keys that a backend knows and the kinds of their values, in several tables.
pub(crate) type KnownKeys = [&'static [(&'static str, ValueKind)]];

const DYNAMIC: &[(&str, ValueKind)] = &[
    ("join_timeout", ValueKind::Positive),
    ("last_call_timeout", ValueKind::Positive),
    ("close_timeout", ValueKind::Positive),
    ("heartbeat_timeout", ValueKind::Positive),
    ("keep_alive_interval", ValueKind::Positive),
    ("keep_alive_max_attempt", ValueKind::Positive),
    ("cas_backoff_max_seconds", ValueKind::Seconds),
    ("read_timeout", ValueKind::Positive),
    ("restart_budget", ValueKind::Choice(&["agent", "job"])),
];

const C10D_ONLY: &[(&str, ValueKind)] = &[
    ("is_host", ValueKind::Switch),
    ("store_type", ValueKind::Choice(&["tcp", "file"])),
    // Selects the implementation of torch's own key-value store; convoke ignores it.
    ("use_libuv", ValueKind::Text),
];

const ETCD_ONLY: &[(&str, ValueKind)] = &[
    ("timeout", ValueKind::Positive),
    ("protocol", ValueKind::Choice(&["http", "https"])),
    ("etcd_prefix", ValueKind::Text),
    ("ca_cert", ValueKind::Text),
    ("cacert", ValueKind::Text),
    ("ssl_cert", ValueKind::Text),
    ("cert", ValueKind::Text),
    ("ssl_cert_key", ValueKind::Text),
    ("key", ValueKind::Text),
    // The check of the etcd settings rejects passwords with advice.
    ("password", ValueKind::Text),
    ("etcd_password", ValueKind::Text),
];

const STATIC_ONLY: &[(&str, ValueKind)] = &[("timeout", ValueKind::Positive)];

/// Keys of the backend `c10d`, the built-in rendezvous.
pub(crate) const C10D: &KnownKeys = &[DYNAMIC, C10D_ONLY];
/// Keys of the backends `etcd` and `etcd-v2`.
pub(crate) const ETCD: &KnownKeys = &[DYNAMIC, ETCD_ONLY];
pub(crate) const STATIC: &KnownKeys = &[STATIC_ONLY];
pub(crate) const ANY: &KnownKeys = &[DYNAMIC, C10D_ONLY, STATIC_ONLY, ETCD_ONLY];

/// Checks the values of the keys that `known` lists; does not check other keys.
pub(crate) fn check(conf: &[(String, String)], known: &KnownKeys) -> Result<(), String> {
    for (key, value) in conf {
        let Some((_, kind)) = known.iter().copied().flatten().find(|(name, _)| name == key) else { continue };
        let (wanted, example) = match kind {
            ValueKind::Positive if integer(value).is_some_and(|number| number > 0) => continue,
            ValueKind::Seconds if float(value).is_some_and(|number| number >= 0.0 && number.is_finite()) => {
                continue;
            }
            ValueKind::Switch if parse_bool(value).is_some() => continue,
            ValueKind::Choice(choices) if choices.contains(&value.as_str()) => continue,
            ValueKind::Text => continue,
            ValueKind::Positive => ("a whole number above 0".to_owned(), "60"),
            ValueKind::Seconds => ("a number of seconds, 0 or more".to_owned(), "0.5"),
            ValueKind::Switch => ("true or false".to_owned(), "true"),
            ValueKind::Choice(choices) => (choices.join(" or "), *choices.first().unwrap_or(&"")),
        };
        return Err(format!("{key}={value} must be {wanted}; write {key}={example}"));
    }
    Ok(())
}

/// Returns a warning about keys that `known` does not list. The launcher ignores them, as torchrun does.
/// `None` means that `known` lists all keys.
pub(crate) fn ignored(conf: &[(String, String)], known: &KnownKeys, reader: &str) -> Option<String> {
    let all = || known.iter().copied().flatten().map(|(name, _)| *name);
    let unknown: Vec<&str> =
        conf.iter().map(|(key, _)| key.as_str()).filter(|key| !all().any(|name| name == *key)).collect();
    let first = unknown.first()?;
    let verb = if unknown.len() == 1 { "is" } else { "are" };
    let advice = suggest_choice(first, &all().collect::<Vec<_>>());
    let advice = advice.map_or(String::new(), |name| format!("; did you mean {name}?"));
    Some(format!("{} {verb} ignored: {reader} knows no such setting{advice}", unknown.join(", ")))
}

/// Parses a boolean setting, such as `is_host`; `None` if it is none.
pub(crate) fn parse_bool(value: &str) -> Option<bool> {
    match value.to_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" => Some(true),
        "0" | "false" | "f" | "no" | "n" => Some(false),
        _ => None,
    }
}
