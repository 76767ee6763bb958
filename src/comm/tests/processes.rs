//! Ranks as processes that die by SIGKILL at any moment, with and without a launcher that reports the cause.
//!
//! The test binary starts itself as the workers (`worker` below) and acts as their launcher.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use convoke_comm::{CommError, Group, ReduceOp, Session, World, op};
use convoke_env::{ExitCause, Generation, ToWorker, Token};
use convoke_store::StoreServer;
use convoke_testkit::{assert_one_passed, subprocess_test, subprocess_variable};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The timeout of events that should happen.
const LONG: Duration = Duration::from_secs(60);
/// The time that survivors wait for each other.
const SURVIVOR_TIMEOUT: Duration = Duration::from_secs(3);

// ---------------------------------------------------------------- the worker's side

#[test]
#[ignore = "what the processes run that the tests start"]
fn worker() {
    let scenario = subprocess_variable("CONVOKE_TEST_SCENARIO");
    let outcome = join().and_then(|mut session| {
        let world = session.world()?;
        send_event("joined");
        run_scenario(&scenario, &mut session, world)
    });
    match outcome {
        Ok(()) => send_event("done"),
        Err(error) => {
            let variant = match &error {
                CommError::Excluded { .. } => "Excluded",
                CommError::Store(_) => "Store",
                _ => "other",
            };
            send_event(&format!("error {variant} {error}"));
        }
    }
}

fn join() -> Result<Session, CommError> {
    Ok(Session::join()?.with_options(|options| options.timeout(LONG).init_timeout(LONG)))
}

fn run_scenario(scenario: &str, session: &mut Session, world: World) -> Result<(), CommError> {
    match scenario {
        "barrier" => world.barrier(),
        "fork" => fork(world),
        "variables" => {
            assert_eq!((world.local_rank(), world.local_world_size(), world.restart_count()), (1, 2, 3));
            Ok(())
        }
        "two rounds" => two_rounds(session, world),
        "groups" => groups(world.group()),
        "shrink" => shrink(world.group()),
        "single copy" => copy_once(&world),
        other => panic!("no scenario {other}"),
    }
}

/// A forked child drops its copy and may not use it; the group is not affected.
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

/// After a failure all ranks continue in the same processes.
fn two_rounds(session: &mut Session, world: World) -> Result<(), CommError> {
    let generation = world.generation();
    world.barrier()?;
    drop(world);
    let again = session.next_round()?;
    assert_ne!(again.generation(), generation);
    // The abort may overtake the barrier on ranks that have not passed it yet.
    let through = again.barrier();
    if again.rank() == 0 {
        again.abort("try a third");
    }
    let error = through.and_then(|()| again.barrier()).unwrap_err();
    assert!(matches!(error, CommError::Aborted { by: 0, .. }), "{error}");
    drop(again);
    session.next_round()?.barrier()
}

/// Rank 3 dies while it belongs to some of the groups. It is named in each of them, by its number there, and
/// the other groups go on.
fn groups(world: Group) -> Result<(), CommError> {
    let me = world.rank();
    let with = [world.subgroup(&[3, 0, 1])?, world.subgroup(&[1, 2, 3])?, world.subgroup(&[0, 1, 2, 3])?];
    let without = world.subgroup(&[2, 1, 0])?;
    world.barrier()?;
    send_event("ready");
    if me == 3 {
        loop {
            std::thread::park();
        }
    }
    for (group, number) in
        with.iter().zip([0, 2, 3]).filter_map(|(group, rank)| Some((group.as_ref()?, rank)))
    {
        let error = group.all_reduce(&mut [1], ReduceOp::Sum).unwrap_err();
        let CommError::PeerLost { rank, how, .. } = &error else { panic!("{error}") };
        assert_eq!((*rank, how), (number, &convoke_comm::LossReason::Signal { signal: 9 }), "{error}");
        assert!(error.to_string().contains(group.name()), "{error}");
    }
    assert!(matches!(world.barrier(), Err(CommError::PeerLost { rank: 3, .. })));
    let without = without.unwrap();
    for _ in 0..100 {
        without.all_reduce(&mut [1], ReduceOp::Sum)?;
    }
    assert!(without.split(Some(0), 0)?.is_some());
    Ok(())
}

/// Continues with the survivors, repeatedly.
fn shrink(mut group: Group) -> Result<(), CommError> {
    loop {
        let want: usize = group.global_ranks().iter().sum();
        let me = group.global_ranks()[group.rank()];
        let mut memory = vec![0.0_f32; 100_000];
        let lost = loop {
            memory.fill(me as f32);
            match group.all_reduce(&mut memory, ReduceOp::Sum) {
                Ok(()) => assert!(memory.iter().all(|&sum| sum == want as f32)),
                Err(error) => break error,
            }
        };
        assert!(matches!(lost, CommError::PeerLost { .. }), "{lost}");
        group = group.shrink(SURVIVOR_TIMEOUT)?;
        send_event(&format!("shrunk {:?}", group.global_ranks()));
    }
}

/// Passes messages round and exchanges blocks, which the ranks read in the memory of each other, until a rank is lost.
fn copy_once(world: &Group) -> Result<(), CommError> {
    const BYTES: usize = 1_500_000;
    let (me, ranks) = (world.rank(), world.size());
    let data = |from: usize, turn: usize| vec![(from * 50 + turn) as u8; BYTES];
    let exchange = |turn: usize| {
        let (mut sent, mut got) = (data(me, turn), vec![0; BYTES]);
        world.scope(|scope| {
            scope.start(op::send(&sent[..], (me + 1) % ranks))?;
            scope.start(op::recv(&mut got[..], (me + ranks - 1) % ranks)).map(drop)
        })?;
        assert!(got == data((me + ranks - 1) % ranks, turn));
        // The receiver has its data before the sender may change it.
        sent.fill(0);
        let mut all = vec![0; ranks * BYTES];
        world.all_to_all(&data(me, turn).repeat(ranks), &mut all)?;
        assert!(all == (0..ranks).flat_map(|from| data(from, turn)).collect::<Vec<_>>());
        Ok(())
    };
    for turn in 0.. {
        if let Err(error) = exchange(turn) {
            assert!(matches!(error, CommError::PeerLost { .. }), "{error}");
            break;
        }
        if turn == 1 {
            send_event("exchanged");
        }
    }
    Ok(())
}

fn send_event(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n@ {line}").unwrap();
    out.flush().unwrap();
}

// ---------------------------------------------------------------- the launcher's side

struct Job {
    workers: Vec<Worker>,
    events: Receiver<(usize, String)>,
    /// The messages of workers that arrived before a wait for them.
    before: RefCell<Vec<(usize, String)>>,
    generation: Generation,
    _store: Option<StoreServer>,
}

struct Worker {
    child: Child,
    agent: Option<UnixStream>,
    reader: Option<JoinHandle<()>>,
}

#[derive(Clone, Copy, PartialEq)]
enum Launcher {
    /// Environment variables only; rank 0 serves the store.
    Plain,
    /// The launcher serves the store.
    Torchrun,
    /// The launcher serves the store and provides an agent channel with a token.
    Convoke,
}

impl Job {
    fn start(scenario: &str, world: usize, launcher: Launcher) -> Self {
        let generation = Generation::random().unwrap();
        let token = Token::random().unwrap();
        let local = SocketAddr::from(([127, 0, 0, 1], 0));
        let store = (launcher != Launcher::Plain).then(|| StoreServer::bind(&[local]).unwrap());
        let port = store.as_ref().map_or_else(common::free_port, StoreServer::port);
        let (events, received) = channel();
        let workers = (0..world)
            .map(|rank| {
                let mut command = subprocess_test("worker");
                command.env("CONVOKE_TEST_SCENARIO", scenario);
                command.env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
                command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
                command.env("TORCHELASTIC_USE_AGENT_STORE", if store.is_some() { "True" } else { "False" });
                command.stdin(Stdio::null()).stdout(Stdio::piped());
                if scenario == "single copy" {
                    command.env("CONVOKE_SINGLE_COPY", "always").env("CONVOKE_LOG", "debug");
                    command.stderr(Stdio::piped());
                }
                let agent = (launcher == Launcher::Convoke).then(|| agent(&mut command, generation, &token));
                let mut child = command.spawn().unwrap();
                let reader = watch(rank, &mut child, events.clone());
                let agent = agent.map(|(ours, _theirs)| ours);
                Worker { child, agent, reader: Some(reader) }
            })
            .collect();
        Self { workers, events: received, before: RefCell::default(), generation, _store: store }
    }

    /// Waits until each of `ranks` has sent `what`. Other messages are kept for the next wait.
    fn wait(&self, ranks: &[usize], what: &str) {
        let deadline = Instant::now() + LONG;
        let (mut said, mut others) = (Vec::new(), Vec::new());
        let mut before = std::mem::take(&mut *self.before.borrow_mut()).into_iter();
        while said.len() < ranks.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            match before.next().map_or_else(|| self.events.recv_timeout(left), Ok) {
                Ok((rank, line)) if !ranks.contains(&rank) || said.contains(&rank) => {
                    others.push((rank, line))
                }
                Ok((rank, line)) if line.starts_with(what) => said.push(rank),
                Ok((rank, line)) => {
                    let expected = !line.starts_with("error") && line != "done";
                    assert!(expected, "rank {rank}: {line}, instead of {what}");
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("ranks {ranks:?} should say {what}, but only {said:?} did");
                }
            }
        }
        *self.before.borrow_mut() = others.into_iter().chain(before).collect();
    }

    fn kill(&mut self, rank: usize) {
        self.workers[rank].child.kill().unwrap();
        self.workers[rank].child.wait().unwrap();
        self.report_dead(rank);
    }

    /// Sends the other workers the launcher's report of a dead rank.
    fn report_dead(&mut self, rank: usize) {
        let cause = ExitCause::Signal(9);
        let verdict = ToWorker::PeerExit { generation: self.generation, rank, cause }.encode();
        for worker in &mut self.workers {
            if let Some(agent) = &mut worker.agent {
                let _ = agent.write_all(&verdict);
            }
        }
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

fn watch(rank: usize, child: &mut Child, events: Sender<(usize, String)>) -> JoinHandle<()> {
    let stdout = BufReader::new(child.stdout.take().unwrap());
    if let Some(stderr) = child.stderr.take() {
        let events = events.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                eprintln!("{line}");
                if let Some((_, what)) = line.split_once("this rank ")
                    && what.contains("in the memory of the other ranks of its host")
                {
                    let _ = events.send((rank, format!("log {what}")));
                }
            }
        });
    }
    std::thread::spawn(move || {
        for line in stdout.lines().map_while(Result::ok) {
            if let Some(line) = line.strip_prefix("@ ") {
                let _ = events.send((rank, line.to_owned()));
            }
        }
    })
}

#[test]
fn world_without_variables_has_one_rank_and_some_are_refused() {
    let run = |vars: &[(&str, &str)]| {
        let mut command = subprocess_test("worker");
        for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            command.env_remove(name);
        }
        command.env("CONVOKE_TEST_SCENARIO", if vars.is_empty() { "barrier" } else { "variables" });
        command.envs(vars.iter().copied()).stdin(Stdio::null()).stdout(Stdio::piped());
        let output = command.output().unwrap();
        assert_one_passed(&output);
        String::from_utf8(output.stdout).unwrap()
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

/// Random delays, spread over the duration of a few calls.
struct RandomDelays(u64);

impl RandomDelays {
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

    /// The only sleep in these tests: the moment of a death must be arbitrary.
    fn sleep(&mut self, most: Duration) {
        std::thread::sleep(Duration::from_micros(self.below(most.as_micros() as u64 + 1)));
    }
}

impl Job {
    fn run_to_success(scenario: &str, world: usize, launcher: Launcher) {
        let job = Self::start(scenario, world, launcher);
        job.wait(&(0..world).collect::<Vec<_>>(), "done");
    }
}

#[test]
fn forked_child_disturbs_nobody() {
    Job::run_to_success("fork", 3, Launcher::Convoke);
    Job::run_to_success("fork", 2, Launcher::Plain);
}

#[test]
fn dead_rank_is_named_in_each_of_its_groups() {
    let mut job = Job::start("groups", 4, Launcher::Convoke);
    job.wait(&[0, 1, 2, 3], "ready");
    job.kill(3);
    job.wait(&[0, 1, 2], "done");
}

#[test]
fn all_ranks_can_form_a_new_group_in_their_processes() {
    for launcher in [Launcher::Convoke, Launcher::Torchrun, Launcher::Plain] {
        Job::run_to_success("two rounds", 3, launcher);
    }
}

impl Job {
    /// Checks that exactly the survivors continue together.
    fn expect_survivors(&self, survivors: &[usize]) {
        self.wait(survivors, &format!("shrunk {survivors:?}"));
    }

    fn signal(&self, rank: usize, signal: Signal) {
        let pid = self.workers[rank].child.id();
        kill(Pid::from_raw(i32::try_from(pid).unwrap()), signal).unwrap();
    }
}

#[test]
fn survivors_of_killed_ranks_continue_repeatedly() {
    let mut delays = RandomDelays::new();
    for launcher in [Launcher::Torchrun, Launcher::Convoke, Launcher::Plain] {
        let mut job = Job::start("shrink", 6, launcher);
        job.wait(&[0, 1, 2, 3, 4, 5], "joined");
        delays.sleep(Duration::from_millis(30));
        job.kill(4);
        job.expect_survivors(&[0, 1, 2, 3, 5]);
        // Two ranks die at once; rank 0 survives if it serves the store.
        delays.sleep(Duration::from_millis(30));
        let (first, left) = if launcher == Launcher::Plain { (1, [0, 2, 5]) } else { (0, [1, 2, 5]) };
        job.kill(first);
        job.kill(3);
        job.expect_survivors(&left);
        delays.sleep(Duration::from_millis(30));
        job.kill(2);
        job.expect_survivors(&[left[0], 5]);
        if launcher == Launcher::Plain {
            job.kill(0);
            job.wait(&[5], "error Store ");
        }
    }
}

#[test]
fn rank_that_dies_during_shrink_is_excluded() {
    let mut delays = RandomDelays::new();
    for _ in 0..6 {
        let mut job = Job::start("shrink", 4, Launcher::Torchrun);
        job.wait(&[0, 1, 2, 3], "joined");
        job.kill(1);
        delays.sleep(Duration::from_millis(15));
        job.kill(0);
        job.expect_survivors(&[2, 3]);
    }
}

#[test]
fn stopped_rank_is_excluded_by_shrink_and_learns_it() {
    let mut job = Job::start("shrink", 4, Launcher::Torchrun);
    job.wait(&[0, 1, 2, 3], "joined");
    job.signal(2, Signal::SIGSTOP);
    job.kill(1);
    job.expect_survivors(&[0, 3]);
    job.signal(2, Signal::SIGCONT);
    job.wait(&[2], "error Excluded ");
}

#[test]
fn disconnected_rank_is_excluded_by_shrink_and_learns_it() {
    let mut job = Job::start("shrink", 3, Launcher::Convoke);
    job.wait(&[0, 1, 2], "joined");
    job.report_dead(1);
    job.expect_survivors(&[0, 2]);
    job.wait(&[1], "error Excluded ");
}

#[test]
fn ranks_that_read_in_the_memory_of_each_other_notice_a_death() {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    let is_restricted = scope.is_ok_and(|scope| scope.trim() != "0") && !nix::unistd::geteuid().is_root();
    let mut random = RandomDelays::new();
    for _ in 0..if common::is_full_test_run() { 100 } else { 6 } {
        let mut job = Job::start("single copy", 3, Launcher::Convoke);
        job.wait(&[0, 1, 2], if is_restricted { "log does not read" } else { "log reads" });
        job.wait(&[0, 1, 2], "exchanged");
        random.sleep(Duration::from_millis(10));
        let victim = random.below(3) as usize;
        job.kill(victim);
        let others: Vec<_> = (0..3).filter(|&rank| rank != victim).collect();
        job.wait(&others, "done");
    }
}
