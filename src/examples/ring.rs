//! Ring all-reduce implemented with send and receive: first with whole buffers, then in chunks.
//!
//! ```text
//! $ convoke --nproc-per-node=4 ring
//! whole buffers: right, each rank sent 3.00 times its buffer
//! chunks: right, each rank sent 1.50 times its buffer
//! ```
//!
//! The runtime's own `all_reduce` also uses a ring for large buffers, but without separate steps or copies.

#![allow(clippy::print_stdout)]

use convoke_comm::{CommError, Group, ReduceOp, init, op};

fn main() -> Result<(), CommError> {
    let world = init()?;
    // The length of the buffer is prime, so that chunks differ in size.
    let mine: Vec<f64> = (0..100_003).map(|index| ((world.rank() + 1) * (index % 17)) as f64).collect();
    let mut expected = mine.clone();
    world.all_reduce(&mut expected, ReduceOp::Sum)?;

    for (name, ring) in [
        ("whole buffers", ring_with_whole_buffers as RingAllReduce),
        ("chunks", ring_with_chunks as RingAllReduce),
    ] {
        let mut buffer = mine.clone();
        let sent = ring(&world, &mut buffer)?;
        assert_eq!(buffer, expected, "{name}");
        if world.rank() == 0 {
            println!("{name}: right, each rank sent {:.2} times its buffer", sent as f64 / mine.len() as f64);
        }
    }
    Ok(())
}

/// A function that adds the buffers of all ranks. It returns the number of elements that this rank has sent.
type RingAllReduce = fn(&Group, &mut [f64]) -> Result<usize, CommError>;

/// Passes every buffer once around the ring. Each rank sends `(P - 1) * S` bytes, for S bytes and P ranks.
fn ring_with_whole_buffers(group: &Group, buffer: &mut [f64]) -> Result<usize, CommError> {
    let (next, previous) = neighbours(group);
    let mut passing = buffer.to_vec();
    for _ in 1..group.size() {
        // At once: if all ranks blocked in a send first, all would wait.
        let outgoing = passing.clone();
        group.run((op::send(&outgoing, next), op::recv(&mut passing, previous)))?;
        buffer.iter_mut().zip(&passing).for_each(|(sum, value)| *sum += value);
    }
    Ok((group.size() - 1) * buffer.len())
}

/// Splits the buffer into P chunks: reduce-scatter around the ring, then all-gather. Each rank sends
/// `2 * (P - 1) / P * S` bytes (Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).
fn ring_with_chunks(group: &Group, buffer: &mut [f64]) -> Result<usize, CommError> {
    let (rank, size, len) = (group.rank(), group.size(), buffer.len());
    let (next, previous) = neighbours(group);
    let chunk = |index: usize| index * len / size..(index + 1) * len / size;
    let mut sent = 0;
    for step in 0..2 * (size - 1) {
        let (sends, receives) = ((rank + 2 * size - step) % size, (rank + 2 * size - step - 1) % size);
        let outgoing = buffer[chunk(sends)].to_vec();
        sent += outgoing.len();
        let mut incoming = vec![0.0; chunk(receives).len()];
        group.run((op::send(&outgoing, next), op::recv(&mut incoming, previous)))?;
        for (value, incoming) in buffer[chunk(receives)].iter_mut().zip(incoming) {
            // The first half of the steps adds incoming chunks; the second half distributes complete sums.
            *value = if step < size - 1 { *value + incoming } else { incoming };
        }
    }
    Ok(sent)
}

fn neighbours(group: &Group) -> (usize, usize) {
    let (rank, size) = (group.rank(), group.size());
    ((rank + 1) % size, (rank + size - 1) % size)
}
