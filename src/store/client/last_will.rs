//! Last wills: a value that the server stores when a client disappears.

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::time::Instant;

use super::TcpStore;
use super::connect::random_u32;
use super::connection::{Connection, ExchangeError};
use crate::call::Call;
use crate::error::StoreError;
use crate::keepalive::set_fast_keepalive;
use crate::keys::{check_value, stored_key};
use crate::wire::Kind;
use crate::wire::encode::{blobs, counted};

/// A last will: a key and the value that the server stores under it when this process has ended.
///
/// The server stores the value when the connection ends: because the `LastWill` was dropped, or the
/// process or its host died. If the key already exists then, it keeps its value.
/// [`withdraw`](LastWill::withdraw) cancels the will. The server notices the loss of another host
/// within about 4 s.
#[derive(Debug)]
pub struct LastWill {
    stream: TcpStream,
    key: Vec<u8>,
}

/// A watch on the key of a [`LastWill`].
///
/// The watch reports the value as soon as the key exists, whoever stored it, and reports the end of
/// the store.
#[derive(Debug)]
pub struct KeyWatch {
    connection: Connection,
    store: String,
    key: Vec<u8>,
    /// True if the key exists and the request for its value has been sent.
    is_value_requested: bool,
}

impl TcpStore {
    /// Asks the server to store `value` (not empty) under `key` when this process has ended, and
    /// watches that key. Opens a connection for this purpose.
    ///
    /// Only convoke's servers know this request. A torch server closes the new connection, and the
    /// call returns [`StoreError::Lost`]; other connections of this client stay open.
    ///
    /// # Errors
    /// [`StoreError::Lost`] from a torch server. Otherwise the errors that every operation may
    /// return, see [`Store`](crate::Store).
    pub fn set_last_will(
        &self,
        key: &[u8],
        value: &[u8],
        deadline: Instant,
    ) -> Result<(LastWill, KeyWatch), StoreError> {
        check_value(value)?;
        let call = Call::new("set_last_will", &[], deadline);
        let key = stored_key(key)?;
        let mut connection = self.pool.address.connect(deadline)?;
        let store = self.pool.address.to_string();
        let opened = (|| {
            let stream = connection.stream.try_clone()?;
            set_fast_keepalive(&stream)?;
            blobs(connection.request(), Kind::SetLastWill, &[&key, value]);
            connection.send_and_confirm(random_u32())?;
            connection.ask(|out| counted(out, Kind::Wait, 1, [key.as_slice()].into_iter()))?;
            Ok(stream)
        })();
        let stream = opened.map_err(|error| store_error(error, call, &store))?;
        let watch = KeyWatch { connection, store, key: key.clone(), is_value_requested: false };
        Ok((LastWill { stream, key }, watch))
    }
}

impl LastWill {
    /// Cancels the will: the end of this process has no effect any more. The [`KeyWatch`] of the will
    /// then returns an error.
    pub fn withdraw(mut self) {
        let mut request = Vec::new();
        blobs(&mut request, Kind::SetLastWill, &[&self.key, b""]);
        // A failed write needs no handling: if the store has ended, so has the will.
        if self.stream.write_all(&request).is_ok() {
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }
}

impl KeyWatch {
    /// Waits until the key exists and returns its value. Returns `None` at the deadline; the caller
    /// may then call `wait` again.
    ///
    /// # Errors
    /// [`StoreError::Lost`] if the store has ended or the will was withdrawn.
    pub fn wait(&mut self, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        let call = Call::new("watch", &[], deadline);
        self.connection.deadline = deadline;
        match self.value() {
            Ok(value) => Ok(Some(value)),
            Err(ExchangeError::Timeout) => Ok(None),
            Err(error) => Err(store_error(error, call, &self.store)),
        }
    }

    fn value(&mut self) -> Result<Vec<u8>, ExchangeError> {
        if !self.is_value_requested {
            self.connection.read_ready()?;
            self.connection.ask(|out| blobs(out, Kind::Get, &[&self.key]))?;
            self.is_value_requested = true;
        }
        self.connection.read_blob()
    }
}

fn store_error(error: ExchangeError, call: Call<'_>, store: &str) -> StoreError {
    error.of_call(call, store.to_owned(), vec!["the server's answer".to_owned()])
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Store, StoreServer};

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn server() -> (StoreServer, TcpStore) {
        let server = StoreServer::bind(&[([127, 0, 0, 1], 0).into()]).unwrap();
        let store = TcpStore::connect(&server.addresses()[0].to_string(), soon()).unwrap();
        (server, store)
    }

    #[test]
    fn first_executed_last_will_keeps_its_value() {
        let (_server, store) = server();
        let (first, first_watch) = store.set_last_will(b"verdict", b"first is gone", soon()).unwrap();
        let (second, mut second_watch) = store.set_last_will(b"verdict", b"second is gone", soon()).unwrap();
        assert_eq!(second_watch.wait(Instant::now()).unwrap(), None, "nothing has happened yet");
        drop((first, first_watch));
        assert_eq!(second_watch.wait(soon()).unwrap().as_deref(), Some(&b"first is gone"[..]));
        drop((second, second_watch));
        assert_eq!(store.get(b"verdict", soon()).unwrap(), b"first is gone");
    }

    #[test]
    fn withdrawn_last_will_is_never_run_and_ends_its_watch() {
        let (_server, store) = server();
        let (will, mut watch) = store.set_last_will(b"verdict", b"gone", soon()).unwrap();
        will.withdraw();
        assert!(matches!(watch.wait(soon()), Err(StoreError::Lost { .. })));
        drop(watch);
        // The server handles ends in order: after a later one, it has handled the first.
        drop(store.set_last_will(b"other", b"x", soon()).unwrap());
        store.wait(&[b"other"], soon()).unwrap();
        assert_eq!(store.try_get(b"verdict", soon()).unwrap(), None);
    }

    #[test]
    fn watch_reports_the_loss_of_the_store() {
        let (server, store) = server();
        let (_will, mut watch) = store.set_last_will(b"verdict", b"gone", soon()).unwrap();
        server.shutdown();
        assert!(matches!(watch.wait(soon()), Err(StoreError::Lost { .. })));
    }
}
