//! The `convoke-store` binary.
fn main() {}
