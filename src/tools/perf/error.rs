//! Errors that end `convoke-perf`.

use std::io;
use std::path::PathBuf;

use convoke_comm::{CommError, Dtype};

use super::collective::Collective;
use super::sizes;
use super::verify::WrongElement;

#[derive(Debug, thiserror::Error)]
pub(crate) enum PerfError {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(
        "wrong result of {collective} of {} of {dtype}{}, root {root}, on rank {rank}: element {} is {}, not {}",
        sizes::text(*bytes), op.as_deref().map(|op| format!(" by {op}")).unwrap_or_default(), wrong.index, wrong.got,
        wrong.expected
    )]
    WrongResult {
        collective: Collective,
        bytes: usize,
        dtype: Dtype,
        op: Option<String>,
        root: usize,
        rank: usize,
        wrong: WrongElement,
    },
    #[error("{0}")]
    Usage(String),
    #[error(
        "{what} needs buffers of {} on each rank, {} for the {ranks} on this host, and {} are free: take a smaller \
         --max-bytes, or fewer --in-flight",
        sizes::approximate(*bytes), sizes::approximate(bytes.saturating_mul(*ranks)), sizes::approximate(*free)
    )]
    Memory { what: String, bytes: usize, ranks: usize, free: usize },
    #[error("no memory for {what}: take a smaller --max-bytes, fewer --iters or fewer --in-flight")]
    Allocation { what: String },
    #[error("cannot write to stdout: {0}")]
    Print(#[from] io::Error),
    #[error("cannot write the plot to {}: {why}", path.display())]
    Plot { path: PathBuf, why: String },
}
