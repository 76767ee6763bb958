//! Checks that an abort or a deadline ends operations that would otherwise never end.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use convoke_comm::device::{DeviceError, DeviceOptions};
use convoke_comm::nccl::Library;
use convoke_comm::{CommError, Group, GroupOptions, ReduceOp};
use convoke_store::{MemoryStore, Store};
use serde::{Deserialize, Serialize};

use super::kernels::Spin;
use super::place::{CheckError, Place};
use super::report::Outcome;

/// Time limit for an abort or a deadline to take effect.
const SOON: Duration = Duration::from_secs(2);
/// Duration of the operation before the abort; also the deadline under test.
const MEANWHILE: Duration = Duration::from_millis(500);
/// Timeout for connecting the ranks on the host.
const LONG: Duration = Duration::from_secs(60);

/// The message that ranks exchange before NCCL is initialized. It mirrors the message of
/// `Group::with_device`, so that a rank can announce itself and then not call NCCL.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    version: Option<(u32, u32, u32)>,
    device: String,
    error: Option<String>,
}

/// Runs two ranks. The second announces that it initializes NCCL, does not do it, and calls `then`. Returns
/// the outcome on the first rank and its time.
fn without_the_second(
    place: &Place,
    options: DeviceOptions,
    then: impl FnOnce(&Group) + Send,
) -> Result<(Result<Group, CommError>, Instant), CheckError> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let group = |rank: usize| {
        Group::new(Arc::clone(&store), rank, 2, GroupOptions::default().timeout(LONG).init_timeout(LONG))
    };
    let group = &group;
    let version = Library::load()?.version();
    let (over, is_over) = channel::<()>();
    thread::scope(|scope| {
        let second = scope.spawn(move || -> Result<(), CommError> {
            let group = group(1)?;
            let version = Some((version.major, version.minor, version.patch));
            group.all_gather_object(&Told { version, device: "absent".to_owned(), error: None })?;
            group.broadcast(&mut [0_u8; 128], 0)?;
            thread::sleep(MEANWHILE);
            then(&group);
            // The second rank stays alive until the first has finished: it is absent, not dead.
            let _ = is_over.recv_timeout(LONG);
            Ok(())
        });
        let first = group(0)?;
        let got = first.with_device(&place.context, options);
        let end = Instant::now();
        drop(over);
        let second = second.join();
        second.map_err(|_| CheckError::Other("the second rank panicked".to_owned()))??;
        Ok((got, end))
    })
}

/// Checks an abort while a rank does not call NCCL.
pub(crate) fn absent(place: &Place) -> Result<Outcome, CheckError> {
    let (told, when) = channel();
    let abort = move |group: &Group| {
        let _ = told.send(Instant::now());
        group.abort("enough");
    };
    let (got, end) = without_the_second(place, DeviceOptions::default(), abort)?;
    let begun = when.try_recv().map_err(|_| CheckError::Other("it ended before the abort".to_owned()))?;
    Ok(judged("abort", end - begun, SOON, matches!(got, Err(CommError::Aborted { .. })), got.err()))
}

/// Checks the deadline for a rank that does not call NCCL.
pub(crate) fn deadline(place: &Place) -> Result<Outcome, CheckError> {
    let options = DeviceOptions::default().init_timeout(MEANWHILE);
    let begun = Instant::now();
    let (got, end) = without_the_second(place, options, |_| {})?;
    let is_right = matches!(got, Err(CommError::Device(DeviceError::Init { .. })));
    Ok(judged("deadline of 0.5 s", end - begun, SOON + MEANWHILE, is_right, got.err()))
}

/// Checks an abort of an operation that is enqueued behind a kernel that does not end.
pub(crate) fn spinning(place: &Place) -> Result<Outcome, CheckError> {
    let (group, stream) = (place.group()?, place.stream()?);
    let (send, mut recv) = (stream.alloc_zeros::<f32>(1024)?, stream.alloc_zeros::<f32>(1024)?);
    let spin = Spin::on(&stream)?;
    let work = group.on(&stream)?.all_reduce_into(&send, &mut recv, ReduceOp::Sum)?;
    let work = match work.wait_timeout(MEANWHILE)? {
        Ok(()) => return Ok(Outcome::failed("it was done before the kernel that it is behind".to_owned())),
        Err(work) => work,
    };
    let begun = Instant::now();
    group.abort("enough");
    let got = work.wait();
    let took = begun.elapsed();
    let outcome = judged("abort", took, SOON, matches!(got, Err(CommError::Aborted { .. })), got.err());
    drop(spin);
    // The stream is usable again: enqueued work runs to completion.
    stream.synchronize()?;
    Ok(outcome)
}

fn judged(what: &str, took: Duration, most: Duration, is_right: bool, got: Option<CommError>) -> Outcome {
    let said = got.map_or_else(|| "no error".to_owned(), |error| error.to_string());
    let seen = format!("{:.0} ms from the {what} to: {said}", took.as_secs_f64() * 1e3);
    if is_right && took < most { Outcome::passed(seen) } else { Outcome::failed(seen) }
}
