//! Memory that all ranks of a host can access.

use convoke_comm::SharedBuffer;
use pyo3::prelude::*;

/// Memory of this rank that the other ranks of its host can access. Python code uses it by its address.
#[pyclass(frozen, module = "convoke_dist._core")]
pub(crate) struct Memory {
    buffer: SharedBuffer<u64>,
    address: usize,
    bytes: usize,
}

impl Memory {
    pub(crate) fn new(mut buffer: SharedBuffer<u64>, bytes: usize) -> Self {
        let address = buffer.as_mut_ptr().expose_provenance();
        Self { buffer, address, bytes }
    }
}

#[pymethods]
impl Memory {
    /// Whether other ranks can access the memory.
    #[getter]
    fn is_shared(&self) -> bool {
        self.buffer.is_shared()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.bytes
    }

    #[getter]
    fn address(&self) -> usize {
        self.address
    }
}
