//! The stores that this process serves as rank 0.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use convoke_store::StoreServer;

use crate::error::CommError;

/// Servers by process id and address. The id is needed because a forked child has no server threads.
type Servers = HashMap<(u32, String), Arc<StoreServer>>;

static SERVERS: Mutex<Option<Servers>> = Mutex::new(None);

/// Returns the server at `address` that an earlier world of this process started, or a new one from `serve`.
///
/// The server lives as long as the process, because ranks drop a world at different times. A rank that
/// rejoins early, or forms a group without rank 0, needs the store of the previous world.
///
/// # Errors
/// The errors of `serve`. `serve` is also called while a live world uses the server; it then reports that
/// the address is in use.
pub(super) fn get_or_serve(
    address: String,
    serve: impl FnOnce() -> Result<StoreServer, CommError>,
) -> Result<Arc<StoreServer>, CommError> {
    let mut served = SERVERS.lock().unwrap_or_else(PoisonError::into_inner);
    let served = served.get_or_insert_default();
    let key = (std::process::id(), address);
    if let Some(left) = served.get(&key).filter(|server| Arc::strong_count(server) == 1) {
        return Ok(Arc::clone(left));
    }
    let server = Arc::new(serve()?);
    served.insert(key, Arc::clone(&server));
    Ok(server)
}
