//! A store in one file, for processes that share a file system. The format is that of torch's
//! FileStore, byte for byte.

mod log;

use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::call::Call;
use crate::error::StoreError;
use crate::interrupt::{self, Interrupted};
use crate::keys::{check_value, not_a_number, printable_or, stored_key, stored_keys, user_key};
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
    /// The process that opened the store.
    pid: u32,
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
        let store = FileStore::at(path.as_ref(), worker_count);
        store.add_stored(Call::new("open", &[], deadline), OPEN_KEY, 1)?;
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
        let store = FileStore::at(path.as_ref(), None);
        let key = stored_key(key)?;
        store.write(Call::new("open", &[], deadline), |log, out| {
            add_to(log, out, OPEN_KEY, 1)?;
            if log.has(&key) { add_to(log, out, &key, -1).map(drop) } else { Ok(()) }
        })?;
        Ok(store)
    }

    fn at(path: &Path, worker_count: Option<usize>) -> Self {
        let (path, pid) = (path.to_owned(), std::process::id());
        FileStore { path, worker_count, is_closing: false, pid, log: Mutex::default() }
    }

    /// Adds 1 to the counter `key` of processes that have left. Removes the file when the counter reaches
    /// `all`.
    ///
    /// # Errors
    /// Only the errors that every operation may return, see [`Store`](crate::Store).
    pub fn leave(&self, key: &[u8], all: usize, deadline: Instant) -> Result<(), StoreError> {
        let key = stored_key(key)?;
        self.write(Call::new("leave", &[], deadline), |log, out| {
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
    fn read<R>(&self, call: Call<'_>, work: impl FnOnce(&Log) -> R) -> Result<R, StoreError> {
        let (log, _file) = self.lock(call, File::try_lock_shared)?;
        Ok(work(&log))
    }

    /// Locks the file for writing, replays new records, and appends the records that `work` makes.
    fn write<R>(
        &self,
        call: Call<'_>,
        work: impl FnOnce(&Log, &mut Vec<u8>) -> Result<R, StoreError>,
    ) -> Result<R, StoreError> {
        let (mut log, mut file) = self.lock(call, File::try_lock)?;
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
        append(&mut file).map_err(|source| call.lost(self.name(), source))?;
        log.replay(&records).expect("records of this process are well-formed");
        Ok(result)
    }

    /// Locks the log, opens and locks the file by `lock`, and replays new records.
    fn lock(
        &self,
        call: Call<'_>,
        lock: fn(&File) -> Result<(), TryLockError>,
    ) -> Result<(MutexGuard<'_, Log>, File), StoreError> {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let mut file = self.open_locked(call, lock)?;
        self.replay(call, &mut file, &mut log)?;
        Ok((log, file))
    }

    /// Opens the file at the path and locks it by `lock`. Every operation does this, as in torch, because the
    /// file may have been replaced. Repeats that until the deadline if the file is locked, or if another
    /// process removed or replaced it before the lock was acquired. Closing the file unlocks it.
    fn open_locked(
        &self,
        call: Call<'_>,
        lock: fn(&File) -> Result<(), TryLockError>,
    ) -> Result<File, StoreError> {
        let identity = |metadata: Metadata| (metadata.dev(), metadata.ino());
        let lost = |source| call.lost(self.name(), source);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(!self.is_closing).truncate(false);
        loop {
            let file = options.open(&self.path).map_err(lost)?;
            let (awaited, delay) = match lock(&file) {
                Ok(()) => {
                    let locked = file.metadata().map(identity).map_err(lost)?;
                    if std::fs::metadata(&self.path).map(identity).is_ok_and(|at_path| at_path == locked) {
                        return Ok(file);
                    }
                    ("the file, which other processes keep replacing", Duration::ZERO)
                }
                Err(TryLockError::WouldBlock) => ("the file's lock", LOCK_POLL),
                Err(TryLockError::Error(source)) => return Err(lost(source)),
            };
            if Instant::now() >= call.deadline {
                return Err(call.timeout(self.name(), vec![awaited.to_owned()]));
            }
            interrupt::sleep(delay)
                .map_err(|Interrupted| call.interrupted(self.name(), vec![awaited.to_owned()]))?;
        }
    }

    fn replay(&self, call: Call<'_>, file: &mut File, log: &mut Log) -> Result<(), StoreError> {
        let lost = |source| call.lost(self.name(), source);
        let wrong = |what| StoreError::Protocol { store: self.name(), what };
        let length = file.metadata().map_err(lost)?.len();
        if length < log.replayed_bytes {
            return Err(wrong(format!("the file shrank from {} to {length} bytes", log.replayed_bytes)));
        }
        if length > log.replayed_bytes {
            let mut bytes = Vec::new();
            file.seek(SeekFrom::Start(log.replayed_bytes)).map_err(lost)?;
            file.read_to_end(&mut bytes).map_err(lost)?;
            log.replay(&bytes).map_err(|log::Damaged { at_byte, length }| {
                wrong(format!("not a file store, or damaged: a length of {length} bytes at byte {at_byte}"))
            })?;
        }
        Ok(())
    }

    /// Reads the file every 10 ms until `find` returns a result or the deadline passes.
    fn poll<R>(&self, call: Call<'_>, find: impl Fn(&Log) -> Option<R>) -> Result<R, StoreError> {
        loop {
            let found = self.read(call, |log| {
                let is_missing = |key: &&&[u8]| stored_key(key).is_ok_and(|stored| !log.has(&stored));
                let missing = || call.keys.iter().filter(is_missing).copied();
                find(log).ok_or_else(|| printable_or(missing(), call.keys))
            })?;
            let missing = match found {
                Ok(found) => return Ok(found),
                Err(missing) => missing,
            };
            let left = call.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(call.timeout(self.name(), missing));
            }
            interrupt::sleep(POLL.min(left)).map_err(|Interrupted| call.interrupted(self.name(), missing))?;
        }
    }

    /// Adds `delta` to the number under `key`, which is given in the form that the file has.
    fn add_stored(&self, call: Call<'_>, key: &[u8], delta: i64) -> Result<i64, StoreError> {
        self.write(call, |log, out| add_to(log, out, key, delta))
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // A forked child has a copy of this object; the store is still open in its parent.
            return;
        }
        self.is_closing = true;
        let call = Call::new("close", &[], Instant::now() + CLOSE_TIME);
        let closed = self.add_stored(call, CLOSED_KEY, 1);
        let open = self.add_stored(call, OPEN_KEY, -1);
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
    let wrong = || not_a_number(key.strip_prefix(b"/").unwrap_or(key));
    let old = log.get(key).map_or(Ok(0), |text| leading_number(text).ok_or_else(wrong))?;
    let sum = old.wrapping_add(delta);
    push_record(out, key, sum.to_string().as_bytes());
    Ok(sum)
}

impl Store for FileStore {
    fn get(&self, key: &[u8], deadline: Instant) -> Result<Vec<u8>, StoreError> {
        let stored = stored_key(key)?;
        self.poll(Call::new("get", &[key], deadline), |log| log.get(&stored).map(<[u8]>::to_vec))
    }

    fn try_get(&self, key: &[u8], deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        let stored = stored_key(key)?;
        self.read(Call::new("get", &[], deadline), |log| log.get(&stored).map(<[u8]>::to_vec))
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
        self.write(Call::new("compare_set", &[], deadline), |log, out| {
            let current = log.get(&stored);
            if current.unwrap_or_default() == expected {
                push_record(out, &stored, desired);
                return Ok(desired.to_vec());
            }
            Ok(current.unwrap_or(expected).to_vec())
        })
    }

    fn add(&self, key: &[u8], delta: i64, deadline: Instant) -> Result<i64, StoreError> {
        self.add_stored(Call::new("add", &[], deadline), &stored_key(key)?, delta)
    }

    fn append(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        check_value(value)?;
        let stored = stored_key(key)?;
        self.write(Call::new("append", &[], deadline), |log, out| {
            let whole = [log.get(&stored).unwrap_or_default(), value].concat();
            if whole.len() > log::MAX_FIELD_BYTES {
                let what = format!("the value would have {} bytes after appending", whole.len());
                return Err(StoreError::Invalid { what });
            }
            push_record(out, &stored, &whole);
            Ok(())
        })
    }

    fn check(&self, keys: &[&[u8]], deadline: Instant) -> Result<bool, StoreError> {
        let stored_keys = stored_keys(keys)?;
        self.read(Call::new("check", &[], deadline), |log| stored_keys.iter().all(|stored| log.has(stored)))
    }

    fn wait(&self, keys: &[&[u8]], deadline: Instant) -> Result<(), StoreError> {
        let stored_keys = stored_keys(keys)?;
        self.poll(Call::new("wait", keys, deadline), |log| {
            stored_keys.iter().all(|stored| log.has(stored)).then_some(())
        })
    }

    fn multi_get(&self, keys: &[&[u8]], deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        let stored_keys = stored_keys(keys)?;
        self.poll(Call::new("multi_get", keys, deadline), |log| {
            stored_keys.iter().map(|stored| log.get(stored).map(<[u8]>::to_vec)).collect()
        })
    }

    fn multi_set(&self, pairs: &[(&[u8], &[u8])], deadline: Instant) -> Result<(), StoreError> {
        pairs.iter().try_for_each(|(_, value)| check_value(value))?;
        let keys: Vec<&[u8]> = pairs.iter().map(|(key, _)| *key).collect();
        let stored_keys = stored_keys(&keys)?;
        self.write(Call::new("set", &[], deadline), |_, out| {
            stored_keys.iter().zip(pairs).for_each(|(stored, (_, value))| push_record(out, stored, value));
            Ok(())
        })
    }

    fn delete(&self, key: &[u8], deadline: Instant) -> Result<bool, StoreError> {
        let stored = stored_key(key)?;
        self.write(Call::new("delete", &[], deadline), |log, out| {
            push_deletion(out, &stored);
            Ok(log.has(&stored))
        })
    }

    fn num_keys(&self, deadline: Instant) -> Result<u64, StoreError> {
        self.read(Call::new("num_keys", &[], deadline), |log| log.values.len() as u64)
    }

    fn list_keys(&self, deadline: Instant) -> Result<Vec<Vec<u8>>, StoreError> {
        self.read(Call::new("list_keys", &[], deadline), |log| {
            log.values.keys().filter_map(|key| user_key(key)).collect()
        })
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
        self.poll(Call::new("barrier", &[key], deadline), |log| log.has(&last).then_some(()))
    }
}
