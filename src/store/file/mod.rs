//! A store in one file, for processes that share a file system. The format is that of torch's
//! FileStore, byte for byte.

mod log;

use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::StoreError;
use crate::keys::{check_value, not_a_number, printable, stored_key, stored_keys, user_key};
use crate::state::leading_number;
use crate::store::Store;
use log::{Log, push_deletion, push_record};

/// Interval at which a waiting operation reads the file; torch uses the same interval.
const POLL: Duration = Duration::from_millis(10);
/// Interval of attempts to lock the file. Each operation holds the lock only briefly.
const LOCK_POLL: Duration = Duration::from_millis(1);
/// Longest time for updating the counters of processes in the file when a store is dropped.
const CLOSE_TIME: Duration = Duration::from_secs(2);
/// Key that counts the processes that have the store open.
const OPEN_KEY: &[u8] = b"refcount/";
/// Key that counts the processes that have closed the store.
const CLOSED_KEY: &[u8] = b"cleanup/";

/// A store in a file, which processes that use torch's FileStore can share.
///
/// The file is an append-only log, protected by `flock`. A wait reads the file every 10 ms. The store
/// has no queues. The file is deleted when the given number of workers have closed the store.
#[derive(Debug)]
pub struct FileStore {
    path: PathBuf,
    worker_count: Option<usize>,
    /// The store is being dropped: a file that was removed must not be created again.
    is_closing: bool,
    log: Mutex<Log>,
}

impl FileStore {
    /// Opens or creates the store in the file `path`. With a `worker_count`, the file is deleted when
    /// that many processes have closed it and no process has it open.
    ///
    /// # Errors
    /// [`StoreError::Lost`] if the file cannot be opened, [`StoreError::Protocol`] if it is damaged,
    /// [`StoreError::Timeout`] if other processes hold the file's lock until the deadline.
    pub fn open(
        path: impl AsRef<Path>,
        worker_count: Option<usize>,
        deadline: Instant,
    ) -> Result<FileStore, StoreError> {
        let path = path.as_ref().to_owned();
        let store = FileStore { path, worker_count, is_closing: false, log: Mutex::default() };
        store.add_stored("open", OPEN_KEY, 1, deadline)?;
        Ok(store)
    }

    /// Opens the store again in a process that called [`leave`](FileStore::leave) with `key`.
    ///
    /// Subtracts from the counter `key` what `leave` added. If the file was removed in between, the new file
    /// has no such counter, and nothing is subtracted. The returned store has no `worker_count`.
    ///
    /// # Errors
    /// Returns the errors of [`open`](FileStore::open).
    pub fn rejoin(path: impl AsRef<Path>, key: &[u8], deadline: Instant) -> Result<FileStore, StoreError> {
        let path = path.as_ref().to_owned();
        let store = FileStore { path, worker_count: None, is_closing: false, log: Mutex::default() };
        let key = stored_key(key)?;
        store.write("open", deadline, |log, out| {
            add_to(log, out, OPEN_KEY, 1)?;
            if log.has(&key) { add_to(log, out, &key, -1).map(drop) } else { Ok(()) }
        })?;
        Ok(store)
    }

    /// Adds 1 to the counter `key` of processes that have left. Removes the file when the counter reaches
    /// `all`.
    ///
    /// # Errors
    /// Only the errors that every operation may return, see [`Store`](crate::Store).
    pub fn leave(&self, key: &[u8], all: usize, deadline: Instant) -> Result<(), StoreError> {
        let key = stored_key(key)?;
        self.write("leave", deadline, |log, out| {
            let left = add_to(log, out, &key, 1)?;
            if usize::try_from(left) == Ok(all) {
                // The file is locked, so no process can rejoin in between. If the removal fails, the
                // file stays.
                let _ = std::fs::remove_file(&self.path);
            }
            Ok(())
        })
    }

    /// Locks the file for reading, replays new records and passes the log to `work`.
    fn read<R>(
        &self,
        operation: &'static str,
        deadline: Instant,
        work: impl FnOnce(&Log) -> R,
    ) -> Result<R, StoreError> {
        let mut log = self.lock_log();
        let mut file = self.open_locked(operation, deadline, File::try_lock_shared)?;
        self.replay(operation, &mut file, &mut log)?;
        Ok(work(&log))
    }

    /// Locks the file for writing, replays new records, and appends the records that `work` makes.
    fn write<R>(
        &self,
        operation: &'static str,
        deadline: Instant,
        work: impl FnOnce(&Log, &mut Vec<u8>) -> Result<R, StoreError>,
    ) -> Result<R, StoreError> {
        let mut log = self.lock_log();
        let mut file = self.open_locked(operation, deadline, File::try_lock)?;
        self.replay(operation, &mut file, &mut log)?;
        let mut records = Vec::new();
        let result = work(&log, &mut records)?;
        let append = |file: &mut File| {
            if file.metadata()?.len() > log.replayed_bytes {
                // Another writer died in the middle of a record.
                file.set_len(log.replayed_bytes)?;
            }
            file.seek(SeekFrom::Start(log.replayed_bytes))?;
            file.write_all(&records)
        };
        append(&mut file).map_err(|source| self.lost(operation, source))?;
        log.replay(&records).expect("records of this process are well-formed");
        Ok(result)
    }

    fn lock_log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the file. Every operation does this, as in torch, because the file may have been replaced.
    fn open_file(&self, operation: &'static str) -> Result<File, StoreError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(!self.is_closing).truncate(false);
        options.open(&self.path).map_err(|source| self.lost(operation, source))
    }

    /// Opens and locks the file at the path. Repeats that if another process removed or replaced the
    /// file before the lock was acquired.
    fn open_locked(
        &self,
        operation: &'static str,
        deadline: Instant,
        lock: fn(&File) -> Result<(), TryLockError>,
    ) -> Result<File, StoreError> {
        let identity = |metadata: Metadata| (metadata.dev(), metadata.ino());
        loop {
            let file = self.open_file(operation)?;
            self.lock_file(operation, deadline, || lock(&file))?;
            let locked = file.metadata().map(identity).map_err(|source| self.lost(operation, source))?;
            if std::fs::metadata(&self.path).map(identity).is_ok_and(|at_path| at_path == locked) {
                return Ok(file);
            }
            if Instant::now() >= deadline {
                return Err(self.timeout(
                    operation,
                    vec!["the file, which other processes keep replacing".into()],
                    Instant::now(),
                ));
            }
        }
    }

    /// Locks the file by `try_lock`, which it repeats until the deadline. Closing the file unlocks it.
    fn lock_file(
        &self,
        operation: &'static str,
        deadline: Instant,
        try_lock: impl Fn() -> Result<(), TryLockError>,
    ) -> Result<(), StoreError> {
        let started = Instant::now();
        loop {
            match try_lock() {
                Ok(()) => return Ok(()),
                Err(TryLockError::Error(source)) => return Err(self.lost(operation, source)),
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                    return Err(self.timeout(operation, vec!["the file's lock".into()], started));
                }
                Err(TryLockError::WouldBlock) => thread::sleep(LOCK_POLL),
            }
        }
    }

    fn replay(&self, operation: &'static str, file: &mut File, log: &mut Log) -> Result<(), StoreError> {
        let lost = |source| self.lost(operation, source);
        let length = file.metadata().map_err(lost)?.len();
        if length < log.replayed_bytes {
            let what = format!("the file shrank from {} to {length} bytes", log.replayed_bytes);
            return Err(StoreError::Protocol { store: self.name(), what });
        }
        if length > log.replayed_bytes {
            let mut bytes = Vec::new();
            file.seek(SeekFrom::Start(log.replayed_bytes)).map_err(lost)?;
            file.read_to_end(&mut bytes).map_err(lost)?;
            log.replay(&bytes).map_err(|damaged| self.damaged(&damaged))?;
        }
        Ok(())
    }

    /// Reads the file every 10 ms until `find` returns a result or the deadline passes.
    fn poll<R>(
        &self,
        operation: &'static str,
        keys: &[&[u8]],
        deadline: Instant,
        find: impl Fn(&Log) -> Option<R>,
    ) -> Result<R, StoreError> {
        let started = Instant::now();
        loop {
            let found = self.read(operation, deadline, |log| {
                find(log).ok_or_else(|| {
                    let missing =
                        keys.iter().filter(|key| stored_key(key).is_ok_and(|stored| !log.has(&stored)));
                    printable(missing.copied())
                })
            })?;
            let missing = match found {
                Ok(found) => return Ok(found),
                Err(missing) => missing,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let all = || printable(keys.iter().copied());
                return Err(self.timeout(
                    operation,
                    if missing.is_empty() { all() } else { missing },
                    started,
                ));
            }
            thread::sleep(POLL.min(left));
        }
    }

    /// Adds `delta` to the number under `key`, which is given in the form that the file has.
    fn add_stored(
        &self,
        operation: &'static str,
        key: &[u8],
        delta: i64,
        deadline: Instant,
    ) -> Result<i64, StoreError> {
        self.write(operation, deadline, |log, out| add_to(log, out, key, delta))
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn lost(&self, operation: &'static str, source: io::Error) -> StoreError {
        StoreError::Lost { store: self.name(), operation, source }
    }

    fn damaged(&self, damaged: &log::Damaged) -> StoreError {
        let log::Damaged { at_byte, length } = damaged;
        let what = format!("not a file store, or damaged: a length of {length} bytes at byte {at_byte}");
        StoreError::Protocol { store: self.name(), what }
    }

    fn timeout(&self, operation: &'static str, keys: Vec<String>, started: Instant) -> StoreError {
        StoreError::Timeout { store: self.name(), operation, after: started.elapsed(), keys }
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        self.is_closing = true;
        let deadline = Instant::now() + CLOSE_TIME;
        let closed = self.add_stored("close", CLOSED_KEY, 1, deadline);
        let open = self.add_stored("close", OPEN_KEY, -1, deadline);
        let (Ok(closed), Ok(0), Some(workers)) = (closed, open, self.worker_count) else { return };
        if closed >= i64::try_from(workers).unwrap_or(i64::MAX) {
            // If the removal fails, the file stays.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Appends to `out` the record that adds `delta` to the number under `key`, given in the form that the file
/// has. Returns the sum.
fn add_to(log: &Log, out: &mut Vec<u8>, key: &[u8], delta: i64) -> Result<i64, StoreError> {
    let old = match log.get(key) {
        None => 0,
        Some(text) => {
            leading_number(text).ok_or_else(|| not_a_number(key.strip_prefix(b"/").unwrap_or(key)))?
        }
    };
    let sum = old.wrapping_add(delta);
    push_record(out, key, sum.to_string().as_bytes());
    Ok(sum)
}

impl Store for FileStore {
    fn get(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError> {
        let stored = stored_key(key)?;
        self.poll("get", &[key], deadline, |log| log.get(&stored).map(<[u8]>::to_vec))
    }

    fn try_get(&self, key: &[u8], deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        let stored = stored_key(key)?;
        self.read("get", deadline, |log| log.get(&stored).map(<[u8]>::to_vec))
    }

    fn compare_set(
        &self,
        key: &[u8],
        expected: &[u8],
        desired: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, StoreError> {
        check_value(desired)?;
        let stored = stored_key(key)?;
        self.write("compare_set", deadline, |log, out| {
            let current = log.get(&stored);
            if current.unwrap_or_default() == expected {
                push_record(out, &stored, desired);
                return Ok(desired.to_vec());
            }
            Ok(current.unwrap_or(expected).to_vec())
        })
    }

    fn add(&self, key: &[u8], delta: i64, deadline: Instant) -> Result<i64, StoreError> {
        self.add_stored("add", &stored_key(key)?, delta, deadline)
    }

    fn append(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        check_value(value)?;
        let stored = stored_key(key)?;
        self.write("append", deadline, |log, out| {
            let whole = [log.get(&stored).unwrap_or_default(), value].concat();
            if whole.len() > log::MAX_FIELD_BYTES {
                return Err(StoreError::Invalid {
                    what: format!("the value would have {} bytes after appending", whole.len()),
                });
            }
            push_record(out, &stored, &whole);
            Ok(())
        })
    }

    fn check(&self, keys: &[&[u8]], deadline: Instant) -> Result<bool, StoreError> {
        let stored_keys = stored_keys(keys)?;
        self.read("check", deadline, |log| stored_keys.iter().all(|stored| log.has(stored)))
    }

    fn wait(&self, keys: &[&[u8]], deadline: Instant) -> Result<(), StoreError> {
        let stored_keys = stored_keys(keys)?;
        self.poll("wait", keys, deadline, |log| {
            stored_keys.iter().all(|stored| log.has(stored)).then_some(())
        })
    }

    fn multi_get(&self, keys: &[&[u8]], deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        let stored_keys = stored_keys(keys)?;
        self.poll("multi_get", keys, deadline, |log| {
            stored_keys.iter().map(|stored| log.get(stored).map(<[u8]>::to_vec)).collect()
        })
    }

    fn multi_set(&self, pairs: &[(&[u8], &[u8])], deadline: Instant) -> Result<(), StoreError> {
        pairs.iter().try_for_each(|(_, value)| check_value(value))?;
        let keys: Vec<&[u8]> = pairs.iter().map(|(key, _)| *key).collect();
        let stored_keys = stored_keys(&keys)?;
        self.write("set", deadline, |_, out| {
            stored_keys.iter().zip(pairs).for_each(|(stored, (_, value))| push_record(out, stored, value));
            Ok(())
        })
    }

    fn delete(&self, key: &[u8], deadline: Instant) -> Result<bool, StoreError> {
        let stored = stored_key(key)?;
        self.write("delete", deadline, |log, out| {
            push_deletion(out, &stored);
            Ok(log.has(&stored))
        })
    }

    fn num_keys(&self, deadline: Instant) -> Result<u64, StoreError> {
        self.read("num_keys", deadline, |log| log.len() as u64)
    }

    fn list_keys(&self, deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        self.read("list_keys", deadline, |log| log.keys().filter_map(user_key).collect())
    }

    fn queue_push(&self, _key: &[u8], _value: &[u8], _deadline: Instant) -> Result<(), StoreError> {
        Err(StoreError::Unsupported { store: "file store", operation: "queue_push" })
    }

    fn queue_pop(&self, _key: &[u8], _deadline: Instant) -> Result<Vec<u8>, StoreError> {
        Err(StoreError::Unsupported { store: "file store", operation: "queue_pop" })
    }

    fn try_queue_pop(&self, _key: &[u8], _deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        Err(StoreError::Unsupported { store: "file store", operation: "queue_pop" })
    }

    fn queue_len(&self, _key: &[u8], _deadline: Instant) -> Result<u64, StoreError> {
        Err(StoreError::Unsupported { store: "file store", operation: "queue_len" })
    }

    /// Uses a counter and a key that the last arrival sets, like torch's stores without a native barrier.
    fn barrier(&self, key: &[u8], world_size: usize, deadline: Instant) -> Result<(), StoreError> {
        let world_size = i64::try_from(world_size).unwrap_or(i64::MAX);
        let last = [key, b"/last_member"].concat();
        if self.add(&[key, b"/num_members"].concat(), 1, deadline)? >= world_size {
            return self.set(&last, b"1", deadline);
        }
        let last = stored_key(&last)?;
        self.poll("barrier", &[key], deadline, |log| log.has(&last).then_some(()))
    }
}
