//! The `convoke` binary.
fn main() {}
