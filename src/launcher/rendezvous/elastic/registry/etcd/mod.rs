//! The registry in etcd, API version 3. Its keys are `PREFIX/RUN_ID/coordinator`, `/record`, and `/holder`
//! while the coordinator is alive.

mod cluster;

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, Error, PutOptions, Txn, TxnOp, TxnOpResponse, WatchOptions};

use cluster::Cluster;

use super::{
    Entry, EntrySnapshot, RegistryError, Version, escape_path_component, from_json, requested_ttl, to_json,
};
use crate::config::EtcdCluster;
use crate::membership::Record;
use crate::rendezvous::elastic::wire;

/// Time for which the keys of a job outlive its last coordinator.
const RETENTION: Duration = Duration::from_secs(7 * 24 * 3600);

/// Key of the entry that names the coordinator.
const ENTRY_KEY: &str = "coordinator";
/// Key that is bound to the coordinator's lease: etcd deletes it when the lease expires. Its value is the
/// term of the coordinator.
const LEASE_KEY: &str = "holder";
/// Key of the record of the job.
const RECORD_KEY: &str = "record";

#[derive(Clone)]
pub(in super::super) struct EtcdRegistry {
    cluster: Rc<Cluster>,
    /// Prefix of the job's etcd keys.
    job: String,
    heartbeat_timeout: Duration,
    /// Ids of the latest two leases: that of the coordinator, and that of the entry, which outlives the
    /// coordinator.
    leases: Cell<[i64; 2]>,
}

impl EtcdRegistry {
    /// Reads certificates, user and password. The first request makes the connection.
    ///
    /// # Errors
    /// A file cannot be read, or only one of user and password is set.
    pub(in super::super) fn new(
        config: &EtcdCluster,
        run_id: &str,
        heartbeat_timeout: Duration,
    ) -> Result<Self, String> {
        let job = format!("{}/{}/", config.prefix.trim_end_matches('/'), escape_path_component(run_id));
        Ok(Self { cluster: Rc::new(Cluster::new(config)?), job, heartbeat_timeout, leases: Cell::default() })
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.job)
    }

    pub(super) async fn read(&self) -> Result<EntrySnapshot, RegistryError> {
        let both = Txn::new().and_then([ENTRY_KEY, LEASE_KEY].map(|name| TxnOp::get(self.key(name), None)));
        let found = self.cluster.call(async |client| client.kv_client().txn(both.clone()).await).await?;
        let now = found.header().map_or(0, |header| header.revision());
        let mut pairs = found.op_responses().into_iter().map(|response| match response {
            TxnOpResponse::Get(mut found) => found.take_kvs().pop(),
            _ => None,
        });
        let (pair, lease_value) = (pairs.next().flatten(), pairs.next().flatten());
        let Some(pair) = pair else {
            return Ok(EntrySnapshot { revisions: (0, now), ..EntrySnapshot::default() });
        };
        let at = self.location(ENTRY_KEY);
        from_json(pair.value(), &at).and_then(|version: Version| Entry::check(version, &at))?;
        let entry: Entry = from_json(pair.value(), &at)?;
        let is_leased = lease_value.is_some_and(|term| term.value() == entry.term.to_string().as_bytes());
        let revisions = (pair.mod_revision(), now);
        Ok(EntrySnapshot { entry: Some(entry), is_leased, revisions, ..EntrySnapshot::default() })
    }

    pub(super) async fn record(&self) -> Result<Option<Record>, RegistryError> {
        let key = self.key(RECORD_KEY);
        let found = self.cluster.call(async |mut client| client.get(key.as_str(), None).await).await?;
        let Some(pair) = found.kvs().first() else { return Ok(None) };
        wire::decode(pair.value()).map(Some).map_err(|error| {
            let at = self.location(RECORD_KEY);
            RegistryError::Permanent(format!("{at}: not a record of convoke: {error}"))
        })
    }

    pub(super) async fn replace(
        &self,
        seen: &EntrySnapshot,
        entry: &Entry,
        record: Option<&Record>,
    ) -> Result<EntrySnapshot, RegistryError> {
        let [lease, entry_lease] = self.leases.get();
        let put = |name: &str, text: Vec<u8>, lease: i64| {
            TxnOp::put(self.key(name), text, Some(PutOptions::new().with_lease(lease)))
        };
        let mut puts = vec![
            put(LEASE_KEY, entry.term.to_string().into_bytes(), lease),
            put(ENTRY_KEY, to_json(entry), entry_lease),
        ];
        // The record is binary: as text it would exceed etcd's limit on the size of a request with ten
        // thousand nodes.
        puts.extend(record.map(|record| put(RECORD_KEY, wire::encode(record), entry_lease)));
        let txn = Txn::new()
            .when([Compare::mod_revision(self.key(ENTRY_KEY), CompareOp::Equal, seen.revisions.0)])
            .and_then(puts);
        let done = self.cluster.call(async |client| client.kv_client().txn(txn.clone()).await).await?;
        if done.succeeded() {
            let now = done.header().map_or(0, |header| header.revision());
            let (entry, revisions) = (Some(entry.clone()), (now, now));
            return Ok(EntrySnapshot { entry, is_leased: true, revisions, ..EntrySnapshot::default() });
        }
        self.read().await
    }

    /// Waits until the lease key changes after the read of `seen`. Each write of the entry or the record also
    /// writes the lease key.
    pub(super) async fn changed(&self, seen: &EntrySnapshot) -> Result<(), RegistryError> {
        let (key, options) =
            (self.key(LEASE_KEY), WatchOptions::new().with_start_revision(seen.revisions.1 + 1));
        let watch =
            self.cluster.call(async |mut client| client.watch(key.as_str(), Some(options.clone())).await);
        let mut stream = watch.await?;
        loop {
            match stream.message().await {
                Ok(Some(news)) if news.events().is_empty() && !news.canceled() => {}
                // A watch also ends here if etcd has compacted the history: the caller must then read the
                // keys again.
                Ok(_) => return Ok(()),
                Err(error) => return Err(self.cluster.stream_error(&error)),
            }
        }
    }

    pub(super) async fn lease(&self) -> Result<Duration, RegistryError> {
        let seconds = |duration: Duration| i64::try_from(duration.as_secs()).unwrap_or(i64::MAX).max(1);
        let (wanted, kept) = (seconds(requested_ttl(self.heartbeat_timeout)), seconds(RETENTION));
        let (lease, entry) = self
            .cluster
            .call(async |mut client| {
                let lease = client.lease_grant(wanted, None).await?;
                Ok::<_, Error>((lease, client.lease_grant(kept, None).await?))
            })
            .await?;
        let ttl = granted_ttl(lease.ttl())?;
        self.leases.set([lease.id(), entry.id()]);
        Ok(ttl)
    }

    pub(super) async fn keep(&self) -> Result<bool, RegistryError> {
        let keeps = self.cluster.call(async |mut client| {
            for id in self.leases.get() {
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

    pub(super) async fn release(&self) {
        let [lease, _] = self.leases.get();
        let _ = self.cluster.call(async |mut client| client.lease_revoke(lease).await).await;
    }

    fn location(&self, name: &str) -> String {
        format!("{}, {}", self.cluster.name, self.key(name))
    }
}

/// Returns the time to live of a lease that etcd has granted. A lease without time to live is an error: it
/// would expire at once, and the leadership would be lost.
fn granted_ttl(seconds: i64) -> Result<Duration, RegistryError> {
    match u64::try_from(seconds) {
        Ok(seconds @ 1..) => Ok(Duration::from_secs(seconds)),
        Ok(0) | Err(_) => {
            Err(RegistryError::Transient(format!("etcd has granted a lease of {seconds} s: is it healthy?")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::{AgentId, Profile, RoundNode};

    #[test]
    fn record_of_ten_thousand_nodes_fits_into_etcd() {
        // etcd limits a request to 1.5 MiB.
        const MOST: usize = 1 << 20;
        let node = |index: u128| {
            let host = format!("node{index:05}.rack07.cluster.example.org");
            let (min, max, role) = (10_000, 10_000, "default".to_owned());
            let profile = Profile { host, pid: 4_000_000, min, max, workers: 8, role };
            RoundNode { agent: AgentId(u128::MAX - index), profile }
        };
        let record = Record { nodes: (0..10_000).map(node).collect(), ..Record::default() };
        let bytes = wire::encode(&record);
        assert!(bytes.len() < MOST, "{} bytes", bytes.len());
        assert_eq!(wire::decode::<Record>(&bytes).unwrap(), record);
    }

    #[test]
    fn lease_without_time_to_live_is_refused() {
        assert_eq!(granted_ttl(7).unwrap(), Duration::from_secs(7));
        for seconds in [0, -1, i64::MIN] {
            let error = granted_ttl(seconds).unwrap_err();
            assert!(
                matches!(&error, RegistryError::Transient(what) if what.contains(&seconds.to_string())),
                "{error}"
            );
        }
    }
}
