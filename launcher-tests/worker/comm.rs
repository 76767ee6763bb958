//! `test-worker comm SCENARIO [DIRECTORY]`: a worker that uses convoke's runtime. It enters a barrier, then
//! plays the scenario. A rank that delays the others waits for the file DIRECTORY/go.

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use convoke_comm::{CommError, ReduceOp, Reduction, Session, World};

const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// The rank that deviates from the others.
const OUTLIER: usize = 2;

pub(super) fn run(arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    let (scenario, directory) = match *arguments {
        [scenario] => (scenario, Path::new(".")),
        [scenario, directory] => (scenario, Path::new(directory)),
        _ => return Err("usage: test-worker comm SCENARIO [DIRECTORY]".into()),
    };
    let timeout = if scenario == "timeout" { Duration::from_millis(500) } else { TEST_TIMEOUT };
    if scenario == "absent" && std::env::var("RANK")? == OUTLIER.to_string() {
        wait_for_go(directory)?;
    }
    if scenario == "again" {
        return rejoin_repeatedly();
    }
    let world = Session::join()?.with_options(|options| options.timeout(timeout)).world()?;
    world.barrier()?;
    let is_outlier = world.rank() == OUTLIER;
    match scenario {
        "good" | "absent" => {}
        // The outlier does not join the collective of the others, at least for a while.
        "late" | "timeout" => {
            if is_outlier {
                wait_for_go(directory)?;
            }
            sum(&world, 1 << 20)?;
        }
        // On all ranks, the program's own reduction function does not return for a while.
        "function" | "long-function" => {
            let directory = directory.to_owned();
            let waits = Reduction::new(move |into: &mut [f32], from: &[f32]| {
                if wait_for_go(&directory).is_err() {
                    std::process::abort();
                }
                into.iter_mut().zip(from).for_each(|(into, from)| *into += from);
            });
            world.all_reduce(&mut vec![1.0_f32; if scenario == "function" { 8 } else { 1 << 20 }], waits)?;
        }
        "mismatch" => {
            // All ranks have left the barrier before one makes another call than the others.
            meet(directory, world.rank(), world.size())?;
            sum(&world, if is_outlier { 7 } else { 8 })?;
        }
        // Rank 0 waits for a message from the outlier in their common group. The outlier waits for rank 0
        // in the world.
        "groups" => {
            let even = world.rank().is_multiple_of(2);
            let half = world.split(Some(u32::from(even)), 0)?.ok_or("no group")?;
            if world.rank() == 0 {
                half.recv(&mut [0_f32; 3], 1, 7)?;
            }
            world.barrier()?;
        }
        "crash" => {
            if is_outlier {
                wait_for_go(directory)?;
                std::process::abort();
            }
            world.barrier()?;
        }
        other => return Err(format!("no scenario {other}").into()),
    }
    world.barrier()?;
    Ok(())
}

/// Joins, runs a collective and leaves, 100 times.
fn rejoin_repeatedly() -> Result<(), Box<dyn Error>> {
    for round in 0..100 {
        let world = convoke_comm::init().map_err(|error| format!("round {round}: {error}"))?;
        sum(&world, 100)?;
    }
    Ok(())
}

fn sum(world: &World, count: usize) -> Result<(), CommError> {
    world.all_reduce(&mut vec![1.0_f32; count], ReduceOp::Sum)
}

fn wait_for_go(directory: &Path) -> Result<(), Box<dyn Error>> {
    wait_for_file(&directory.join("go"))
}

/// Waits until all ranks have called this, without a call of the group.
fn meet(directory: &Path, rank: usize, size: usize) -> Result<(), Box<dyn Error>> {
    let place = |rank: usize| directory.join(format!("met-{rank}"));
    std::fs::write(place(rank), "")?;
    (0..size).try_for_each(|rank| wait_for_file(&place(rank)))
}

fn wait_for_file(path: &Path) -> Result<(), Box<dyn Error>> {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !path.exists() {
        if Instant::now() > deadline {
            return Err("waited in vain".into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
