//! Parses an endpoint `host:port`, as torchrun does.

use std::net::{IpAddr, Ipv6Addr};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EndpointError {
    #[error("the port must be a number from 0 to 65535")]
    Port,
    /// The host is empty, or has characters that no host name or address has.
    #[error("the host must be a name or an address")]
    Host,
    /// The text begins with `http://` or another scheme. `rest` is the text after it, without a path.
    #[error("only HOST:PORT, without {scheme}://")]
    Scheme { scheme: String, rest: String },
    /// An IPv6 address without brackets that may or may not end with a port.
    #[error("an IPv6 address stands in brackets")]
    Bare {
        /// The whole text as an address, in brackets.
        whole: String,
        /// The text with its last part as a port and the rest in brackets, if that is possible.
        split: Option<String>,
    },
}

/// Parses `host`, `host:port`, `[v6]`, `[v6]:port`. The last colon separates host and port, as in torchrun,
/// so that `::1:29500` could be port 29500 of `::1`. A text that is also an IPv6 address as a whole is
/// therefore an error. An empty text is `localhost`.
pub(crate) fn parse(text: &str) -> Result<(String, Option<u16>), EndpointError> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(("localhost".to_owned(), None));
    }
    if let Some((scheme, rest)) = text.split_once("://") {
        let rest = rest.split('/').next().unwrap_or_default().to_owned();
        return Err(EndpointError::Scheme { scheme: scheme.to_owned(), rest });
    }
    if is_v6(text) {
        let split = text.rsplit_once(':').filter(|(host, port)| is_v6(host) && port.parse::<u16>().is_ok());
        let split = split.map(|(host, port)| format!("[{host}]:{port}"));
        return Err(EndpointError::Bare { whole: format!("[{text}]"), split });
    }
    let bracketed =
        |text: &str| text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).map(str::to_owned);
    let (host, port) = match (bracketed(text), text.rsplit_once(':')) {
        (Some(host), _) => (host, None),
        (None, Some((host, port))) => (bracketed(host).unwrap_or_else(|| host.to_owned()), Some(port)),
        (None, None) => (text.to_owned(), None),
    };
    let number = |port: &str| port.parse().ok().filter(|_| !port.starts_with('+'));
    let port = port.map(|port| number(port).ok_or(EndpointError::Port)).transpose()?;
    let allowed = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | ':' | '-');
    if host.is_empty() || !host.chars().all(allowed) || host.contains(':') && !is_v6(&host) {
        return Err(EndpointError::Host);
    }
    Ok((host, port))
}

/// Returns whether every host reaches itself by this name.
pub(crate) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

pub(super) fn is_v6(text: &str) -> bool {
    text.parse::<Ipv6Addr>().is_ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_text_is_an_endpoint_or_refused(text in "(\\[?[a-z0-9:._-]{0,8}\\]?:?[0-9]{0,6}|\\PC{0,20})") {
            if let Ok((host, Some(port))) = parse(&text) {
                prop_assert_eq!(parse(&format!("[{host}]:{port}")), Ok((host, Some(port))));
            }
        }
    }

    #[test]
    fn ipv6_without_brackets_is_split_only_if_unambiguous() {
        let of = |host: &str, port| Ok((host.to_owned(), Some(port)));
        assert_eq!(parse("::1:29500"), of("::1", 29500));
        assert_eq!(parse("1:2:3:4:5:6:7:8:29500"), of("1:2:3:4:5:6:7:8", 29500));
        let bare = |whole: &str, split: Option<&str>| {
            Err(EndpointError::Bare { whole: whole.to_owned(), split: split.map(str::to_owned) })
        };
        assert_eq!(parse("::1"), bare("[::1]", None));
        assert_eq!(parse("fe80::1:2950"), bare("[fe80::1:2950]", Some("[fe80::1]:2950")));
        assert_eq!(parse("fe80::abcd"), bare("[fe80::abcd]", None));
        for text in ["a:b:1", "10.0.0.1:29500:1", "fe80::1%eth0:1", "[a:b]:1"] {
            assert_eq!(parse(text), Err(EndpointError::Host), "{text}");
        }
    }

    #[test]
    fn url_scheme_in_an_endpoint_is_refused_by_name() {
        for (text, scheme, rest) in [
            ("http://etcd:2379", "http", "etcd:2379"),
            ("https://etcd:2379/v2/", "https", "etcd:2379"),
            ("tcp://[::1]:7", "tcp", "[::1]:7"),
        ] {
            let (scheme, rest) = (scheme.to_owned(), rest.to_owned());
            assert_eq!(parse(text), Err(EndpointError::Scheme { scheme, rest }), "{text}");
        }
    }
}
