//! Collectives of objects, over real connections, ranks as threads.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::collections::BTreeMap;

use common::run_ranks;
use convoke_comm::CommError;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct TestObject {
    name: String,
    values: Vec<f64>,
    by_rank: BTreeMap<usize, Option<i64>>,
}

/// A value of another size on each rank, from a few bytes to more than one message holds.
fn test_object(rank: usize, scale: usize) -> TestObject {
    TestObject {
        name: "x".repeat(rank),
        values: (0..rank * scale).map(|i| i as f64 / 3.0).collect(),
        by_rank: [(rank, None), (rank + 1, Some(-1))].into(),
    }
}

#[test]
fn objects_of_different_sizes_are_delivered_to_their_destinations() {
    for world in 1..=4 {
        run_ranks(world, |group| {
            let me = group.rank();
            for scale in [0, 1, 1000, 40_000] {
                let all: Vec<_> = (0..world).map(|rank| test_object(rank, scale)).collect();
                assert_eq!(group.all_gather_object(&test_object(me, scale)).unwrap(), all);
                for root in [0, world - 1] {
                    let mine = (me == root).then(|| test_object(root + 1, scale));
                    assert_eq!(group.broadcast_object(mine, root).unwrap(), test_object(root + 1, scale));
                    let gathered = group.gather_object(&test_object(me, scale), root).unwrap();
                    assert_eq!(gathered, (me == root).then(|| all.clone()));
                    let scattered = group.scatter_object((me == root).then(|| all.clone()), root).unwrap();
                    assert_eq!(scattered, test_object(me, scale));
                }
            }
        });
    }
}

/// A value whose serialisation fails on demand.
#[derive(Debug, Deserialize)]
struct FailingObject(bool);

impl Serialize for FailingObject {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0 { serializer.serialize_bool(false) } else { Err(serde::ser::Error::custom("not today")) }
    }
}

#[test]
fn unserialisable_object_is_reported_to_all_and_group_continues() {
    run_ranks(3, |group| {
        let me = group.rank();
        let named = |error: CommError| {
            assert_eq!(error.suspect_rank(), Some(1), "{error}");
            assert!(error.to_string().starts_with("the object of rank 1 cannot be serialized"), "{error}");
        };
        named(group.all_gather_object(&FailingObject(me != 1)).unwrap_err());
        named(group.gather_object(&FailingObject(me != 1), 0).unwrap_err());
        named(group.broadcast_object((me == 1).then_some(FailingObject(false)), 1).unwrap_err());
        let objects = (me == 1).then(|| vec![FailingObject(true), FailingObject(true), FailingObject(false)]);
        named(group.scatter_object(objects, 1).unwrap_err());
        group.barrier().unwrap();
    });
}

#[test]
fn undecodable_object_error_names_its_sender() {
    run_ranks(2, |group| {
        let result = if group.rank() == 0 {
            group.all_gather_object(&7_u8).map(|_| ())
        } else {
            group.all_gather_object(&"seven".to_owned()).map(|_| ())
        };
        let error = result.unwrap_err();
        let other = 1 - group.rank();
        assert!(error.to_string().contains("do both ranks use the same type?"), "{error}");
        assert_eq!(error.suspect_rank(), Some(other));
        group.barrier().unwrap();
    });
}

#[test]
fn missing_root_object_is_reported_before_anything_is_sent() {
    run_ranks(1, |group| {
        assert!(matches!(group.broadcast_object::<u8>(None, 0), Err(CommError::InvalidArgument(_))));
        assert!(matches!(group.scatter_object::<u8>(Some(vec![]), 0), Err(CommError::InvalidArgument(_))));
    });
}
