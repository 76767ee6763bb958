//! Checks that an abort or a deadline ends operations that would otherwise never end.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use convoke_comm::device::{DeviceError, DeviceOptions};
use convoke_comm::nccl::Library;
use convoke_comm::{CommError, Group, GroupOptions, ReduceOp, op};
use convoke_store::{MemoryStore, Store};
use serde::{Deserialize, Serialize};

use super::gpu::{CheckError, Gpu};
use super::kernels::SpinKernel;
use super::report::Outcome;

/// Time limit for an abort or a deadline to take effect.
const ABORT_LIMIT: Duration = Duration::from_secs(2);
/// Duration of the operation before the abort; also the deadline under test.
const ABORT_DELAY: Duration = Duration::from_millis(500);
/// Timeout for connecting the ranks on the host.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// The message that ranks exchange before NCCL is initialized. It mirrors the message of
/// `Group::with_device`, so that a rank can announce itself and then not call NCCL.
#[derive(Debug, Serialize, Deserialize)]
struct InitMessage {
    version: Option<(u32, u32, u32)>,
    device: String,
    error: Option<String>,
}

/// Runs two ranks. The second announces that it initializes NCCL, does not do it, and calls `then`. Returns
/// the outcome on the first rank and its time.
fn with_absent_rank(
    gpu: &Gpu,
    options: DeviceOptions,
    then: impl FnOnce(&Group) + Send,
) -> Result<(Result<Group, CommError>, Instant), CheckError> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let group_options = GroupOptions::default().timeout(CONNECT_TIMEOUT).init_timeout(CONNECT_TIMEOUT);
    let group = |rank: usize| Group::new(Arc::clone(&store), rank, 2, group_options.clone());
    let group = &group;
    let version = Library::load()?.version();
    let (over, is_over) = channel::<()>();
    thread::scope(|scope| {
        let second = scope.spawn(move || -> Result<(), CommError> {
            let group = group(1)?;
            let version = Some((version.major, version.minor, version.patch));
            group.all_gather_object(&InitMessage { version, device: "absent".to_owned(), error: None })?;
            group.broadcast(&mut [0_u8; 128], 0)?;
            thread::sleep(ABORT_DELAY);
            then(&group);
            // The second rank stays alive until the first has finished: it is absent, not dead.
            let _ = is_over.recv_timeout(CONNECT_TIMEOUT);
            Ok(())
        });
        let first = group(0)?;
        let got = first.with_device(&gpu.context, options);
        let end = Instant::now();
        drop(over);
        let second = second.join();
        second.map_err(|_| CheckError::Other("the second rank panicked".to_owned()))??;
        Ok((got, end))
    })
}

/// Checks that an abort ends an operation while another rank does not call NCCL.
pub(crate) fn abort_with_absent_rank(gpu: &Gpu) -> Result<Outcome, CheckError> {
    let (sender, receiver) = channel();
    let abort = move |group: &Group| {
        let _ = sender.send(Instant::now());
        group.abort("enough");
    };
    let (got, end) = with_absent_rank(gpu, DeviceOptions::default(), abort)?;
    let start = receiver.try_recv().map_err(|_| CheckError::Other("it ended before the abort".to_owned()))?;
    let is_right = matches!(got, Err(CommError::Aborted { .. }));
    Ok(outcome_of("abort", end - start, ABORT_LIMIT, is_right, got.err()))
}

/// Checks that the deadline ends an operation while another rank does not call NCCL.
pub(crate) fn deadline_with_absent_rank(gpu: &Gpu) -> Result<Outcome, CheckError> {
    let options = DeviceOptions::default().init_timeout(ABORT_DELAY);
    let start = Instant::now();
    let (got, end) = with_absent_rank(gpu, options, |_| {})?;
    let is_right = matches!(got, Err(CommError::Device(DeviceError::InitTimeout { .. })));
    Ok(outcome_of("deadline of 0.5 s", end - start, ABORT_LIMIT + ABORT_DELAY, is_right, got.err()))
}

/// Checks that an abort ends an operation that is enqueued behind a kernel that does not end.
pub(crate) fn abort_behind_running_kernel(gpu: &Gpu) -> Result<Outcome, CheckError> {
    let (group, stream) = (gpu.group()?, gpu.stream()?);
    let (send, mut recv) = (stream.alloc_zeros::<f32>(1024)?, stream.alloc_zeros::<f32>(1024)?);
    let spin = SpinKernel::start(&stream)?;
    let mut work = group.on(&stream)?.enqueue(op::all_reduce_into(&send, &mut recv, ReduceOp::Sum))?;
    if work.wait_for(ABORT_DELAY)?.is_some() {
        let details = "it ended before the kernel that precedes it in the stream".to_owned();
        return Ok(Outcome { passed: false, details });
    }
    let start = Instant::now();
    group.abort("enough");
    let got = work.wait();
    let took = start.elapsed();
    drop(spin);
    // The stream is usable again: enqueued work runs to completion.
    stream.synchronize()?;
    let is_right = matches!(got, Err(CommError::Aborted { .. }));
    Ok(outcome_of("abort", took, ABORT_LIMIT, is_right, got.err()))
}

fn outcome_of(what: &str, took: Duration, most: Duration, is_right: bool, got: Option<CommError>) -> Outcome {
    let said = got.map_or_else(|| "no error".to_owned(), |error| error.to_string());
    let details = format!("{:.0} ms from the {what} to: {said}", took.as_secs_f64() * 1e3);
    Outcome { passed: is_right && took < most, details }
}
