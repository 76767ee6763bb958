//! Tests of gradient averages on devices, with stand-ins for CUDA and NCCL.

#![cfg(feature = "nccl")]
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::fmt::Debug;
use std::sync::Arc;

use convoke_comm::device::cudarc::driver::{CudaStream, DeviceRepr, ValidAsZeroBits};
use convoke_comm::device::{self, DeviceOptions};
use convoke_comm::{CommError, Group, GroupOptions, bf16, f16};
use convoke_store::{MemoryStore, Store};
use convoke_testkit::gpu::run_with_simulated_gpus;
use convoke_train::{DdpOptions, DeviceDdp, Gradient, TrainError};

/// Three parameters; the last two share a bucket.
const PARAMETERS: [(&str, usize); 3] = [("first", 5), ("second", 2), ("third", 3)];

fn options() -> DdpOptions {
    DdpOptions::default().first_bucket_bytes(16).bucket_bytes(16)
}

fn ranks(world: usize, body: impl Fn(Group, Arc<CudaStream>) + Sync) {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    std::thread::scope(|scope| {
        for rank in 0..world {
            let (store, body) = (Arc::clone(&store), &body);
            scope.spawn(move || {
                let group = Group::new(store, rank, world, GroupOptions::default()).unwrap();
                let context = device::open(rank).unwrap();
                let group = group.with_device(&context, DeviceOptions::default()).unwrap();
                let stream = context.new_stream().unwrap();
                body(group, stream);
            });
        }
    });
}

fn average(ddp: &DeviceDdp, stream: &Arc<CudaStream>, parameter: usize) -> Vec<f32> {
    stream.clone_dtoh(&ddp.average(ddp.parameters()[parameter])).unwrap()
}

#[test]
fn device_gradients_are_averaged_in_every_step() {
    if !run_with_simulated_gpus("device_gradients_are_averaged_in_every_step", &[]) {
        return;
    }
    ranks(3, |group, stream| {
        let (mut ddp, ids) = DeviceDdp::new(&group, stream.context(), PARAMETERS, options()).unwrap();
        assert_eq!(ddp.buckets(), [vec![2, 1], vec![0]]);
        for step in 0..5_u16 {
            let value = |parameter: usize| (parameter + 10 * group.rank() + 100 * usize::from(step)) as f32;
            let mut pass = ddp.pass(&stream);
            for (parameter, (_, len)) in PARAMETERS.iter().enumerate().rev() {
                let gradient = stream.clone_htod(&vec![value(parameter); *len]).unwrap();
                pass.add(ids[parameter], &gradient).unwrap();
            }
            pass.finish().unwrap();
            for (parameter, (_, len)) in PARAMETERS.iter().enumerate() {
                let expected = (parameter + 10 + 100 * usize::from(step)) as f32;
                assert_eq!(average(&ddp, &stream, parameter), vec![expected; *len]);
            }
        }
    });
}

#[test]
fn no_sync_gradients_are_sent_with_the_next_pass() {
    if !run_with_simulated_gpus("no_sync_gradients_are_sent_with_the_next_pass", &[]) {
        return;
    }
    ranks(2, |group, stream| {
        let (mut ddp, ids) = DeviceDdp::new(&group, stream.context(), [("only", 4)], options()).unwrap();
        let mut pass = ddp.pass_no_sync(&stream);
        stream.memcpy_htod(&[group.rank() as f32; 4], &mut pass.gradient(ids[0]).unwrap()).unwrap();
        pass.finish().unwrap();
        assert_eq!(average(&ddp, &stream, 0), [group.rank() as f32; 4]);
        ddp.pass(&stream).finish().unwrap();
        assert_eq!(average(&ddp, &stream, 0), [0.5; 4]);
    });
}

/// Returns the device's sum of `a`, left by a pass without sending, and `b`.
fn added<T: Gradient + DeviceRepr + ValidAsZeroBits>(
    group: &Group,
    stream: &Arc<CudaStream>,
    a: &[T],
    b: &[T],
) -> Vec<T> {
    let (mut ddp, ids) =
        DeviceDdp::<T>::new(group, stream.context(), [("only", a.len())], options()).unwrap();
    for values in [a, b] {
        let mut pass = ddp.pass_no_sync(stream);
        pass.add(ids[0], &stream.clone_htod(values).unwrap()).unwrap();
        pass.finish().unwrap();
    }
    stream.clone_dtoh(&ddp.average(ids[0])).unwrap()
}

/// Asserts that the device adds as the host does: in `f32`, rounded once.
fn same_as_on_the_host<T: Gradient + DeviceRepr + ValidAsZeroBits + PartialOrd + Debug>(
    group: &Group,
    stream: &Arc<CudaStream>,
    of_bits: impl Fn(u16) -> T,
    sum: impl Fn(&T, &T) -> T,
    bits: impl Fn(&T) -> u16,
) {
    // Adds a few operands to all 65,536 values: subnormal, huge and infinite values, rounding ties, and NaN.
    let all: Vec<T> = (0..=u16::MAX).map(&of_bits).collect();
    for other in [0, 1, 0x0400, 0x3C00, 0x3F80, 0x7BFF, 0x7C00, 0x7F7F, 0x7F80, 0x8001, 0xBC01, 0xFF80] {
        let others = vec![of_bits(other); all.len()];
        let on_device = added(group, stream, &all, &others);
        for (a, got) in all.iter().zip(&on_device) {
            let expected = sum(a, &others[0]);
            // The bits of a NaN are unspecified. Only a NaN is unordered with itself.
            let is_none = |value: &T| value.partial_cmp(value).is_none();
            let both_none = is_none(&expected) && is_none(got);
            assert!(
                both_none || bits(&expected) == bits(got),
                "{a:?} + {:?}: {expected:?}, {got:?}",
                others[0]
            );
        }
    }
}

#[test]
fn added_gradient_is_summed_with_the_existing_one() {
    if !run_with_simulated_gpus("added_gradient_is_summed_with_the_existing_one", &[]) {
        return;
    }
    ranks(1, |group, stream| {
        assert_eq!(added(&group, &stream, &[1.0_f32, 2.0], &[0.5, -2.0]), [1.5, 0.0]);
        assert_eq!(added(&group, &stream, &[1e300_f64], &[1e300]), [2e300]);
        // The vector has more elements than a launch has threads.
        let many = 1_500_000;
        assert_eq!(added(&group, &stream, &vec![1.0_f32; many], &vec![2.0; many]), vec![3.0; many]);
        let sum = |a: &f16, b: &f16| f16::from_f32(a.to_f32() + b.to_f32());
        same_as_on_the_host(&group, &stream, f16::from_bits, sum, |value| value.to_bits());
        let sum = |a: &bf16, b: &bf16| bf16::from_f32(a.to_f32() + b.to_f32());
        same_as_on_the_host(&group, &stream, bf16::from_bits, sum, |value| value.to_bits());
    });
}

#[test]
fn misuse_is_reported_and_blocks_no_other_rank() {
    if !run_with_simulated_gpus("misuse_is_reported_and_blocks_no_other_rank", &[]) {
        return;
    }
    ranks(2, |group, stream| {
        let eight = (0..8).map(|index| (index.to_string(), 1));
        let (_, more) = DeviceDdp::<f32>::new(&group, stream.context(), eight, options()).unwrap();
        let (mut ddp, ids) = DeviceDdp::new(&group, stream.context(), PARAMETERS, options()).unwrap();
        let mut pass = ddp.pass(&stream);
        let short = stream.clone_htod(&[1.0_f32]).unwrap();
        let error = pass.add(ids[0], &short).unwrap_err();
        assert_eq!(error.to_string(), "a gradient of 1 elements for first, which has 5");
        assert!(pass.add(more[7], &short).unwrap_err().to_string().contains("no parameter 7"));
        let third = stream.clone_htod(&[1.0_f32; 3]).unwrap();
        pass.add(ids[2], &third).unwrap();
        let again = pass.add(ids[2], &third).unwrap_err();
        assert_eq!(again.to_string(), "third already has its gradient in this pass");
        if group.rank() == 0 {
            // The other rank drops its pass because of its error, or because this rank aborts the group.
            let error = pass.finish().unwrap_err();
            let is_told = match &error {
                TrainError::Unused { names, .. } => names.as_slice() == ["first", "second"],
                TrainError::Comm(CommError::Aborted { by: 1, .. }) => true,
                _ => false,
            };
            assert!(is_told, "{error}");
        } else {
            drop(pass);
        }
        assert!(matches!(group.barrier(), Err(CommError::Aborted { .. })));
    });
}
