//! Messages between ranks: waited for, on their way, from whoever sends.
//!
//! ```text
//! $ convoke --nproc-per-node=4 p2p
//! 4 ranks passed a token round: 6
//! each got 3 greetings
//! rank 0 heard [1, 2, 3] from whoever was first
//! ```

#![allow(clippy::print_stdout)]

use convoke_comm::{CommError, Work, init, wait_all};

/// Tags tell messages between the same two ranks apart; each is in an order of its own.
const TOKEN: u32 = 1;
const GREETING: u32 = 2;
const REPORT: u32 = 3;

fn main() -> Result<(), CommError> {
    let world = init()?;
    let (rank, size) = (world.rank(), world.size());
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);

    // Blocking: `recv` returns when the message is here, `send` when its buffer may be used again: a small one is on its
    // way then, a large one (over 64 KiB) with its receiver. Rank 0 starts, each adds its rank.
    let mut token = [0_u32];
    if size > 1 {
        if rank == 0 {
            world.send(&token, next, TOKEN)?;
            world.recv(&mut token, previous, TOKEN)?;
        } else {
            world.recv(&mut token, previous, TOKEN)?;
            token[0] += rank as u32;
            world.send(&token, next, TOKEN)?;
        }
    }
    if rank == 0 {
        println!("{size} ranks passed a token round: {}", token[0]);
    }

    // Nonblocking: all greet all at once. Blocking calls in this order could wait for each other for ever; with
    // messages on their way nobody waits before everything has been begun.
    let others = || (0..size).filter(|&other| other != rank);
    let receives: Vec<Work<Vec<f32>>> =
        others().map(|from| world.irecv(vec![0.0; 1000], from, GREETING)).collect::<Result<_, _>>()?;
    let sends: Vec<Work<Vec<f32>>> =
        others().map(|to| world.isend(vec![rank as f32; 1000], to, GREETING)).collect::<Result<_, _>>()?;
    let greetings = wait_all(receives)?;
    wait_all(sends)?;
    for (greeting, from) in greetings.iter().zip(others()) {
        assert!(greeting.iter().all(|&value| value == from as f32));
    }
    if rank == 0 {
        println!("each got {} greetings", greetings.len());
    }

    // From whoever is first; the number of elements is known before it is received, by a probe.
    if rank == 0 {
        let mut heard = Vec::new();
        while heard.len() < size - 1 {
            let envelope = world.probe(None, REPORT)?;
            let mut report = vec![0_u8; envelope.count()];
            world.recv(&mut report, envelope.from(), REPORT)?;
            assert_eq!(report, vec![envelope.from() as u8; envelope.from()]);
            heard.push(envelope.from());
        }
        heard.sort_unstable();
        println!("rank 0 heard {heard:?} from whoever was first");
    } else {
        world.send(&vec![rank as u8; rank], 0, REPORT)?;
    }
    world.barrier()
}
