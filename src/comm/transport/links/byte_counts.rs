//! A transport that counts the bytes of the links that it wraps: the sample of a wrapping transport.
//!
//! It applies to all connections that a thread makes after [`count_into`].

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Link;
use super::wrapper::{Wrapped, Wrapper};

thread_local! {
    static COUNTS: RefCell<Option<Arc<Counts>>> = const { RefCell::new(None) };
}

/// The bytes that links have sent and received.
#[derive(Debug, Default)]
struct Counts {
    sent: AtomicUsize,
    received: AtomicUsize,
}

/// Counts the bytes of later connections of this thread.
fn count_into(counts: &Arc<Counts>) {
    COUNTS.set(Some(Arc::clone(counts)));
}

/// Wraps `link` if this thread counts bytes.
pub(super) fn wrap(link: Box<dyn Link>) -> Box<dyn Link> {
    match COUNTS.with_borrow(Clone::clone) {
        Some(counts) => Box::new(Wrapped { link, wrapper: counts }),
        None => link,
    }
}

impl Wrapper for Arc<Counts> {
    fn try_send(&mut self, link: &mut dyn Link, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let bytes = link.try_send(parts)?;
        self.sent.fetch_add(bytes, Ordering::Relaxed);
        Ok(bytes)
    }

    fn try_recv(&mut self, link: &mut dyn Link, into: &mut [u8]) -> io::Result<usize> {
        let bytes = link.try_recv(into)?;
        self.received.fetch_add(bytes, Ordering::Relaxed);
        Ok(bytes)
    }
}

mod tests {
    use std::time::Duration;

    use convoke_store::{MemoryStore, Store};

    use super::*;
    use crate::{Group, GroupOptions, ReduceOp};

    const RANKS: usize = 3;

    /// Runs `body` on ranks that count their bytes. Returns the bytes that each rank has sent and received.
    fn counted(options: &GroupOptions, body: impl Fn(&Group) + Sync) -> Vec<(usize, usize)> {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let run = |rank| {
            let counts = Arc::default();
            count_into(&counts);
            body(&Group::new(Arc::clone(&store), rank, RANKS, options.clone()).unwrap());
            (counts.sent.load(Ordering::Relaxed), counts.received.load(Ordering::Relaxed))
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..RANKS).map(|rank| scope.spawn(move || run(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn options() -> GroupOptions {
        let long = Duration::from_secs(60);
        GroupOptions::default().timeout(long).init_timeout(long)
    }

    #[test]
    fn wrapping_transport_carries_collectives_and_their_handshakes() {
        let options = options().shared_memory(false).algorithms("all_reduce:ring".parse().unwrap());
        let count = 30_000;
        let counted = counted(&options, |group| {
            let mut sums: Vec<f32> = (0..count).map(|i| (i + group.rank()) as f32).collect();
            group.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
            assert!(sums.iter().enumerate().all(|(i, &sum)| sum == (3 * i + 3) as f32));
        });
        // A ring sends 2·S·(P−1)/P bytes. Frames and handshakes add a few.
        let least = 2 * 4 * count * (RANKS - 1) / RANKS;
        for (sent, received) in counted {
            assert!((least + 1..least + 10_000).contains(&sent), "{sent}, {least}");
            assert!((least + 1..least + 10_000).contains(&received), "{received}, {least}");
        }
    }

    #[test]
    fn wrapping_transport_carries_messages_in_shared_memory() {
        let message = [7_u8; 1000];
        let counted = counted(&options(), |group| {
            let (me, mut got) = (group.rank(), [0; 1000]);
            if me == 0 {
                group.send(&message, 1, 0).unwrap();
            } else if me == 1 {
                group.recv(&mut got, 0, 0).unwrap();
                assert_eq!(got, message);
            }
            group.barrier().unwrap();
        });
        assert!(counted[0].0 >= message.len() && counted[1].1 >= message.len(), "{counted:?}");
    }
}
