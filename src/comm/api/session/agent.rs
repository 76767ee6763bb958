//! Reads the first message that convoke's launcher sends to a worker, from the inherited channel.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use convoke_env::{AgentChannel, Generation, ToWorker, Token};

use crate::error::CommError;

/// Time limit for the first message on the agent channel. It is short: the launcher is running already.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// The content of the launcher's first message on the agent channel, and the channel.
#[derive(Debug, Clone)]
pub(super) struct AgentHello {
    pub(super) generation: Generation,
    pub(super) token: Option<Token>,
    pub(super) channel: Option<Arc<Mutex<AgentChannel>>>,
}

/// Returns the launcher's first message on the inherited channel; `None` if no channel was inherited.
///
/// All duplicates of the channel's descriptor read one byte stream, so its first message can be read only
/// once. Its content is kept for later sessions of this process. Sessions that exist at the same time share
/// the channel; the last one to be dropped closes it.
pub(super) fn inherited_hello() -> Result<Option<AgentHello>, CommError> {
    static FIRST_MESSAGE: Mutex<Option<(AgentHello, Weak<Mutex<AgentChannel>>)>> = Mutex::new(None);
    let mut received = FIRST_MESSAGE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((hello, channel)) = &mut *received {
        let open = match channel.upgrade() {
            Some(open) => Some(open),
            None => AgentChannel::inherited()?.map(|channel| Arc::new(Mutex::new(channel))),
        };
        *channel = open.as_ref().map_or_else(Weak::new, Arc::downgrade);
        return Ok(Some(AgentHello { channel: open, ..hello.clone() }));
    }
    let Some(mut channel) = AgentChannel::inherited()? else { return Ok(None) };
    loop {
        if let ToWorker::Hello { generation, token } = channel.receive(HELLO_TIMEOUT)? {
            let channel = Arc::new(Mutex::new(channel));
            let hello = AgentHello { generation, token, channel: None };
            *received = Some((hello.clone(), Arc::downgrade(&channel)));
            return Ok(Some(AgentHello { channel: Some(channel), ..hello }));
        }
    }
}
