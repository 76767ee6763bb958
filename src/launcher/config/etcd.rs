//! The configuration for access to an etcd cluster: endpoints, TLS and credentials.

use std::fmt;
use std::path::PathBuf;

use convoke_env::vars;

use crate::formatting;

/// `PREFIX` of keys without `etcd_prefix`.
const PREFIX: &str = "/convoke";

/// An etcd cluster and the way into it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EtcdCluster {
    /// Its members, at least one.
    pub(crate) endpoints: Vec<(String, u16)>,
    /// `protocol=https`.
    pub(crate) tls: Option<TlsFiles>,
    /// `etcd_prefix`: the prefix of all keys.
    pub(crate) prefix: String,
}

/// Files in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TlsFiles {
    /// `ca_cert`, `cacert`: the authority that signed the servers' certificates; else those that this host
    /// trusts.
    pub(crate) ca: Option<PathBuf>,
    /// `ssl_cert` and `ssl_cert_key`, `cert` and `key`: the client's certificate and its key.
    pub(crate) identity: Option<(PathBuf, PathBuf)>,
}

impl EtcdCluster {
    /// True in a launcher that was built with the feature `etcd`.
    pub(crate) const IS_BUILT_IN: bool = cfg!(feature = "etcd");
    /// Error text of a launcher without it: the reason and the remedy.
    pub(crate) const MISSING: &str = "this convoke was built without etcd; install protoc (Debian: apt-get install \
        protobuf-compiler libprotobuf-dev) and rebuild (cargo build --release -p convoke), or use \
        --rdzv-backend=c10d, with an endpoint or a shared file (docs/reference/rendezvous.md)";

    /// Of `--rdzv-conf`, whose keys `value` looks up; both torch backends' names for a key are understood.
    ///
    /// # Errors
    /// Settings that contradict each other.
    pub(super) fn new(
        endpoints: Vec<(String, u16)>,
        value: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, String> {
        if value("password").is_some() || value("etcd_password").is_some() {
            return Err(format!(
                "everybody on this host can read a password on a command line; set {} or {}",
                vars::ETCD_PASSWORD,
                vars::ETCD_PASSWORD_FILE
            ));
        }
        let file = |names: [&str; 2]| names.into_iter().find_map(&value).map(PathBuf::from);
        let ca = file(["ca_cert", "cacert"]);
        let (certificate, key) = (file(["ssl_cert", "cert"]), file(["ssl_cert_key", "key"]));
        let https = value("protocol").is_some_and(|protocol| protocol == "https");
        if !https && (ca.is_some() || certificate.is_some() || key.is_some()) {
            return Err("certificates are given, but not protocol=https".to_owned());
        }
        let identity = match (certificate, key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some((certificate, key)),
            _ => return Err("a client certificate needs its key: ssl_cert and ssl_cert_key".to_owned()),
        };
        Ok(Self {
            endpoints,
            tls: https.then_some(TlsFiles { ca, identity }),
            prefix: value("etcd_prefix").unwrap_or_else(|| PREFIX.to_owned()),
        })
    }

    /// Returns whether everyone who reaches the cluster can read and write it, or can intercept credentials.
    pub(crate) fn is_open(&self) -> bool {
        let is_user = std::env::var_os(vars::ETCD_USER).is_some_and(|name| !name.is_empty());
        self.tls.as_ref().is_none_or(|tls| tls.identity.is_none() && !is_user)
    }
}

impl fmt::Display for EtcdCluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("etcd at ")?;
        for (index, (host, port)) in self.endpoints.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(f, "{comma}{}", formatting::address(host, *port))?;
        }
        Ok(())
    }
}
