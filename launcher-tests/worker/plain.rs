//! `test-worker plain lines COUNT [stderr]`: writes COUNT lines to stdout and stderr, or only to stderr, as
//! fast as possible. All workers write at once, in pieces that do not end with lines.
//!
//! `test-worker plain connect DIRECTORY`: connects to its master, writes DIRECTORY/MASTER_PORT.RANK and
//! waits for DIRECTORY/go.

use std::error::Error;
use std::fs::File;
use std::io::{self, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::numbered_line;
use convoke_env::WorkerEnv;

const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Size of a piece; it is no multiple of any line's length.
const PIECE_BYTES: usize = 10_007;

pub(super) fn run(arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    match arguments {
        ["lines", count] => lines(count.parse()?, true),
        ["lines", count, "stderr"] => lines(count.parse()?, false),
        ["connect", directory] => connect(Path::new(directory)),
        other => Err(format!("what? {other:?}").into()),
    }
}

fn lines(count: usize, stdout: bool) -> Result<(), Box<dyn Error>> {
    let worker = WorkerEnv::from_process()?.ok_or("not under a launcher")?;
    let rank = worker.rank;
    let text: String = (0..count).map(|number| numbered_line(rank, number) + "\n").collect();
    std::fs::write(format!("ready.{rank}"), "")?;
    wait_for(|| (0..worker.world_size).all(|rank| Path::new(&format!("ready.{rank}")).exists()))?;
    // A raw descriptor bypasses the line buffer of io::stdout().
    let mut out = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    for piece in text.as_bytes().chunks(PIECE_BYTES) {
        if stdout {
            out.write_all(piece)?;
        }
        io::stderr().write_all(piece)?;
    }
    Ok(())
}

fn connect(directory: &Path) -> Result<(), Box<dyn Error>> {
    let [address, port, rank] = ["MASTER_ADDR", "MASTER_PORT", "RANK"].map(std::env::var);
    let (address, port, rank) = (address?, port?, rank?);
    let _master = TcpStream::connect((address.as_str(), port.parse()?))?;
    std::fs::write(directory.join(format!("{port}.{rank}")), "\n")?;
    wait_for(|| directory.join("go").exists())
}

fn wait_for(condition: impl Fn() -> bool) -> Result<(), Box<dyn Error>> {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !condition() {
        if Instant::now() > deadline {
            return Err("waited in vain".into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
