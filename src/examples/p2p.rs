//! Messages between ranks: blocking, nonblocking, and from any source.
//!
//! ```text
//! $ convoke --nproc-per-node=4 p2p
//! 4 ranks passed a token round: 6
//! each got 3 greetings
//! rank 0 heard [1, 2, 3] from whoever was first
//! ```

#![allow(clippy::print_stdout)]

use convoke_comm::{CommError, init, op};

/// Tags separate messages between two ranks; messages of one tag stay in order.
const TOKEN: u32 = 1;
const GREETING: u32 = 2;
const REPORT: u32 = 3;

fn main() -> Result<(), CommError> {
    let world = init()?;
    let (rank, size) = (world.rank(), world.size());
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);

    // Blocking: `recv` returns when the message has arrived. `send` returns when its buffer may be used
    // again: a small message may still be in flight then, a large one (over 64 KiB) has been received. Rank 0
    // starts the token, and every other rank adds its rank number.
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

    // Several at once: all ranks greet all others. Blocking calls in this order could deadlock.
    let others = || (0..size).filter(|&other| other != rank);
    let sends: Vec<_> = others().map(|to| op::send(vec![rank as f32; 1000], to).tag(GREETING)).collect();
    let receives: Vec<_> = others().map(|from| op::recv(vec![0.0; 1000], from).tag(GREETING)).collect();
    let (_, greetings) = world.run((sends, receives))?;
    for (greeting, status) in &greetings {
        assert!(greeting.iter().all(|&value| value == status.source() as f32));
    }
    if rank == 0 {
        println!("each got {} greetings", greetings.len());
    }

    // Messages from any source. A probe returns the number of elements before they are received.
    if rank == 0 {
        let mut heard = Vec::new();
        while heard.len() < size - 1 {
            let status = world.probe(None, REPORT)?;
            let mut report = vec![0_u8; status.count()];
            world.recv(&mut report, status.source(), REPORT)?;
            assert_eq!(report, vec![status.source() as u8; status.source()]);
            heard.push(status.source());
        }
        heard.sort_unstable();
        println!("rank 0 heard {heard:?} from whoever was first");
    } else {
        world.send(&vec![rank as u8; rank], 0, REPORT)?;
    }
    world.barrier()
}
