//! A store whose keys all begin with a prefix.

use std::sync::Arc;
use std::time::Instant;

use crate::error::StoreError;
use crate::store::Store;

/// A part of another store: `key` is `prefix/key` there.
///
/// An empty prefix still puts a slash before the key. Nested, the inner prefix comes first:
/// `PrefixStore::new("a", PrefixStore::new("b", store))` writes `b/a/key`. Keys are counted over the
/// whole store, and listed of this part only.
#[derive(Debug, Clone)]
pub struct PrefixStore {
    /// With the slash.
    prefix: Vec<u8>,
    inner: Arc<dyn Store>,
}

impl PrefixStore {
    /// The part of `inner` under `prefix`.
    pub fn new(prefix: impl AsRef<[u8]>, inner: Arc<dyn Store>) -> PrefixStore {
        PrefixStore { prefix: [prefix.as_ref(), b"/"].concat(), inner }
    }

    fn name(&self, key: &[u8]) -> Vec<u8> {
        [&self.prefix, key].concat()
    }

    fn names(&self, keys: &[&[u8]]) -> Vec<Vec<u8>> {
        keys.iter().map(|key| self.name(key)).collect()
    }
}

fn slices(names: &[Vec<u8>]) -> Vec<&[u8]> {
    names.iter().map(Vec::as_slice).collect()
}

impl Store for PrefixStore {
    fn set(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        self.inner.set(&self.name(key), value, deadline)
    }

    fn get(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError> {
        self.inner.get(&self.name(key), deadline)
    }

    fn try_get(&self, key: &[u8], deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        self.inner.try_get(&self.name(key), deadline)
    }

    fn compare_set(
        &self,
        key: &[u8],
        expected: &[u8],
        desired: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, StoreError> {
        self.inner.compare_set(&self.name(key), expected, desired, deadline)
    }

    fn add(&self, key: &[u8], delta: i64, deadline: Instant) -> Result<i64, StoreError> {
        self.inner.add(&self.name(key), delta, deadline)
    }

    fn append(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        self.inner.append(&self.name(key), value, deadline)
    }

    fn check(&self, keys: &[&[u8]], deadline: Instant) -> Result<bool, StoreError> {
        self.inner.check(&slices(&self.names(keys)), deadline)
    }

    fn wait(&self, keys: &[&[u8]], deadline: Instant) -> Result<(), StoreError> {
        self.inner.wait(&slices(&self.names(keys)), deadline)
    }

    fn multi_get(&self, keys: &[&[u8]], deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        self.inner.multi_get(&slices(&self.names(keys)), deadline)
    }

    fn multi_set(&self, pairs: &[(&[u8], &[u8])], deadline: Instant) -> Result<(), StoreError> {
        let names: Vec<Vec<u8>> = pairs.iter().map(|(key, _)| self.name(key)).collect();
        let pairs: Vec<(&[u8], &[u8])> =
            names.iter().zip(pairs).map(|(name, (_, value))| (&**name, *value)).collect();
        self.inner.multi_set(&pairs, deadline)
    }

    fn delete(&self, key: &[u8], deadline: Instant) -> Result<bool, StoreError> {
        self.inner.delete(&self.name(key), deadline)
    }

    fn num_keys(&self, deadline: Instant) -> Result<u64, StoreError> {
        self.inner.num_keys(deadline)
    }

    fn list_keys(&self, deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        let names = self.inner.list_keys(deadline)?;
        Ok(names.iter().filter_map(|name| name.strip_prefix(&*self.prefix)).map(<[u8]>::to_vec).collect())
    }

    fn queue_push(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        self.inner.queue_push(&self.name(key), value, deadline)
    }

    fn queue_pop(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError> {
        self.inner.queue_pop(&self.name(key), deadline)
    }

    fn try_queue_pop(&self, key: &[u8], deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        self.inner.try_queue_pop(&self.name(key), deadline)
    }

    fn queue_len(&self, key: &[u8], deadline: Instant) -> Result<u64, StoreError> {
        self.inner.queue_len(&self.name(key), deadline)
    }

    fn barrier(&self, key: &[u8], world_size: usize, deadline: Instant) -> Result<(), StoreError> {
        self.inner.barrier(&self.name(key), world_size, deadline)
    }
}
