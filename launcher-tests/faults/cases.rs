//! What the matrix goes through: ranks, kinds of calls, moments of a call.

use convoke_launcher_tests::fault::{Act, Fault, Orders, Work};
use convoke_testkit::is_full;

use super::job::orders;

/// The call in which it happens; before it all connections have been used.
pub const SEQ: u64 = 4;

/// A moment: its name, and bytes that have moved by then.
pub type Moment = (&'static str, usize);

/// One cell of the matrix.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub size: usize,
    pub victim: usize,
    pub work: Work,
    pub moment: Moment,
    /// Data goes through memory that the ranks share, or over connections.
    pub in_memory: bool,
}

impl Case {
    /// Orders for all ranks, by which `act` happens to the victim.
    pub fn orders(&self, act: Act) -> Orders {
        let (faults, shared_memory) = (vec![fault(self.victim, self.moment, act)], self.in_memory);
        Orders { faults, shared_memory, ..orders(self.work) }
    }
}

/// `act` on `rank` when it comes to this moment of call [`SEQ`], or of a later one if it does not happen in that one.
pub fn fault(rank: usize, (point, bytes): Moment, act: Act) -> Fault {
    let in_call = ["computing", "calling", "sent", "received", "moved", "message sent", "message received"];
    let seq = if in_call.contains(&point) { SEQ } else { 0 };
    Fault { rank, point: point.to_owned(), seq, bytes, act }
}

/// Each rank in each phase of each kind of call, over connections and in memory; in the short form those calls that differ most, by three ranks.
pub fn cases() -> impl Iterator<Item = Case> {
    let (sizes, works): (&[usize], &[Work]) =
        if is_full() { (&[3, 4, 5], &Work::ALL) } else { (&[3], &Work::ALL[..3]) };
    sizes.iter().flat_map(move |&size| {
        works.iter().flat_map(move |&work| {
            let at = move |moment| {
                let of = move |victim| {
                    [false, true].map(|in_memory| Case { size, victim, work, moment, in_memory })
                };
                (0..size).flat_map(of)
            };
            moments(work).into_iter().flat_map(at)
        })
    })
}

/// Moments of a call, in order: before it, in the middle, when all is done but the caller does not know.
fn moments(work: Work) -> Vec<Moment> {
    let half = match work {
        Work::Small | Work::Barrier | Work::Idle => 0,
        Work::Direct => 6 << 10,
        Work::Ring | Work::Broadcast => 2 << 20,
        Work::AllToAll => 128 << 10,
        Work::Messages => 512 << 10,
    };
    if work == Work::Messages {
        return vec![
            ("computing", 0),
            ("message sent", 1),
            ("message sent", half),
            ("message received", 1),
            ("message received", half),
        ];
    }
    let mut moments = vec![("computing", 0), ("calling", 0)];
    if half > 0 {
        moments.extend([("sent", 1), ("received", 1), ("received", half)]);
    }
    moments.extend([("sent", half), ("moved", 0)]);
    moments
}
