//! Coordinator client: connects a node to the coordinator, with authentication of both sides.

use std::io::ErrorKind;
use std::rc::Rc;

use convoke_env::Token;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::net::TcpStream;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::Settings;
use super::discovery::{ConnectFailure, CoordinatorAddresses, LastAttempt};
use super::framing::{self, FramingError};
use super::wire::{self, Hello, MAGIC, Nonce, Seal, ToCoordinator, UNAUTHENTICATED_FRAME_LIMIT, Welcome};
use crate::membership::AgentId;
use crate::rendezvous::munge;

/// Identity of the connecting node.
pub(super) struct Connector {
    pub(super) settings: Rc<Settings>,
    pub(super) agent: AgentId,
}

/// A connection on which both sides have authenticated themselves. `ours` seals the frames of this node,
/// `theirs` opens the frames of the coordinator.
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) ours: Seal,
    pub(super) theirs: Seal,
}

impl Connector {
    /// Connects to the first address that answers, and authenticates this node.
    ///
    /// # Errors
    /// The errors of all addresses as one text.
    pub(super) async fn connect(&self, found: &CoordinatorAddresses) -> Result<Connection, ConnectFailure> {
        let CoordinatorAddresses { addresses, token, timeout: limit } = found;
        let mut attempts: FuturesUnordered<_> = addresses
            .iter()
            .map(async |address| {
                let stream = timeout(*limit, TcpStream::connect(address)).await;
                let late = |_| Err(FramingError::Timeout(*limit));
                (*address, stream.map_or_else(late, |connected| connected.map_err(Into::into)))
            })
            .collect();
        let mut failed = Vec::new();
        while let Some((address, stream)) = attempts.next().await {
            // Only one address at a time is authenticated: two at once could result in two connections of one
            // agent.
            let connected = match stream {
                Ok(stream) => {
                    let proven = timeout(*limit, self.authenticate(stream, token.as_ref())).await;
                    proven.unwrap_or(Err(FramingError::NoHandshake))
                }
                Err(error) => Err(error),
            };
            match connected {
                Ok(connection) => return Ok(connection),
                Err(error) => failed.push((address, error)),
            }
        }
        let refused = !failed.is_empty() && failed.iter().all(|(_, error)| is_refused(error));
        let never = failed.iter().any(|(_, error)| matches!(error, FramingError::Refused(_)));
        failed.sort_by_key(|(address, _)| *address);
        let why: Vec<_> = failed.iter().map(|(address, error)| format!("{address}: {error}")).collect();
        let why = why.join("; ");
        // If the coordinator refuses this node, it would do so again.
        if never {
            return Err(ConnectFailure::Unusable(why));
        }
        let how = if refused { LastAttempt::Refused } else { LastAttempt::Failed };
        Err(ConnectFailure::Unreachable { why, how })
    }

    async fn authenticate(
        &self,
        mut stream: TcpStream,
        token: Option<&Token>,
    ) -> Result<Connection, FramingError> {
        framing::set_socket_options(&stream)?;
        let nonce: Nonce = super::random()?;
        let hello = Hello::new(&self.settings.run_id, self.agent, nonce);
        let mut first = MAGIC.to_vec();
        first.extend(wire::frame(&wire::encode(&hello)));
        framing::write_raw(&mut stream, &first).await?;
        let answer = framing::read_body(&mut stream, UNAUTHENTICATED_FRAME_LIMIT).await;
        let body = answer.map_err(|error| match error {
            FramingError::Wire(_) => FramingError::NotRendezvous,
            FramingError::Io(error)
                if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) =>
            {
                FramingError::ClosedByPeer
            }
            other => other,
        })?;
        let (nonce, credential) = match wire::decode(&body).map_err(|_| FramingError::NotRendezvous)? {
            Welcome::Welcome { nonce, credential, .. } => (nonce, credential),
            Welcome::Refused(why) => return Err(FramingError::Refused(why)),
        };
        let given = match credential.filter(|_| token.is_none() && self.settings.accepts_credential) {
            Some(credential) => Some(decode(credential).await?),
            None => None,
        };
        let (mut ours, mut theirs) = wire::seals(token.or(given.as_ref()), &hello, &nonce);
        framing::read::<()>(&mut stream, &mut theirs, UNAUTHENTICATED_FRAME_LIMIT).await?;
        if given.is_some() {
            self.settings.given_token.replace(given);
        }
        let profile = self.settings.profile.clone();
        framing::write(&mut stream, &mut ours, &ToCoordinator::Profile(profile)).await?;
        Ok(Connection { stream, ours, theirs })
    }
}

/// Decodes the token that the coordinator has given as a MUNGE credential.
async fn decode(credential: String) -> Result<Token, FramingError> {
    let decoded = spawn_blocking(move || munge::decode(&credential)).await;
    let decoded = decoded.unwrap_or_else(|error| Err(error.to_string()));
    decoded.map_err(|why| {
        FramingError::Refused(format!(
            "it gives the job's token as a MUNGE credential, which this node cannot decode: {why}; start munged here, or set \
             CONVOKE_TOKEN to one secret on all nodes"
        ))
    })
}

fn is_refused(error: &FramingError) -> bool {
    matches!(error, FramingError::Io(error) if error.kind() == ErrorKind::ConnectionRefused)
}

/// Returns a new random agent id for this node.
pub(super) fn fresh_id() -> std::io::Result<AgentId> {
    super::random().map(|id| AgentId(u128::from_le_bytes(id)))
}
