//! `convoke-perf`: how fast the collectives are. Run it as a worker, one process for each rank.
//!
//! Keeps to the rules at the top of `peers/collectives/mpi_bench.c`: in place, iterations back to back,
//! rotating roots, an iteration's time is the mean over the ranks, every size verified outside the timed
//! loop.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use convoke_comm::{CommError, ReduceOp, World};

/// Measures the collectives of the job that it is a worker of; rank 0 prints CSV.
#[derive(Debug, Parser)]
#[command(name = "convoke-perf", version)]
struct Flags {
    /// First column of the output
    #[arg(long, default_value = "convoke")]
    system: String,

    /// Second column of the output
    #[arg(long, default_value = "tcp")]
    transport: String,

    /// What to measure, with commas; all of them by default
    #[arg(long, value_delimiter = ',', default_values_t = Collective::ALL)]
    collectives: Vec<Collective>,

    /// Smallest size; each further one is four times the one before
    #[arg(long, default_value_t = 4)]
    min_bytes: usize,

    /// Largest size
    #[arg(long, default_value_t = 64 << 20)]
    max_bytes: usize,

    /// Length of the timed loop of each size, about
    #[arg(long, default_value_t = 30.0)]
    time_ms: f64,

    /// Fewest iterations of the timed loop
    #[arg(long, default_value_t = 5)]
    min_iters: usize,

    /// Most iterations of the timed loop
    #[arg(long, default_value_t = 2000)]
    max_iters: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
enum Collective {
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather,
    Scatter,
    Barrier,
    SendRecv,
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Collective {
    const ALL: [Self; 10] = [
        Self::AllReduce,
        Self::Broadcast,
        Self::Reduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllToAll,
        Self::Gather,
        Self::Scatter,
        Self::Barrier,
        Self::SendRecv,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::Barrier => "barrier",
            Self::SendRecv => "send_recv",
        }
    }

    /// Bus bandwidth over algorithm bandwidth, as nccl-tests define it.
    fn bus_factor(self, ranks: usize) -> f64 {
        let share = (ranks as f64 - 1.0) / ranks as f64;
        match self {
            Self::AllReduce => 2.0 * share,
            Self::AllGather | Self::ReduceScatter | Self::AllToAll | Self::Gather | Self::Scatter => share,
            Self::Broadcast | Self::Reduce | Self::Barrier | Self::SendRecv => 1.0,
        }
    }

    /// Whether its size is that of one block for each rank.
    fn is_blocks(self) -> bool {
        match self {
            Self::AllGather | Self::ReduceScatter | Self::AllToAll | Self::Gather | Self::Scatter => true,
            Self::AllReduce | Self::Broadcast | Self::Reduce | Self::Barrier | Self::SendRecv => false,
        }
    }

    /// The size that is measured where `bytes` are asked for: whole blocks, at least one element each.
    fn size_bytes(self, bytes: usize, ranks: usize) -> usize {
        let row = 4 * ranks;
        if self.is_blocks() { (bytes / row).max(1) * row } else { bytes }
    }
}

/// Why the tool ends with an error.
#[derive(Debug, thiserror::Error)]
enum PerfError {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error("wrong result: {collective} of {bytes} bytes, root {root}, on rank {rank}")]
    Wrong { collective: &'static str, bytes: usize, root: usize, rank: usize },
    #[error("cannot write to stdout: {0}")]
    Print(#[from] io::Error),
}

fn main() -> ExitCode {
    match run(&Flags::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "convoke-perf: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(flags: &Flags) -> Result<(), PerfError> {
    let world = convoke_comm::init()?;
    let elements = flags.max_bytes / 4 + world.size();
    let mut bench = Bench { world, a: vec![0.0; elements], b: vec![0.0; elements] };
    for &collective in &flags.collectives {
        let (mut asked, mut last) = (flags.min_bytes, 0);
        while asked <= flags.max_bytes {
            if collective == Collective::Barrier {
                bench.measure(flags, collective, 0)?;
                break;
            }
            let bytes = collective.size_bytes(asked, bench.world.size());
            asked *= 4;
            if std::mem::replace(&mut last, bytes) == bytes {
                continue;
            }
            bench.verify(collective, bytes, 0)?;
            bench.verify(collective, bytes, bench.world.size() - 1)?;
            bench.measure(flags, collective, bytes)?;
        }
    }
    bench.world.barrier()?;
    if bench.world.rank() == 0 {
        writeln!(io::stdout(), "# done")?;
    }
    Ok(())
}

struct Bench {
    world: World,
    a: Vec<f32>,
    b: Vec<f32>,
}

impl Bench {
    /// One call.
    fn call(&mut self, collective: Collective, count: usize, root: usize) -> Result<(), CommError> {
        let block = count / self.world.size();
        let (a, b) = (&mut self.a[..count], &mut self.b[..count]);
        match collective {
            Collective::Reduce => self.world.reduce(a, ReduceOp::Sum, root),
            Collective::AllGather => self.world.all_gather(&a[..block], b),
            Collective::ReduceScatter => self.world.reduce_scatter(a, &mut b[..block], ReduceOp::Sum),
            Collective::AllToAll => self.world.all_to_all(a, b),
            Collective::Gather => self.world.gather(&a[..block], b, root),
            Collective::Scatter => self.world.scatter(b, &mut a[..block], root),
            Collective::AllReduce => self.world.all_reduce(a, ReduceOp::Sum),
            Collective::Broadcast => self.world.broadcast(a, root),
            Collective::Barrier => self.world.barrier(),
            Collective::SendRecv => {
                let (rank, peer) = (self.world.rank(), self.world.rank() ^ 1);
                if peer >= self.world.size() {
                    return Ok(());
                }
                if rank.is_multiple_of(2) {
                    self.world.send(a, peer, 0)?;
                    self.world.recv(b, peer, 0)
                } else {
                    self.world.recv(b, peer, 0)?;
                    self.world.send(a, peer, 0)
                }
            }
        }
    }

    fn verify(&mut self, collective: Collective, bytes: usize, root: usize) -> Result<(), PerfError> {
        let (rank, size, count) = (self.world.rank(), self.world.size(), bytes / 4);
        let base = |index: usize| (index % 251 + 1) as f32;
        let value = |rank: usize, index: usize| (rank + 1) as f32 * base(index);
        for index in 0..count {
            self.a[index] = value(rank, index);
            self.b[index] = if collective == Collective::Scatter { value(rank, index) } else { -1.0 };
        }
        self.call(collective, count, root)?;
        let block = (count / size).max(1);
        let sum = |index: usize| (size * (size + 1) / 2) as f32 * base(index);
        let (a, b) = (&self.a[..count], &self.b[..count]);
        let all = |got: &[f32], want: &dyn Fn(usize) -> f32| {
            got.iter().enumerate().all(|(index, &x)| x == want(index))
        };
        let gathered = |index: usize| value(index / block, index % block);
        let right = match collective {
            Collective::AllReduce => all(a, &sum),
            Collective::Broadcast => all(a, &|index| value(root, index)),
            Collective::Reduce => rank != root || all(a, &sum),
            Collective::AllGather => all(b, &gathered),
            Collective::Gather => rank != root || all(b, &gathered),
            Collective::ReduceScatter => all(&b[..block], &|index| sum(rank * block + index)),
            Collective::AllToAll => all(b, &|index| value(index / block, rank * block + index % block)),
            Collective::Scatter => all(&a[..block], &|index| value(root, rank * block + index)),
            Collective::SendRecv if (rank ^ 1) < size => all(b, &|index| value(rank ^ 1, index)),
            Collective::Barrier | Collective::SendRecv => true,
        };
        if right {
            Ok(())
        } else {
            Err(PerfError::Wrong { collective: collective.name(), bytes, root, rank })
        }
    }

    fn measure(&mut self, flags: &Flags, collective: Collective, bytes: usize) -> Result<(), PerfError> {
        let (size, count) = (self.world.size(), bytes / 4);
        self.a[..count].fill(0.0);
        self.b[..count].fill(0.0);
        self.world.barrier()?;
        let (mut warm, mut estimate) = (size, f64::INFINITY);
        for _ in 0..3 {
            let start = Instant::now();
            for i in 0..warm {
                self.call(collective, count, i % size)?;
            }
            let mut worst = [start.elapsed().as_secs_f64() * 1e6 / warm as f64];
            self.world.all_reduce(&mut worst, ReduceOp::Max)?;
            estimate = estimate.min(worst[0]);
            if estimate * warm as f64 > flags.time_ms * 200.0 {
                break;
            }
            warm = if estimate < 200.0 { 12 * size } else { size };
        }
        let iters = (flags.time_ms * 1000.0 / estimate.max(0.01)) as usize;
        let iters = iters.max(flags.min_iters).min(flags.max_iters).next_multiple_of(size);
        let mut micros = vec![0.0_f64; iters];
        self.world.barrier()?;
        let mut before = Instant::now();
        for (i, micros) in micros.iter_mut().enumerate() {
            self.call(collective, count, i % size)?;
            let now = Instant::now();
            *micros = now.duration_since(before).as_secs_f64() * 1e6;
            before = now;
        }
        if collective == Collective::SendRecv {
            micros.iter_mut().for_each(|micros| *micros /= 2.0);
        }
        self.world.all_reduce(&mut micros, ReduceOp::Sum)?;
        if self.world.rank() == 0 {
            micros.iter_mut().for_each(|micros| *micros /= size as f64);
            micros.sort_by(f64::total_cmp);
            let (p50, p99) = (micros[iters / 2], micros[((iters - 1) as f64 * 0.99) as usize]);
            let bandwidth = bytes as f64 / p50 / 1e3;
            writeln!(
                io::stdout(),
                "{},{},{},{size},f32,{bytes},{iters},{p50:.2},{p99:.2},{bandwidth:.4},{:.4}",
                flags.system,
                flags.transport,
                collective.name(),
                bandwidth * collective.bus_factor(size),
            )?;
        }
        Ok(())
    }
}
