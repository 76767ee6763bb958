//! Tests of convoke with real processes; see `e2e/`, `conformance/` and `tidy.rs`.

/// What `plain_worker lines` writes: rank, number, and a filler whose length changes from line to line.
#[must_use]
pub fn numbered_line(rank: usize, number: usize) -> String {
    format!("{rank} {number} {}", "x".repeat(number % 97))
}
