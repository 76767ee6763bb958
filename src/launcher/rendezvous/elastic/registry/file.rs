//! `store_type=file`: a registry in a file that all nodes share.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use convoke_store::{FileStore, Store};
use serde::{Deserialize, Serialize};

use super::{
    Entry, EntrySnapshot, RegistryError, Version, escape_path_component, from_json, requested_ttl, to_json,
};
use crate::membership::Record;

/// Longest wait for an operation on the registry file.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which a node checks whether the registry file has changed.
const CHANGE_POLL: Duration = Duration::from_millis(500);

/// Registry in a shared file. A coordinator that is alive regularly touches a second file beside it, the
/// heartbeat file. Other nodes see that its modification time changes, and measure with their own clocks how
/// long it stays the same.
#[derive(Clone)]
pub(in super::super) struct FileRegistry {
    path: PathBuf,
    key: String,
    /// Time without a touch of the heartbeat file after which the lease of the coordinator expires.
    pub(super) ttl: Duration,
    heartbeat_path: PathBuf,
    observed: Rc<Cell<Option<ObservedMtime>>>,
    is_checking: Rc<Cell<bool>>,
}

/// Value in the registry file for one job.
#[derive(Serialize, Deserialize)]
struct FileContent {
    entry: Entry,
    record: Option<Record>,
}

/// Modification time of the heartbeat file (`None` without the file), and the time at which this node first
/// saw that value.
type ObservedMtime = (Option<SystemTime>, Instant);

impl FileRegistry {
    pub(in super::super) fn new(path: &Path, run_id: &str, heartbeat_timeout: Duration) -> Self {
        let mut heartbeat_path = path.as_os_str().to_owned();
        heartbeat_path.push(format!(".{}.coordinator", escape_path_component(run_id)));
        Self {
            path: path.to_owned(),
            key: format!("convoke/rendezvous/{run_id}"),
            ttl: requested_ttl(heartbeat_timeout),
            heartbeat_path: heartbeat_path.into(),
            observed: Rc::default(),
            is_checking: Rc::default(),
        }
    }

    pub(super) async fn read(&self) -> Result<EntrySnapshot, RegistryError> {
        let text = self.call(|store, key, deadline| store.try_get(key, deadline)).await?;
        self.check_heartbeat().await?;
        self.seen(text.unwrap_or_default())
    }

    /// Checks the heartbeat file in the background. If this is called regularly, a lost coordinator is
    /// noticed sooner.
    pub(super) fn check_in_background(&self) {
        if self.is_checking.replace(true) {
            return;
        }
        let file = self.clone();
        tokio::task::spawn_local(async move {
            let _ = file.check_heartbeat().await;
            file.is_checking.set(false);
        });
    }

    /// Reads the modification time of the heartbeat file, and notes the time if it has changed.
    async fn check_heartbeat(&self) -> Result<(), RegistryError> {
        let heartbeat_path = self.heartbeat_path.clone();
        let time = move || match std::fs::metadata(&heartbeat_path) {
            Ok(metadata) => metadata.modified().map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        };
        let observed = self.run_blocking(time).await?;
        let now = Instant::now();
        if self.observed.get().is_none_or(|(before, _)| before != observed) {
            self.observed.set(Some((observed, now)));
        }
        Ok(())
    }

    pub(super) async fn keep(&self) -> Result<(), RegistryError> {
        let heartbeat_path = self.heartbeat_path.clone();
        let touch = move || {
            let file = std::fs::OpenOptions::new().append(true).create(true).open(&heartbeat_path)?;
            file.set_modified(SystemTime::now())
        };
        self.run_blocking(touch).await
    }

    pub(super) async fn release(&self) {
        let heartbeat_path = self.heartbeat_path.clone();
        // Without the heartbeat file, no modification time changes any more, so the lease expires.
        let _ = self.run_blocking(move || std::fs::remove_file(&heartbeat_path)).await;
    }

    pub(super) fn record(&self, seen: &EntrySnapshot) -> Result<Option<Record>, RegistryError> {
        if seen.text.is_empty() {
            return Ok(None);
        }
        from_json(&seen.text, &self.location()).map(|content: FileContent| content.record)
    }

    pub(super) async fn replace(
        &self,
        seen: &EntrySnapshot,
        entry: &Entry,
        record: Option<&Record>,
    ) -> Result<EntrySnapshot, RegistryError> {
        let content = FileContent { entry: entry.clone(), record: record.cloned() };
        let (old, new) = (seen.text.clone(), to_json(&content));
        let now = self.call(move |store, key, deadline| store.compare_set(key, &old, &new, deadline)).await?;
        self.seen(now)
    }

    pub(super) async fn changed(&self, seen: &EntrySnapshot) -> Result<(), RegistryError> {
        while self.read().await? == *seen {
            tokio::time::sleep(CHANGE_POLL).await;
        }
        Ok(())
    }

    /// Runs `call` on the registry file in another thread. A slow disk or a file lock may delay it, which
    /// must not block other tasks.
    async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&FileStore, &[u8], Instant) -> Result<T, convoke_store::StoreError> + Send + 'static,
    ) -> Result<T, RegistryError> {
        let (path, key) = (self.path.clone(), self.key.clone());
        self.run_blocking(move || {
            let deadline = Instant::now() + TIMEOUT;
            call(&FileStore::open(&path, None, deadline)?, key.as_bytes(), deadline)
        })
        .await
    }

    async fn run_blocking<T: Send + 'static, E: std::fmt::Display + Send + 'static>(
        &self,
        call: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, RegistryError> {
        let at = |error: &dyn std::fmt::Display| {
            let (text, path) = (error.to_string(), self.location());
            RegistryError::Transient(if text.contains(&path) { text } else { format!("{path}: {text}") })
        };
        match tokio::task::spawn_blocking(call).await {
            Ok(done) => done.map_err(|error| at(&error)),
            Err(error) => Err(at(&error)),
        }
    }

    fn location(&self) -> String {
        self.path.display().to_string()
    }

    fn seen(&self, text: Vec<u8>) -> Result<EntrySnapshot, RegistryError> {
        if text.is_empty() {
            return Ok(EntrySnapshot::default());
        }
        #[derive(Deserialize)]
        struct Versioned {
            entry: Version,
        }
        let at = self.location();
        from_json(&text, &at).and_then(|Versioned { entry }| Entry::check(entry, &at))?;
        let FileContent { entry, .. } = from_json(&text, &at)?;
        let is_leased = self.observed.get().is_none_or(|(_, since)| since.elapsed() < self.ttl);
        Ok(EntrySnapshot { entry: Some(entry), is_leased, text, revisions: (0, 0) })
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::membership::AgentId;

    const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(3);

    fn entry(term: u64, port: u16) -> Entry {
        Entry::new(term, vec![SocketAddr::from(([127, 0, 0, 1], port))], AgentId(1), [7; 32], None)
    }

    #[tokio::test]
    async fn only_one_of_two_concurrent_candidates_is_elected() {
        let folder = tempfile::tempdir().unwrap();
        let registry = FileRegistry::new(&folder.path().join("file"), "job", HEARTBEAT_TIMEOUT);
        let nothing = registry.read().await.unwrap();
        assert_eq!(nothing, EntrySnapshot::default());
        let (one, two) = (entry(1, 1), entry(1, 2));
        assert_eq!(registry.replace(&nothing, &one, None).await.unwrap().entry, Some(one.clone()));
        assert_eq!(registry.replace(&nothing, &two, None).await.unwrap().entry, Some(one.clone()));
        let seen = registry.read().await.unwrap();
        let next = entry(2, 3);
        assert_eq!(registry.replace(&seen, &next, None).await.unwrap().entry, Some(next.clone()));
        assert_eq!(
            registry.replace(&seen, &one, None).await.unwrap().entry,
            Some(next),
            "it has been replaced"
        );
        let other = FileRegistry::new(&folder.path().join("file"), "other job", HEARTBEAT_TIMEOUT);
        assert_eq!(other.read().await.unwrap(), EntrySnapshot::default());
    }

    #[tokio::test]
    async fn malformed_entry_error_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let registry = FileRegistry::new(&path, "job", HEARTBEAT_TIMEOUT);
        let store = FileStore::open(&path, None, Instant::now() + TIMEOUT).unwrap();
        for text in ["x", "{}", "[1,2]", r#"{"entry":{"version":9},"record":null}"#] {
            store.set(b"convoke/rendezvous/job", text.as_bytes(), Instant::now() + TIMEOUT).unwrap();
            let Err(RegistryError::Permanent(error)) = registry.read().await else {
                panic!("{text} is an entry")
            };
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
        let missing = FileRegistry::new(&folder.path().join("no/such/folder"), "job", HEARTBEAT_TIMEOUT);
        let Err(RegistryError::Transient(error)) = missing.read().await else { panic!("it is there") };
        assert!(error.contains("No such file"), "{error}");
    }
}
