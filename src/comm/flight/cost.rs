//! Measures the cost of recording, for `scripts/bench flight`.

use std::hint::black_box;
use std::path::PathBuf;
use std::time::Instant;

use super::{CallInfo, FlightRecorder, Generation, GroupRecorder, now_ns};
use crate::collectives::call::{Call, CallKind};
use crate::collectives::dtype::{Dtype, ReduceOp};
use crate::collectives::plan::Algorithm;
use convoke_recorder::layout::Operation;

/// The number of measured loops, and of calls in each loop. The median over the loops is reported, since
/// other processes disturb only few loops.
const LOOPS: usize = 1000;
const CALLS: u32 = 100;

/// Returns the name of each measurement and its nanoseconds. The file of the recording in a file is created
/// in `folder`.
pub fn flight_costs(folder: PathBuf) -> Vec<(&'static str, f64)> {
    let group_recorder =
        |folder| FlightRecorder::new(folder, None).group("bench", 7, None::<Generation>, (1, 3), &[5, 6, 8]);
    let (in_file, in_memory): (GroupRecorder, GroupRecorder) =
        (group_recorder(Some(folder)), group_recorder(None));
    // Reading the clock for the start of a call is not measured, since the engine knows that time already.
    let made = call_info();
    let record = in_file.begin(&made);
    vec![
        ("a reading of the clock", median(|_| now_ns())),
        ("the beginning of a call", median(|seq| in_file.begin(&CallInfo { seq, ..made }))),
        ("a call, recorded in a file", median(|seq| in_file.begin(&CallInfo { seq, ..made }).end(true))),
        ("a call, recorded in memory", median(|seq| in_memory.begin(&CallInfo { seq, ..made }).end(true))),
        ("a wait", median(|_| record.wait([1].into_iter(), 0, 0))),
    ]
}

fn call_info() -> CallInfo {
    let (kind, dtype, op) = (CallKind::AllReduce, Dtype::F32, Some(ReduceOp::Sum));
    CallInfo {
        operation: Operation::Collective,
        call: Call::new(kind, dtype, op, 0, 1000),
        at_ns: now_ns(),
        seq: 0,
        algorithm: Some(Algorithm::Ring),
        peer: None,
        to_receive_bytes: 3,
        to_send_bytes: 5,
        queued: false,
    }
}

fn median<R>(call: impl Fn(u64) -> R) -> f64 {
    let mut nanos: Vec<f64> = (0..LOOPS)
        .map(|_| {
            let start = Instant::now();
            (0..u64::from(CALLS)).for_each(|seq| drop(black_box(call(seq))));
            start.elapsed().as_nanos() as f64 / f64::from(CALLS)
        })
        .collect();
    nanos.sort_by(f64::total_cmp);
    nanos[LOOPS / 2]
}
