//! Errors of the runtime as exceptions of `convoke_dist.errors`.

use convoke::status::error_json;
use convoke_comm::CommError;
use convoke_store::StoreError;
use pyo3::prelude::*;

/// Returns the exception that `convoke_dist.errors.from_json` makes of an error.
pub(crate) fn exception(error: &CommError) -> PyErr {
    exception_of_json(error_json(error))
}

/// If a signal came meanwhile, its handlers run, and the exception that they raise has this one as its cause.
pub(crate) fn exception_of_json(json: String) -> PyErr {
    Python::attach(|py| {
        let raised = py.check_signals().err();
        let made =
            py.import("convoke_dist.errors").and_then(|errors| errors.call_method1("from_json", (json,)));
        let exception = made.map_or_else(|error| error, PyErr::from_value);
        match raised {
            None => exception,
            Some(raised) => {
                raised.set_cause(py, Some(exception));
                raised
            }
        }
    })
}

pub(crate) fn store_exception(error: StoreError) -> PyErr {
    exception(&CommError::from(error))
}
