//! The dimensions of the fault matrix: ranks, kinds of calls, fault points of a call.

use convoke_launcher_tests::fault_spec::{Fault, FaultKind, FaultTestConfig, Operation};
use convoke_testkit::is_full_test_run;

use super::job::config;

/// Sequence number of the call that fails. The calls before it have used all connections.
pub const FAULTY_CALL: u64 = 4;

/// A fault point: its name, and the number of bytes moved before it.
pub type FaultPoint = (&'static str, usize);

/// One cell of the matrix.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub size: usize,
    pub victim: usize,
    pub operation: Operation,
    pub fault_point: FaultPoint,
    /// True if data goes through shared memory, false if it goes over connections.
    pub in_memory: bool,
}

impl Case {
    /// Returns the configuration for all ranks that inject `kind` into the victim.
    pub fn config(&self, kind: FaultKind) -> FaultTestConfig {
        let (faults, shared_memory) = (vec![fault(self.victim, self.fault_point, kind)], self.in_memory);
        FaultTestConfig { faults, shared_memory, ..config(self.operation) }
    }
}

/// Injects `kind` into `rank` at this fault point of call [`FAULTY_CALL`], or of a later call if it does
/// not reach the point.
pub fn fault(rank: usize, (point, bytes): FaultPoint, kind: FaultKind) -> Fault {
    let in_call = ["computing", "calling", "sent", "received", "moved", "message sent", "message received"];
    let seq = if in_call.contains(&point) { FAULTY_CALL } else { 0 };
    Fault { rank, point: point.to_owned(), seq, bytes, kind }
}

/// Returns the cases for each rank, each phase and each kind of call, over connections and in shared memory.
/// The short form has three ranks and only the kinds of calls that differ most.
pub fn cases() -> impl Iterator<Item = Case> {
    let (sizes, operations): (&[usize], &[Operation]) =
        if is_full_test_run() { (&[3, 4, 5], &Operation::ALL) } else { (&[3], &Operation::ALL[..3]) };
    sizes.iter().flat_map(move |&size| {
        operations.iter().flat_map(move |&operation| {
            let at = move |fault_point| {
                let of = move |victim| {
                    [false, true].map(|in_memory| Case { size, victim, operation, fault_point, in_memory })
                };
                (0..size).flat_map(of)
            };
            fault_points(operation).into_iter().flat_map(at)
        })
    })
}

/// Returns the fault points of a call in order: before it, in the middle, and after completion but before
/// the caller returns.
fn fault_points(operation: Operation) -> Vec<FaultPoint> {
    let half = match operation {
        Operation::SmallAllReduce | Operation::Barrier | Operation::UnmatchedRecv => 0,
        Operation::DirectAllReduce => 6 << 10,
        Operation::RingAllReduce | Operation::Broadcast => 2 << 20,
        Operation::AllToAll => 128 << 10,
        Operation::MessageRing => 512 << 10,
    };
    if operation == Operation::MessageRing {
        return vec![
            ("computing", 0),
            ("message sent", 1),
            ("message sent", half),
            ("message received", 1),
            ("message received", half),
        ];
    }
    let mut points = vec![("computing", 0), ("calling", 0)];
    if half > 0 {
        points.extend([("sent", 1), ("received", 1), ("received", half)]);
    }
    points.extend([("sent", half), ("moved", 0)]);
    points
}
