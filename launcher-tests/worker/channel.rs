//! `test-worker channel FILE COUNT`: writes COUNT messages of the agent channel to FILE.RANK, one message
//! per line.
//!
//! The worker whose rank is DIE_AFTER_HELLO exits with code 1 once all workers have received their first
//! message.

use std::error::Error;
use std::io::Write;
use std::time::{Duration, Instant};

use convoke_env::{AgentChannel, ToWorker, WorkerEnv};

const TEST_TIMEOUT: Duration = Duration::from_secs(30);

pub(super) fn run(arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    let [path, count] = arguments else {
        return Err("usage: test-worker channel FILE COUNT".into());
    };
    let worker = WorkerEnv::from_process()?.ok_or("not under a launcher")?;
    let mut channel = AgentChannel::inherited()?.ok_or("no agent channel")?;
    let mut file = std::fs::File::create(format!("{path}.{}", worker.rank))?;
    for _ in 0..count.parse::<usize>()? {
        let line = match channel.receive(TEST_TIMEOUT)? {
            ToWorker::Hello { generation, token } => {
                let same = Some(generation) == worker.generation;
                format!(
                    "hello same_generation={same} token={}",
                    token.map_or(0, |token| token.as_bytes().len())
                )
            }
            ToWorker::PeerExit { rank, cause, .. } => format!("exit {rank} {cause:?}"),
            other => format!("{other:?}"),
        };
        writeln!(file, "{line}")?;
        if std::env::var("DIE_AFTER_HELLO").ok().as_deref() == Some(&worker.rank.to_string()) {
            wait_for_hellos(path, &worker)?;
            return Err("told to".into());
        }
    }
    Ok(())
}

/// Waits until all other workers have recorded their hello message. They must run before one worker dies.
fn wait_for_hellos(path: &str, me: &WorkerEnv) -> Result<(), Box<dyn Error>> {
    let deadline = Instant::now() + TEST_TIMEOUT;
    for rank in (0..me.world_size).filter(|&rank| rank != me.rank) {
        while !std::fs::read_to_string(format!("{path}.{rank}")).is_ok_and(|text| text.ends_with('\n')) {
            if Instant::now() > deadline {
                return Err(format!("rank {rank} heard nothing").into());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    Ok(())
}
