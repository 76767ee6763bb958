//! Ranks as processes of the test program: their environment, the reports of their failures, and the cleanup
//! of processes and files.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::print_stderr, clippy::exit)]

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use convoke_comm::{
    Backend, CommError, ReduceOp, Session, Spawn, SpawnError, World, init, is_elastic, is_initialized, op,
    spawn,
};
use convoke_env::{ExitCause, WorkerEnv};
use convoke_testkit::{assert_one_passed, subprocess_test, subprocess_variable};
use nix::sys::signal::{Signal, kill, raise};
use nix::unistd::Pid;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The timeout of events that should happen.
const LONG: Duration = Duration::from_secs(60);

fn sum(world: &World) -> Result<i64, CommError> {
    let mut sum = [world.rank() as i64 + 1];
    world.all_reduce(&mut sum, ReduceOp::Sum)?;
    Ok(sum[0])
}

#[test]
fn spawned_ranks_form_a_group() {
    Spawn::new(3)
        .env("THE_SPAWNER", std::process::id().to_string())
        .timeout(LONG)
        .run(|rank| {
            let spawner = std::env::var("THE_SPAWNER").unwrap();
            assert_eq!(std::os::unix::process::parent_id().to_string(), spawner);
            let env = WorkerEnv::from_process().unwrap().unwrap();
            assert_eq!((env.rank, env.local_rank, env.role.rank), (rank, rank, rank));
            assert_eq!((env.world_size, env.local_world_size, env.group_world_size), (3, 3, 1));
            assert!(!is_initialized() && !is_elastic());
            let world = init().unwrap();
            assert!(is_initialized());
            assert_eq!(
                (world.rank(), world.size(), world.local_rank(), world.local_world_size()),
                (rank, 3, rank, 3)
            );
            assert_eq!(sum(&world).unwrap(), 6);
            drop(world);
            assert!(!is_initialized());
        })
        .unwrap();
}

#[test]
fn spawn_can_be_called_repeatedly_and_in_loops() {
    for round in 0..2 {
        spawn(2, |rank| {
            let world = init()?;
            let mut both = [0_u64; 2];
            world.all_gather(&[round * 10 + rank as u64], &mut both)?;
            assert_eq!(both, [round * 10, round * 10 + 1]);
            Ok::<(), CommError>(())
        })
        .unwrap();
    }
    let error = spawn(1, |_| std::process::exit(7)).unwrap_err();
    assert!(matches!(error, SpawnError::Failed { how: ExitCause::Code(7), .. }), "{error}");
}

/// The error of two ranks if rank 1 ends in this way while rank 0 is in a barrier with it.
#[track_caller]
fn failure(rank_1: impl FnOnce(World) -> Result<(), String>) -> (usize, ExitCause, String) {
    let outcome = Spawn::new(2).timeout(LONG).run(|rank| {
        let world = init().map_err(|error| error.to_string())?;
        world.barrier().map_err(|error| error.to_string())?;
        match rank {
            1 => rank_1(world),
            // Rank 0 exits with its own code as soon as it has lost its peer.
            _ => world.barrier().map_err(|error| format!("rank 0 has lost rank 1: {error}")),
        }
    });
    match outcome.unwrap_err() {
        SpawnError::Failed { rank, size: 2, how, stderr } => (rank, how, stderr),
        other => panic!("{other}"),
    }
}

#[test]
fn spawn_reports_the_panic_message_and_rank() {
    let (rank, how, stderr) = failure(|_world| panic!("the data set is empty"));
    assert_eq!((rank, how), (1, ExitCause::Code(101)));
    assert!(stderr.contains("panicked at") && stderr.contains("the data set is empty"), "{stderr}");
}

#[test]
fn spawn_reports_the_error_text_and_rank() {
    let (rank, how, stderr) = failure(|_world| Err("no such file".to_owned()));
    assert_eq!((rank, how), (1, ExitCause::Code(1)));
    assert!(stderr.contains("Error: \"no such file\""), "{stderr}");
}

#[test]
fn spawn_reports_the_exit_code_and_last_output() {
    let (rank, how, stderr) = failure(|_world| {
        eprintln!("giving up");
        std::process::exit(3)
    });
    assert_eq!((rank, how, stderr.as_str()), (1, ExitCause::Code(3), "giving up\n"));
}

#[test]
fn spawn_reports_the_signal_and_rank() {
    let (rank, how, _) = failure(|_world| {
        raise(Signal::SIGKILL).unwrap();
        Ok(())
    });
    assert_eq!((rank, how), (1, ExitCause::Signal(9)));
}

#[test]
fn early_departed_rank_does_not_hide_a_later_failure() {
    let (rank, how, stderr) = failure(|world| {
        drop(world);
        Ok(())
    });
    assert_eq!((rank, how), (0, ExitCause::Code(1)));
    assert!(stderr.contains("rank 1 at") && stderr.contains("has left the group"), "{stderr}");
}

#[test]
fn unresponsive_rank_is_killed_when_another_fails() {
    let folder = folder();
    let error = Spawn::new(2)
        .env("FOLDER", &folder.0)
        .timeout(LONG)
        .grace(Duration::from_millis(50))
        .run(|rank| {
            if rank == 1 {
                write_pid("rank", std::process::id());
                // A stopped process does not react to SIGTERM.
                raise(Signal::SIGSTOP).unwrap();
            }
            wait_for_pid(Path::new(&std::env::var_os("FOLDER").unwrap()), "rank");
            std::process::exit(2);
        })
        .unwrap_err();
    assert!(matches!(&error, SpawnError::Failed { rank: 0, how: ExitCause::Code(2), .. }), "{error}");
    assert!(!is_alive(read_pid(&folder.0, "rank")));
}

#[test]
fn spawn_timeout_kills_and_names_unfinished_ranks() {
    let after = Duration::from_millis(100);
    let error = Spawn::new(2).timeout(after).run(|_| std::thread::sleep(LONG)).unwrap_err();
    assert!(matches!(&error, SpawnError::Timeout { ranks, .. } if *ranks == [0, 1]), "{error}");
    assert_eq!(error.to_string(), "rank(s) 0, 1 still ran after 100 ms");
}

#[test]
#[allow(clippy::zombie_processes)] // that is the point
fn child_processes_of_a_rank_end_with_it() {
    let folder = folder();
    Spawn::new(1)
        .env("FOLDER", &folder.0)
        .run(|_| {
            let child = Command::new("sleep").arg("1000").stdout(Stdio::inherit()).spawn().unwrap();
            write_pid("child", child.id());
        })
        .unwrap();
    wait_until_gone(read_pid(&folder.0, "child"));
}

#[test]
fn failure_before_the_spawn_call_is_reported_separately() {
    if std::env::var_os("CONVOKE_SPAWN").is_some() {
        eprintln!("not this way");
        std::process::exit(4);
    }
    let error = spawn(1, |_| ()).unwrap_err();
    assert!(matches!(&error, SpawnError::Unreached { rank: 0, how: ExitCause::Code(4), .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("tests/spawn.rs:") && text.contains("not this way"), "{text}");
}

#[test]
fn rank_that_calls_another_spawn_reports_it() {
    let other = std::env::var_os("CONVOKE_SPAWN").is_some();
    let error = if other { spawn(1, |_| ()) } else { spawn(1, |_| ()) }.unwrap_err();
    assert!(matches!(&error, SpawnError::Unreached { how: ExitCause::Code(1), .. }), "{error}");
    assert!(error.to_string().contains("reached call 0 of spawn at"), "{error}");
}

#[test]
fn ranks_cannot_spawn_and_zero_ranks_are_refused() {
    spawn(1, |_| {
        let error = spawn(1, |_| ()).unwrap_err();
        assert!(matches!(error, SpawnError::Unusable(_)), "{error}");
    })
    .unwrap();
    assert!(matches!(spawn(0, |_| ()), Err(SpawnError::Unusable(_))));
    let unnamed = std::thread::spawn(|| spawn(1, |_| ())).join().unwrap().unwrap_err();
    assert!(unnamed.to_string().contains("neither the main thread nor that of a test"), "{unnamed}");
}

#[test]
fn program_started_by_a_rank_may_spawn() {
    spawn(1, |_| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["ranks_cannot_spawn_and_zero_ranks_are_refused", "--exact"]);
        assert_one_passed(&command.output().unwrap());
    })
    .unwrap();
}

#[test]
fn ranks_die_with_the_process_that_spawned_them() {
    let folder = folder();
    let mut spawner = start_spawner(&folder, "");
    let ranks = [wait_for_pid(&folder.0, "0"), wait_for_pid(&folder.0, "1")];
    spawner.kill().unwrap();
    spawner.wait().unwrap();
    ranks.into_iter().for_each(wait_until_gone);
}

#[test]
fn rank_orphaned_before_the_spawn_call_does_not_spawn() {
    let folder = folder();
    let mut spawner = start_spawner(&folder, "before the call");
    let rank = wait_for_pid(&folder.0, "early");
    spawner.kill().unwrap();
    spawner.wait().unwrap();
    wait_until_gone(rank);
    assert!(!folder.0.join("0").exists());
}

/// Runs [`spawner`] in a new process, whose ranks wait for its death at `when`.
fn start_spawner(folder: &Folder, when: &str) -> std::process::Child {
    let mut command = subprocess_test("spawner");
    command.env("FOLDER", &folder.0).env("WHEN", when).stdout(Stdio::null()).spawn().unwrap()
}

#[test]
#[ignore = "a process that other tests start and kill"]
fn spawner() {
    let when = subprocess_variable("WHEN");
    let early = when == "before the call";
    if early && std::env::var_os("CONVOKE_SPAWN").is_some() {
        let (spawner, until) = (std::os::unix::process::parent_id(), Instant::now() + LONG);
        write_pid("early", std::process::id());
        while std::os::unix::process::parent_id() == spawner && Instant::now() < until {
            std::thread::yield_now();
        }
    }
    // Only one rank, since another might see the death before its cause can be known.
    spawn(if early { 1 } else { 2 }, |rank| {
        write_pid(&rank.to_string(), std::process::id());
        std::thread::sleep(LONG);
    })
    .unwrap();
}

// ---------------------------------------------------------------- pids, through files

/// A folder that is removed when this value is dropped.
struct Folder(std::path::PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn folder() -> Folder {
    let name = format!("convoke-spawn-{}-{:?}", std::process::id(), std::thread::current().id());
    let path = std::env::temp_dir().join(name);
    // Spawned ranks run this too and do not need it: FOLDER names the test's folder.
    if std::env::var_os("CONVOKE_SPAWN").is_none() {
        std::fs::create_dir(&path).unwrap();
    }
    Folder(path)
}

fn write_pid(name: &str, pid: u32) {
    let folder = std::env::var_os("FOLDER").unwrap();
    std::fs::write(Path::new(&folder).join(name), format!("{pid}\n")).unwrap();
}

fn read_pid(folder: &Path, name: &str) -> Pid {
    let text = std::fs::read_to_string(folder.join(name)).unwrap();
    Pid::from_raw(text.trim().parse().unwrap())
}

fn wait_for_pid(folder: &Path, name: &str) -> Pid {
    let until = Instant::now() + LONG;
    while !std::fs::read_to_string(folder.join(name)).is_ok_and(|text| text.ends_with('\n')) {
        assert!(Instant::now() < until, "rank {name} did not come");
        std::thread::yield_now();
    }
    read_pid(folder, name)
}

/// Returns whether the process exists and is not a zombie.
fn is_alive(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    kill(pid, None).is_ok() && !stat.contains(") Z ")
}

fn wait_until_gone(pid: Pid) {
    let until = Instant::now() + LONG;
    while is_alive(pid) {
        assert!(Instant::now() < until, "{pid} is left over");
        std::thread::yield_now();
    }
}

#[test]
fn messages_with_dropped_handles_are_delivered_after_the_rank_returns() {
    const LARGE: usize = 200_000;
    for round in 0..3 {
        spawn(3, |rank| {
            let world = init()?;
            if rank == 0 {
                for to in 1..3 {
                    drop(world.start(op::send(vec![round; LARGE], to).tag(1))?);
                    drop(world.start(op::send(vec![round], to).tag(2))?);
                }
                return Ok(());
            }
            // The message is announced, and its sender has no other work.
            world.probe(Some(0), 1)?;
            let (mut large, mut small) = (vec![9_u64; LARGE], [9_u64]);
            world.recv(&mut large, 0, 1)?;
            world.recv(&mut small, 0, 2)?;
            assert!(large == vec![round; LARGE] && small == [round]);
            Ok::<(), CommError>(())
        })
        .unwrap();
    }
}

#[test]
fn ranks_use_tcp_if_file_size_limit_prevents_shared_memory() {
    // The first rank creates the memory.
    for (who, most) in [(0, 0), (0, 10 << 20), (1, 0)] {
        Spawn::new(3)
            .timeout(LONG)
            .run(move |rank| {
                if rank == who {
                    setrlimit(Resource::Fsize, Rlimit { current: Some(most), maximum: None }).unwrap();
                }
                let world = init().unwrap();
                assert_eq!(sum(&world).unwrap(), 6);
                let shared = if who == 0 { Backend::Tcp } else { Backend::SharedMemory };
                assert_eq!(world.backend(), shared);
                let mut buffer = world.alloc::<u64>(300_000).unwrap();
                buffer[0] = rank as u64;
                world.all_reduce(&mut buffer[..1], ReduceOp::Sum).unwrap();
                assert_eq!((buffer[0], buffer.is_shared()), (3, who > 0));
            })
            .unwrap();
    }
}

#[test]
fn descriptor_exhaustion_is_reported_to_all_ranks_at_once() {
    // One rank, or all, can open only `left` more files. Groups without shared memory need connections of
    // their own when they move many bytes.
    for left in 0..16 {
        let who = left % 4;
        Spawn::new(3)
            .timeout(LONG)
            .run(move |rank| {
                let session = Session::join().unwrap();
                let mut session = session.with_options(|options| options.shared_memory(false));
                let world = session.world().unwrap();
                world.barrier().unwrap();
                if who == rank || who == 3 {
                    let open = std::fs::read_dir("/proc/self/fd").unwrap().count();
                    let most = Some((open + left) as u64);
                    let maximum = getrlimit(Resource::Nofile).maximum;
                    setrlimit(Resource::Nofile, Rlimit { current: most, maximum }).unwrap();
                }
                let begin = Instant::now();
                let mut groups = Vec::new();
                let error = loop {
                    let made = world.split(Some(0), 0).map(Option::unwrap);
                    // A rank that could reach all others hears of the failure with its first call.
                    let mut many = vec![1_u64; 50_000];
                    match made.and_then(|group| group.all_reduce(&mut many, ReduceOp::Sum).map(|()| group)) {
                        Ok(group) => groups.push(group),
                        Err(error) => break error,
                    }
                };
                assert!(begin.elapsed() < LONG / 4, "{error}");
                assert!(error.to_string().contains("`ulimit -n "), "{error}");
                assert!(who == 3 || error.suspect_rank() == Some(who), "{error}");
            })
            .unwrap();
    }
}
