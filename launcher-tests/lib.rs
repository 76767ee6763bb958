//! Tests of convoke with real processes; see `e2e/`, `conformance/` and `tidy.rs`.
