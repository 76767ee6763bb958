//! The stores that this process serves as rank 0.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use convoke_store::StoreServer;

use crate::error::CommError;

/// By process and address: a fork has none of its parent's threads.
type Servers = HashMap<(u32, String), Arc<StoreServer>>;

static SERVED: Mutex<Option<Servers>> = Mutex::new(None);

/// The server at `address` that an earlier world of this process has left, or a new one.
///
/// It lives as long as the process. Ranks do not drop a world at the same moment: one that joins again already, or
/// forms a group without rank 0, needs the store that rank 0 has served for the world before.
///
/// # Errors
/// What `serve` returns. It is called also while a world of the server lives, and says that the address is in use.
pub(super) fn at(
    address: String,
    serve: impl FnOnce() -> Result<StoreServer, CommError>,
) -> Result<Arc<StoreServer>, CommError> {
    let mut served = SERVED.lock().unwrap_or_else(PoisonError::into_inner);
    let served = served.get_or_insert_default();
    let key = (std::process::id(), address);
    if let Some(left) = served.get(&key).filter(|server| Arc::strong_count(server) == 1) {
        return Ok(Arc::clone(left));
    }
    let server = Arc::new(serve()?);
    served.insert(key, Arc::clone(&server));
    Ok(server)
}
