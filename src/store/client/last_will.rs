//! A connection whose end the server notices, and which notices the server's.

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::time::Instant;

use super::TcpStore;
use super::connect::random;
use super::connection::{Connection, Failure};
use crate::close_watch::watch_closely;
use crate::error::StoreError;
use crate::keys::check_value;
use crate::wire::Kind;
use crate::wire::encode::{blobs, counted};

/// A last will: what the store shall say under a key when this process is gone.
///
/// However its connection ends, by drop, by the death of the process or of its host, the server stores
/// the value, if the key is absent then. Only [`withdraw`](LastWill::withdraw) ends it without.
#[derive(Debug)]
pub struct LastWill {
    stream: TcpStream,
    key: Vec<u8>,
}

/// The other end of a [`LastWill`]: hears when its key has a value, be it from another's will, and when the
/// store is gone.
#[derive(Debug)]
pub struct KeyWatch {
    connection: Connection,
    store: String,
    key: Vec<u8>,
    /// The key has a value, and it has been asked for.
    ready: bool,
}

impl TcpStore {
    /// Leaves a will with the store: `value` (not empty) under `key` when this process is gone; and
    /// watches that key.
    ///
    /// Convoke's own request: a torch server closes the connection instead, which shows as
    /// [`StoreError::Lost`]; other connections of this client are not touched.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn set_last_will(
        &self,
        key: &[u8],
        value: &[u8],
        deadline: Instant,
    ) -> Result<(LastWill, KeyWatch), StoreError> {
        check_value(value)?;
        let key = self.keys.outer(key)?.into_owned();
        let mut connection = self.pool.address.reach(deadline)?;
        let store = self.pool.address.to_string();
        let opened = (|| {
            let stream = connection.stream().try_clone()?;
            watch_closely(&stream)?;
            blobs(connection.request(), Kind::SetLastWill, &[&key, value]);
            connection.send_and_confirm(random(), deadline)?;
            counted(connection.request(), Kind::Wait, 1, [key.as_slice()].into_iter());
            connection.send(deadline)?;
            Ok(stream)
        })();
        match opened {
            Ok(stream) => {
                Ok((LastWill { stream, key: key.clone() }, KeyWatch { connection, store, key, ready: false }))
            }
            Err(failure) => Err(error(failure, store, "set_last_will", deadline)),
        }
    }
}

impl LastWill {
    /// Takes the will back: from now on the end of this process is no news. Its [`KeyWatch`] ends.
    pub fn withdraw(mut self) {
        let mut request = Vec::new();
        blobs(&mut request, Kind::SetLastWill, &[&self.key, b""]);
        // If the store is gone, so is the will.
        if self.stream.write_all(&request).is_ok() {
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }
}

impl KeyWatch {
    /// The key's value as soon as it has one; `None` at the deadline, and the call may be repeated.
    ///
    /// # Errors
    /// [`StoreError::Lost`]: the store is gone, or the will was withdrawn.
    pub fn wait(&mut self, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        match self.value(deadline) {
            Ok(value) => Ok(Some(value)),
            Err(Failure::Late) => Ok(None),
            Err(failure) => Err(error(failure, self.store.clone(), "watch", deadline)),
        }
    }

    fn value(&mut self, deadline: Instant) -> Result<Vec<u8>, Failure> {
        if !self.ready {
            self.connection.read_byte(deadline)?;
            blobs(self.connection.request(), Kind::Get, &[&self.key]);
            self.connection.send(deadline)?;
            self.ready = true;
        }
        self.connection.read_blob(deadline)
    }
}

fn error(failure: Failure, store: String, operation: &'static str, deadline: Instant) -> StoreError {
    match failure {
        Failure::Late => {
            let after = Instant::now().saturating_duration_since(deadline);
            StoreError::Timeout { store, operation, after, keys: Vec::new() }
        }
        Failure::Lost(source) => StoreError::Lost { store, operation, source },
        Failure::Protocol(what) => StoreError::Protocol { store, what: format!("{operation}: it {what}") },
    }
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
    fn a_will_speaks_when_its_connection_ends_and_the_first_word_stays() {
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
    fn a_withdrawn_will_says_nothing_and_ends_its_watch() {
        let (_server, store) = server();
        let (will, mut watch) = store.set_last_will(b"verdict", b"gone", soon()).unwrap();
        will.withdraw();
        assert!(matches!(watch.wait(soon()), Err(StoreError::Lost { .. })));
        drop(watch);
        // The end of that connection has been dealt with when a later one is served.
        drop(store.set_last_will(b"other", b"x", soon()).unwrap());
        store.wait(&[b"other"], soon()).unwrap();
        assert_eq!(store.try_get(b"verdict", soon()).unwrap(), None);
    }

    #[test]
    fn a_watch_sees_the_end_of_the_store() {
        let (server, store) = server();
        let (_will, mut watch) = store.set_last_will(b"verdict", b"gone", soon()).unwrap();
        server.shutdown();
        assert!(matches!(watch.wait(soon()), Err(StoreError::Lost { .. })));
    }
}
