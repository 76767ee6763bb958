//! `test-worker-faults fault CONFIG`: a rank of the fault matrix. It makes its calls, injects the configured
//! fault, and reports its result.
//!
//! `test-worker-faults fault store FOLDER` serves the store of a job until its stdin closes.

use std::error::Error;
use std::io::Read;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::fault_spec::{FaultKind, FaultTestConfig, Operation, Report, ReportedError, now, write_json};
use convoke_comm::{CommError, FaultPoint, LossReason, ReduceOp, Session, World};
use convoke_store::StoreServer;
use nix::libc;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigHandler, Signal, raise, signal};
use nix::unistd::{ForkResult, fork};

const MIB: usize = 1 << 20;

static CONFIG: OnceLock<(usize, FaultTestConfig)> = OnceLock::new();

pub(super) fn run(arguments: &[&str]) -> Result<ExitCode, Box<dyn Error>> {
    match *arguments {
        ["store", folder] => serve(Path::new(folder)).map(|()| ExitCode::SUCCESS),
        [config] => run_rank(serde_json::from_str(config)?),
        _ => Err("usage: test-worker-faults fault CONFIG | fault store FOLDER".into()),
    }
}

fn serve(folder: &Path) -> Result<(), Box<dyn Error>> {
    let server = StoreServer::bind(&[SocketAddr::from(([0, 0, 0, 0], 0))])?;
    write_json(folder, "port", 0, &server.port())?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

#[allow(unsafe_code)]
fn run_rank(config: FaultTestConfig) -> Result<ExitCode, Box<dyn Error>> {
    // A launcher sends SIGTERM to the others when one rank dies. They ignore it, because the test checks how
    // the runtime itself detects the death.
    // SAFETY: no handler is installed.
    unsafe { signal(Signal::SIGTERM, SigHandler::SigIgn) }?;
    let rank = std::env::var("RANK")?.parse()?;
    let (rank, config) = CONFIG.get_or_init(|| (rank, config));
    convoke_comm::on_fault_point(|FaultPoint { point, seq, bytes }| inject_fault(point, seq, bytes));
    let mut world = None;
    let (calls, outcome) = run_calls(*rank, config, &mut world);
    let returned_at = now();
    drop(world);
    let error = outcome.err().map(|error| reported_error(&error));
    let code = ExitCode::from(u8::from(error.is_some()));
    let report = Report { rank: *rank, calls, returned_at, left_at: now(), error };
    write_json(&config.folder, "report", *rank, &report)?;
    Ok(code)
}

/// Returns the number of calls that succeeded, and the error that ended them.
fn run_calls(
    rank: usize,
    config: &FaultTestConfig,
    world: &mut Option<World>,
) -> (u64, Result<(), CommError>) {
    let joined = Session::join().and_then(|session| {
        let times = |options: convoke_comm::GroupOptions| {
            let options = options.timeout(config.timeout).init_timeout(config.init_timeout);
            options.peer_timeout(config.peer_timeout)
        };
        session.with_options(times).world()
    });
    let world = match joined {
        Ok(joined) => world.insert(joined),
        Err(error) => return (0, Err(error)),
    };
    let mut buffers = Buffers::default();
    let calls = config.early_leave.filter(|&(who, _)| who == rank).map_or(config.calls, |(_, calls)| calls);
    for seq in 0..calls {
        // The rank announces that it is in its calls. With `UnmatchedRecv` it never leaves the first
        // call, so the mark comes before that call.
        if seq == if config.operation == Operation::UnmatchedRecv { 0 } else { 2 } {
            let _ = write_json(&config.folder, "up", rank, &());
        }
        inject_fault("computing", seq, 0);
        if let Err(error) = buffers.call(world, config.operation, seq) {
            return (seq, Err(error));
        }
        std::thread::sleep(config.pause);
    }
    (calls, Ok(()))
}

#[derive(Default)]
struct Buffers {
    numbers: Vec<f32>,
    bytes: Vec<u8>,
    more_bytes: Vec<u8>,
}

impl Buffers {
    fn call(&mut self, world: &World, operation: Operation, seq: u64) -> Result<(), CommError> {
        let (rank, size) = (world.rank(), world.size());
        let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
        match operation {
            Operation::SmallAllReduce => self.sum(world, 1),
            Operation::DirectAllReduce => self.sum(world, 16 << 10),
            // 8 MiB, because direct exchange handles smaller sums.
            Operation::RingAllReduce => self.sum(world, 2 * MIB),
            Operation::Broadcast => {
                self.bytes.resize(4 * MIB, 0);
                world.broadcast(&mut self.bytes, seq as usize % size)
            }
            Operation::Barrier => world.barrier(),
            Operation::AllToAll => {
                self.bytes.resize(MIB / 4 * size, 0);
                self.more_bytes.resize(MIB / 4 * size, 0);
                world.all_to_all(&self.bytes, &mut self.more_bytes)
            }
            Operation::MessageRing => {
                self.bytes.resize(MIB, 0);
                if rank == 0 {
                    world.send(&self.bytes, next, 0)?;
                }
                world.recv(&mut self.bytes, previous, 0)?;
                if rank == 0 { Ok(()) } else { world.send(&self.bytes, next, 0) }
            }
            Operation::UnmatchedRecv => world.recv(&mut [0_u8], next, 0).map(drop),
        }
    }

    fn sum(&mut self, world: &World, count: usize) -> Result<(), CommError> {
        self.numbers.clear();
        self.numbers.resize(count, (world.rank() + 1) as f32);
        world.all_reduce(&mut self.numbers, ReduceOp::Sum)?;
        let sum = (world.size() * (world.size() + 1) / 2) as f32;
        assert!(self.numbers.iter().all(|&number| number == sum), "a wrong sum");
        Ok(())
    }
}

fn reported_error(error: &CommError) -> ReportedError {
    let (kind, named) = match error {
        CommError::PeerLost { rank, .. } => ("PeerLost", vec![*rank]),
        CommError::Timeout { missing, .. } => ("Timeout", missing.clone()),
        CommError::Bootstrap { ranks, .. } => ("Bootstrap", ranks.clone()),
        CommError::Aborted { by, .. } => ("Aborted", vec![*by]),
        CommError::Protocol { peer, .. } => ("Protocol", vec![*peer]),
        CommError::Mismatch { rank, by, .. } => ("Mismatch", vec![*rank, *by]),
        CommError::Store(_) => ("Store", Vec::new()),
        CommError::System { .. } => ("System", Vec::new()),
        _ => ("other", Vec::new()),
    };
    let how = match error {
        CommError::PeerLost { how, .. } => Some(match how {
            LossReason::Signal { signal } => format!("Signal {signal}"),
            LossReason::Exit { code } => format!("Exit {code}"),
            LossReason::Unreachable { .. } => "Unreachable".to_owned(),
            other => format!("{other:?}"),
        }),
        _ => None,
    };
    let context = error.context();
    ReportedError {
        kind: kind.to_owned(),
        loss_reason: how,
        suspect: error.suspect_rank(),
        named_ranks: named,
        detected_by: context.map(|context| context.reported_by),
        confirmed: context.is_some_and(|context| context.confirmed),
        text: error.to_string(),
    }
}

/// Injects the configured fault at its fault point. Records the time at which the rank begins to leave.
fn inject_fault(point: &str, seq: u64, bytes: usize) {
    static DONE: AtomicBool = AtomicBool::new(false);
    let Some((rank, FaultTestConfig { faults, folder, .. })) = CONFIG.get() else { return };
    if point == "leaving" {
        let _ = write_json(folder, "leaving", *rank, &now());
    }
    let Some(fault) = faults.iter().find(|fault| fault.rank == *rank) else { return };
    let here = fault.point == point && seq >= fault.seq && bytes >= fault.bytes;
    if !here || DONE.swap(true, Ordering::Relaxed) {
        return;
    }
    let _ = write_json(folder, "fault", *rank, &now());
    inject(fault.kind);
}

#[allow(unsafe_code, clippy::exit)]
fn inject(kind: FaultKind) {
    match kind {
        FaultKind::Kill => drop(raise(Signal::SIGKILL)),
        FaultKind::Exit => std::process::exit(3),
        FaultKind::CloseSockets => {
            close_sockets();
            park_forever();
        }
        FaultKind::DieHoldingSockets => {
            for socket in sockets() {
                // SAFETY: the descriptor is open, and its copy stays open on purpose.
                unsafe { libc::fcntl(socket, libc::F_DUPFD_CLOEXEC, 0) };
            }
            die_leaving_child();
        }
        FaultKind::DieLeavingChild => die_leaving_child(),
        FaultKind::Stop => drop(raise(Signal::SIGSTOP)),
        FaultKind::Sleep(time) => std::thread::sleep(time),
        FaultKind::ExhaustDescriptors => exhaust_descriptors(),
    }
}

/// Kills this process and leaves a child behind.
#[allow(unsafe_code)]
fn die_leaving_child() {
    let piped = target(0).is_some_and(|target| target.starts_with("pipe:"));
    // SAFETY: the child makes only system calls until it ends with _exit.
    match unsafe { fork() } {
        Ok(ForkResult::Parent { .. }) => drop(raise(Signal::SIGKILL)),
        // SAFETY: the child reads one byte into its own memory and ends. If stdin is a pipe, the driver
        // closes its end after the case. A launcher gives no stdin, and kills the processes that its workers
        // leave behind.
        Ok(ForkResult::Child) => unsafe {
            let mut byte = 0_u8;
            if piped {
                while libc::read(0, (&raw mut byte).cast(), 1) > 0 {}
            } else {
                libc::pause();
            }
            libc::_exit(0);
        },
        Err(_) => {}
    }
}

fn target(fd: RawFd) -> Option<String> {
    Some(std::fs::read_link(format!("/proc/self/fd/{fd}")).ok()?.display().to_string())
}

fn descriptors() -> Vec<RawFd> {
    let names = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    names.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn sockets() -> impl Iterator<Item = RawFd> {
    descriptors().into_iter().filter(|&fd| target(fd).is_some_and(|target| target.starts_with("socket:")))
}

/// Replaces each socket by /dev/null, so that no later descriptor gets its number.
#[allow(unsafe_code)]
fn close_sockets() {
    let Ok(null) = std::fs::File::open("/dev/null") else { return };
    let null = std::os::fd::AsRawFd::as_raw_fd(&null);
    for socket in sockets() {
        // SAFETY: both descriptors are open. The owner of the socket gets errors, because the descriptor is
        // no socket any more.
        unsafe { libc::dup2(null, socket) };
    }
}

fn exhaust_descriptors() {
    let highest = descriptors().into_iter().max().unwrap_or(0);
    // The loop fills gaps in the descriptor table, so that the limit below leaves no free number.
    while let Ok(file) = std::fs::File::open("/dev/null") {
        let number = std::os::fd::IntoRawFd::into_raw_fd(file);
        if number > highest {
            if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
                let _ = setrlimit(Resource::RLIMIT_NOFILE, u64::from(number.unsigned_abs()) + 1, hard);
            }
            return;
        }
    }
}

fn park_forever() -> ! {
    loop {
        std::thread::park();
    }
}
