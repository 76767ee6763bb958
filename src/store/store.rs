//! The interface of all stores.

use std::fmt;
use std::time::Instant;

use crate::error::StoreError;

/// A key-value store shared by the processes of a job.
///
/// The trait is object-safe. Several threads may use a store at once. Every operation ends by its
/// `deadline`. Keys and values are arbitrary bytes. The operations behave as those of
/// torch.distributed's stores. An operation costs one to three round trips over TCP.
///
/// Every operation may return [`StoreError::Lost`], [`StoreError::Unreachable`],
/// [`StoreError::Protocol`], [`StoreError::Timeout`], and [`StoreError::Invalid`] for a key or value
/// that is too long. The sections "Errors" below name the errors with a special meaning; an operation
/// without such a section has none.
pub trait Store: Send + Sync + fmt::Debug {
    /// Stores `value` under `key`.
    fn set(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        self.multi_set(&[(key, value)], deadline)
    }

    /// Waits until `key` exists and returns its value.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] if the key does not appear.
    fn get(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError>;

    /// Returns the value of `key`, or `None` if the key does not exist now.
    fn try_get(&self, key: &[u8], deadline: Instant) -> Result<Option<Vec<u8>>, StoreError>;

    /// Stores `desired` if the value of `key` is `expected`, or if the key is absent and `expected` is
    /// empty. Returns the value after the operation, or `expected` if the key is absent and stays
    /// absent.
    fn compare_set(
        &self,
        key: &[u8],
        expected: &[u8],
        desired: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, StoreError>;

    /// Adds `delta` to the decimal number under `key` and returns the sum. An absent key counts as 0.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] if the value is not a number.
    fn add(&self, key: &[u8], delta: i64, deadline: Instant) -> Result<i64, StoreError>;

    /// Appends `value` to the value of `key`. An absent key counts as empty.
    fn append(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError>;

    /// Returns true if all `keys` exist now.
    fn check(&self, keys: &[&[u8]], deadline: Instant) -> Result<bool, StoreError>;

    /// Waits until all `keys` exist.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] with the missing keys, or with all keys if the missing ones are unknown.
    fn wait(&self, keys: &[&[u8]], deadline: Instant) -> Result<(), StoreError>;

    /// Waits until all `keys` exist and returns their values in the order of `keys`.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] if a key does not appear.
    fn multi_get(&self, keys: &[&[u8]], deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError>;

    /// Stores all pairs of key and value with one request.
    fn multi_set(&self, pairs: &[(&[u8], &[u8])], deadline: Instant) -> Result<(), StoreError>;

    /// Deletes `key`. Returns true if it existed.
    fn delete(&self, key: &[u8], deadline: Instant) -> Result<bool, StoreError>;

    /// Returns the number of keys in the whole store, whatever their prefix.
    fn num_keys(&self, deadline: Instant) -> Result<u64, StoreError>;

    /// Returns the keys that are visible through this view of the store, in any order.
    fn list_keys(&self, deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError>;

    /// Appends `value` to the queue `key`.
    ///
    /// # Errors
    /// [`StoreError::Unsupported`] from a file store, which has no queues.
    fn queue_push(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError>;

    /// Waits until the queue `key` has an item, then removes and returns the first one.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] if no item comes before `deadline`. [`StoreError::Unsupported`] from
    /// a file store, which has no queues.
    fn queue_pop(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError>;

    /// Removes and returns the first item of the queue `key`, or `None` if the queue is empty now.
    ///
    /// # Errors
    /// [`StoreError::Unsupported`] from a file store, which has no queues. Otherwise the errors
    /// that every operation may return, see [`Store`].
    fn try_queue_pop(&self, key: &[u8], deadline: Instant) -> Result<Option<Vec<u8>>, StoreError>;

    /// Returns the number of items in the queue `key`.
    ///
    /// # Errors
    /// [`StoreError::Unsupported`] from a file store, which has no queues. Otherwise the errors
    /// that every operation may return, see [`Store`].
    fn queue_len(&self, key: &[u8], deadline: Instant) -> Result<u64, StoreError>;

    /// Waits until `world_size` calls have been made for the barrier `key`. A key can be used for one
    /// barrier only.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] if not all calls were made; this call still counts as an arrival.
    fn barrier(&self, key: &[u8], world_size: usize, deadline: Instant) -> Result<(), StoreError>;
}
