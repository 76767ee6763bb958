//! `host:port`, as torchrun reads it. Pure.

/// Why a text is no endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EndpointError {
    /// The port is no number or too large.
    #[error("the port must be a number from 0 to 65535")]
    Port,
    /// The host has characters that no host has.
    #[error("the host must be a name or an address")]
    Host,
}

/// Reads `host`, `host:port`, `[v6]`, `[v6]:port`. The last colon separates, as in torchrun, so that
/// `::1:29500` is port 29500 of `::1`. An empty text is `localhost`.
pub(crate) fn parse(text: &str) -> Result<(String, Option<u16>), EndpointError> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(("localhost".to_owned(), None));
    }
    let bracketed =
        |text: &str| text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).map(str::to_owned);
    let (host, port) = match (bracketed(text), text.rsplit_once(':')) {
        (Some(host), _) => (host, None),
        (None, Some((host, port))) => (bracketed(host).unwrap_or_else(|| host.to_owned()), Some(port)),
        (None, None) => (text.to_owned(), None),
    };
    let port = match port {
        Some(port) if port.bytes().all(|byte| byte.is_ascii_digit()) => {
            Some(port.parse().map_err(|_| EndpointError::Port)?)
        }
        Some(_) => return Err(EndpointError::Port),
        None => None,
    };
    let allowed = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | ':' | '-');
    if host.is_empty() || !host.chars().all(allowed) {
        return Err(EndpointError::Host);
    }
    Ok((host, port))
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
}
