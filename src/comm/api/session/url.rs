//! Parses the URLs of torch's `init_method`, without resolving names.

use std::path::PathBuf;

use crate::error::CommError;

/// A parsed URL: how the ranks meet, and the rank if the URL contains it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Url {
    pub(super) init_method: InitMethod,
    /// Rank and number of ranks; `None` if the URL does not contain them.
    pub(super) rank_and_size: Option<(usize, usize)>,
}

/// How ranks meet, as the URL says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum InitMethod {
    /// `env://`: environment variables say how ranks meet.
    Env,
    /// `tcp://host:port`: rank 0 serves the store at this address.
    Tcp { host: String, port: u16 },
    /// `file:///path`: a store in this file.
    File(PathBuf),
}

impl Url {
    /// Parses `scheme://...?rank=0&world_size=2`. A path is taken literally, without `%` escapes.
    pub(super) fn parse(text: &str) -> Result<Self, CommError> {
        parse(text).map_err(|what| CommError::Url { url: text.chars().take(256).collect(), what })
    }
}

fn parse(text: &str) -> Result<Url, String> {
    let (base, query) = text.split_once('?').unwrap_or((text, ""));
    let (scheme, rest) =
        base.split_once("://").ok_or("it has no scheme: tcp://host:port, file:///path or env://")?;
    let init_method = match scheme {
        "env" if rest.is_empty() => InitMethod::Env,
        "env" => return Err("env:// takes no address: write env://, or env:// followed by `?`".to_owned()),
        "tcp" => tcp(rest.strip_suffix('/').unwrap_or(rest))?,
        "file" => file(rest)?,
        other => return Err(format!("the scheme {other:?} is not tcp, file or env")),
    };
    Ok(Url { init_method, rank_and_size: parse_rank_and_size(query)? })
}

fn tcp(address: &str) -> Result<InitMethod, String> {
    let form = "an address is host:port, as in tcp://node-1:29500 or tcp://[::1]:29500";
    let (host, port) = address.rsplit_once(':').ok_or(form)?;
    if host.contains('%') {
        let what = "a link-local address with a scope is a different host on each host: give a global address \
                    or a name";
        return Err(what.to_owned());
    }
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let plain = |host: &str| !host.is_empty() && !host.contains([':', '/', '@', '[', ']']);
    if bare.is_none() && !plain(host) || bare.is_some_and(|v6| v6.parse::<std::net::Ipv6Addr>().is_err()) {
        return Err(form.to_owned());
    }
    let port = port.parse::<u16>().ok().filter(|&port| port != 0);
    let port = port.ok_or("a port is 1 to 65535, the same for all ranks")?;
    Ok(InitMethod::Tcp { host: bare.unwrap_or(host).to_owned(), port })
}

fn file(path: &str) -> Result<InitMethod, String> {
    // Browsers write `file://localhost/path` for a file of this host.
    let path = path.strip_prefix("localhost").unwrap_or(path);
    if !path.starts_with('/') || path.ends_with('/') {
        return Err("a file is named by its absolute path, as in file:///shared/job-7".to_owned());
    }
    Ok(InitMethod::File(PathBuf::from(path)))
}

fn parse_rank_and_size(query: &str) -> Result<Option<(usize, usize)>, String> {
    let (mut rank, mut size) = (None, None);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let slot = match name {
            "rank" => &mut rank,
            "world_size" => &mut size,
            _ => return Err(format!("{name:?} is not rank or world_size")),
        };
        let number = value.parse::<usize>().map_err(|_| format!("{name}={value:?} is not a whole number"))?;
        if slot.replace(number).is_some() {
            return Err(format!("{name} is given twice"));
        }
    }
    match (rank, size) {
        (None, None) => Ok(None),
        (Some(rank), Some(size)) if rank < size => Ok(Some((rank, size))),
        (Some(rank), Some(size)) => Err(format!(
            "rank={rank} is out of range: world_size={size} allows 0 to {}",
            size.saturating_sub(1)
        )),
        (Some(_), None) => Err("it gives rank, but not world_size".to_owned()),
        (None, Some(_)) => Err("it gives world_size, but not rank".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> InitMethod {
        InitMethod::Tcp { host: host.to_owned(), port }
    }

    #[test]
    fn torch_urls_are_accepted() {
        let cases = [
            ("env://", InitMethod::Env, None),
            ("env://?rank=1&world_size=2", InitMethod::Env, Some((1, 2))),
            ("tcp://10.1.1.20:23456", tcp("10.1.1.20", 23456), None),
            ("tcp://node-1:29500/", tcp("node-1", 29500), None),
            ("tcp://[::1]:29500?world_size=4&rank=3", tcp("::1", 29500), Some((3, 4))),
            ("file:///tmp/a%20b c", InitMethod::File(PathBuf::from("/tmp/a%20b c")), None),
            (
                "file://localhost/tmp/x?rank=0&world_size=1&",
                InitMethod::File(PathBuf::from("/tmp/x")),
                Some((0, 1)),
            ),
        ];
        for (text, init_method, rank_and_size) in cases {
            assert_eq!(Url::parse(text).unwrap(), Url { init_method, rank_and_size }, "{text}");
        }
    }

    #[test]
    fn random_urls_never_cause_a_panic() {
        let good =
            ["tcp://[::1]:29500?world_size=4&rank=3", "tcp://node-1:29500/", "file:///tmp/x", "env://"];
        let decode = |bytes: &[u8]| Url::parse(&String::from_utf8_lossy(bytes)).ok();
        let encode = |url: &Url| {
            let init_method = match &url.init_method {
                InitMethod::Env => "env://".to_owned(),
                InitMethod::Tcp { host, port } if host.contains(':') => format!("tcp://[{host}]:{port}"),
                InitMethod::Tcp { host, port } => format!("tcp://{host}:{port}"),
                InitMethod::File(path) => format!("file://{}", path.display()),
            };
            let rank_and_size =
                url.rank_and_size.map(|(rank, size)| format!("?rank={rank}&world_size={size}"));
            (init_method + &rank_and_size.unwrap_or_default()).into_bytes()
        };
        convoke_testkit::fuzz("random_urls_never_cause_a_panic", &good, 4000, decode, encode);
    }

    #[test]
    fn malformed_urls_are_reported_with_advice() {
        let cases = [
            ("", "it has no scheme: tcp://host:port"),
            ("node-1:29500", "it has no scheme"),
            ("http://node-1:80", "the scheme \"http\" is not tcp, file or env"),
            ("env://x", "env:// takes no address"),
            ("tcp://", "an address is host:port"),
            ("tcp://node-1", "an address is host:port"),
            ("tcp://:29500", "an address is host:port"),
            ("tcp://::1:29500", "an address is host:port, as in tcp://node-1:29500 or tcp://[::1]:29500"),
            ("tcp://[::1]", "an address is host:port"),
            ("tcp://[fe80::1%eth0]:29500", "a link-local address with a scope"),
            ("tcp://[node]:1", "an address is host:port"),
            ("tcp://me@node:1", "an address is host:port"),
            ("tcp://node:1/path", "a port is 1 to 65535"),
            ("tcp://node:", "a port is 1 to 65535"),
            ("tcp://node:0", "a port is 1 to 65535"),
            ("tcp://node:65536", "a port is 1 to 65535"),
            ("file://", "absolute path, as in file:///shared/job-7"),
            ("file://relative/path", "absolute path"),
            ("file:///tmp/", "absolute path"),
            ("tcp://h:1?rank=0", "it gives rank, but not world_size"),
            ("tcp://h:1?world_size=2", "it gives world_size, but not rank"),
            ("tcp://h:1?rank=2&world_size=2", "rank=2 is out of range: world_size=2 allows 0 to 1"),
            ("tcp://h:1?rank=0&world_size=0", "rank=0 is out of range"),
            ("tcp://h:1?rank=-1&world_size=2", "rank=\"-1\" is not a whole number"),
            ("tcp://h:1?rank&world_size=2", "rank=\"\" is not a whole number"),
            ("tcp://h:1?rank=0&rank=1&world_size=2", "rank is given twice"),
            ("tcp://h:1?timeout=3", "\"timeout\" is not rank or world_size"),
        ];
        for (text, message) in cases {
            let error = Url::parse(text).unwrap_err();
            assert!(matches!(&error, CommError::Url { url, .. } if url == text), "{error:?}");
            assert!(error.to_string().contains(message), "{text}: {error}");
        }
    }
}
