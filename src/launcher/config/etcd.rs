//! The configuration for access to an etcd cluster: endpoints, TLS and credentials.

use std::fmt;
use std::path::PathBuf;

use convoke_env::vars;

use crate::formatting;

/// Prefix of all keys in etcd if the setting `etcd_prefix` is missing.
const PREFIX: &str = "/convoke";

/// An etcd cluster, and how to connect to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EtcdCluster {
    /// Host and port of the cluster's members, at least one.
    pub(crate) endpoints: Vec<(String, u16)>,
    /// The files for TLS; set if `protocol=https`.
    pub(crate) tls: Option<TlsFiles>,
    /// The prefix of all keys, from the setting `etcd_prefix`.
    pub(crate) prefix: String,
}

/// Files in PEM format for TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TlsFiles {
    /// Settings `ca_cert` or `cacert`: certificate of the authority that signed the servers' certificates. If
    /// `None`, the authorities that this host trusts apply.
    pub(crate) ca: Option<PathBuf>,
    /// Settings `ssl_cert` and `ssl_cert_key`, or `cert` and `key`: the client's certificate and its key.
    pub(crate) identity: Option<(PathBuf, PathBuf)>,
}

impl EtcdCluster {
    /// True if this launcher was built with the feature `etcd`.
    pub(crate) const IS_BUILT_IN: bool = cfg!(feature = "etcd");
    /// Error text if this launcher was built without etcd: the reason and the remedy.
    pub(crate) const MISSING: &str = "this convoke was built without etcd; install protoc (Debian: apt-get install \
        protobuf-compiler libprotobuf-dev) and rebuild (cargo build --release -p convoke), or use \
        --rdzv-backend=c10d, with an endpoint or a shared file (docs/reference/rendezvous.md)";

    /// Reads the cluster's settings from `--rdzv-conf`, where `value` looks up a key. For some keys, the
    /// names of both torch backends are accepted.
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

    /// Returns whether access to the cluster is unprotected: anyone who reaches it can read and write its
    /// keys, or can intercept credentials.
    pub(crate) fn is_open(&self) -> bool {
        let is_user = std::env::var_os(vars::ETCD_USER).is_some_and(|name| !name.is_empty());
        self.tls.as_ref().is_none_or(|tls| tls.identity.is_none() && !is_user)
    }
}

impl fmt::Display for EtcdCluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let members = self.endpoints.iter().map(|(host, port)| formatting::address(host, *port));
        write!(f, "etcd at {}", members.collect::<Vec<_>>().join(","))
    }
}
