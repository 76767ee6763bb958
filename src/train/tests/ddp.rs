//! Tests of data parallel training: averages, and the errors of incorrect use.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use common::{LONG, TimedBarrier, on_hosts, ranks, ranks_together};
use convoke_comm::{CommError, Group, ReduceOp, bf16, f16};
use convoke_train::{
    Ddp, DdpOptions, Gradient, Joined, Random, TrainError, first_of_all, first_on_each_host,
};

/// Options with small buckets, so that a few parameters make several buckets.
fn small() -> DdpOptions {
    DdpOptions::default().first_bucket_bytes(64).bucket_bytes(256)
}

/// The gradient of `parameter` on `rank` in `round`: small whole numbers, whose sums are exact in 16-bit
/// types.
fn share(round: usize, rank: usize, parameter: usize, count: usize) -> Vec<f32> {
    (0..count).map(|index| ((round * 7 + rank * 3 + parameter * 5 + index) % 16) as f32).collect()
}

fn mean(round: usize, world: usize, parameter: usize, count: usize) -> Vec<f32> {
    let shares: Vec<_> = (0..world).map(|rank| share(round, rank, parameter, count)).collect();
    (0..count).map(|index| shares.iter().map(|share| share[index]).sum::<f32>() / world as f32).collect()
}

fn averages_of<T: Gradient>(from: fn(f32) -> T, to: fn(T) -> f32) {
    let seed = std::env::var("CONVOKE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(11);
    let mut random = Random::new(seed, 0);
    for world in [1, 2, 4] {
        let counts: Vec<usize> = (0..12).map(|_| random.below(90)).collect();
        let overlap = random.below(2) == 0;
        let bits = ranks(world, |group| {
            // Each rank hands over its parameters in a different order.
            let (rank, mut random) = (group.rank(), Random::new(seed, 1 + group.rank() as u64));
            let named = counts.iter().enumerate().map(|(index, &count)| (format!("p{index}"), count));
            let (mut ddp, ids) = Ddp::<T>::with_options(&group, named, small().overlap(overlap)).unwrap();
            assert!(ddp.buckets().len() > 2);
            let mut seen = Vec::new();
            for round in 0..5 {
                let mut order: Vec<usize> = (0..counts.len()).collect();
                random.shuffle(&mut order);
                let mut pass = ddp.pass();
                for parameter in order {
                    let gradient = share(round, rank, parameter, counts[parameter]);
                    let gradient: Vec<T> = gradient.into_iter().map(from).collect();
                    if random.below(2) == 0 {
                        pass.add(ids[parameter], &gradient).unwrap();
                    } else {
                        pass.gradient(ids[parameter]).unwrap().copy_from_slice(&gradient);
                        pass.ready(ids[parameter]).unwrap();
                    }
                }
                pass.finish().unwrap();
                for (parameter, &count) in counts.iter().enumerate() {
                    let got: Vec<f32> = ddp.average(ids[parameter]).iter().map(|&x| to(x)).collect();
                    let want: Vec<f32> =
                        mean(round, world, parameter, count).iter().map(|&x| to(from(x))).collect();
                    assert_eq!(got, want, "{} parameter {parameter}, seed {seed}", T::DTYPE);
                    seen.extend(got.iter().map(|x| x.to_bits()));
                    assert!(ddp.is_used(ids[parameter]));
                }
            }
            seen
        });
        assert!(bits.iter().all(|other| *other == bits[0]), "the same bits on all ranks");
    }
}

#[test]
fn gradients_are_averaged_in_any_arrival_order() {
    averages_of::<f32>(|x| x, |x| x);
    averages_of::<f64>(f64::from, |x| x as f32);
    averages_of::<f16>(f16::from_f32, f16::to_f32);
    averages_of::<bf16>(bf16::from_f32, bf16::to_f32);
}

#[test]
fn accumulated_gradients_are_averaged_once() {
    ranks(3, |group| {
        let (rank, (mut ddp, ids)) = (group.rank(), Ddp::new(&group, [("a", 2), ("b", 1)]).unwrap());
        for _ in 0..2 {
            for part in 1..4 {
                let last = part == 3;
                let mut pass = if last { ddp.pass() } else { ddp.pass_no_sync() };
                pass.add(ids[0], &[(rank * part) as f32, 1.0]).unwrap();
                // Parameter 1 gets a gradient in one pass only; one gradient before the sent pass is enough.
                if part == 1 {
                    pass.add(ids[1], &[rank as f32]).unwrap();
                }
                pass.finish().unwrap();
            }
            // The result is summed over the parts and averaged over the ranks.
            assert_eq!((ddp.average(ids[0]), ddp.average(ids[1])), (&[6.0, 3.0][..], &[1.0][..]));
        }
    });
}

#[test]
fn rank_without_batches_joins_the_collectives_of_the_others() {
    for divide_by_world in [false, true] {
        let steps = ranks(3, |group| {
            let rank = group.rank();
            let options = small().divide_by_world(divide_by_world);
            let (mut ddp, ids) = Ddp::with_options(&group, [("a", 40), ("b", 80)], options).unwrap();
            let (mut batches, mut steps, mut parameter) = (0..2 * rank, 0, 0.0);
            loop {
                let batch = match ddp.join(batches.next()).unwrap() {
                    Joined::Batch(batch) => Some(batch),
                    Joined::Help => None,
                    Joined::Done => break,
                };
                let mut pass = ddp.pass();
                assert_eq!(batch.is_some(), steps < 2 * rank);
                if batch.is_some() {
                    pass.add(ids[1], &[1.0; 80]).unwrap();
                    pass.add(ids[0], &[rank as f32; 40]).unwrap();
                }
                pass.finish().unwrap();
                // Ranks 1 and 2 have a batch in two steps; only rank 2 has one in two more.
                let (sum, with_batch) = if steps < 2 { (3.0, 2.0) } else { (2.0, 1.0) };
                let number = if divide_by_world { 3.0 } else { with_batch };
                assert_eq!(
                    (ddp.average(ids[0]), ddp.average(ids[1])),
                    (&[sum / number; 40][..], &[with_batch / number; 80][..])
                );
                parameter += ddp.average(ids[0])[0];
                steps += 1;
            }
            // In a later pass without `join`, all ranks contribute again.
            let mut pass = ddp.pass();
            pass.add(ids[0], &[3.0; 40]).unwrap();
            pass.add(ids[1], &[3.0; 80]).unwrap();
            pass.finish().unwrap();
            assert_eq!(ddp.average(ids[1])[0], 3.0);
            (steps, parameter)
        });
        assert!(
            steps.iter().all(|&(steps, parameter)| steps == 4 && parameter == steps_of(divide_by_world)),
            "{steps:?}"
        );
    }
}

fn steps_of(divide_by_world: bool) -> f32 {
    if divide_by_world { 1.0 + 1.0 + 2.0 * (2.0 / 3.0) } else { 1.5 + 1.5 + 2.0 + 2.0 }
}

#[test]
fn partial_accumulation_of_an_exhausted_rank_is_included() {
    let averages = ranks(3, |group| {
        let (mut ddp, ids) = Ddp::new(&group, [("a", 1)]).unwrap();
        // Rank 0 has one batch left, rank 1 has two, rank 2 has none; a step takes two batches.
        if group.rank() < 2 {
            let mut pass = ddp.pass_no_sync();
            pass.add(ids[0], &[1.0]).unwrap();
            pass.finish().unwrap();
        }
        let joined = ddp.join((group.rank() == 1).then_some(1.0)).unwrap();
        assert_eq!(joined == Joined::Help, group.rank() != 1);
        let mut pass = ddp.pass();
        if let Joined::Batch(batch) = joined {
            pass.add(ids[0], &[batch]).unwrap();
        }
        pass.finish().unwrap();
        let first = ddp.average(ids[0])[0];
        // The agreement of `join` applies to one pass only. A step can be skipped, and averages changed.
        let mut pass = ddp.pass_no_sync();
        pass.add(ids[0], &[f32::NAN]).unwrap();
        pass.finish().unwrap();
        ddp.discard();
        let mut pass = ddp.pass();
        pass.add(ids[0], &[group.rank() as f32]).unwrap();
        pass.finish().unwrap();
        ddp.average_mut(ids[0])[0] *= 2.0;
        (first, ddp.average(ids[0])[0])
    });
    // The first value is (1 + 2) / 2 from two ranks; the second is (0 + 1 + 2) / 3 from three ranks, doubled.
    assert_eq!(averages, [(1.5, 2.0); 3]);
}

#[test]
fn unused_parameters_are_an_error_or_zero() {
    let errors = ranks(2, |group| {
        let (mut ddp, ids) = Ddp::new(&group, (0..12).map(|index| (format!("p{index}"), 3))).unwrap();
        let mut pass = ddp.pass();
        (0..if group.rank() == 0 { 12 } else { 1 }).for_each(|p| pass.add(ids[p], &[1.0; 3]).unwrap());
        pass.finish().unwrap_err()
    });
    let text = errors[1].to_string();
    assert!(
        matches!(&errors[1], TrainError::Unused { rank: 1, names, more: 3 } if names.len() == 8),
        "{text}"
    );
    assert!(
        text.contains("p1, p2") && text.contains("and 3 more") && text.contains("unused_parameters"),
        "{text}"
    );
    let other = errors[0].to_string();
    assert!(matches!(&errors[0], TrainError::Comm(CommError::Aborted { by: 1, .. })), "{other}");
    assert!(other.contains("without a gradient for p1"), "{other}");

    ranks(2, |group| {
        let (rank, options) = (group.rank(), small().unused_parameters(true));
        let (mut ddp, ids) = Ddp::with_options(&group, [("a", 30), ("b", 30), ("c", 30)], options).unwrap();
        for _ in 0..3 {
            let mut pass = ddp.pass();
            pass.add(ids[2], &[4.0; 30]).unwrap();
            if rank == 1 {
                pass.add(ids[0], &[2.0; 30]).unwrap();
            }
            pass.finish().unwrap();
            let averages = [0, 1, 2].map(|p| ddp.average(ids[p])[29]);
            assert_eq!(averages, [1.0, 0.0, 4.0]);
            assert_eq!([0, 1, 2].map(|p| ddp.is_used(ids[p])), [true, false, true]);
        }
    });
}

#[test]
fn ranks_with_different_networks_learn_the_difference_and_continue() {
    type Parameters = fn(usize) -> Vec<(String, usize)>;
    let cases: [(Parameters, &str); 3] = [
        (
            |rank| vec![("w".to_owned(), 10 + rank / 2)],
            "parameter 0 is w with 11 elements, not w with 10 elements",
        ),
        (|rank| vec![("w".to_owned(), 10); 1 + rank / 2], "it has 2 parameters, not 1"),
        (|rank| vec![("w".to_owned(), 10); rank / 2], "it has 1 parameters, not 0"),
    ];
    for (parameters, part) in cases {
        ranks(3, |group| {
            let error = Ddp::<f32>::new(&group, parameters(group.rank())).unwrap_err();
            assert!(matches!(error, TrainError::Layout { rank: 2, with: 0, .. }), "{error}");
            assert!(error.to_string().contains(part), "{error}");
            group.barrier().unwrap();
        });
    }
    ranks(2, |group| {
        let options = DdpOptions::default().bucket_bytes(4 + 1000 * group.rank()).first_bucket_bytes(1);
        let error = Ddp::<f64>::with_options(&group, [("a", 9), ("b", 9), ("c", 9)], options).unwrap_err();
        assert!(error.to_string().contains("buckets have other sizes"), "{error}");
        let options = DdpOptions::default().unused_parameters(group.rank() == 1);
        let error = Ddp::<f64>::with_options(&group, [("a", 9)], options).unwrap_err();
        assert!(error.to_string().contains("its options are unused_parameters(true)"), "{error}");
        let error = Ddp::<f32>::new(&group, [("a", 1); 0]).unwrap_err();
        assert!(matches!(error, TrainError::InvalidArgument(_)), "{error}");
    });
}

#[test]
fn abandoned_pass_blocks_no_other_rank() {
    let (begin, gate) = (Instant::now(), TimedBarrier::new(3));
    let errors = ranks(3, |group| {
        let (mut ddp, ids) = Ddp::with_options(&group, [("a", 100_000), ("b", 100_000)], small()).unwrap();
        // All ranks are set up before any rank fails.
        gate.wait();
        let mut pass = ddp.pass();
        pass.add(ids[1], &vec![1.0; 100_000]).unwrap();
        let error = if group.rank() == 2 {
            // An error returned by `?` drops the pass in this way.
            let error = pass.add(ids[1], &[1.0]).unwrap_err();
            drop(pass);
            error
        } else {
            pass.add(ids[0], &vec![1.0; 100_000]).and_then(|()| pass.finish()).unwrap_err()
        };
        // Later passes fail with the same error, without a panic.
        let mut pass = ddp.pass();
        let again =
            pass.add(ids[1], &vec![1.0; 100_000]).and_then(|()| pass.add(ids[0], &vec![1.0; 100_000]));
        let again = again.and_then(|()| pass.finish()).unwrap_err();
        assert!(matches!(again, TrainError::Comm(CommError::Aborted { by: 2, .. })), "{again}");
        assert_eq!(ddp.average(ids[0]).len(), 100_000);
        // So does a pass whose errors are ignored.
        let mut pass = ddp.pass();
        (0..2).for_each(|parameter| drop(pass.add(ids[parameter], &vec![1.0; 100_000])));
        let again = pass.finish().unwrap_err();
        assert!(matches!(again, TrainError::Comm(CommError::Aborted { by: 2, .. })), "{again}");
        error
    });
    assert!(matches!(errors[2], TrainError::InvalidArgument(_)), "{}", errors[2]);
    for error in &errors[..2] {
        assert!(matches!(error, TrainError::Comm(CommError::Aborted { by: 2, .. })), "{error}");
        assert!(error.to_string().contains("rank 2 gave up in the middle of a backward pass"), "{error}");
    }
    assert!(begin.elapsed() < LONG / 2, "{:?}", begin.elapsed());
}

#[test]
fn gradients_that_a_leaked_pass_has_kept_are_no_empty_slices() {
    ranks(1, |group| {
        let (mut ddp, ids) = Ddp::with_options(&group, [("a", 2)], small().overlap(true)).unwrap();
        let mut pass = ddp.pass();
        pass.add(ids[0], &[1.0_f32, 2.0]).unwrap();
        std::mem::forget(pass);
        let average = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ddp.average(ids[0]).len()));
        assert!(average.is_err(), "{average:?}");
        // A later pass refuses gradients. When it is dropped, the memory is there again.
        let mut pass = ddp.pass();
        assert!(matches!(pass.add(ids[0], &[1.0, 2.0]), Err(TrainError::InvalidArgument(_))));
        drop(pass);
        assert_eq!(ddp.average(ids[0]).len(), 2);
    });
}

#[test]
fn meaningless_ddp_arguments_are_refused() {
    ranks(1, |group| {
        let (_, more) = Ddp::<f32>::new(&group, (0..8).map(|index| (index.to_string(), 1))).unwrap();
        let (mut ddp, ids) = Ddp::new(&group, [("a", 2), ("b", 1)]).unwrap();
        let mut pass = ddp.pass();
        let refused = |result: Result<(), TrainError>, part: &str| {
            let error = result.unwrap_err();
            assert!(
                matches!(error, TrainError::InvalidArgument(_)) && error.to_string().contains(part),
                "{error}"
            );
        };
        refused(pass.add(more[7], &[1.0]), "no parameter 7: there are 2");
        refused(pass.add(ids[0], &[1.0]), "a gradient of 1 elements for a, which has 2");
        pass.add(ids[0], &[1.0, 2.0]).unwrap();
        refused(pass.add(ids[0], &[1.0, 2.0]), "a already has its gradient in this pass");
        refused(pass.ready(ids[0]), "a already has its gradient in this pass");
        pass.add(ids[1], &[5.0]).unwrap();
        pass.finish().unwrap();
        assert_eq!(ddp.average(ids[0]), [1.0, 2.0]);
    });
}

#[test]
fn first_rank_of_a_host_prepares_before_the_others() {
    // Ranks 0 and 1 are the first ranks of their hosts.
    let (first, later) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let outcomes = on_hosts(&[0, 1, 1, 0, 1], "", |group| {
        first_on_each_host(&group, || {
            if group.rank() < 2 {
                first.fetch_add(1, Ordering::SeqCst);
            } else {
                assert_eq!(first.load(Ordering::SeqCst), 2, "before it was prepared");
                later.fetch_add(1, Ordering::SeqCst);
            }
            Ok::<_, String>(group.rank())
        })
        .unwrap()
    });
    assert_eq!((outcomes, later.into_inner()), (vec![0, 1, 2, 3, 4], 3));
    let prepared = AtomicBool::new(false);
    on_hosts(&[0, 1, 1], "", |group| {
        let prepare = || Ok::<_, String>(prepared.swap(true, Ordering::SeqCst));
        assert_eq!(first_of_all(&group, prepare).unwrap(), group.rank() != 0);
    });
}

#[test]
fn failed_preparation_is_reported_to_all_ranks_and_group_continues() {
    let calls = AtomicUsize::new(0);
    on_hosts(&[0, 1, 1, 0], "", |group| {
        let error = first_on_each_host(&group, || {
            calls.fetch_add(1, Ordering::SeqCst);
            if group.rank() == 1 { Err("the disk is full") } else { Ok(()) }
        });
        let error = error.unwrap_err();
        assert!(
            matches!(&error, TrainError::Preparation { rank: 1, reason } if reason == "the disk is full"),
            "{error}"
        );
        assert_eq!(error.suspect_rank(), Some(1));
        group.barrier().unwrap();
    });
    assert_eq!(calls.into_inner(), 2, "nobody prepares after a failure");
}

#[test]
fn panic_during_preparation_ends_the_wait() {
    let errors = ranks_together(3, |group: Group| {
        let prepare = || {
            first_of_all(
                &group,
                || if group.rank() == 0 { panic!("on purpose") } else { Ok::<_, String>(()) },
            )
        };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(prepare));
        assert_eq!(outcome.is_err(), group.rank() == 0);
        // The rank that panicked is still alive, but makes no calls.
        outcome.map_or_else(|_| group.barrier().unwrap_err().into(), Result::unwrap_err)
    });
    for error in errors {
        assert!(matches!(error, TrainError::Comm(CommError::Aborted { by: 0, .. })), "{error}");
        assert!(error.to_string().contains("rank 0 panicked while it prepared"), "{error}");
    }
}

#[test]
fn trace_shows_all_ranks_and_transfers_during_computation() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    ranks(2, |group| {
        let trace = convoke_train::Trace::default();
        let options = small().trace(&trace);
        let (mut ddp, ids) = Ddp::with_options(&group, [("a", 64), ("b", 64)], options).unwrap();
        let mut pass = ddp.pass();
        pass.add(ids[1], &[1.0; 64]).unwrap();
        let span = trace.span("backward of a");
        // This all-reduce ends only after the other rank has sent its part of the bucket in flight.
        group.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap();
        span.end();
        pass.add(ids[0], &[1.0; 64]).unwrap();
        pass.finish().unwrap();
        trace.write(&group, &path).unwrap();
        let error = trace.write(&group, &folder.path().join("none/trace.json"));
        assert_eq!(error.is_err(), group.rank() == 0);
    });
    let text = std::fs::read_to_string(&path).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for rank in 0..2 {
        let find = |name: &str| {
            let is = |event: &&serde_json::Value| {
                event["name"] == name && event["pid"] == rank && event["ph"] == "X"
            };
            events.iter().find(is).unwrap_or_else(|| panic!("rank {rank}, {name}: {text}"))
        };
        let time =
            |event: &serde_json::Value| (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        let ((sent, took), (computed, _)) = (time(find("bucket 0")), time(find("backward of a")));
        assert!(sent <= computed && took > 0.0 && sent >= 0.0, "{text}");
        assert_eq!(find("bucket 0")["args"]["bytes"], "512");
        let (later, _) = time(find("bucket 1"));
        assert!(later >= computed, "{text}");
    }
    let off = convoke_train::Trace::off();
    ranks(1, |group| {
        off.span("nothing").end();
        off.write(&group, &path).unwrap();
    });
    assert!(!std::fs::read_to_string(&path).unwrap().contains("nothing"));
    let rows: Vec<_> =
        events.iter().filter(|event| event["ph"] == "M").map(|event| &event["args"]["name"]).collect();
    assert!(
        rows.iter().any(|name| *name == "rank 1") && rows.iter().any(|name| *name == "bucket 1: a"),
        "{rows:?}"
    );
}
