//! A rank that leaves without having read the frames that it was sent.

use std::time::Duration;

use super::byzantine::{await_frame, connection_to, send_all};
use super::{frame, with_scripted_peer};
use crate::collectives::call::{Call, CallKind};
use crate::collectives::dtype::Dtype;
use crate::transport::frame::{Frame, Kind};
use crate::transport::links::hello::ConnectionKind;
use convoke_testkit::TimedBarrier;

/// Number of queries whose answers, 12 MB in all, are more than the two kernels buffer for a connection.
const QUESTIONS: usize = 200_000;

#[test]
fn departed_rank_that_never_reads_blocks_no_monitored_barrier() {
    let over = TimedBarrier::new(3);
    let through = with_scripted_peer(
        |group| {
            let group = group.unwrap();
            let through = group.monitored_barrier(Duration::from_secs(20));
            over.wait();
            through
        },
        |peer| {
            let mut engine = peer.engine();
            let call = Call::new(CallKind::MonitoredBarrier, Dtype::U8, None, 0, 0);
            // Rank 0 waits in the barrier. It still sends reports of that wait when this rank reads no more.
            let control = connection_to(&mut engine, 0, ConnectionKind::Control);
            await_frame(control, Kind::State);
            send_all(control, &frame(Kind::StateQuery, 0).encode().repeat(QUESTIONS));
            for peer in 0..2 {
                let control = connection_to(&mut engine, peer, ConnectionKind::Control);
                send_all(control, &Frame { call: call.encode(), ..frame(Kind::State, 0) }.encode());
                send_all(control, &frame(Kind::Goodbye, 0).encode());
                control.close_write();
                send_all(control, &[]);
            }
            over.wait();
        },
    );
    assert!(through.iter().all(Result::is_ok), "{through:?}");
}
