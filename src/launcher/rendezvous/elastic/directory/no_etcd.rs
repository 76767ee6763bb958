//! Replacement of the etcd registry in a launcher that was built without the feature `etcd`.

use std::time::Duration;

use super::{Entry, Lease, Seen, Trouble};
use crate::config::EtcdCluster;
use crate::membership::Record;

/// This type has no values, so none of its methods is ever called.
#[derive(Debug, Clone)]
pub(in super::super) enum EtcdDirectory {}

impl EtcdDirectory {
    /// Refuses etcd. The command line has already refused it before.
    ///
    /// # Errors
    /// Always.
    pub(in super::super) fn new(_: &EtcdCluster, _: &str, _: Duration) -> Result<Self, String> {
        Err(EtcdCluster::MISSING.to_owned())
    }

    pub(super) async fn read(&self) -> Result<Seen, Trouble> {
        match *self {}
    }

    pub(super) async fn record(&self) -> Result<Option<Record>, Trouble> {
        match *self {}
    }

    pub(super) async fn replace(
        &self,
        _: &Seen,
        _: &Entry,
        _: Option<&Record>,
        _: &Lease,
    ) -> Result<Seen, Trouble> {
        match *self {}
    }

    pub(super) async fn changed(&self, _: &Seen) -> Result<(), Trouble> {
        match *self {}
    }

    pub(super) async fn lease(&self) -> Result<Lease, Trouble> {
        match *self {}
    }

    pub(super) async fn keep(&self, _: &Lease) -> Result<bool, Trouble> {
        match *self {}
    }

    pub(super) async fn release(&self, _: &Lease) {
        match *self {}
    }
}
