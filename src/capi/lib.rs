//! The communication runtime for C, C++ and bindings of other languages: `libconvoke.so` and `convoke.h`.
//!
//! `docs/reference/c.md` is the reference for users. cbindgen makes `include/convoke.h` from this crate, and
//! a test compares them. Each function of the header is here, and in the [table](table::Api) of functions
//! too.
//!
//! - A function that can fail returns a [`Status`]. The calling thread keeps the error of its last failed call
//!   ([`status`]).
//! - Handles are pointers that the library makes and the program frees: groups, works, memory.
//! - A panic does not leave the library: it becomes [`Status::Internal`].
//! - Callbacks run while the library holds no lock.

pub mod call;
pub mod collectives;
pub mod group;
pub mod init;
pub mod memory;
mod pointers;
pub mod probe;
pub mod status;
pub mod store;
pub mod table;
pub mod work;

pub use status::Status;
