//! Replacement of the etcd registry in a launcher that was built without the feature `etcd`.

use std::time::Duration;

use super::{Entry, EntrySnapshot, Lease, RegistryError};
use crate::config::EtcdCluster;
use crate::membership::Record;

/// This type has no values, so none of its methods is ever called.
#[derive(Debug, Clone)]
pub(in super::super) enum EtcdRegistry {}

impl EtcdRegistry {
    /// Returns an error, because this launcher was built without etcd. The command line has refused etcd
    /// already.
    ///
    /// # Errors
    /// Always.
    pub(in super::super) fn new(_: &EtcdCluster, _: &str, _: Duration) -> Result<Self, String> {
        Err(EtcdCluster::MISSING.to_owned())
    }

    pub(super) async fn read(&self) -> Result<EntrySnapshot, RegistryError> {
        match *self {}
    }

    pub(super) async fn record(&self) -> Result<Option<Record>, RegistryError> {
        match *self {}
    }

    pub(super) async fn replace(
        &self,
        _: &EntrySnapshot,
        _: &Entry,
        _: Option<&Record>,
        _: &Lease,
    ) -> Result<EntrySnapshot, RegistryError> {
        match *self {}
    }

    pub(super) async fn changed(&self, _: &EntrySnapshot) -> Result<(), RegistryError> {
        match *self {}
    }

    pub(super) async fn lease(&self) -> Result<Lease, RegistryError> {
        match *self {}
    }

    pub(super) async fn keep(&self, _: &Lease) -> Result<bool, RegistryError> {
        match *self {}
    }

    pub(super) async fn release(&self, _: &Lease) {
        match *self {}
    }
}
