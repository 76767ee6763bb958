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

    fn all_with_prefix(&self, keys: &[&[u8]]) -> Vec<Vec<u8>> {
        keys.iter().map(|key| self.with_prefix(key)).collect()
    }
}

fn slices(keys: &[Vec<u8>]) -> Vec<&[u8]> {
    keys.iter().map(Vec::as_slice).collect()
}

impl Store for PrefixStore {
    fn get(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError> {
        self.inner.get(&self.with_prefix(key), deadline)
    }

    fn try_get(&self, key: &[u8], deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        self.inner.try_get(&self.with_prefix(key), deadline)
    }

    fn compare_set(
        &self,
        key: &[u8],
        expected: &[u8],
        desired: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, StoreError> {
        self.inner.compare_set(&self.with_prefix(key), expected, desired, deadline)
    }

    fn add(&self, key: &[u8], delta: i64, deadline: Instant) -> Result<i64, StoreError> {
        self.inner.add(&self.with_prefix(key), delta, deadline)
    }

    fn append(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        self.inner.append(&self.with_prefix(key), value, deadline)
    }

    fn check(&self, keys: &[&[u8]], deadline: Instant) -> Result<bool, StoreError> {
        self.inner.check(&slices(&self.all_with_prefix(keys)), deadline)
    }

    fn wait(&self, keys: &[&[u8]], deadline: Instant) -> Result<(), StoreError> {
        self.inner.wait(&slices(&self.all_with_prefix(keys)), deadline)
    }

    fn multi_get(&self, keys: &[&[u8]], deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        self.inner.multi_get(&slices(&self.all_with_prefix(keys)), deadline)
    }

    fn multi_set(&self, pairs: &[(&[u8], &[u8])], deadline: Instant) -> Result<(), StoreError> {
        let keys: Vec<Vec<u8>> = pairs.iter().map(|(key, _)| self.with_prefix(key)).collect();
        let pairs: Vec<(&[u8], &[u8])> =
            keys.iter().zip(pairs).map(|(key, (_, value))| (&**key, *value)).collect();
        self.inner.multi_set(&pairs, deadline)
    }

    fn delete(&self, key: &[u8], deadline: Instant) -> Result<bool, StoreError> {
        self.inner.delete(&self.with_prefix(key), deadline)
    }

    fn num_keys(&self, deadline: Instant) -> Result<u64, StoreError> {
        self.inner.num_keys(deadline)
    }

    fn list_keys(&self, deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        let keys = self.inner.list_keys(deadline)?;
        Ok(keys.iter().filter_map(|key| key.strip_prefix(&*self.prefix)).map(<[u8]>::to_vec).collect())
    }

    fn queue_push(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        self.inner.queue_push(&self.with_prefix(key), value, deadline)
    }

    fn queue_pop(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError> {
        self.inner.queue_pop(&self.with_prefix(key), deadline)
    }

    fn try_queue_pop(&self, key: &[u8], deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        self.inner.try_queue_pop(&self.with_prefix(key), deadline)
    }

    fn queue_len(&self, key: &[u8], deadline: Instant) -> Result<u64, StoreError> {
        self.inner.queue_len(&self.with_prefix(key), deadline)
    }

    fn barrier(&self, key: &[u8], world_size: usize, deadline: Instant) -> Result<(), StoreError> {
        self.inner.barrier(&self.with_prefix(key), world_size, deadline)
    }
}
