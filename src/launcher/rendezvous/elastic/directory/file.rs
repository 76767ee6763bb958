//! `store_type=file`: a registry in a file that all nodes share.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use convoke_store::{FileStore, Store};
use serde::{Deserialize, Serialize};

use super::{Entry, Lease, Seen, Trouble, Version, from_json, one_step, to_json};
use crate::membership::Record;

/// Longest wait for an operation on the file.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which a node checks whether the file has changed.
const LOOK: Duration = Duration::from_millis(500);

/// Registry in a file. A coordinator that is alive regularly touches a second file beside it. Other nodes see
/// that its modification time changes.
/// They measure the intervals with their own clocks only.
#[derive(Debug, Clone)]
pub(in super::super) struct FileDirectory {
    path: PathBuf,
    key: String,
    lease: Duration,
    beside: PathBuf,
    touched: Rc<Cell<Option<Touched>>>,
    is_looking: Rc<Cell<bool>>,
}

/// Content of the file.
#[derive(Serialize, Deserialize)]
struct Page {
    entry: Entry,
    record: Option<Record>,
}

/// Modification time of the second file, if it exists, and the time since which it has been that.
type Touched = (Option<SystemTime>, Instant);

impl FileDirectory {
    pub(in super::super) fn new(path: PathBuf, run_id: &str, silence: Duration) -> Self {
        let key = format!("convoke/rendezvous/{run_id}");
        let mut beside = path.clone().into_os_string();
        beside.push(format!(".{}.coordinator", one_step(run_id)));
        Self {
            path,
            key,
            lease: Lease::time(silence),
            beside: beside.into(),
            touched: Rc::default(),
            is_looking: Rc::default(),
        }
    }

    pub(super) async fn read(&self) -> Result<Seen, Trouble> {
        let text = self.call(|store, key, deadline| store.try_get(key, deadline)).await?;
        self.see().await?;
        self.seen(text.unwrap_or_default())
    }

    /// Checks the second file in the background. Regular calls shorten the time until a lost coordinator is
    /// noticed.
    pub(super) fn look(&self) {
        if self.is_looking.replace(true) {
            return;
        }
        let file = self.clone();
        tokio::task::spawn_local(async move {
            let _ = file.see().await;
            file.is_looking.set(false);
        });
    }

    /// Reads when the second file was touched.
    async fn see(&self) -> Result<(), Trouble> {
        let beside = self.beside.clone();
        let time = move || match std::fs::metadata(&beside) {
            Ok(metadata) => metadata.modified().map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        };
        let touched = self.blocking(time).await?;
        let now = Instant::now();
        if self.touched.get().is_none_or(|(before, _)| before != touched) {
            self.touched.set(Some((touched, now)));
        }
        Ok(())
    }

    pub(super) fn lease(&self) -> Lease {
        Lease { ids: (0, 0), ttl: self.lease, granted: tokio::time::Instant::now() }
    }

    pub(super) async fn keep(&self) -> Result<(), Trouble> {
        let beside = self.beside.clone();
        let touch = move || {
            let file = std::fs::OpenOptions::new().append(true).create(true).open(&beside)?;
            file.set_modified(SystemTime::now())
        };
        self.blocking(touch).await
    }

    pub(super) async fn release(&self) {
        let beside = self.beside.clone();
        // Without the second file, no modification time changes any more.
        let _ = self.blocking(move || std::fs::remove_file(&beside)).await;
    }

    pub(super) fn record(&self, seen: &Seen) -> Result<Option<Record>, Trouble> {
        if seen.text.is_empty() {
            return Ok(None);
        }
        from_json(&seen.text, &self.at()).map(|page: Page| page.record)
    }

    pub(super) async fn replace(
        &self,
        seen: &Seen,
        entry: &Entry,
        record: Option<&Record>,
    ) -> Result<Seen, Trouble> {
        let page = Page { entry: entry.clone(), record: record.cloned() };
        let (old, new) = (seen.text.clone(), to_json(&page));
        let now = self.call(move |store, key, deadline| store.compare_set(key, &old, &new, deadline)).await?;
        self.seen(now)
    }

    pub(super) async fn changed(&self, seen: &Seen) -> Result<(), Trouble> {
        while self.read().await? == *seen {
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// Runs an operation on the file in a thread. A slow disk or a lock may delay it, which must not block
    /// other tasks.
    async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&FileStore, &[u8], Instant) -> Result<T, convoke_store::StoreError> + Send + 'static,
    ) -> Result<T, Trouble> {
        let (path, key) = (self.path.clone(), self.key.clone());
        let open = |path: &Path, deadline| FileStore::open(path, None, deadline);
        self.blocking(move || {
            let deadline = Instant::now() + TIMEOUT;
            open(&path, deadline).and_then(|store| call(&store, key.as_bytes(), deadline))
        })
        .await
    }

    async fn blocking<T: Send + 'static, E: std::fmt::Display + Send + 'static>(
        &self,
        call: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, Trouble> {
        let at = |error: &dyn std::fmt::Display| {
            let (text, path) = (error.to_string(), self.at());
            Trouble::Passing(if text.contains(&path) { text } else { format!("{path}: {text}") })
        };
        match tokio::task::spawn_blocking(call).await {
            Ok(done) => done.map_err(|error| at(&error)),
            Err(error) => Err(at(&error)),
        }
    }

    fn at(&self) -> String {
        self.path.display().to_string()
    }

    fn seen(&self, text: Vec<u8>) -> Result<Seen, Trouble> {
        if text.is_empty() {
            return Ok(Seen::default());
        }
        #[derive(Deserialize)]
        struct Versioned {
            entry: Version,
        }
        let at = self.at();
        from_json(&text, &at).and_then(|Versioned { entry }| Entry::check(entry, &at))?;
        let Page { entry, .. } = from_json(&text, &at)?;
        let held = self.touched.get().is_none_or(|(_, since)| since.elapsed() < self.lease);
        Ok(Seen { entry: Some(entry), held, text, revisions: (0, 0) })
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::membership::AgentId;

    const SILENCE: Duration = Duration::from_secs(3);

    fn entry(term: u64, port: u16) -> Entry {
        Entry::new(term, vec![SocketAddr::from(([127, 0, 0, 1], port))], AgentId(1), [7; 32], None)
    }

    #[tokio::test]
    async fn only_one_of_two_concurrent_candidates_is_elected() {
        let folder = tempfile::tempdir().unwrap();
        let directory = FileDirectory::new(folder.path().join("file"), "job", SILENCE);
        let nothing = directory.read().await.unwrap();
        assert_eq!(nothing, Seen::default());
        let (one, two) = (entry(1, 1), entry(1, 2));
        assert_eq!(directory.replace(&nothing, &one, None).await.unwrap().entry, Some(one.clone()));
        assert_eq!(directory.replace(&nothing, &two, None).await.unwrap().entry, Some(one.clone()));
        let seen = directory.read().await.unwrap();
        let next = entry(2, 3);
        assert_eq!(directory.replace(&seen, &next, None).await.unwrap().entry, Some(next.clone()));
        assert_eq!(
            directory.replace(&seen, &one, None).await.unwrap().entry,
            Some(next),
            "it has been replaced"
        );
        let other = FileDirectory::new(folder.path().join("file"), "other job", SILENCE);
        assert_eq!(other.read().await.unwrap(), Seen::default());
    }

    #[tokio::test]
    async fn malformed_entry_error_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let directory = FileDirectory::new(path.clone(), "job", SILENCE);
        let store = FileStore::open(&path, None, Instant::now() + TIMEOUT).unwrap();
        for text in ["x", "{}", "[1,2]", r#"{"entry":{"version":9},"record":null}"#] {
            store.set(b"convoke/rendezvous/job", text.as_bytes(), Instant::now() + TIMEOUT).unwrap();
            let Err(Trouble::Final(error)) = directory.read().await else { panic!("{text} is an entry") };
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
        let missing = FileDirectory::new(folder.path().join("no/such/folder"), "job", SILENCE);
        let Err(Trouble::Passing(error)) = missing.read().await else { panic!("it is there") };
        assert!(error.contains("No such file"), "{error}");
    }
}
