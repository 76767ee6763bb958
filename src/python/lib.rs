//! The module `convoke_dist._core`: groups, operations and stores for Python.
//!
//! Python code of the package describes arrays by address, length and type (`convoke_dist/_arrays.py`). Functions
//! that may wait release the interpreter's lock. Errors become the exceptions of `convoke_dist.errors`.

mod error;
mod group;
mod memory;
mod store;

use convoke_env::host::{Reach, interfaces};
use pyo3::prelude::*;

/// Returns the address of the C interface's table of functions, for the backend of torch.distributed.
#[pyfunction]
fn api_table() -> usize {
    std::ptr::from_ref(convoke::table::api()).addr()
}

/// Returns the address by which other hosts most likely reach this one; `None` if there is only loopback.
#[pyfunction]
fn host_address() -> Option<String> {
    let interfaces = interfaces().ok()?;
    let reachable =
        interfaces.iter().filter(|interface| interface.is_up && interface.reach() < Reach::Bridge);
    let best = reachable
        .filter(|interface| !interface.addresses.is_empty())
        .min_by_key(|interface| interface.reach())?;
    Some(best.addresses.first()?.to_string())
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(api_table, module)?)?;
    module.add_function(wrap_pyfunction!(host_address, module)?)?;
    module.add_function(wrap_pyfunction!(group::init, module)?)?;
    module.add_function(wrap_pyfunction!(group::forget_works, module)?)?;
    module.add_class::<group::Group>()?;
    module.add_class::<group::Work>()?;
    module.add_class::<memory::Memory>()?;
    module.add_class::<store::Store>()?;
    module.add_class::<store::StoreServer>()
}
