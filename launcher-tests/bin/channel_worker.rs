//! `channel_worker FILE COUNT`: writes COUNT messages of the agent channel to FILE.RANK, one a line.
//! The worker whose rank is DIE_AFTER_HELLO exits with 1 after the first.

use std::error::Error;
use std::io::Write;
use std::time::Duration;

use convoke_env::{AgentChannel, ToWorker, WorkerEnv};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, path, count] = arguments.as_slice() else {
        return Err("usage: channel_worker FILE COUNT".into());
    };
    let worker = WorkerEnv::from_process()?.ok_or("not under a launcher")?;
    let mut channel = AgentChannel::inherited()?.ok_or("no agent channel")?;
    let mut file = std::fs::File::create(format!("{path}.{}", worker.rank))?;
    for _ in 0..count.parse::<usize>()? {
        let line = match channel.receive(Duration::from_secs(30))? {
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
            return Err("told to".into());
        }
    }
    Ok(())
}
