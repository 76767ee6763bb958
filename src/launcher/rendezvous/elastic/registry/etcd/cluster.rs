//! Sends requests to an etcd cluster through any member that answers, and describes errors.

use std::cell::{Cell, RefCell};
use std::error::Error as _;
use std::time::Duration;

use convoke_env::vars;
use etcd_client::{Channel, Client, ConnectOptions, Error};
use tokio::time::{Instant, timeout};
use tonic::Code;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use super::super::RegistryError;
use crate::config::EtcdCluster;
use crate::formatting::address;

/// Longest time to connect to an etcd member, including TLS and authentication.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of a request to one etcd member: this multiple of the time that the previous request took, at
/// least [`MIN_CALL_TIMEOUT`] and at most [`MAX_CALL_TIMEOUT`].
const TIMEOUT_FACTOR: u32 = 4;
const MIN_CALL_TIMEOUT: Duration = Duration::from_millis(500);
const MAX_CALL_TIMEOUT: Duration = Duration::from_secs(8);

/// Client of an etcd cluster.
pub(super) struct Cluster {
    /// Address of each member, and how to connect to it.
    members: Vec<(String, Endpoint)>,
    /// Name of the whole cluster for messages.
    pub(super) name: String,
    user: Option<(String, String)>,
    /// Index of the member in use. `client` is the connection to it.
    at: Cell<usize>,
    client: RefCell<Option<Client>>,
    /// Timeout of the next request. It doubles after each request that no member answered.
    call_timeout: Cell<Duration>,
}

impl Cluster {
    /// See [`EtcdRegistry::new`](super::EtcdRegistry::new).
    pub(super) fn new(config: &EtcdCluster) -> Result<Self, String> {
        let read = |what: &str, path: &std::path::Path| {
            std::fs::read(path).map_err(|error| format!("{what} {}: {error}", path.display()))
        };
        let mut tls = None;
        if let Some(files) = &config.tls {
            let mut with = ClientTlsConfig::new();
            with = match &files.ca {
                Some(ca) => with.ca_certificate(Certificate::from_pem(read("CA certificate", ca)?)),
                None => with.with_native_roots(),
            };
            if let Some((certificate, key)) = &files.identity {
                let identity =
                    Identity::from_pem(read("client certificate", certificate)?, read("client key", key)?);
                with = with.identity(identity);
            }
            tls = Some(with);
        }
        let scheme = if tls.is_some() { "https" } else { "http" };
        let mut members = Vec::new();
        for (host, port) in &config.endpoints {
            let at = address(host, *port);
            let wrong = |error: tonic::transport::Error| format!("etcd at {at}: {}", error_chain(&error));
            let mut member = Endpoint::from_shared(format!("{scheme}://{at}"))
                .map_err(wrong)?
                .connect_timeout(CONNECT_TIMEOUT)
                .tcp_nodelay(true);
            if let Some(tls) = &tls {
                member = member.tls_config(tls.clone()).map_err(wrong)?;
            }
            members.push((at, member));
        }
        Ok(Self {
            members,
            name: config.to_string(),
            user: credentials()?,
            at: Cell::new(0),
            client: RefCell::default(),
            call_timeout: Cell::new(MIN_CALL_TIMEOUT),
        })
    }

    /// Sends a request by `call` to the member that answered last, and if that fails, to the other members in
    /// turn.
    ///
    /// # Errors
    /// No member answers, or a member refuses the request.
    pub(super) async fn call<T>(
        &self,
        call: impl AsyncFn(Client) -> Result<T, Error>,
    ) -> Result<T, RegistryError> {
        let mut failed = Vec::new();
        for _ in 0..self.members.len() {
            let (name, _) = self.member();
            let call_timeout = self.call_timeout.get();
            let began = Instant::now();
            let attempt = async {
                let client = timeout(CONNECT_TIMEOUT, self.client()).await.map_err(|_| CONNECT_TIMEOUT)?;
                let done = match client {
                    Ok(client) => timeout(call_timeout, call(client)).await.map_err(|_| call_timeout)?,
                    Err(error) => Err(error),
                };
                Ok::<_, Duration>(done)
            };
            let why = match attempt.await {
                Ok(Ok(value)) => {
                    let took = began.elapsed() * TIMEOUT_FACTOR;
                    self.call_timeout.set(took.clamp(MIN_CALL_TIMEOUT, MAX_CALL_TIMEOUT));
                    return Ok(value);
                }
                Ok(Err(error)) => match self.describe_error(name, &error) {
                    RegistryError::Transient(why) => why,
                    refused => {
                        self.client.take();
                        return Err(refused);
                    }
                },
                Err(after) => format!("{name}: no answer within {after:?}"),
            };
            failed.push(why);
            self.use_next_member();
        }
        self.call_timeout.set((self.call_timeout.get() * 2).min(MAX_CALL_TIMEOUT));
        Err(RegistryError::Transient(format!("etcd at {}", failed.join("; "))))
    }

    /// Describes the error of a watch, which is a gRPC stream of the member in use. The next request goes to
    /// another member.
    pub(super) fn stream_error(&self, error: &Error) -> RegistryError {
        let error = self.describe_error(&self.member().0, error);
        self.use_next_member();
        match error {
            RegistryError::Transient(why) => RegistryError::Transient(format!("etcd at {why}")),
            refused => refused,
        }
    }

    /// Returns the member in use.
    fn member(&self) -> &(String, Endpoint) {
        &self.members[self.at.get()]
    }

    fn use_next_member(&self) {
        self.client.take();
        self.at.set((self.at.get() + 1) % self.members.len());
    }

    async fn client(&self) -> Result<Client, Error> {
        if let Some(client) = self.client.borrow().as_ref() {
            return Ok(client.clone());
        }
        let channel = self.member().1.connect().await?;
        let mut options = ConnectOptions::new().with_auto_token_refresh(true).with_require_leader(true);
        if let Some((name, password)) = &self.user {
            options = options.with_user(name, password);
        }
        let client = Client::from_channel(Channel::Tonic(channel), Some(options)).await?;
        self.client.replace(Some(client.clone()));
        Ok(client)
    }

    /// Describes the error of a request to member `name`, as temporary or permanent.
    fn describe_error(&self, name: &str, error: &Error) -> RegistryError {
        let all = match error {
            Error::GRpcStatus(status) => match status.source() {
                Some(source) => format!("{}: {}", status.message(), error_chain(source)),
                None => status.message().to_owned(),
            },
            Error::TransportError(error) => error_chain(error),
            other => other.to_string(),
        };
        let user = self.user.as_ref().map_or("", |(name, _)| name.as_str());
        let code = if let Error::GRpcStatus(status) = error { Some(status.code()) } else { None };
        RegistryError::Permanent(if let Some((_, what)) = all.split_once("invalid peer certificate: ") {
            format!(
                "the certificate of etcd at {name} is refused: {what}\n  try: the CA that has signed it (ca_cert or cacert)"
            )
        } else if let Some((_, alert)) = all.split_once("received fatal alert: ") {
            format!(
                "etcd at {name} refuses our certificate ({alert})\n  try: a certificate and its key that it accepts (ssl_cert and \
                 ssl_cert_key, or cert and key)"
            )
        } else {
            match code {
                Some(Code::InvalidArgument) if all.contains("authentication failed") => format!(
                    "etcd at {name} refuses user {user} or the password\n  try: CONVOKE_ETCD_USER and CONVOKE_ETCD_PASSWORD"
                ),
                Some(Code::InvalidArgument) if all.contains("user name is empty") => format!(
                    "etcd at {name} requires a user and a password\n  try: CONVOKE_ETCD_USER and CONVOKE_ETCD_PASSWORD"
                ),
                Some(Code::FailedPrecondition) if all.contains("authentication is not enabled") => format!(
                    "etcd at {name} has authentication disabled, but user {user} is given\n  try: unset CONVOKE_ETCD_USER"
                ),
                Some(Code::PermissionDenied) => format!(
                    "etcd at {name} does not let user {user} read and write there\n  try: another etcd_prefix, or the right \
                     to read and write below it"
                ),
                _ => return RegistryError::Transient(format!("{name}: {all}")),
            }
        })
    }
}

/// Returns user and password for etcd from the environment. `None` if neither is set.
///
/// # Errors
/// Only one of them is set, or a file cannot be read.
fn credentials() -> Result<Option<(String, String)>, String> {
    let get = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let from_file = |path: String| {
        let text = std::fs::read_to_string(&path)
            .map_err(|error| format!("{}={path}: {error}", vars::ETCD_PASSWORD_FILE))?;
        Ok::<_, String>(text.trim_end_matches(['\r', '\n']).to_owned())
    };
    let password = match get(vars::ETCD_PASSWORD) {
        Some(password) => Some(password),
        None => get(vars::ETCD_PASSWORD_FILE).map(from_file).transpose()?,
    };
    match (get(vars::ETCD_USER), password) {
        (Some(user), Some(password)) => Ok(Some((user, password))),
        (None, None) => Ok(None),
        (Some(_), None) => Err(format!(
            "{} is set without {} or {}",
            vars::ETCD_USER,
            vars::ETCD_PASSWORD,
            vars::ETCD_PASSWORD_FILE
        )),
        (None, Some(_)) => Err(format!("a password for etcd is set without {}", vars::ETCD_USER)),
    }
}

/// Returns an error and all its causes, without repetitions.
fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}
