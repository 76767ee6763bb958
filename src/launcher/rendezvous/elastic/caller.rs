//! Coordinator client: connects a node to the coordinator, with authentication of both sides.

use std::io::ErrorKind;
use std::time::Duration;

use convoke_env::Token;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::finder::{Attempt, Found};
use super::link::{self, LinkError};
use super::wire::{self, Hello, MAGIC, Nonce, STRANGERS_LIMIT, Seal, ToCoordinator, Welcome};
use crate::membership::{AgentId, Profile};

/// Identity of the connecting node.
pub(super) struct Caller {
    pub(super) run_id: String,
    pub(super) profile: Profile,
    pub(super) agent: AgentId,
}

/// A connection on which both sides have authenticated themselves.
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) ours: Seal,
    pub(super) theirs: Seal,
}

impl Caller {
    /// Connects to the first address that answers, and authenticates this node.
    ///
    /// # Errors
    /// The error of each address.
    pub(super) async fn connect(&self, found: &Found) -> Result<Connection, (String, Attempt)> {
        let Found { addresses, token, patience } = found;
        let mut attempts: FuturesUnordered<_> = addresses
            .iter()
            .map(async |address| (*address, in_time(*patience, TcpStream::connect(address)).await))
            .collect();
        let mut failed = Vec::new();
        while let Some((address, stream)) = attempts.next().await {
            // Two authentications at once would result in two connections of one agent.
            let connected = match stream {
                Ok(stream) => {
                    let proven = timeout(*patience, self.prove(stream, token.as_ref())).await;
                    proven.unwrap_or(Err(LinkError::Mute))
                }
                Err(error) => Err(error),
            };
            match connected {
                Ok(connection) => return Ok(connection),
                Err(error) => failed.push((address, error)),
            }
        }
        let refused = !failed.is_empty() && failed.iter().all(|(_, error)| is_refused(error));
        let never = failed.iter().any(|(_, error)| matches!(error, LinkError::Refused(_)));
        let how = match (never, refused) {
            (true, _) => Attempt::Never,
            (false, true) => Attempt::Refused,
            (false, false) => Attempt::Failed,
        };
        failed.sort_by_key(|(address, _)| *address);
        let why: Vec<_> = failed.iter().map(|(address, error)| format!("{address}: {error}")).collect();
        Err((why.join("; "), how))
    }

    async fn prove(&self, mut stream: TcpStream, token: Option<&Token>) -> Result<Connection, LinkError> {
        link::prepare(&stream)?;
        let nonce: Nonce = super::random()?;
        let hello = Hello::new(&self.run_id, self.agent, nonce);
        let mut first = MAGIC.to_vec();
        first.extend(wire::frame(&wire::encode(&hello)));
        link::write_raw(&mut stream, &first).await?;
        let (body, _) =
            link::read_frame(&mut stream, STRANGERS_LIMIT, false).await.map_err(|error| match error {
                LinkError::Wire(_) => LinkError::Stranger,
                LinkError::Io(error)
                    if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) =>
                {
                    LinkError::HungUp
                }
                other => other,
            })?;
        let nonce = match wire::decode(&body).map_err(|_| LinkError::Stranger)? {
            Welcome::Welcome { nonce, .. } => nonce,
            Welcome::Refused(why) => return Err(LinkError::Refused(why)),
        };
        let (mut ours, mut theirs) = wire::seals(token, &hello, &nonce);
        link::read::<()>(&mut stream, &mut theirs, STRANGERS_LIMIT).await?;
        link::write(&mut stream, &mut ours, &ToCoordinator::Profile(self.profile.clone())).await?;
        Ok(Connection { stream, ours, theirs })
    }
}

async fn in_time<T, E: Into<LinkError>>(
    patience: Duration,
    what: impl Future<Output = Result<T, E>>,
) -> Result<T, LinkError> {
    match timeout(patience, what).await {
        Ok(done) => done.map_err(Into::into),
        Err(_) => Err(LinkError::Silent(patience)),
    }
}

fn is_refused(error: &LinkError) -> bool {
    matches!(error, LinkError::Io(error) if error.kind() == ErrorKind::ConnectionRefused)
}

/// Returns a new random id for this node.
pub(super) fn fresh_id() -> std::io::Result<AgentId> {
    super::random().map(|id| AgentId(u128::from_le_bytes(id)))
}
