//! `test-worker collectives`: checks the results of collectives in the world and in subgroups; the bits must
//! be equal on all ranks.
//!
//! On success rank 0 prints `sent S: A B ...`: the bytes of one large `all_reduce`, and the bytes that each
//! host's network interface sent during it.

use std::error::Error;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;

use convoke_comm::{Group, ReduceOp};

use super::Outcome;

/// Counts of 4-byte elements: few, one below the tuning table's minimum for a hierarchical algorithm, the
/// minimum, and several chunks.
const COUNTS: [usize; 4] = [5, 16_383, 16_384, 400_003];
/// Number of elements of the `all_reduce` whose traffic is counted.
const TRAFFIC_COUNT: usize = 1 << 20;

pub(super) fn run() -> Outcome {
    let world = convoke_comm::init()?;
    check(&world)?;
    // The three splits give groups with unequal numbers of ranks per host, groups whose ranks alternate
    // between hosts, and groups with one rank per host.
    let (rank, half) = (world.rank(), world.size() / 2);
    for (color, key) in [(rank % 2, rank), (0, rank % half), (rank % half, rank)] {
        if let Some(part) = world.split(Some(color as u32), -(key as i64))? {
            check(&part)?;
        }
    }
    measure_traffic(&world)
}

fn check(group: &Group) -> Outcome {
    for count in COUNTS {
        for op in [ReduceOp::Sum, ReduceOp::Avg] {
            reductions(group, count, op)?;
        }
        copies(group, count)?;
    }
    Ok(group.barrier()?)
}

/// Returns a number whose sums need rounding.
fn inexact(rank: usize, index: usize) -> f32 {
    ((index * 31 + rank * 17) as f32).sin() * 1.7
}

fn reductions(group: &Group, count: usize, op: ReduceOp) -> Outcome {
    let (rank, size) = (group.rank(), group.size());
    let mine: Vec<f32> = (0..count).map(|index| inexact(rank, index)).collect();
    let divisor = if op == ReduceOp::Avg { size as f64 } else { 1.0 };
    let right = |got: &[f32], from: usize| {
        got.iter().enumerate().all(|(index, &got)| {
            let sum: f64 = (0..size).map(|rank| f64::from(inexact(rank, from + index))).sum();
            (f64::from(got) - sum / divisor).abs() < 1e-5
        })
    };
    let mut all = mine.clone();
    group.all_reduce(&mut all, op)?;
    let mut again = mine.clone();
    group.all_reduce(&mut again, op)?;
    let mut root = mine.clone();
    group.reduce(&mut root, op, size - 1)?;
    let block = count / size;
    let mut scattered = vec![0.0; block];
    group.reduce_scatter(&mine[..block * size], &mut scattered, op)?;
    expect(right(&all, 0), "all_reduce", group, count)?;
    expect(rank + 1 < size || right(&root, 0), "reduce", group, count)?;
    expect(right(&scattered, rank * block), "reduce_scatter", group, count)?;
    let bits = |values: &[f32]| {
        let mut hasher = DefaultHasher::new();
        values.iter().for_each(|value| value.to_bits().hash(&mut hasher));
        hasher.finish()
    };
    expect(bits(&all) == bits(&again), "all_reduce again", group, count)?;
    let mut hashes = vec![0; size];
    group.all_gather(&[bits(&all)], &mut hashes)?;
    expect(hashes.iter().all(|&hash| hash == hashes[0]), "all_reduce's bits", group, count)
}

fn copies(group: &Group, count: usize) -> Outcome {
    let (rank, size) = (group.rank(), group.size());
    for root in 0..size {
        let mut buf = vec![rank as u32; count];
        group.broadcast(&mut buf, root)?;
        expect(buf.iter().all(|&value| value == root as u32), "broadcast", group, count)?;
    }
    let block = count / size;
    let mut row = vec![0; block * size];
    group.all_gather(&vec![rank as u32; block], &mut row)?;
    let gathered = row.chunks_exact(block.max(1)).enumerate();
    expect(
        gathered.into_iter().all(|(rank, block)| block.iter().all(|&v| v == rank as u32)),
        "all_gather",
        group,
        count,
    )
}

fn expect(right: bool, what: &str, group: &Group, count: usize) -> Outcome {
    if right {
        return Ok(());
    }
    let (rank, size, name) = (group.rank(), group.size(), group.name());
    Err(format!("{what} of {count} elements is wrong on rank {rank} of {size} in {name}").into())
}

fn measure_traffic(world: &Group) -> Outcome {
    let sent = || -> Result<u64, Box<dyn Error>> {
        Ok(std::fs::read_to_string("/sys/class/net/eth0/statistics/tx_bytes")?.trim().parse()?)
    };
    let mut buf = vec![1.0_f32; TRAFFIC_COUNT];
    world.barrier()?;
    let before = sent()?;
    world.barrier()?;
    world.all_reduce(&mut buf, ReduceOp::Sum)?;
    world.barrier()?;
    let mut all = vec![0; world.size()];
    world.all_gather(&[sent()? - before], &mut all)?;
    if world.rank() == 0 {
        let all: Vec<_> = all.iter().map(u64::to_string).collect();
        writeln!(std::io::stdout(), "sent {}: {}", size_of_val(&buf[..]), all.join(" "))?;
    }
    Ok(())
}
