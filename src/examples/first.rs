//! One rank of each host prepares the data. The other ranks wait and then find it.
//!
//! ```text
//! $ convoke --nproc-per-node=4 first data.csv
//! rank 0 made data.csv, the other 3 found it
//! all have read 1000 rows, mean 499.5
//! ```

#![allow(clippy::print_stdout)]

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use convoke_comm::{ReduceOp, init};
use convoke_train::{TrainError, first_on_each_host};

const ROWS: usize = 1000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = PathBuf::from(std::env::args_os().nth(1).ok_or("usage: first FILE")?);
    let world = init()?;

    // The first rank of each host fetches, unpacks or computes the data; the other ranks run the closure
    // afterwards. If the first rank fails, all ranks get the reason; if it dies, an error that names it. No
    // rank waits forever or reads an incomplete file.
    let (rows, made_it) = first_on_each_host(&world, || match read_data(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            write_data(&path)?;
            Ok((read_data(&path)?, true))
        }
        found => found.map(|rows| (rows, false)),
    })?;

    report(&world, &path, &rows, made_it)?;
    Ok(())
}

/// Writes the data under another name first, so that a killed process leaves no incomplete file under the
/// final name.
fn write_data(path: &Path) -> io::Result<()> {
    let partial = path.with_extension("partial");
    let text: String = (0..ROWS).map(|row| format!("{row}\n")).collect();
    std::fs::write(&partial, text)?;
    std::fs::rename(partial, path)
}

fn read_data(path: &Path) -> io::Result<Vec<u32>> {
    let text = std::fs::read_to_string(path)?;
    let rows =
        text.lines().map(|line| line.parse().map_err(|_| io::Error::other(format!("not a number: {line}"))));
    rows.collect()
}

fn report(group: &convoke_comm::Group, path: &Path, rows: &[u32], made_it: bool) -> Result<(), TrainError> {
    let mut makers = [i32::from(made_it)];
    group.all_reduce(&mut makers, ReduceOp::Sum)?;
    let mut mean = [rows.iter().sum::<u32>() as f32 / rows.len() as f32];
    group.all_reduce(&mut mean, ReduceOp::Avg)?;
    if group.rank() == 0 {
        let others = group.size() as i32 - makers[0];
        println!(
            "rank 0 {} {}, the other {others} found it",
            if made_it { "made" } else { "found" },
            path.display()
        );
        println!("all have read {} rows, mean {}", rows.len(), mean[0]);
    }
    Ok(())
}
