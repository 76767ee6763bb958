//! Meshes with named axes over real connections, ranks as threads.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::time::Instant;

use common::{CommError, Group, LONG, ReduceOp, SHORT, run_ranks, run_ranks_together};
use convoke_comm::Mesh;

/// The ranks in the mesh's group of a group's members, gathered from them.
fn members(group: &Group, rank: usize) -> Vec<usize> {
    let mut all = vec![0_u64; group.size()];
    group.all_gather(&[rank as u64], &mut all).unwrap();
    all.into_iter().map(|rank| rank as usize).collect()
}

#[test]
fn mesh_axis_groups_contain_ranks_differing_only_along_it() {
    let shapes: [&[(&str, usize)]; 4] =
        [&[("dp", 2), ("tp", 2)], &[("dp", 2), ("tp", 3)], &[("pp", 2), ("dp", 2), ("tp", 2)], &[("dp", 3)]];
    for axes in shapes {
        run_ranks(axes.iter().map(|axis| axis.1).product(), |world| {
            let me = world.rank();
            let mesh = Mesh::new(&world, axes).unwrap();
            assert_eq!(mesh.axes().collect::<Vec<_>>(), axes.iter().map(|axis| axis.0).collect::<Vec<_>>());
            assert_eq!(mesh.shape(), axes.iter().map(|axis| axis.1).collect::<Vec<_>>());
            assert_eq!((mesh.size(), mesh.ranks()), (world.size(), (0..world.size()).collect()));
            let here = mesh.coordinates();
            assert_eq!(mesh.rank_at(&here).unwrap(), me);
            for (index, &(axis, size)) in axes.iter().enumerate() {
                let along: Vec<usize> = (0..size)
                    .map(|at| {
                        let mut place = here.clone();
                        place[index] = at;
                        mesh.rank_at(&place).unwrap()
                    })
                    .collect();
                let group = mesh.group(axis).unwrap();
                assert_eq!(group.global_ranks(), along);
                assert_eq!((group.rank(), group.size()), (here[index], size));
                assert_eq!(mesh.local_rank(axis).unwrap(), here[index]);
                assert_eq!(members(group, me), along);
                assert!(group.name().contains(axis), "{}", group.name());
            }
        });
    }
}

#[test]
fn the_last_axis_varies_fastest() {
    run_ranks(6, |world| {
        let mesh = Mesh::new(&world, &[("dp", 2), ("tp", 3)]).unwrap();
        let all = (0..2).flat_map(|dp| (0..3).map(move |tp| [dp, tp])).enumerate();
        for (rank, place) in all {
            assert_eq!(mesh.rank_at(&place).unwrap(), rank);
        }
        assert_eq!(mesh.coordinates(), [world.rank() / 3, world.rank() % 3]);
    });
}

#[test]
fn submeshes_share_groups_and_can_be_flattened() {
    run_ranks(8, |world| {
        let me = world.rank();
        let mesh = Mesh::new(&world, &[("pp", 2), ("dp", 2), ("tp", 2)]).unwrap();
        let (pp, dp, tp) = (me / 4, me / 2 % 2, me % 2);
        assert_eq!(mesh.coordinates(), [pp, dp, tp]);

        let outer = mesh.submesh(&["pp", "tp"]).unwrap();
        assert_eq!((outer.shape(), outer.coordinates()), (vec![2, 2], vec![pp, tp]));
        let want: Vec<usize> = [0, 1, 4, 5].map(|rank| rank + 2 * dp).to_vec();
        assert_eq!(outer.ranks(), want);
        assert_eq!(outer.rank_at(&[1, 0]).unwrap(), 4 + 2 * dp);
        assert_eq!(outer.group("tp").unwrap().name(), mesh.group("tp").unwrap().name());
        let flat = outer.flatten().unwrap();
        assert_eq!(flat.global_ranks(), want);
        assert_eq!(members(&flat, me), want);
        assert_eq!(flat.rank(), 2 * pp + tp);

        // The order of the axes is that of the caller.
        let turned = mesh.submesh(&["tp", "pp"]).unwrap();
        assert_eq!(turned.coordinates(), [tp, pp]);
        let flat = turned.flatten().unwrap();
        assert_eq!(flat.rank(), 2 * tp + pp);
        assert_eq!(members(&flat, me), turned.ranks());

        // A submesh of a submesh has only what that has; the whole can be flattened as well.
        let inner = outer.submesh(&["pp"]).unwrap();
        assert_eq!(inner.ranks(), [me % 4, me % 4 + 4]);
        assert!(matches!(outer.submesh(&["dp"]), Err(CommError::InvalidArgument(_))));
        assert_eq!(members(&mesh.flatten().unwrap(), me), (0..8).collect::<Vec<_>>());
        drop((world, mesh, outer, turned));
        let mut sum = [1];
        inner.group("pp").unwrap().all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [2]);
    });
}

#[test]
fn subgroup_mesh_and_two_meshes_of_one_group_work() {
    run_ranks(5, |world| {
        let part = world.subgroup(&[4, 2, 1, 0]).unwrap();
        let Some(part) = part else { return };
        let first = Mesh::new(&part, &[("dp", 2), ("tp", 2)]).unwrap();
        let second = Mesh::new(&part, &[("dp", 4), ("tp", 1)]).unwrap();
        let row = if part.rank() < 2 { [4, 2] } else { [1, 0] };
        assert_eq!(first.group("tp").unwrap().global_ranks(), row);
        assert_eq!(members(first.group("tp").unwrap(), world.rank()), row);
        assert_eq!(members(second.group("dp").unwrap(), world.rank()), [4, 2, 1, 0]);
        assert_eq!(second.group("tp").unwrap().size(), 1);
    });
}

#[test]
fn invalid_or_differing_axes_are_refused_and_the_group_continues() {
    fn invalid<T>(result: Result<T, CommError>, what: &str) {
        let Err(CommError::InvalidArgument(text)) = result.map(drop) else { panic!("no error: {what}") };
        assert!(text.contains(what), "{text}");
    }
    run_ranks(4, |world| {
        let make = |axes: &[(&str, usize)]| Mesh::new(&world, axes);
        invalid(make(&[("dp", 2), ("tp", 3)]), "its axes hold 6 ranks, and the group has 4 ranks");
        invalid(make(&[("dp", 0), ("tp", 3)]), "its axes hold 0 ranks, and the group has 4 ranks");
        invalid(make(&[("dp", usize::MAX), ("tp", 3)]), "too many ranks, and the group has 4 ranks");
        invalid(make(&[]), "it needs an axis");
        invalid(make(&[("x", 2), ("x", 2)]), "two axes are called \"x\"");
        let differ = if world.rank() == 3 { ("dp", "mp") } else { ("dp", "tp") };
        let other = if world.rank() == 3 { "rank 0 creates another" } else { "rank 3 creates another" };
        invalid(make(&[(differ.0, 2), (differ.1, 2)]), other);

        let mesh = make(&[("dp", 2), ("tp", 2)]).unwrap();
        invalid(mesh.group("pp"), "no axis \"pp\" in a mesh of [\"dp\", \"tp\"]");
        invalid(mesh.local_rank("pp"), "no axis \"pp\"");
        invalid(mesh.submesh(&["dp", "pp"]), "no axis \"pp\"");
        invalid(mesh.submesh(&["dp", "dp"]), "it has \"dp\" twice");
        invalid(mesh.submesh(&[]), "it needs an axis");
        invalid(mesh.rank_at(&[0, 2]), "no rank at [0, 2]");
        invalid(mesh.rank_at(&[0]), "no rank at [0]");
        // All flatten, but different meshes.
        let axis = if world.rank() == 0 { "dp" } else { "tp" };
        let flat = mesh.submesh(&[axis]).unwrap().flatten();
        invalid(flat, if world.rank() == 0 { "rank 1 creates another" } else { "rank 0 creates another" });
        world.barrier().unwrap();
    });
}

#[test]
fn rank_that_creates_no_mesh_is_named_in_time() {
    let timeout = SHORT;
    run_ranks_together(4, |world| {
        if world.rank() != 2 {
            let start = Instant::now();
            let error = Mesh::new(&world.with_timeout(timeout), &[("dp", 2), ("tp", 2)]).unwrap_err();
            assert!(matches!(&error, CommError::Timeout { missing, .. } if *missing == [2]), "{error}");
            assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
        }
        while world.rank() == 2 && world.try_probe(Some(0), 0).is_ok() {
            std::thread::yield_now();
        }
    });
}
