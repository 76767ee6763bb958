//! Ranks as processes that die: by SIGKILL, at any moment, with and without a launcher that says how.
//!
//! The test binary starts itself as the workers (`worker` below) and acts as their launcher.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use convoke_comm::{CommError, Loss, ReduceOp, Session, World};
use convoke_env::{ExitCause, Generation, ToWorker, Token};
use convoke_store::StoreServer;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};

/// Bound for anything that should happen; what is asserted of speed is stated beside it.
const LONG: Duration = Duration::from_secs(60);
/// The promise is one second from a death to the error of the last rank; the rest is for a busy machine.
const PROMISE: Duration = Duration::from_secs(5);

/// How long a forked child holds what it has of its parent.
const HELD: Duration = Duration::from_secs(3);

// ---------------------------------------------------------------- the worker's side

/// Not a test: what the processes run that the tests start.
#[test]
fn worker() {
    let Ok(scenario) = std::env::var("CONVOKE_TEST_SCENARIO") else { return };
    let outcome = join().and_then(|mut session| {
        let world = session.world()?;
        say("joined");
        act(&scenario, &mut session, world)
    });
    match outcome {
        Ok(()) => say("done"),
        Err(error) => {
            let variant = match &error {
                CommError::PeerLost { how: Loss::Signal { .. }, .. } => "PeerLost/signal",
                CommError::PeerLost { .. } => "PeerLost",
                CommError::Timeout { .. } => "Timeout",
                CommError::Bootstrap { .. } => "Bootstrap",
                _ => "other",
            };
            say(&format!("error {variant} {} {error}", error.blame().map_or(-1, |rank| rank as i64)));
        }
    }
}

fn join() -> Result<Session, CommError> {
    let init = Duration::from_millis(std::env::var("CONVOKE_TEST_INIT_MS").unwrap().parse().unwrap());
    Ok(Session::join()?.with_options(|options| options.timeout(LONG).init_timeout(init)))
}

fn act(scenario: &str, session: &mut Session, world: World) -> Result<(), CommError> {
    let mut memory = vec![1.0_f32; 4 << 20];
    match scenario {
        "small" => loop {
            world.all_reduce(&mut memory[..1], ReduceOp::Max)?;
        },
        "large" => loop {
            world.all_reduce(&mut memory, ReduceOp::Max)?;
        },
        "barrier" => loop {
            world.barrier()?;
        },
        // The last rank is in no call; the first two wait for each other in messages, others in a barrier.
        "apart" => match world.rank() {
            rank if rank + 1 == world.size() => {
                wait_for_line();
                Ok(())
            }
            rank @ (0 | 1) => world.recv(&mut memory, 1 - rank, 0),
            _ => world.barrier(),
        },
        // In no call when it happens; one call after.
        "late" => {
            wait_for_line();
            world.barrier()
        }
        "fork" => fork(world),
        "fork-and-hold" => {
            if world.rank() == 1 {
                hold_in_a_fork();
            }
            say("held");
            world.recv(&mut memory, (world.rank() + 1) % world.size(), 0)
        }
        "variables" => {
            assert_eq!((world.local_rank(), world.local_world_size(), world.restart_count()), (1, 2, 3));
            Ok(())
        }
        "two rounds" => two_rounds(session, world),
        other => panic!("no scenario {other}"),
    }
}

/// A forked child drops its copy and may not use it; the group goes on without noticing.
#[allow(unsafe_code)]
fn fork(world: World) -> Result<(), CommError> {
    world.barrier()?;
    // SAFETY: the child allocates, which glibc allows after fork, and locks nothing that another thread
    // of the test harness could hold; it ends with _exit.
    match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            let refused = matches!(world.barrier(), Err(CommError::InvalidArgument(_)));
            drop(world);
            // SAFETY: ends the process at once.
            unsafe { nix::libc::_exit(i32::from(!refused)) };
        }
        nix::unistd::ForkResult::Parent { child } => {
            let status = nix::sys::wait::waitpid(child, None).unwrap();
            assert!(matches!(status, nix::sys::wait::WaitStatus::Exited(_, 0)), "{status:?}");
        }
    }
    for _ in 0..10 {
        world.all_reduce(&mut [1], ReduceOp::Sum)?;
    }
    Ok(())
}

/// A forked child that outlives its parent and holds copies of its sockets.
#[allow(unsafe_code)]
fn hold_in_a_fork() {
    // SAFETY: the child only sleeps and exits.
    if let nix::unistd::ForkResult::Child = unsafe { nix::unistd::fork() }.unwrap() {
        // SAFETY: sleep and _exit touch nothing of ours. It ends by itself soon after the test.
        unsafe {
            nix::libc::sleep(HELD.as_secs() as u32);
            nix::libc::_exit(0);
        }
    }
}

/// After a failure all ranks go on in the same processes.
fn two_rounds(session: &mut Session, world: World) -> Result<(), CommError> {
    let generation = world.generation();
    world.barrier()?;
    drop(world);
    let again = session.next_round()?;
    assert_ne!(again.generation(), generation);
    // The abort may overtake the barrier on ranks that are not through yet.
    let through = again.barrier();
    if again.rank() == 0 {
        again.abort("try a third");
    }
    let error = through.and_then(|()| again.barrier()).unwrap_err();
    assert!(matches!(error, CommError::Aborted { by: 0, .. }), "{error}");
    drop(again);
    session.next_round()?.barrier()
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n@ {line}").unwrap();
    out.flush().unwrap();
}

fn wait_for_line() {
    std::io::stdin().read_exact(&mut [0]).unwrap();
}

// ---------------------------------------------------------------- the launcher's side

struct Job {
    workers: Vec<Worker>,
    events: Receiver<(usize, String, Instant)>,
    generation: Generation,
    _store: Option<StoreServer>,
}

struct Worker {
    child: Child,
    stdin: Option<ChildStdin>,
    agent: Option<UnixStream>,
    reader: Option<JoinHandle<()>>,
}

#[derive(Clone, Copy, PartialEq)]
enum Launcher {
    /// Variables only, rank 0 serves the store.
    Plain,
    /// The launcher serves the store.
    Torchrun,
    /// Also an agent channel, with a token.
    Convoke,
}

impl Job {
    fn start(scenario: &str, world: usize, launcher: Launcher, init: Duration) -> Self {
        let generation = Generation::random().unwrap();
        let token = Token::random().unwrap();
        let local = SocketAddr::from(([127, 0, 0, 1], 0));
        let store = (launcher != Launcher::Plain).then(|| StoreServer::bind(&[local]).unwrap());
        let port = store.as_ref().map_or_else(common::free_port, StoreServer::port);
        let (events, received) = channel();
        let workers = (0..world)
            .map(|rank| {
                let mut command = Command::new(std::env::current_exe().unwrap());
                command.args(["worker", "--exact", "--nocapture"]);
                command.env("CONVOKE_TEST_SCENARIO", scenario);
                command.env("CONVOKE_TEST_INIT_MS", init.as_millis().to_string());
                command.env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
                command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
                command.env("TORCHELASTIC_USE_AGENT_STORE", if store.is_some() { "True" } else { "False" });
                command.stdin(Stdio::piped()).stdout(Stdio::piped());
                let agent = (launcher == Launcher::Convoke).then(|| agent(&mut command, generation, &token));
                let mut child = command.spawn().unwrap();
                let reader = watch(rank, &mut child, events.clone());
                let agent = agent.map(|(ours, _theirs)| ours);
                Worker { stdin: child.stdin.take(), child, agent, reader: Some(reader) }
            })
            .collect();
        Self { workers, events: received, generation, _store: store }
    }

    /// Waits until each of `ranks` has said `what`; returns the whole lines and when they came.
    fn wait(&self, ranks: &[usize], what: &str) -> Vec<(usize, String, Instant)> {
        let deadline = Instant::now() + LONG;
        let mut said = Vec::new();
        while said.len() < ranks.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok((rank, line, at)) if ranks.contains(&rank) && line.starts_with(what) => {
                    said.push((rank, line, at));
                }
                Ok((rank, line, _)) => {
                    let expected = !ranks.contains(&rank) || !(line.starts_with("error") || line == "done");
                    assert!(expected, "rank {rank}: {line}, instead of {what}");
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("ranks {ranks:?} should say {what}, so far: {said:?}");
                }
            }
        }
        said
    }

    fn kill(&mut self, rank: usize) -> Instant {
        let at = Instant::now();
        self.workers[rank].child.kill().unwrap();
        self.workers[rank].child.wait().unwrap();
        let cause = ExitCause::Signal(9);
        let verdict = ToWorker::PeerExit { generation: self.generation, rank, cause }.encode();
        for worker in &mut self.workers {
            if let Some(agent) = &mut worker.agent {
                let _ = agent.write_all(&verdict);
            }
        }
        at
    }

    fn others(&self, rank: usize) -> Vec<usize> {
        (0..self.workers.len()).filter(|&other| other != rank).collect()
    }

    fn wake(&mut self, rank: usize) {
        self.workers[rank].stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// All survivors must blame `rank`; how long the last took since `at`.
    fn blames(&self, rank: usize, at: Instant, variant: &str) -> Duration {
        let errors = self.wait(&self.others(rank), "error");
        for (who, line, _) in &errors {
            let wanted = format!("error {variant} {rank} ");
            assert!(line.starts_with(&wanted), "rank {who} says {line:?}, not {wanted:?}");
        }
        errors.iter().map(|(.., when)| when.saturating_duration_since(at)).max().unwrap()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            let _ = worker.child.kill();
            let _ = worker.child.wait();
            if let Some(reader) = worker.reader.take() {
                let _ = reader.join();
            }
        }
    }
}

/// Gives the worker the other end of a channel that already holds the first message.
fn agent(command: &mut Command, generation: Generation, token: &Token) -> (UnixStream, UnixStream) {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    fcntl(theirs.as_fd(), FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
    command.env("CONVOKE_AGENT_FD", theirs.as_raw_fd().to_string());
    ours.write_all(&ToWorker::Hello { generation, token: Some(token.clone()) }.encode()).unwrap();
    (ours, theirs)
}

fn watch(rank: usize, child: &mut Child, events: Sender<(usize, String, Instant)>) -> JoinHandle<()> {
    let stdout = BufReader::new(child.stdout.take().unwrap());
    std::thread::spawn(move || {
        for line in stdout.lines().map_while(Result::ok) {
            if let Some(line) = line.strip_prefix("@ ") {
                let _ = events.send((rank, line.to_owned(), Instant::now()));
            }
        }
    })
}

#[test]
fn without_variables_it_is_a_world_of_one_and_with_some_an_error_that_names_the_others() {
    let run = |vars: &[(&str, &str)]| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["worker", "--exact", "--nocapture"]).env("CONVOKE_TEST_INIT_MS", "1000");
        for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            command.env_remove(name);
        }
        command.env("CONVOKE_TEST_SCENARIO", if vars.is_empty() { "late" } else { "variables" });
        command.envs(vars.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
    };
    let said = run(&[]);
    assert!(said.contains("@ joined") && said.contains("@ done"), "{said}");
    let said = run(&[("RANK", "0"), ("MASTER_PORT", "1")]);
    assert!(said.contains("RANK, MASTER_PORT set, but not WORLD_SIZE, MASTER_ADDR"), "{said}");
    let alone = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")];
    let rest = [("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2"), ("TORCHELASTIC_RESTART_COUNT", "3")];
    let said = run(&[&alone[..], &rest].concat());
    assert!(said.contains("@ done"), "{said}");
}

/// Moments from now on, spread over a few calls.
struct Moments(u64);

impl Moments {
    fn new() -> Self {
        let seed = std::env::var("CONVOKE_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
        eprintln!("CONVOKE_SEED={seed}");
        Self(seed)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    /// The one place where a test waits for time: the moment of a death must be arbitrary.
    fn pass(&mut self, most: Duration) {
        std::thread::sleep(Duration::from_micros(self.below(most.as_micros() as u64 + 1)));
    }
}

#[test]
fn a_killed_rank_is_named_by_all_others_wherever_they_are() {
    let mut moments = Moments::new();
    let mut times = Vec::new();
    for launcher in [Launcher::Torchrun, Launcher::Plain, Launcher::Convoke] {
        for scenario in ["small", "large", "barrier", "apart", "late"] {
            for world in [2, 4] {
                let mut job = Job::start(scenario, world, launcher, LONG);
                job.wait(&(0..world).collect::<Vec<_>>(), "joined");
                moments.pass(Duration::from_millis(30));
                // In "apart" it must be the one that is in no call.
                let victim = match scenario {
                    "apart" => world - 1,
                    _ => moments.below(world as u64) as usize,
                };
                let mut at = job.kill(victim);
                if scenario == "late" {
                    at = Instant::now();
                    job.others(victim).into_iter().for_each(|rank| job.wake(rank));
                }
                let variant = if launcher == Launcher::Convoke { "PeerLost/signal" } else { "PeerLost" };
                let took = job.blames(victim, at, variant);
                assert!(took < PROMISE, "{scenario} of {world}, rank {victim}: {took:?}");
                times.push(took);
            }
        }
    }
    times.sort_unstable();
    eprintln!(
        "death to the last error: median {:?}, longest {:?}",
        times[times.len() / 2],
        times[times.len() - 1]
    );
}

#[test]
fn a_rank_that_dies_while_the_group_forms_is_named() {
    let mut moments = Moments::new();
    for round in 0..6 {
        let init = Duration::from_secs(3);
        let mut job = Job::start("barrier", 3, Launcher::Torchrun, init);
        let victim = round % 3;
        moments.pass(Duration::from_millis(25));
        job.kill(victim);
        for (who, line, _) in job.wait(&job.others(victim), "error") {
            let blamed = [format!("error Bootstrap {victim} "), format!("error PeerLost {victim} ")];
            assert!(blamed.iter().any(|wanted| line.starts_with(wanted)), "rank {who} of {victim}: {line}");
        }
    }
}

impl Job {
    fn ends_well(scenario: &str, world: usize, launcher: Launcher) {
        let job = Self::start(scenario, world, launcher, LONG);
        job.wait(&(0..world).collect::<Vec<_>>(), "done");
    }
}

#[test]
fn a_forked_child_disturbs_nobody() {
    Job::ends_well("fork", 3, Launcher::Convoke);
    Job::ends_well("fork", 2, Launcher::Plain);
}

#[test]
fn a_forked_child_that_holds_the_sockets_does_not_hide_the_death_of_its_parent() {
    for (launcher, variant) in [(Launcher::Convoke, "PeerLost/signal"), (Launcher::Torchrun, "PeerLost")] {
        let mut job = Job::start("fork-and-hold", 3, launcher, LONG);
        job.wait(&[0, 1, 2], "held");
        let at = job.kill(1);
        let took = job.blames(1, at, variant);
        assert!(took < HELD, "{took:?}");
    }
}

#[test]
fn all_ranks_can_go_on_in_the_same_processes() {
    for launcher in [Launcher::Convoke, Launcher::Torchrun, Launcher::Plain] {
        Job::ends_well("two rounds", 3, launcher);
    }
}
