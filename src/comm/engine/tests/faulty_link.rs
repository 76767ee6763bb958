//! Real ranks over connections with injected faults: the connections move only a few bytes at a time, or none
//! although they could.

use super::*;
use crate::LossReason;
use crate::transport::links::fault_injection;
use convoke_testkit::TimedBarrier;

/// Runs `body` on two ranks repeatedly, each time with connections whose faults come in another pattern.
fn pairs<R: Send>(rounds: u64, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    let pair = |seed| {
        let (store, body): (Arc<dyn Store>, _) = (Arc::new(MemoryStore::new()), &body);
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..2)
                .map(|rank| {
                    let store = Arc::clone(&store);
                    scope.spawn(move || {
                        fault_injection::set_seed(Some(2 * seed + rank as u64));
                        let options = GroupOptions::default().timeout(LONG).init_timeout(LONG);
                        body(Group::new(store, rank, 2, options).unwrap())
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        })
    };
    (0..rounds).flat_map(pair).collect()
}

#[test]
fn goodbye_is_delivered_although_the_socket_buffer_is_full() {
    pairs(60, |group| {
        if group.rank() == 0 {
            let error = group.recv(&mut [0], 1, 0).unwrap_err();
            assert!(matches!(error, CommError::PeerLost { rank: 1, how: LossReason::Left, .. }), "{error}");
        }
    });
}

#[test]
fn message_split_into_any_pieces_is_read() {
    // Half a second before the deadline all ranks ask each other again what they wait in, so a lost report
    // would arrive only then.
    let time = Duration::from_secs(20);
    let (gate, late) = (TimedBarrier::new(2), AtomicBool::new(false));
    pairs(20, |group| {
        for _ in 0..20 {
            let start = Instant::now();
            if !late.load(Ordering::SeqCst) {
                group.monitored_barrier(time).unwrap();
            }
            late.fetch_or(start.elapsed() > time / 2, Ordering::SeqCst);
            // No rank sends anything else until both ranks have received the arrival of the other rank.
            gate.wait();
        }
    });
    assert!(!late.into_inner(), "a sign was not heard when it had come");
}
