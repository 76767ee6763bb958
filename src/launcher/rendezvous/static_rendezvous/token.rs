//! The token of a scheduler's job whose user has set none: node 0 draws it, and MUNGE protects it on the way to
//! the other nodes.

use convoke_env::Token;
use convoke_store::Store;

use super::{StaticRendezvous, soon};
use crate::rendezvous::{RendezvousError, munge};

impl StaticRendezvous {
    /// On node 0: draws a token and publishes it. Returns `None` if the user has set a token or the address of
    /// node 0, or if this host has no MUNGE.
    pub(super) fn publish_token(&self, job: &dyn Store) -> Result<Option<Token>, RendezvousError> {
        if !self.needs_token()? {
            return Ok(None);
        }
        let token = Token::random().map_err(RendezvousError::system("cannot get random numbers"))?;
        let Some(credential) = munge::encode(&token) else { return Ok(None) };
        job.set(munge::TOKEN_KEY, credential.as_bytes(), soon())?;
        Ok(Some(token))
    }

    /// On the other nodes: returns the token that node 0 has published.
    pub(super) fn read_token(&self, job: &dyn Store) -> Result<Option<Token>, RendezvousError> {
        if !self.needs_token()? {
            return Ok(None);
        }
        let Some(credential) = job.try_get(munge::TOKEN_KEY, soon())? else { return Ok(None) };
        let token = munge::decode(&String::from_utf8_lossy(&credential));
        token.map(Some).map_err(|why| RendezvousError::Munge { host: self.host.clone(), why })
    }

    fn needs_token(&self) -> Result<bool, RendezvousError> {
        let given = Token::from_process().map_err(|error| RendezvousError::Refused(error.to_string()))?;
        Ok(self.search.is_some() && given.is_none())
    }
}
