//! etcd, version 3 of its API: `PREFIX/RUN_ID/entry`, and `PREFIX/RUN_ID/holder` while the coordinator is there.

use std::rc::Rc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, Error, GetOptions, PutOptions, Txn, TxnOp, WatchOptions};
use tokio::time::Instant;

use super::cluster::{Cluster, Trouble};
use super::{Entry, Lease, Seen, one_step};

/// What is written of a job outlives its last coordinator by so long.
const KEPT: Duration = Duration::from_secs(7 * 24 * 3600);

#[derive(Debug, Clone)]
pub(in super::super) struct EtcdDirectory {
    cluster: Rc<Cluster>,
    /// What the job's keys begin with.
    job: String,
    silence: Duration,
}

impl EtcdDirectory {
    pub(in super::super) fn new(cluster: Rc<Cluster>, prefix: &str, run_id: &str, silence: Duration) -> Self {
        Self { cluster, job: format!("{}/{}/", prefix.trim_end_matches('/'), one_step(run_id)), silence }
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.job)
    }

    pub(super) async fn read(&self) -> Result<Seen, Trouble> {
        let found = self
            .cluster
            .call(async |mut client| {
                client.get(self.job.as_str(), Some(GetOptions::new().with_prefix())).await
            })
            .await?;
        let now = found.header().map_or(0, |header| header.revision());
        let of = |name: &str| found.kvs().iter().find(|pair| pair.key() == self.key(name).as_bytes());
        let Some(pair) = of("entry") else {
            return Ok(Seen { revisions: (0, now), ..Seen::default() });
        };
        let entry = Entry::from_text(pair.value(), &self.at())?;
        let held = of("holder").is_some_and(|holder| holder.value() == entry.term.to_string().as_bytes());
        Ok(Seen { entry: Some(entry), held, text: Vec::new(), revisions: (pair.mod_revision(), now) })
    }

    pub(super) async fn replace(&self, seen: &Seen, entry: &Entry, lease: &Lease) -> Result<Seen, Trouble> {
        let put = |name: &str, text: Vec<u8>, lease: i64| {
            TxnOp::put(self.key(name), text, Some(PutOptions::new().with_lease(lease)))
        };
        let puts = [
            put("holder", entry.term.to_string().into_bytes(), lease.ids.0),
            put("entry", entry.to_text(), lease.ids.1),
        ];
        let txn = Txn::new()
            .when([Compare::mod_revision(self.key("entry"), CompareOp::Equal, seen.revisions.0)])
            .and_then(puts);
        let done = self.cluster.call(async |client| client.kv_client().txn(txn.clone()).await).await?;
        if done.succeeded() {
            let now = done.header().map_or(0, |header| header.revision());
            return Ok(Seen {
                entry: Some(entry.clone()),
                held: true,
                text: Vec::new(),
                revisions: (now, now),
            });
        }
        self.read().await
    }

    pub(super) async fn changed(&self, seen: &Seen) -> Result<(), Trouble> {
        let options = WatchOptions::new().with_prefix().with_start_revision(seen.revisions.1 + 1);
        let watch = self
            .cluster
            .call(async |mut client| client.watch(self.job.as_str(), Some(options.clone())).await);
        let mut stream = watch.await?;
        loop {
            match stream.message().await {
                Ok(Some(news)) if news.events().is_empty() && !news.canceled() => {}
                // Also if what happened since then is forgotten already: then it must be read.
                Ok(_) => return Ok(()),
                Err(error) => return Err(self.cluster.broken(&error)),
            }
        }
    }

    pub(super) async fn lease(&self) -> Result<Lease, Trouble> {
        let seconds = |duration: Duration| i64::try_from(duration.as_secs()).unwrap_or(i64::MAX).max(1);
        let granted = Instant::now();
        let (wanted, kept) = (seconds(Lease::time(self.silence)), seconds(KEPT));
        let (lease, entry) = self
            .cluster
            .call(async |mut client| {
                let lease = client.lease_grant(wanted, None).await?;
                Ok::<_, Error>((lease, client.lease_grant(kept, None).await?))
            })
            .await?;
        let ttl = Duration::from_secs(u64::try_from(lease.ttl()).unwrap_or_default());
        Ok(Lease { ids: (lease.id(), entry.id()), ttl, granted })
    }

    pub(super) async fn keep(&self, lease: &Lease) -> Result<bool, Trouble> {
        let keeps = self.cluster.call(async |mut client| {
            for id in [lease.ids.0, lease.ids.1] {
                match client.lease_keep_alive(id).await {
                    Ok(_) => {}
                    Err(Error::LeaseKeepAliveError(_)) => return Ok(false),
                    Err(error) => return Err(error),
                }
            }
            Ok(true)
        });
        keeps.await
    }

    pub(super) async fn release(&self, lease: &Lease) {
        let _ = self.cluster.call(async |mut client| client.lease_revoke(lease.ids.0).await).await;
    }

    fn at(&self) -> String {
        format!("{}, {}entry", self.cluster.name(), self.job)
    }
}
