//! Groups of some ranks: from a list, from a color, and along the axes of a mesh.
//!
//! ```text
//! $ convoke --nproc-per-node=4 groups
//! ranks 0 and 2: sum 2
//! even ranks: [0, 2], odd ranks: [1, 3]
//! mesh of 2 x 2: along tp [0, 1], along dp [0, 2]
//! ```

#![allow(clippy::print_stdout)]

use convoke_comm::{CommError, Mesh, ReduceOp, init};

fn main() -> Result<(), CommError> {
    let world = init()?;
    let (rank, size) = (world.rank(), world.size());
    let is_root = rank == 0;

    // A group from a list: all ranks make the call, and the listed ranks get the group. Its ranks count from
    // 0.
    if let Some(pair) = world.subgroup(&[0, size / 2])? {
        let mut sum = [rank as u32];
        pair.all_reduce(&mut sum, ReduceOp::Sum)?;
        if is_root {
            println!("ranks 0 and {}: sum {}", size / 2, sum[0]);
        }
        assert_eq!(pair.global_rank(1), Some(size / 2));
    }

    // Groups from a color: ranks with equal colors form a group, ordered by a key.
    let color = (rank % 2) as u32;
    if let Some(half) = world.split(Some(color), rank as i64)? {
        let halves = world.all_gather_object(&(color, half.global_ranks().to_vec()))?;
        let of =
            |color: u32| halves.iter().find(|(other, _)| *other == color).map(|(_, ranks)| ranks.clone());
        if is_root {
            println!(
                "even ranks: {:?}, odd ranks: {:?}",
                of(0).unwrap_or_default(),
                of(1).unwrap_or_default()
            );
        }
        // Both groups run concurrently and independently.
        half.barrier()?;
    }

    // Groups from named axes: tensor parallelism on the inner axis, data parallelism on the outer axis.
    let mesh = Mesh::new(&world, &[("dp", size / 2), ("tp", 2)])?;
    let (tp, dp) = (mesh.group("tp")?, mesh.group("dp")?);
    if is_root {
        let (along_tp, along_dp) = (tp.global_ranks(), dp.global_ranks());
        println!("mesh of {} x 2: along tp {along_tp:?}, along dp {along_dp:?}", size / 2);
    }
    let mut activation = [1.0_f32; 8];
    tp.all_reduce(&mut activation, ReduceOp::Sum)?;
    let mut gradient = [rank as f32; 8];
    dp.all_reduce(&mut gradient, ReduceOp::Avg)?;
    assert_eq!(activation, [2.0; 8]);
    world.barrier()
}
