//! A store whose keys all begin with a prefix.

use std::sync::Arc;
use std::time::Instant;

use crate::error::StoreError;
use crate::store::Store;

/// A view of another store in which `key` stands for `prefix/key`.
///
/// An empty prefix also adds a slash. In nested views the inner prefix comes first:
/// `PrefixStore::new("a", PrefixStore::new("b", store))` writes `b/a/key`. `num_keys` counts the keys
/// of the whole store, `list_keys` lists only those with the prefix.
#[derive(Debug, Clone)]
pub struct PrefixStore {
    /// The prefix with its slash.
    prefix: Vec<u8>,
    inner: Arc<dyn Store>,
}

impl PrefixStore {
    /// Creates a view of `inner` with `prefix`.
    pub fn new(prefix: impl AsRef<[u8]>, inner: Arc<dyn Store>) -> PrefixStore {
        PrefixStore { prefix: [prefix.as_ref(), b"/"].concat(), inner }
    }

    fn with_prefix(&self, key: &[u8]) -> Vec<u8> {
        [&self.prefix, key].concat()
    }

    fn with_prefixes<R>(&self, keys: &[&[u8]], operation: impl FnOnce(&[&[u8]]) -> R) -> R {
        let keys: Vec<Vec<u8>> = keys.iter().map(|key| self.with_prefix(key)).collect();
        operation(&keys.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }
}

/// Defines operations of one key, which call the operation of the same name with the prefixed key.
macro_rules! of_one_key {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {$(
        fn $name(&self, key: &[u8], $($argument: $type,)* deadline: Instant) -> Result<$result, StoreError> {
            self.inner.$name(&self.with_prefix(key), $($argument,)* deadline)
        }
    )*};
}

impl Store for PrefixStore {
    of_one_key! {
        get() -> Vec<u8>;
        try_get() -> Option<Vec<u8>>;
        compare_set(expected: &[u8], desired: &[u8]) -> Vec<u8>;
        add(delta: i64) -> i64;
        append(value: &[u8]) -> ();
        delete() -> bool;
        queue_push(value: &[u8]) -> ();
        queue_pop() -> Vec<u8>;
        try_queue_pop() -> Option<Vec<u8>>;
        queue_len() -> u64;
        barrier(world_size: usize) -> ();
    }

    fn check(&self, keys: &[&[u8]], deadline: Instant) -> Result<bool, StoreError> {
        self.with_prefixes(keys, |keys| self.inner.check(keys, deadline))
    }

    fn wait(&self, keys: &[&[u8]], deadline: Instant) -> Result<(), StoreError> {
        self.with_prefixes(keys, |keys| self.inner.wait(keys, deadline))
    }

    fn multi_get(&self, keys: &[&[u8]], deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        self.with_prefixes(keys, |keys| self.inner.multi_get(keys, deadline))
    }

    fn multi_set(&self, pairs: &[(&[u8], &[u8])], deadline: Instant) -> Result<(), StoreError> {
        let keys: Vec<Vec<u8>> = pairs.iter().map(|(key, _)| self.with_prefix(key)).collect();
        let pairs: Vec<(&[u8], &[u8])> =
            keys.iter().zip(pairs).map(|(key, (_, value))| (&**key, *value)).collect();
        self.inner.multi_set(&pairs, deadline)
    }

    fn num_keys(&self, deadline: Instant) -> Result<u64, StoreError> {
        self.inner.num_keys(deadline)
    }

    fn list_keys(&self, deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        let keys = self.inner.list_keys(deadline)?;
        Ok(keys.iter().filter_map(|key| key.strip_prefix(&*self.prefix)).map(<[u8]>::to_vec).collect())
    }
}
