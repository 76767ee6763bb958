//! A rank that leaves without having read the frames that it was sent.

use std::time::Duration;

use super::mad::{await_frame, lane_to, send_all};
use super::{frame, siege};
use crate::call::{Call, CallKind};
use crate::dtype::Dtype;
use crate::frame::{Frame, Kind};
use crate::links::hello::Lane;
use convoke_testkit::Gate;

/// Questions whose answers, 12 MB, are more than two kernels hold for a connection.
const QUESTIONS: usize = 200_000;

#[test]
fn departed_rank_that_never_reads_blocks_no_monitored_barrier() {
    let over = Gate::new(3);
    let through = siege(
        |group| {
            let group = group.unwrap();
            let through = group.monitored_barrier(Duration::from_secs(20));
            over.wait();
            through
        },
        |siege| {
            let mut engine = siege.engine();
            let call = Call::new(CallKind::MonitoredBarrier, Dtype::U8, None, 0, 0);
            // Rank 0 is in the barrier. It still sends its waits when this rank reads no more.
            let control = lane_to(&mut engine, 0, Lane::Control);
            await_frame(control, Kind::State);
            send_all(control, &frame(Kind::Ask, 0).encode().repeat(QUESTIONS));
            for peer in 0..2 {
                let control = lane_to(&mut engine, peer, Lane::Control);
                send_all(control, &Frame { call: call.encode(), ..frame(Kind::State, 0) }.encode());
                send_all(control, &frame(Kind::Goodbye, 0).encode());
                control.close_write();
            }
            over.wait();
        },
    );
    assert!(through.iter().all(Result::is_ok), "{through:?}");
}
