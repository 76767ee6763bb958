//! `test-worker group`: joins its job under any starter, sums the ranks with all others and prints its own
//! rank.

use std::error::Error;
use std::io::{self, Write};

use convoke_comm::ReduceOp;

pub(super) fn run() -> Result<(), Box<dyn Error>> {
    let world = convoke_comm::init()?;
    let mut sum = [world.rank() as u64 + 1];
    world.all_reduce(&mut sum, ReduceOp::Sum)?;
    let (rank, size) = (world.rank(), world.size());
    let (local_rank, local_size) = (world.local_rank(), world.local_world_size());
    // One write for the whole line, because several workers share the output.
    let line = format!("rank {rank} of {size}, {local_rank} of {local_size} here, sum {}\n", sum[0]);
    Ok(io::stdout().write_all(line.as_bytes())?)
}
