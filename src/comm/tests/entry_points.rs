//! The entry points: URLs, files, stores and variables; the listening addresses; the log messages.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use common::{Group, LONG, ReduceOp, TimedBarrier, free_port, options};
use convoke_comm::{CommError, Session, Spawn, SpawnError, World, is_initialized};
use convoke_store::{FileStore, MemoryStore, Store, StoreError};

/// The worlds of `size` ranks in threads, each with its own session.
fn worlds<R: Send>(
    size: usize,
    session: impl Fn(usize) -> Result<Session, CommError> + Sync,
    body: impl Fn(Session, World) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size)
            .map(|rank| {
                let (session, body) = (&session, &body);
                scope.spawn(move || {
                    let session = session(rank).unwrap_or_else(|error| panic!("rank {rank}: {error}"));
                    let mut session =
                        session.with_options(|options| options.timeout(LONG).init_timeout(LONG));
                    let world = session.world().unwrap_or_else(|error| panic!("rank {rank}: {error}"));
                    body(session, world)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn check_sum(world: &World) {
    let mut sum = [world.rank() as i64 + 1];
    world.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum[0], (1..=world.size() as i64).sum::<i64>());
}

/// Returns whether this machine has IPv6; prints a note if not.
fn has_ipv6(what: &str) -> bool {
    let has = std::net::TcpListener::bind("[::1]:0").is_ok();
    if !has {
        convoke_testkit::skip(format_args!("{what}: no ::1 here"));
    }
    has
}

#[test]
fn ranks_join_through_a_tcp_url() {
    let port = free_port();
    let by_url = |rank| Session::from_url(&format!("tcp://127.0.0.1:{port}?rank={rank}&world_size=3"));
    let places = worlds(3, by_url, |_, world| {
        check_sum(&world);
        (world.rank(), world.size(), world.local_rank(), world.local_world_size(), world.backend().name())
    });
    assert_eq!(places, [(0, 3, 0, 3, "shm"), (1, 3, 1, 3, "shm"), (2, 3, 2, 3, "shm")]);
    let port = free_port();
    let by_arguments = |rank| Session::from_url_as(&format!("tcp://localhost:{port}"), rank, 2);
    worlds(2, by_arguments, |mut session, world| {
        check_sum(&world);
        drop(world);
        check_sum(&session.next_round().unwrap());
    });
}

/// Three processes join at `url`, leave, and join again.
fn join_100_times(url: &str) {
    let rounds = Spawn::new(3).env("URL", url).timeout(LONG).run(|rank| {
        let url = std::env::var("URL").unwrap();
        for round in 0..100 {
            let session = Session::from_url_as(&url, rank, 3).unwrap();
            let world = session.with_options(|options| options.timeout(LONG).init_timeout(LONG)).world();
            check_sum(&world.unwrap_or_else(|error| panic!("rank {rank}, round {round}: {error}")));
        }
    });
    rounds.unwrap();
}

/// Ranks drop a world at different times: one joins again while rank 0 still holds the previous world.
#[test]
fn processes_that_host_the_store_join_100_times() {
    let port = free_port();
    join_100_times(&format!("tcp://127.0.0.1:{port}"));
}

#[test]
fn ranks_form_groups_after_the_rank_hosting_the_store_exits() {
    let port = free_port();
    let outcome = Spawn::new(4).env("PORT", port.to_string()).timeout(LONG).run(|rank| {
        let address = format!("127.0.0.1:{}", std::env::var("PORT").unwrap());
        let session = Session::from_url_as(&format!("tcp://{address}"), rank, 4).unwrap();
        let world = session.with_options(|options| options.timeout(LONG).init_timeout(LONG)).world().unwrap();
        // The process of rank 0 ends while the others form the group.
        let Some(group) = world.subgroup(&[1, 2, 3]).unwrap() else { return };
        convoke_testkit::wait_until("the store to be gone", || {
            std::net::TcpStream::connect(&address).is_err().then_some(())
        });
        for _ in 0..3 {
            let half = group.split(Some(u32::from(rank == 1)), 0).unwrap().unwrap();
            let mut sum = [rank as u64];
            half.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [if rank == 1 { 1 } else { 5 }]);
        }
        drop(world);
        assert_eq!(group.subgroup(&[2, 0]).unwrap().is_some(), rank != 2);
    });
    outcome.unwrap();
}

#[test]
fn groups_form_over_ipv6() {
    if !has_ipv6("groups over IPv6") {
        return;
    }
    let port = free_port();
    worlds(
        3,
        |rank| Session::from_url_as(&format!("tcp://[::1]:{port}"), rank, 3),
        |_, world| {
            check_sum(&world);
            let pair = world.split(Some(u32::from(world.rank() == 0)), 0).unwrap().unwrap();
            pair.barrier().unwrap();
            // Rank 0 serves the store, through which the others form a group without it.
            world.barrier().unwrap();
        },
    );
    let port = free_port().to_string();
    let spawn = Spawn::new(2).env("MASTER_ADDR", "::1").env("MASTER_PORT", port).timeout(LONG);
    spawn
        .env("TORCHELASTIC_USE_AGENT_STORE", "False")
        .run(|_| check_sum(&convoke_comm::init().unwrap()))
        .unwrap();
}

#[test]
fn ranks_join_through_a_store() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    worlds(2, |rank| Session::from_store(Arc::clone(&store), rank, 2), |_, world| check_sum(&world));
    let mut alone = Session::from_store(store, 0, 1).unwrap();
    check_sum(&alone.world().unwrap());
}

// ---------------------------------------------------------------- files

/// An unused path that is cleaned up.
struct StoreFile(PathBuf);

impl StoreFile {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("convoke-ways-in-{}-{name}", std::process::id())))
    }

    fn url(&self) -> String {
        format!("file://{}", self.0.display())
    }
}

impl Drop for StoreFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn ranks_join_through_a_file_that_is_removed_finally() {
    let place = StoreFile::new("file");
    for _ in 0..2 {
        worlds(
            3,
            |rank| Session::from_url_as(&place.url(), rank, 3),
            |mut session, world| {
                assert!(place.0.exists());
                check_sum(&world);
                drop(world);
                let world = session.next_round().unwrap();
                assert!(place.0.exists());
                drop(session);
                check_sum(&world);
            },
        );
        assert!(!place.0.exists());
    }
}

/// The last rank to leave a round removes the file, while others have begun the next round in it.
#[test]
fn processes_join_through_a_file_100_times() {
    let place = StoreFile::new("again");
    join_100_times(&place.url());
    assert!(!place.0.exists());
}

#[test]
fn file_left_by_a_killed_job_is_reusable() {
    let place = StoreFile::new("stale");
    let url = place.url();
    // In the previous job rank 0 is killed in the middle, and rank 1 fails because of that.
    let killed = Spawn::new(2).env("URL", &url).timeout(LONG).run(|rank| {
        let url = std::env::var("URL").unwrap();
        let world = Session::from_url_as(&url, rank, 2).unwrap().world().unwrap();
        world.barrier().unwrap();
        if rank == 0 {
            nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL).unwrap();
        }
        world.barrier().unwrap();
    });
    assert!(matches!(killed, Err(SpawnError::Failed { rank: 0, .. })), "{killed:?}");
    assert!(place.0.exists());
    worlds(2, |rank| Session::from_url_as(&url, rank, 2), |_, world| check_sum(&world));
    assert!(!place.0.exists());
}

#[test]
fn stale_generation_of_a_dead_rank_0_is_ignored() {
    let place = StoreFile::new("announcement");
    // The state that rank 0 leaves if it dies before the others have joined.
    let store = FileStore::open(&place.0, None, std::time::Instant::now() + LONG).unwrap();
    let announcement = br#"{"generation":"00000000000000000000000000000007","given":false}"#;
    store.set(b"convoke/world/generation", announcement, std::time::Instant::now() + LONG).unwrap();
    drop(store);
    let others_are_there = TimedBarrier::new(3);
    let session = |rank| {
        if rank == 0 {
            others_are_there.wait();
            // Waits until they have read the announcement and use it.
            let store = FileStore::open(&place.0, None, std::time::Instant::now() + LONG).unwrap();
            let stale = "convoke/world/00000000000000000000000000000007/rank";
            let keys = [1, 2].map(|rank| format!("{stale}/{rank}"));
            store.wait(&[keys[0].as_bytes(), keys[1].as_bytes()], std::time::Instant::now() + LONG).unwrap();
        } else {
            others_are_there.wait();
        }
        Session::from_url_as(&place.url(), rank, 3)
    };
    worlds(3, session, |_, world| check_sum(&world));
    assert!(!place.0.exists());
}

#[test]
fn files_that_cannot_serve_are_typed_errors() {
    let join =
        |url: &str| Session::from_url_as(url, 1, 2).unwrap().with_options(|_| options()).world().unwrap_err();
    let place = StoreFile::new("garbage");
    std::fs::write(&place.0, [0xFF; 100]).unwrap();
    let error = join(&place.url());
    assert!(matches!(&error, CommError::Store(StoreError::Protocol { .. })), "{error}");
    let error = join("file:///no/such/folder/job").to_string();
    assert!(error.contains("/no/such/folder/job") && error.contains("No such file"), "{error}");
    let error = join(&format!("file://{}", std::env::temp_dir().display())).to_string();
    assert!(error.contains("Is a directory"), "{error}");
    // No other rank joins: it must not hang.
    let place = StoreFile::new("alone");
    let soon = Duration::from_millis(200);
    let session = Session::from_url_as(&place.url(), 1, 2).unwrap();
    let error = session.with_options(|options| options.init_timeout(soon)).world().unwrap_err();
    assert!(matches!(&error, CommError::Bootstrap { ranks, .. } if *ranks == [0]), "{error}");
}

// ---------------------------------------------------------------- wrong arguments

#[test]
fn invalid_arguments_are_typed_errors() {
    let cases = [
        (Session::from_url("tcp://h:1"), "it does not give the rank: add ?rank=0&world_size=2"),
        (Session::from_url("udp://h:1"), "cannot join at \"udp://h:1\": the scheme \"udp\""),
        (
            Session::from_url_as("tcp://h:1?rank=0&world_size=2", 0, 2),
            "it gives a rank, and another was passed",
        ),
        (Session::from_url_as("tcp://h:1", 2, 2), "rank 2 of 2: ranks are 0 to 1"),
        (Session::from_url_as("file:///tmp/x", 0, 0), "rank 0 of 0"),
        (Session::from_store(Arc::new(MemoryStore::new()), 5, 2), "rank 5 of 2"),
    ];
    for (outcome, message) in cases {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    let port = free_port();
    let _taken = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    let error = Session::from_url_as(&format!("tcp://127.0.0.1:{port}"), 0, 2).unwrap().world().unwrap_err();
    let wanted = format!("cannot serve the store at 127.0.0.1:{port}: 127.0.0.1:{port} is in use");
    assert!(error.to_string().starts_with(&wanted), "{error}");
}

/// The text that a process with these variables prints when it joins.
#[track_caller]
fn join_with(variables: &[(&str, &str)]) -> String {
    let mut spawn = Spawn::new(1).timeout(LONG);
    for (name, value) in variables {
        spawn = spawn.env(*name, *value);
    }
    let outcome = spawn.run(|_| -> Result<(), String> {
        let session = Session::join().map_err(|error| error.to_string())?;
        Err(format!("{session:?}"))
    });
    match outcome.unwrap_err() {
        SpawnError::Failed { stderr, .. } => stderr,
        other => panic!("{other}"),
    }
}

#[test]
fn interface_is_read_from_the_first_set_variable() {
    let cases: [(&[(&str, &str)], &str); 9] = [
        (&[("NCCL_SOCKET_IFNAME", "l")], "Address(127.0.0.1)"),
        (&[("NCCL_SOCKET_IFNAME", "=l")], "NCCL_SOCKET_IFNAME=\\\"=l\\\": no network interface"),
        (&[("GLOO_SOCKET_IFNAME", "none0,lo")], "Address(127.0.0.1)"),
        (&[("GLOO_SOCKET_IFNAME", "l")], "GLOO_SOCKET_IFNAME=\\\"l\\\": no network interface"),
        (&[("GLOO_SOCKET_IFNAME", "lo"), ("NCCL_SOCKET_IFNAME", "none0")], "Address(127.0.0.1)"),
        (&[("CONVOKE_SOCKET_IFNAME", "lo"), ("GLOO_SOCKET_IFNAME", "none0")], "Address(127.0.0.1)"),
        (&[("CONVOKE_SOCKET_IFNAME", " "), ("GLOO_SOCKET_IFNAME", "lo")], "Address(127.0.0.1)"),
        (&[("CONVOKE_SOCKET_IFNAME", "none0")], "CONVOKE_SOCKET_IFNAME=\\\"none0\\\": no network interface"),
        (&[], "RouteTo"),
    ];
    for (variables, expected) in cases {
        let text = join_with(variables);
        assert!(text.contains(expected), "{variables:?}: {text}");
    }
}

#[test]
fn malformed_variables_are_named() {
    let text = join_with(&[("CONVOKE_LOG", "loud")]);
    assert!(text.contains("CONVOKE_LOG=\\\"loud\\\" is not off, error, warn"), "{text}");
    let text = join_with(&[("CONVOKE_TOKEN_FILE", "/no/such/file"), ("CONVOKE_TOKEN", "")]);
    assert!(text.contains("token from CONVOKE_TOKEN: it is empty"), "{text}");
    let text = join_with(&[("WORLD_SIZE", "many")]);
    assert!(text.contains("WORLD_SIZE=\\\"many\\\" is not a whole number"), "{text}");
}

#[test]
fn explicit_rank_uses_only_the_master_address_from_environment() {
    let outcome = Spawn::new(1).env("MASTER_ADDR", "somewhere").env("MASTER_PORT", "7").run(|_| {
        let session = Session::from_url_as("env://", 1, 4).unwrap();
        Err::<(), _>(format!("{session:?}"))
    });
    let text = outcome.unwrap_err().to_string();
    assert!(text.contains("rank: 1, size: 4"), "{text}");
    assert!(text.contains("host: \\\"somewhere\\\", port: 7"), "{text}");
}

// ---------------------------------------------------------------- several threads

/// Two threads make rank 0. The main thread makes rank 1 once one of them has been refused, so the other
/// cannot have finished before.
fn join_twice<G: Send>(make: impl Fn(usize) -> Result<G, CommError> + Sync, check: impl Fn(&G) + Sync) {
    let (told, outcomes) = mpsc::channel();
    let begin = TimedBarrier::new(2);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let (told, begin, make, check) = (told.clone(), &begin, &make, &check);
            scope.spawn(move || {
                begin.wait();
                let outcome = make(0);
                told.send(outcome.as_ref().err().map(ToString::to_string)).unwrap();
                outcome.iter().for_each(check);
            });
        }
        let refused = outcomes.recv_timeout(LONG).unwrap().unwrap();
        assert!(
            refused.starts_with("another thread of this process is already joining as rank 0 of "),
            "{refused}"
        );
        check(&make(1).unwrap());
        assert_eq!(outcomes.recv_timeout(LONG).unwrap(), None);
    });
}

#[test]
fn second_thread_with_the_same_rank_is_refused() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let world = |session: Session| session.with_options(|_| options()).world();
    join_twice(|rank| world(Session::from_store(Arc::clone(&store), rank, 2)?), check_sum);
    join_twice(|rank| Group::new(Arc::clone(&store), rank, 2, options()), |group| group.barrier().unwrap());
    let place = StoreFile::new("contested");
    join_twice(|rank| world(Session::from_url_as(&place.url(), rank, 2)?), check_sum);
}

#[test]
fn threads_may_create_different_groups_concurrently() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let begin = TimedBarrier::new(8);
    std::thread::scope(|scope| {
        for (rank, name) in (0..2).flat_map(|rank| ["a", "b", "c", "d"].map(|name| (rank, name))) {
            let (store, begin) = (Arc::clone(&store), &begin);
            scope.spawn(move || {
                begin.wait();
                let group = Group::new(store, rank, 2, options().name(name)).unwrap();
                let mut all = [0_u32; 2];
                group.all_gather(&[u32::from(name.as_bytes()[0]) + rank as u32], &mut all).unwrap();
                assert_eq!(all[1], all[0] + 1);
                assert_eq!(all[0], u32::from(name.as_bytes()[0]));
            });
        }
    });
}

// ---------------------------------------------------------------- log messages

/// The stderr of rank 0 of two; rank 1 joins or not.
#[track_caller]
fn stderr_of_rank_0(level: &str, rank_1_comes: bool) -> String {
    let mut spawn = Spawn::new(2).env("CONVOKE_LOG", level).timeout(LONG);
    if rank_1_comes {
        spawn = spawn.env("COMES", "");
    }
    let outcome = spawn.run(|rank| -> Result<(), String> {
        let comes = std::env::var_os("COMES").is_some();
        if rank == 1 && !comes {
            return Ok(());
        }
        let init = if comes { LONG } else { Duration::from_millis(600) };
        let mut session = Session::join().unwrap().with_options(|options| options.init_timeout(init));
        let outcome = session.world().map_err(|error| error.to_string()).map(|world| {
            world.barrier().unwrap();
        });
        if rank == 0 { outcome.and(Err("the end".to_owned())) } else { Ok(()) }
    });
    match outcome.unwrap_err() {
        SpawnError::Failed { rank: 0, stderr, .. } => stderr,
        other => panic!("{other}"),
    }
}

#[test]
fn events_are_written_to_stderr_on_request() {
    let text = stderr_of_rank_0("info", true);
    let lines: Vec<_> = text.lines().filter(|line| line.starts_with("convoke[")).collect();
    for wanted in ["world: rank 0 listens at 127.0.0.1:", "world: rank 0 of 2 connected after"] {
        assert!(
            lines.iter().any(|line| line.contains(" s info: ") && line.contains(wanted)),
            "{wanted}: {text}"
        );
    }
    let text = stderr_of_rank_0("", true);
    assert!(!text.contains("convoke["), "{text}");
    let text = stderr_of_rank_0("warn", false);
    assert!(text.contains(" s warn: world: rank(s) 1 have not joined yet"), "{text}");
    assert!(text.contains(" s error: world: rank 0 of 2: group world could not form: rank(s) 1"), "{text}");
    assert!(!text.contains(" info: "), "{text}");
}

/// A logger of the program.
struct ProgramLogger(Mutex<Vec<String>>);

impl log::Log for ProgramLogger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        self.0.lock().unwrap().push(format!("{} {}", record.target(), record.args()));
    }

    fn flush(&self) {}
}

#[test]
fn events_use_the_logger_of_the_program() {
    static LOGGER: ProgramLogger = ProgramLogger(Mutex::new(Vec::new()));
    let outcome = Spawn::new(2).env("CONVOKE_LOG", "info").timeout(LONG).run(|rank| -> Result<(), String> {
        log::set_logger(&LOGGER).unwrap();
        log::set_max_level(log::LevelFilter::Info);
        let world = convoke_comm::init().unwrap();
        if rank == 1 {
            world.abort("enough");
        }
        let error = world.barrier().unwrap_err();
        assert!(matches!(error, CommError::Aborted { by: 1, .. }));
        let got = LOGGER.0.lock().unwrap().join("\n");
        for wanted in ["connected after", "aborted by rank 1: enough"] {
            assert!(got.contains("convoke_comm") && got.contains(wanted), "{wanted}: {got}");
        }
        if rank == 0 { Err("the end".to_owned()) } else { Ok(()) }
    });
    match outcome.unwrap_err() {
        SpawnError::Failed { rank: 0, stderr, .. } => assert!(!stderr.contains("convoke["), "{stderr}"),
        other => panic!("{other}"),
    }
}

#[test]
fn is_initialized_lasts_while_a_group_of_the_world_exists() {
    Spawn::new(2)
        .timeout(LONG)
        .run(|_| {
            let world = convoke_comm::init().unwrap();
            let group = world.group();
            drop(world);
            assert!(is_initialized());
            group.barrier().unwrap();
            drop(group);
            assert!(!is_initialized());
        })
        .unwrap();
}
