//! The module `convoke_dist._core`: groups, operations and stores for Python.
//!
//! Python code of the package describes arrays by address, length and type (`convoke_dist/_arrays.py`). Functions
//! that may wait release the interpreter's lock. Errors become the exceptions of `convoke_dist.errors`.

mod error;
mod group;
mod interrupt;
mod memory;
mod store;

use std::collections::HashMap;

use convoke_env::{LocalWorld, host};
use pyo3::prelude::*;

/// Returns the address of the C interface's table of functions, for the backend of torch.distributed.
#[pyfunction]
fn api_table() -> usize {
    std::ptr::from_ref(convoke::table::api()).addr()
}

/// Returns the address by which other hosts most likely reach this one; `None` if it has none.
#[pyfunction]
fn host_address() -> Option<String> {
    host::most_reachable_address(&host::interfaces().ok()?).map(|address| address.to_string())
}

/// Returns the random number that the kernel drew at its start, in hexadecimal.
#[pyfunction]
fn boot_id() -> Option<String> {
    host::boot_id().map(|id| format!("{id:032x}"))
}

/// Returns the variables of each of `size` ranks of this host that meet at a store at `port`. `None` removes a
/// variable.
#[pyfunction]
fn local_world(size: usize, port: u16) -> PyResult<Vec<HashMap<&'static str, Option<String>>>> {
    let world = LocalWorld::new(size, port)?;
    Ok((0..size).map(|rank| world.variables(rank).into_iter().collect()).collect())
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    convoke_comm::raw::set_interrupt_check(interrupt::is_interrupted);
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(api_table, module)?)?;
    module.add_function(wrap_pyfunction!(host_address, module)?)?;
    module.add_function(wrap_pyfunction!(boot_id, module)?)?;
    module.add_function(wrap_pyfunction!(local_world, module)?)?;
    module.add_function(wrap_pyfunction!(group::init, module)?)?;
    module.add_function(wrap_pyfunction!(group::detach_works, module)?)?;
    module.add_class::<group::Group>()?;
    module.add_class::<group::Work>()?;
    module.add_class::<memory::Memory>()?;
    module.add_class::<store::Store>()?;
    module.add_class::<store::StoreServer>()
}
