//! The interface that all stores share.

use std::fmt;
use std::time::Instant;

use crate::error::StoreError;

/// A key-value store shared by the processes of a job.
///
/// Object-safe, usable from several threads at once, and every call ends by its `deadline`. Keys and
/// values are any bytes. The operations mean what torch.distributed's stores mean by them.
pub trait Store: Send + Sync + fmt::Debug {
    /// Stores `value` under `key`.
    ///
    /// # Errors
    /// As for every operation: [`StoreError`].
    fn set(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError>;

    /// Waits for `key` and returns its value.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] if the key does not appear.
    fn get(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError>;

    /// The value of `key` if it is there now.
    ///
    /// # Errors
    /// [`StoreError`].
    fn try_get(&self, key: &[u8], deadline: Instant) -> Result<Option<Vec<u8>>, StoreError>;

    /// Stores `desired` if the value is `expected`, or if the key is absent and `expected` empty.
    /// Returns the value after the operation, or `expected` if the key is absent and stays so.
    ///
    /// # Errors
    /// [`StoreError`].
    fn compare_set(
        &self,
        key: &[u8],
        expected: &[u8],
        desired: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, StoreError>;

    /// Adds `delta` to the decimal number under `key` (absent: 0) and returns the sum.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] if the value is not a number.
    fn add(&self, key: &[u8], delta: i64, deadline: Instant) -> Result<i64, StoreError>;

    /// Appends `value` to the value of `key` (absent: empty).
    ///
    /// # Errors
    /// [`StoreError`].
    fn append(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError>;

    /// Whether all `keys` are there now.
    ///
    /// # Errors
    /// [`StoreError`].
    fn check(&self, keys: &[&[u8]], deadline: Instant) -> Result<bool, StoreError>;

    /// Waits until all `keys` are there.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] with the keys that are missing, as far as they are known.
    fn wait(&self, keys: &[&[u8]], deadline: Instant) -> Result<(), StoreError>;

    /// Waits for all `keys` and returns their values in order.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] if one does not appear.
    fn multi_get(&self, keys: &[&[u8]], deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError>;

    /// Stores all pairs.
    ///
    /// # Errors
    /// [`StoreError`].
    fn multi_set(&self, pairs: &[(&[u8], &[u8])], deadline: Instant) -> Result<(), StoreError>;

    /// Removes `key`; whether it was there.
    ///
    /// # Errors
    /// [`StoreError`].
    fn delete(&self, key: &[u8], deadline: Instant) -> Result<bool, StoreError>;

    /// Number of keys in the whole store, prefixes not considered.
    ///
    /// # Errors
    /// [`StoreError`].
    fn num_keys(&self, deadline: Instant) -> Result<u64, StoreError>;

    /// The keys that this view of the store can see, in any order.
    ///
    /// # Errors
    /// [`StoreError`].
    fn list_keys(&self, deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError>;

    /// Puts `value` at the end of the queue `key`.
    ///
    /// # Errors
    /// [`StoreError::Unsupported`] by a file store.
    fn queue_push(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError>;

    /// Waits for the first item of the queue `key` and takes it.
    ///
    /// # Errors
    /// [`StoreError::Timeout`], [`StoreError::Unsupported`].
    fn queue_pop(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError>;

    /// The first item of the queue `key`, taken if there is one now.
    ///
    /// # Errors
    /// [`StoreError::Unsupported`].
    fn try_queue_pop(&self, key: &[u8], deadline: Instant) -> Result<Option<Vec<u8>>, StoreError>;

    /// Number of items in the queue `key`.
    ///
    /// # Errors
    /// [`StoreError::Unsupported`].
    fn queue_len(&self, key: &[u8], deadline: Instant) -> Result<u64, StoreError>;

    /// Waits until `world_size` callers have come to the barrier `key`. A barrier key works once.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] if not all came; this caller still counts as arrived.
    fn barrier(&self, key: &[u8], world_size: usize, deadline: Instant) -> Result<(), StoreError>;
}
