//! Errors of the runtime as exceptions of `convoke_dist.errors`.

use convoke::status::error_json;
use convoke_comm::CommError;
use convoke_store::StoreError;
use pyo3::prelude::*;

/// Returns the exception that `convoke_dist.errors.from_json` makes of an error.
pub(crate) fn exception(error: &CommError) -> PyErr {
    exception_of_json(error_json(error))
}

pub(crate) fn exception_of_json(json: String) -> PyErr {
    Python::attach(|py| {
        let made =
            py.import("convoke_dist.errors").and_then(|errors| errors.call_method1("from_json", (json,)));
        made.map_or_else(|error| error, PyErr::from_value)
    })
}

pub(crate) fn store_exception(error: StoreError) -> PyErr {
    exception(&CommError::from(error))
}
