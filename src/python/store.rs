//! Stores: a client and a server of the protocol of torch's TCPStore.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use convoke_store::{PrefixStore, TcpStore};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::store_exception;

/// A client of a store server.
#[pyclass(frozen, module = "convoke_dist._core")]
pub(crate) struct Store {
    store: Arc<dyn convoke_store::Store>,
    timeout: Duration,
}

/// Returns the deadline of a call that gets `timeout` seconds, or the store's own time limit.
fn deadline(own: Duration, timeout: Option<f64>) -> PyResult<Instant> {
    Ok(Instant::now() + timeout.map_or(Ok(own), seconds)?)
}

/// Returns a duration of up to 100 years.
pub(crate) fn seconds(seconds: f64) -> PyResult<Duration> {
    const MAX: f64 = 100.0 * 365.0 * 86_400.0;
    if seconds.is_nan() || seconds < 0.0 {
        return Err(PyValueError::new_err(format!(
            "a time limit of {seconds} seconds: it must be 0 or more"
        )));
    }
    Ok(Duration::from_secs_f64(seconds.min(MAX)))
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (address, timeout = 300.0))]
    fn new(py: Python<'_>, address: &str, timeout: f64) -> PyResult<Self> {
        let timeout = seconds(timeout)?;
        let connected = py.detach(|| TcpStore::connect(address, Instant::now() + timeout));
        Ok(Self { store: Arc::new(connected.map_err(store_exception)?), timeout })
    }

    fn prefix(&self, prefix: &str) -> Self {
        Self { store: Arc::new(PrefixStore::new(prefix, Arc::clone(&self.store))), timeout: self.timeout }
    }

    fn set(&self, py: Python<'_>, key: &str, value: &[u8]) -> PyResult<()> {
        let deadline = deadline(self.timeout, None)?;
        py.detach(|| self.store.set(key.as_bytes(), value, deadline)).map_err(store_exception)
    }

    #[pyo3(signature = (key, timeout = None))]
    fn get<'py>(&self, py: Python<'py>, key: &str, timeout: Option<f64>) -> PyResult<Bound<'py, PyBytes>> {
        let deadline = deadline(self.timeout, timeout)?;
        let value = py.detach(|| self.store.get(key.as_bytes(), deadline)).map_err(store_exception)?;
        Ok(PyBytes::new(py, &value))
    }

    fn try_get<'py>(&self, py: Python<'py>, key: &str) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let deadline = deadline(self.timeout, None)?;
        let value = py.detach(|| self.store.try_get(key.as_bytes(), deadline)).map_err(store_exception)?;
        Ok(value.map(|value| PyBytes::new(py, &value)))
    }

    fn add(&self, py: Python<'_>, key: &str, amount: i64) -> PyResult<i64> {
        let deadline = deadline(self.timeout, None)?;
        py.detach(|| self.store.add(key.as_bytes(), amount, deadline)).map_err(store_exception)
    }

    fn compare_set<'py>(
        &self,
        py: Python<'py>,
        key: &str,
        expected: &[u8],
        desired: &[u8],
    ) -> PyResult<Bound<'py, PyBytes>> {
        let deadline = deadline(self.timeout, None)?;
        let value = py.detach(|| self.store.compare_set(key.as_bytes(), expected, desired, deadline));
        Ok(PyBytes::new(py, &value.map_err(store_exception)?))
    }

    #[pyo3(signature = (keys, timeout = None))]
    fn wait(&self, py: Python<'_>, keys: Vec<String>, timeout: Option<f64>) -> PyResult<()> {
        let deadline = deadline(self.timeout, timeout)?;
        let keys: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
        py.detach(|| self.store.wait(&keys, deadline)).map_err(store_exception)
    }

    fn check(&self, py: Python<'_>, keys: Vec<String>) -> PyResult<bool> {
        let deadline = deadline(self.timeout, None)?;
        let keys: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
        py.detach(|| self.store.check(&keys, deadline)).map_err(store_exception)
    }

    fn delete(&self, py: Python<'_>, key: &str) -> PyResult<bool> {
        let deadline = deadline(self.timeout, None)?;
        py.detach(|| self.store.delete(key.as_bytes(), deadline)).map_err(store_exception)
    }

    fn num_keys(&self, py: Python<'_>) -> PyResult<u64> {
        let deadline = deadline(self.timeout, None)?;
        py.detach(|| self.store.num_keys(deadline)).map_err(store_exception)
    }
}

/// A store server in a thread of this process. It ends with this object.
#[pyclass(frozen, module = "convoke_dist._core")]
pub(crate) struct StoreServer {
    server: convoke_store::StoreServer,
}

#[pymethods]
impl StoreServer {
    #[new]
    #[pyo3(signature = (host = "::", port = 0))]
    fn new(host: &str, port: u16) -> PyResult<Self> {
        let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
        let server = convoke_store::StoreServer::bind(&addresses);
        Ok(Self { server: server.map_err(|error| PyOSError::new_err(error.to_string()))? })
    }

    #[getter]
    fn port(&self) -> u16 {
        self.server.port()
    }
}
