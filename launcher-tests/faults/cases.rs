//! The dimensions of the fault matrix: ranks, kinds of calls, fault points of a call.

use convoke_launcher_tests::fault::{Act, Fault, Orders, Work};
use convoke_testkit::is_full;

use super::job::orders;

/// Sequence number of the call that fails. The calls before it have used all connections.
pub const SEQ: u64 = 4;

/// A fault point: its name, and the number of bytes moved before it.
pub type Moment = (&'static str, usize);

/// One cell of the matrix.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub size: usize,
    pub victim: usize,
    pub work: Work,
    pub moment: Moment,
    /// True if data goes through shared memory, false if it goes over connections.
    pub in_memory: bool,
}

impl Case {
    /// Returns orders for all ranks that inject `act` into the victim.
    pub fn orders(&self, act: Act) -> Orders {
        let (faults, shared_memory) = (vec![fault(self.victim, self.moment, act)], self.in_memory);
        Orders { faults, shared_memory, ..orders(self.work) }
    }
}

/// Injects `act` into `rank` at this fault point of call [`SEQ`], or of a later call if [`SEQ`] does not
/// reach the point.
pub fn fault(rank: usize, (point, bytes): Moment, act: Act) -> Fault {
    let in_call = ["computing", "calling", "sent", "received", "moved", "message sent", "message received"];
    let seq = if in_call.contains(&point) { SEQ } else { 0 };
    Fault { rank, point: point.to_owned(), seq, bytes, act }
}

/// Returns the cases for each rank, each phase and each kind of call, over connections and in shared memory.
/// The short form has three ranks and only the kinds of calls that differ most.
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

/// Returns the fault points of a call in order: before it, in the middle, and after completion but before
/// the caller returns.
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
