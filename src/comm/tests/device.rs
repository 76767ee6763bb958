//! Groups with a device side, on stand-ins for CUDA and NCCL (`launcher-tests/gpu`). Ranks are threads of a
//! process that was started with the stand-ins.

#![cfg(feature = "nccl")]
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod common;
#[path = "device/misuse.rs"]
mod misuse;
#[path = "device/process_exit.rs"]
mod process_exit;
#[path = "device/threads.rs"]
mod threads;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::{CommError, Group, LONG, ReduceOp, op, run_ranks, run_ranks_together};
use convoke_comm::device::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, result};
use convoke_comm::device::{self, DeviceError, DeviceOptions, F8E4M3};
use convoke_comm::{LossReason, Reduction, bf16, f16, wait_any};
use convoke_testkit::Thread;
use convoke_testkit::gpu::{has_simulated_gpus, run_with_simulated_gpus};

/// The time within which an abort ends all operations.
const PROMPT_LIMIT: Duration = Duration::from_secs(LONG.as_secs() / 2);

/// A group of `world` ranks, each with the device of its number.
fn on_devices<R: Send>(world: usize, body: impl Fn(Group, Arc<CudaStream>) -> R + Sync) -> Vec<R> {
    run_with_options(world, &DeviceOptions::default(), body)
}

fn run_with_options<R: Send>(
    world: usize,
    options: &DeviceOptions,
    body: impl Fn(Group, Arc<CudaStream>) -> R + Sync,
) -> Vec<R> {
    run_ranks(world, |group| {
        let context = device::open(group.rank()).unwrap();
        let group = group.with_device(&context, options.clone()).unwrap_or_else(|error| panic!("{error}"));
        let stream = context.new_stream().unwrap();
        body(group, stream)
    })
}

fn buffer<T: DeviceRepr>(stream: &Arc<CudaStream>, values: &[T]) -> CudaSlice<T> {
    stream.clone_htod(values).unwrap()
}

/// A kernel that keeps its stream busy until this is dropped.
struct Spin(*mut i32);

// SAFETY: an address in pinned memory, which is only written atomically.
#[allow(unsafe_code)]
unsafe impl Send for Spin {}

#[allow(unsafe_code)]
impl Spin {
    fn on(stream: &Arc<CudaStream>) -> Self {
        use result::{launch_kernel, malloc_host, module};
        stream.context().bind_to_thread().unwrap();
        // SAFETY: never freed, and the kernel has one argument, an address.
        unsafe {
            let module = module::load_data(c"".as_ptr().cast()).unwrap();
            let function = module::get_function(module, c"spin".to_owned()).unwrap();
            let flag = malloc_host(4, 0).unwrap().cast::<i32>();
            flag.write(0);
            let mut arguments = [(&raw const flag).cast_mut().cast()];
            let one = (1, 1, 1);
            launch_kernel(function, one, one, 0, stream.cu_stream(), &mut arguments).unwrap();
            Self(flag)
        }
    }
}

impl Spin {
    /// Ends the kernel after a while, on a new thread.
    fn end_after(self, time: Duration) -> std::thread::JoinHandle<()> {
        std::thread::spawn(move || {
            std::thread::sleep(time);
            drop(self);
        })
    }
}

/// Aborts a group from a new thread once the calling thread sleeps.
fn abort_when_asleep(group: &Group) -> std::thread::JoinHandle<()> {
    let (group, caller) = (group.clone(), Thread::current());
    std::thread::spawn(move || {
        caller.wait_until_asleep();
        group.abort("enough");
    })
}

#[allow(unsafe_code)]
impl Drop for Spin {
    fn drop(&mut self) {
        // SAFETY: never freed.
        unsafe { std::sync::atomic::AtomicI32::from_ptr(self.0) }
            .store(1, std::sync::atomic::Ordering::SeqCst);
    }
}

#[test]
fn device_collectives_are_correct() {
    if run_with_simulated_gpus("device_collectives_are_correct", &[]) {
        for options in [
            DeviceOptions::default(),
            DeviceOptions::default().staged(true),
            DeviceOptions::default().checked(true),
        ] {
            run_with_options(3, &options, |group, stream| collectives(&group, &stream));
        }
    }
}

fn collectives(group: &Group, stream: &Arc<CudaStream>) {
    let (rank, on) = (group.rank(), group.on(stream).unwrap());
    let host = |buf: &CudaSlice<f32>| stream.clone_dtoh(buf).unwrap();
    let mine = || buffer(stream, &[rank as f32, 10.0 * rank as f32]);
    let zeros = |count: usize| buffer(stream, &vec![0.0_f32; count]);

    let mut buf = mine();
    on.enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap().wait().unwrap();
    assert_eq!(host(&buf), [3.0, 30.0]);
    let (send, mut recv) = (mine(), zeros(2));
    drop(on.enqueue(op::all_reduce_into(&send, &mut recv, ReduceOp::Avg)).unwrap());
    assert_eq!((host(&send)[0], host(&recv)), (rank as f32, vec![1.0, 10.0]));
    drop(on.enqueue(op::all_reduce_into(&send, &mut recv, Reduction::premul_sum(0.5))).unwrap());
    assert_eq!(host(&recv), [1.5, 15.0]);
    let mut buf = mine();
    drop(on.enqueue(op::broadcast(&mut buf, 2)).unwrap());
    assert_eq!(host(&buf), [2.0, 20.0]);
    let mut buf = mine();
    drop(on.enqueue(op::reduce(&mut buf, ReduceOp::Max, 1)).unwrap());
    if rank == 1 {
        assert_eq!(host(&buf), [2.0, 20.0]);
    }
    let mut root = zeros(if rank == 0 { 2 } else { 1 });
    drop(on.enqueue(op::reduce_into(&send, &mut root, ReduceOp::Sum, 0)).unwrap());
    assert_eq!(host(&root), if rank == 0 { vec![3.0, 30.0] } else { vec![0.0] });
    let mut all = zeros(6);
    drop(on.enqueue(op::all_gather(&send, &mut all)).unwrap());
    assert_eq!(host(&all), [0.0, 0.0, 1.0, 10.0, 2.0, 20.0]);
    let mut block = zeros(2);
    drop(on.enqueue(op::reduce_scatter(&all, &mut block, ReduceOp::Sum)).unwrap());
    assert_eq!(host(&block), [3.0 * rank as f32, 30.0 * rank as f32]);
    let mut gathered = zeros(if rank == 1 { 6 } else { 1 });
    drop(on.enqueue(op::gather(&send, &mut gathered, 1)).unwrap());
    if rank == 1 {
        assert_eq!(host(&gathered), [0.0, 0.0, 1.0, 10.0, 2.0, 20.0]);
    }
    let mut part = zeros(2);
    drop(on.enqueue(op::scatter(&all, &mut part, 2)).unwrap());
    assert_eq!(host(&part), [rank as f32, 10.0 * rank as f32]);
    let send = buffer(stream, &[0, 1, 2].map(|to| (10 * rank + to) as f32));
    let mut recv = zeros(3);
    drop(on.enqueue(op::all_to_all(&send, &mut recv)).unwrap());
    assert_eq!(host(&recv), [0, 1, 2].map(|from| (10 * from + rank) as f32));
    unequal(group, stream);
    on.enqueue(op::barrier()).unwrap().wait().unwrap();
}

/// Collectives with blocks of rank + 1 elements.
fn unequal(group: &Group, stream: &Arc<CudaStream>) {
    let (rank, on) = (group.rank(), group.on(stream).unwrap());
    let host = |buf: &CudaSlice<i32>| stream.clone_dtoh(buf).unwrap();
    let (lens, all) = ([1, 2, 3], [0, 1, 1, 2, 2, 2]);
    let (send, mut recv) = (buffer(stream, &vec![rank as i32; rank + 1]), buffer(stream, &[-1; 6]));
    drop(on.enqueue(op::all_gather_v(&send, &mut recv, &lens)).unwrap());
    assert_eq!(host(&recv), all);
    let mut own = buffer(stream, &vec![-1; rank + 1]);
    drop(on.enqueue(op::reduce_scatter_v(&recv, &mut own, &lens, ReduceOp::Sum)).unwrap());
    assert_eq!(host(&own), vec![3 * rank as i32; rank + 1]);
    let mut gathered = buffer(stream, &[-1; 6]);
    drop(on.enqueue(op::gather_v(&send, &mut gathered, &lens, 0)).unwrap());
    assert_eq!(host(&gathered), if rank == 0 { all } else { [-1; 6] });
    let mut own = buffer(stream, &vec![-1; rank + 1]);
    drop(on.enqueue(op::scatter_v(&recv, &mut own, &lens, 1)).unwrap());
    assert_eq!(host(&own), vec![rank as i32; rank + 1]);
    // Each rank sends r elements to rank r, so none to rank 0.
    let send = buffer(stream, &[rank as i32; 3]);
    let mut recv = buffer(stream, &vec![-1; 3 * rank.max(1)]);
    let lens = if rank == 0 { [0; 3] } else { [rank; 3] };
    if rank > 0 {
        drop(on.enqueue(op::all_to_all_v((&send, &[0, 1, 2]), (&mut recv, &lens))).unwrap());
        assert_eq!(host(&recv), [0, 1, 2].map(|from| vec![from; rank]).concat());
    } else {
        let mut empty = recv.slice_mut(0..0);
        drop(on.enqueue(op::all_to_all_v((&send, &[0, 1, 2]), (&mut empty, &lens))).unwrap());
    }
}

#[test]
fn device_types_match_host_types() {
    if !run_with_simulated_gpus("device_types_match_host_types", &[]) {
        return;
    }
    fn summed<T: device::DeviceElement + DeviceRepr + Clone + PartialEq + std::fmt::Debug>(
        group: &Group,
        stream: &Arc<CudaStream>,
        one: T,
        sum: T,
    ) {
        let mut buf = buffer(stream, &[one.clone(), one]);
        drop(group.on(stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap());
        assert_eq!(stream.clone_dtoh(&buf).unwrap(), [sum.clone(), sum]);
    }
    on_devices(2, |group, stream| {
        summed(&group, &stream, 3_i8, 6);
        summed(&group, &stream, 3_u64, 6);
        summed(&group, &stream, f16::from_f32(1.5), f16::from_f32(3.0));
        summed(&group, &stream, bf16::from_f32(1.5), bf16::from_f32(3.0));
        summed(&group, &stream, 0.5_f64, 1.0);
        let on = group.on(&stream).unwrap();
        // NCCL lacks this type, but can move it.
        let mut buf = buffer(&stream, &[group.rank() as u16 + 7]);
        drop(on.enqueue(op::broadcast(&mut buf, 1)).unwrap());
        assert_eq!(stream.clone_dtoh(&buf).unwrap(), [8]);
        let error = on.enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap_err();
        assert_eq!(error.to_string(), "not supported: NCCL has no sum of u16");
        let mut buf = buffer(&stream, &[1_i32]);
        let error = on.enqueue(op::all_reduce(&mut buf, ReduceOp::Bxor)).unwrap_err();
        assert!(matches!(error, CommError::Unsupported(_)), "{error}");
        let error = on.enqueue(op::all_reduce(&mut buf, ReduceOp::Avg)).unwrap_err();
        assert!(matches!(error, CommError::InvalidArgument(_)), "{error}");
        let error =
            on.enqueue(op::all_reduce(&mut buf, Reduction::new(|_: &mut [i32], _: &[i32]| {}))).unwrap_err();
        assert!(matches!(error, CommError::Unsupported(_)), "{error}");
        let mut eight = stream.alloc_zeros::<F8E4M3>(4).unwrap();
        drop(on.enqueue(op::all_reduce(&mut eight, ReduceOp::Max)).unwrap());
        // The refused calls have done no harm.
        summed(&group, &stream, 1.0_f32, 2.0);
    });
}

#[test]
fn batched_messages_run_concurrently() {
    if !run_with_simulated_gpus("batched_messages_run_concurrently", &[]) {
        return;
    }
    for staged in [false, true] {
        run_with_options(2, &DeviceOptions::default().staged(staged), |group, stream| {
            let (rank, on) = (group.rank(), group.on(&stream).unwrap());
            // More than the stand-in for NCCL buffers.
            let send = buffer(&stream, &vec![rank as f32 + 1.0; 100_000]);
            let mut recv = buffer(&stream, &vec![0.0_f32; 100_000]);
            let (mut own, mut sum) = (buffer(&stream, &[0.0_f32; 2]), buffer(&stream, &[1.0_f32]));
            let two = buffer(&stream, &[5.0_f32, 6.0]);
            let exchange = (op::send(&send, 1 - rank), op::recv(&mut recv, 1 - rank));
            let to_self = (op::send(&two, rank), op::recv(&mut own, rank));
            let all = (exchange, to_self, op::all_reduce(&mut sum, ReduceOp::Sum));
            on.enqueue(all).unwrap().wait().unwrap();
            assert_eq!(stream.clone_dtoh(&recv).unwrap(), vec![2.0 - rank as f32; 100_000]);
            assert_eq!(stream.clone_dtoh(&own).unwrap(), [5.0, 6.0]);
            assert_eq!(stream.clone_dtoh(&sum).unwrap(), [2.0]);
            assert!(on.enqueue(Vec::<op::Barrier>::new()).unwrap().is_completed());
        });
    }
}

#[test]
fn result_is_usable_on_another_stream_a_thousand_times() {
    if !run_with_simulated_gpus("result_is_usable_on_another_stream_a_thousand_times", &[]) {
        return;
    }
    on_devices(2, |group, stream| {
        let other = stream.context().new_stream().unwrap();
        let mut buf = buffer(&stream, &[0.0_f32; 4]);
        let mut copy = buffer(&stream, &[0.0_f32; 4]);
        for turn in 0..1000_u16 {
            stream.memcpy_htod(&[f32::from(turn) + group.rank() as f32; 4], &mut buf).unwrap();
            let work = group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap();
            work.wait_on(&other).unwrap();
            other.memcpy_dtod(&buf, &mut copy).unwrap();
            assert_eq!(other.clone_dtoh(&copy).unwrap(), [2.0 * f32::from(turn) + 1.0; 4]);
        }
    });
}

#[test]
fn device_work_is_awaited_like_host_work() {
    if !run_with_simulated_gpus("device_work_is_awaited_like_host_work", &[]) {
        return;
    }
    on_devices(2, |group, stream| {
        let on = group.on(&stream).unwrap();
        let mut buf = buffer(&stream, &[1.0_f32]);
        let spin = Spin::on(&stream);
        let mut work = on.enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap();
        assert!(!work.is_completed());
        assert!(work.wait_for(Duration::from_millis(20)).unwrap().is_none(), "a kernel is before it");
        let (done, told) = channel();
        work.on_complete(move || done.send(()).unwrap());
        assert!(told.recv_timeout(Duration::from_millis(20)).is_err());
        drop(spin);
        told.recv_timeout(LONG).unwrap();
        pollster::block_on(work).unwrap();
        let mut works = vec![on.enqueue(op::barrier()).unwrap(), on.enqueue(op::barrier()).unwrap()];
        assert!(wait_any(&mut works).unwrap().is_some());
        drop(works);
        assert_eq!(stream.clone_dtoh(&buf).unwrap(), [2.0]);
    });
}

#[test]
fn abort_ends_pending_device_operations_on_all_ranks() {
    if !run_with_simulated_gpus("abort_ends_pending_device_operations_on_all_ranks", &[]) {
        return;
    }
    let ended = on_devices(3, |group, stream| {
        let mut buf = buffer(&stream, &[1.0_f32]);
        let _spin = (group.rank() == 0).then(|| Spin::on(&stream));
        // On rank 0 it waits behind a kernel that does not end, on the others in NCCL.
        let work = group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap();
        let begun = Instant::now();
        if group.rank() == 1 {
            group.abort("enough");
        }
        let error = work.wait().unwrap_err();
        assert!(begun.elapsed() < PROMPT_LIMIT, "{:?}", begun.elapsed());
        let later = group.on(&stream).unwrap().enqueue(op::barrier()).unwrap_err();
        std::mem::forget(buf);
        [error, later].map(|error| match error {
            CommError::Aborted { by, reason, .. } => (by, reason),
            other => panic!("{other}"),
        })
    });
    assert_eq!(ended.as_flattened(), vec![(1, "enough".to_owned()); 6]);
}

#[test]
fn device_operation_timeout_ends_the_group() {
    if !run_with_simulated_gpus("device_operation_timeout_ends_the_group", &[]) {
        return;
    }
    on_devices(2, |group, stream| {
        let mut buf = buffer(&stream, &[1.0_f32]);
        let error = if group.rank() == 0 {
            // Rank 1 does not make this call.
            let short = group.with_timeout(common::SHORT);
            let work = short.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap();
            work.wait().unwrap_err()
        } else {
            group.recv(&mut [0], 0, 0).unwrap_err()
        };
        let CommError::Timeout { after, .. } = &error else { panic!("{error}") };
        assert_eq!(*after, common::SHORT);
        std::mem::forget(buf);
    });
}

#[test]
fn departed_rank_is_named_instead_of_awaited() {
    if !run_with_simulated_gpus("departed_rank_is_named_instead_of_awaited", &[]) {
        return;
    }
    on_devices(2, |group, stream| {
        if group.rank() == 1 {
            return;
        }
        let mut buf = buffer(&stream, &[1.0_f32]);
        let error = group
            .on(&stream)
            .unwrap()
            .enqueue(op::all_reduce(&mut buf, ReduceOp::Sum))
            .and_then(|work| work.wait());
        let error = error.unwrap_err();
        assert!(matches!(error, CommError::PeerLost { rank: 1, how: LossReason::Left, .. }), "{error}");
        std::mem::forget(buf);
    });
}

#[test]
fn nccl_error_ends_the_group_on_all_ranks() {
    if !run_with_simulated_gpus("nccl_error_ends_the_group_on_all_ranks", &[("SIMULATED_NCCL_SICK", "1")]) {
        return;
    }
    let errors = on_devices(2, |group, stream| {
        let mut buf = buffer(&stream, &[1.0_f32]);
        drop(group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap());
        let _spin = Spin::on(&stream);
        let work = group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum));
        let error = work.and_then(|work| work.wait()).unwrap_err();
        std::mem::forget(buf);
        error.to_string()
    });
    let said = "NCCL: remote process exited or there was a network error (a network card is gone)";
    assert!(errors.iter().all(|error| error.contains(said)), "{errors:?}");
}

#[test]
fn call_refused_by_nccl_returns_the_nccl_message() {
    if !run_with_simulated_gpus(
        "call_refused_by_nccl_returns_the_nccl_message",
        &[("SIMULATED_NCCL_FAIL", "ncclAllReduce")],
    ) {
        return;
    }
    on_devices(1, |group, stream| {
        let mut buf = buffer(&stream, &[1.0_f32]);
        let error = group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "ncclAllReduce: unhandled system error (ncclAllReduce was told to fail)"
        );
        let later = group.on(&stream).unwrap().enqueue(op::broadcast(&mut buf, 0)).unwrap_err();
        assert_eq!(later.to_string(), error.to_string());
    });
}

#[test]
fn broken_device_is_an_error_instead_of_a_hang() {
    if !run_with_simulated_gpus(
        "broken_device_is_an_error_instead_of_a_hang",
        &[("SIMULATED_GPU_BROKEN", "1")],
    ) {
        return;
    }
    on_devices(1, |group, stream| {
        let mut buf = buffer(&stream, &[1.0_f32]);
        let error = group
            .on(&stream)
            .unwrap()
            .enqueue(op::all_reduce(&mut buf, ReduceOp::Sum))
            .and_then(|work| work.wait());
        let said = "the device failed: CUDA_ERROR_ILLEGAL_ADDRESS, an illegal memory access was encountered";
        assert_eq!(error.unwrap_err().to_string(), said);
    });
}

/// Rank 0 of two; rank 1 reports a usable device, but never calls NCCL.
#[test]
fn device_group_formation_ends_at_timeout_or_abort() {
    let test = "device_group_formation_ends_at_timeout_or_abort";
    if !run_with_simulated_gpus(test, &[("SIMULATED_NCCL_ABSENT", "1")]) {
        return;
    }
    run_ranks(2, |group| {
        let context = device::open(group.rank()).unwrap();
        let options = DeviceOptions::default().init_timeout(Duration::from_millis(300));
        let error = group.with_device(&context, options).unwrap_err();
        // The rank that times out first tells the others.
        let text = error.to_string();
        assert!(text.contains("NCCL did not connect the group's devices within 300 ms"), "{text}");
    });
    // Together, since the abort might come while a rank still forms the group.
    run_ranks_together(2, |group| {
        let context = device::open(group.rank()).unwrap();
        let aborter = group.clone();
        let (rank, begun) = (group.rank(), Instant::now());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                if rank == 1 {
                    aborter.abort("enough");
                }
            });
            let error = group.with_device(&context, DeviceOptions::default()).unwrap_err();
            assert!(matches!(error, CommError::Aborted { by: 1, .. }), "{error}");
        });
        assert!(begun.elapsed() < PROMPT_LIMIT, "{:?}", begun.elapsed());
    });
}

#[test]
fn failed_nccl_init_reports_the_reason() {
    let test = "failed_nccl_init_reports_the_reason";
    if !run_with_simulated_gpus(test, &[("SIMULATED_NCCL_FAIL", "ncclCommInitRankConfig")]) {
        return;
    }
    let errors = run_ranks(2, |group| {
        let context = device::open(group.rank()).unwrap();
        group.with_device(&context, DeviceOptions::default()).unwrap_err().to_string()
    });
    let said = "ncclCommInitRankConfig: unhandled system error (ncclCommInitRankConfig was told to fail)";
    assert!(errors.iter().all(|error| error.contains(said)), "{errors:?}");
}

#[test]
fn ranks_sharing_one_device_are_reported_and_continue_without_it() {
    if !run_with_simulated_gpus("ranks_sharing_one_device_are_reported_and_continue_without_it", &[]) {
        return;
    }
    run_ranks(2, |group| {
        let context = device::open(3).unwrap();
        let error = group.with_device(&context, DeviceOptions::default()).unwrap_err();
        let CommError::Device(DeviceError::DeviceShared { ranks: (0, 1), .. }) = error else {
            panic!("{error}")
        };
        group.barrier().unwrap();
        let stream = context.new_stream().unwrap();
        let error = group.on(&stream).unwrap_err();
        assert!(error.to_string().ends_with("has no device: Group::with_device gives it one"), "{error}");
        // Ranks may share a device if they are staged through the host.
        let staged = group.with_device(&context, DeviceOptions::default().staged(true)).unwrap();
        let mut buf = buffer(&stream, &[1.0_f32]);
        drop(staged.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap());
        assert_eq!(stream.clone_dtoh(&buf).unwrap(), [2.0]);
    });
}

#[test]
fn error_without_a_driver_states_what_to_do() {
    let (count, open) = (device::count(), device::open(0));
    if has_simulated_gpus() || count.as_ref().is_ok_and(|&count| count > 0) {
        convoke_testkit::skip("there is a GPU here");
        return;
    }
    assert!(matches!(open, Err(DeviceError::NoDriver)), "{open:?}");
    assert!(open.unwrap_err().to_string().contains("docker run --gpus all"));
}

#[test]
fn subgroups_of_a_device_group_have_devices() {
    if !run_with_simulated_gpus("subgroups_of_a_device_group_have_devices", &[]) {
        return;
    }
    on_devices(4, |group, stream| {
        let mut buf = buffer(&stream, &[group.rank() as f32]);
        // Another color than NCCL's, and another order of ranks.
        let half = group.split(Some(group.rank() as u32 % 2), -(group.rank() as i64)).unwrap().unwrap();
        let mut first = buffer(&stream, &[group.rank() as f32]);
        drop(half.on(&stream).unwrap().enqueue(op::broadcast(&mut first, 0)).unwrap());
        assert_eq!(stream.clone_dtoh(&first).unwrap(), [2.0 + (group.rank() % 2) as f32]);
        let pair = group.subgroup(&[3, 1]).unwrap();
        assert_eq!(pair.is_some(), [1, 3].contains(&group.rank()));
        if let Some(pair) = pair {
            drop(pair.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap());
            assert_eq!(stream.clone_dtoh(&buf).unwrap(), [4.0]);
        }
        drop(half);
        group.on(&stream).unwrap().enqueue(op::barrier()).unwrap().wait().unwrap();
    });
}

#[test]
fn buffer_of_another_device_is_refused() {
    if !run_with_simulated_gpus("buffer_of_another_device_is_refused", &[]) {
        return;
    }
    on_devices(2, |group, stream| {
        let other = device::open(2).unwrap().new_stream().unwrap();
        let mut elsewhere = buffer(&other, &[1.0_f32]);
        let error =
            group.on(&stream).unwrap().enqueue(op::all_reduce(&mut elsewhere, ReduceOp::Sum)).unwrap_err();
        let said =
            format!("invalid argument: a buffer is on device 2; the group is on device {}", group.rank());
        assert_eq!(error.to_string(), said);
        let error = group.on(&other).unwrap_err();
        assert!(error.to_string().contains("a stream is on device 2"), "{error}");
        let (mut short, long) = (buffer(&stream, &[0.0_f32]), buffer(&stream, &[0.0_f32; 3]));
        let error = group.on(&stream).unwrap().enqueue(op::all_gather(&long, &mut short)).unwrap_err();
        assert_eq!(error.to_string(), "invalid argument: recv has 1 elements, not 6");
        assert!(group.on(&stream).unwrap().enqueue(op::broadcast(&mut short, 2)).is_err());
    });
}

#[test]
fn differing_device_calls_are_named_when_checks_are_enabled() {
    if !run_with_simulated_gpus("differing_device_calls_are_named_when_checks_are_enabled", &[]) {
        return;
    }
    run_with_options(2, &DeviceOptions::default().checked(true), |group, stream| {
        let mut buf = buffer(&stream, &vec![1.0_f32; 4 + group.rank()]);
        let error = group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap_err();
        assert!(matches!(error, CommError::Mismatch { .. }), "{error}");
        assert!(error.to_string().contains("all_reduce(f32, 5, sum)"), "{error}");
    });
}

#[test]
fn registered_memory_behaves_like_any_other() {
    if !run_with_simulated_gpus("registered_memory_behaves_like_any_other", &[]) {
        return;
    }
    on_devices(2, |group, stream| {
        let mut known = group.register(buffer(&stream, &[1.0_f32; 8])).unwrap();
        drop(group.on(&stream).unwrap().enqueue(op::all_reduce(&mut known, ReduceOp::Sum)).unwrap());
        assert_eq!(stream.clone_dtoh(&*known).unwrap(), [2.0; 8]);
        // A registration that is dropped during an operation stays until the operation is done.
        drop(group.on(&stream).unwrap().enqueue(op::all_reduce(&mut known, ReduceOp::Sum)).unwrap());
        drop(known);
    });
}

#[test]
fn failed_registration_returns_the_buffer() {
    if !run_with_simulated_gpus(
        "failed_registration_returns_the_buffer",
        &[("SIMULATED_NCCL_FAIL", "ncclCommRegister")],
    ) {
        return;
    }
    on_devices(1, |group, stream| {
        let refused = group.register(buffer(&stream, &[5.0_f32])).unwrap_err();
        assert!(refused.to_string().contains("ncclCommRegister"), "{refused}");
        let mut buf = refused.buffer;
        drop(group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Sum)).unwrap());
        assert_eq!(stream.clone_dtoh(&buf).unwrap(), [5.0]);
    });
}

#[test]
fn destroying_a_group_completes_queued_operations() {
    if !run_with_simulated_gpus("destroying_a_group_completes_queued_operations", &[]) {
        return;
    }
    on_devices(2, |group, stream| {
        let mut buf = buffer(&stream, &[1.0_f32]);
        let mut works: Vec<_> = (0..600)
            .map(|_| group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Max)).unwrap())
            .collect();
        works.pop().unwrap().wait().unwrap();
        drop(works);
        // The kernel takes longer than two checks of the watchdog.
        let spin = Spin::on(&stream);
        let last = group.on(&stream).unwrap().enqueue(op::all_reduce(&mut buf, ReduceOp::Max)).unwrap();
        let kernel = spin.end_after(Duration::from_millis(300));
        group.destroy();
        last.wait().unwrap();
        kernel.join().unwrap();
        let error = group.on(&stream).unwrap_err();
        assert!(matches!(error, CommError::Destroyed { .. }), "{error}");
        assert_eq!(stream.clone_dtoh(&buf).unwrap(), [1.0]);
    });
}
