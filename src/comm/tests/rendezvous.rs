//! Absent ranks, duplicate ranks, and ranks that join another job's address: all ranks report them at once.

#![allow(clippy::unwrap_used, clippy::panic, clippy::exit)]

mod common;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::{LONG, free_port};
use convoke_comm::{CommError, Session, Spawn};
use convoke_store::{Store, StoreServer, TcpStore};

/// Much less than a timeout of two minutes; the margin is for a busy machine.
const PROMPT_LIMIT: Duration = Duration::from_secs(20);

/// A set of processes that join as `ranks` of `size`.
struct Processes<'a> {
    url: &'a str,
    size: usize,
    ranks: &'a [usize],
    /// The time in which they must connect.
    init: Duration,
    /// The number of processes that form a world before the others start.
    first: usize,
    /// The index of a process that exits after it has connected to the store.
    ends: Option<usize>,
}

impl Processes<'_> {
    /// The outcome of each process: "joined", or the error.
    fn outcomes(&self) -> Vec<String> {
        let server = StoreServer::bind(&[SocketAddr::from(([127, 0, 0, 1], 0))]).unwrap();
        let ranks: Vec<_> = self.ranks.iter().map(ToString::to_string).collect();
        let spawn = Spawn::new(self.ranks.len())
            .env("REPORT", server.addresses()[0].to_string())
            .env("URL", self.url)
            .env("SIZE", self.size.to_string())
            .env("RANKS", ranks.join(","))
            .env("INIT_MS", self.init.as_millis().to_string())
            .env("FIRST", self.first.to_string())
            .env("ENDS", self.ends.map_or_else(String::new, |index| index.to_string()))
            .timeout(LONG);
        let _ = spawn.run(join_and_report);
        let soon = Instant::now() + LONG;
        let outcome = |index: usize| server.store().get(format!("outcome/{index}").as_bytes(), soon).unwrap();
        (0..self.ranks.len()).map(|index| String::from_utf8(outcome(index)).unwrap()).collect()
    }
}

fn join_and_report(index: usize) {
    let variable = |name: &str| std::env::var(name).unwrap();
    let number = |name: &str| variable(name).parse::<usize>().unwrap();
    let ranks: Vec<usize> = variable("RANKS").split(',').map(|rank| rank.parse().unwrap()).collect();
    let report = TcpStore::connect(&variable("REPORT"), Instant::now() + LONG).unwrap();
    let soon = || Instant::now() + LONG;
    let first = number("FIRST");
    if index >= first {
        for other in 0..first {
            report.get(format!("outcome/{other}").as_bytes(), soon()).unwrap();
        }
    }
    let init = Duration::from_millis(number("INIT_MS") as u64);
    if variable("ENDS") == index.to_string() {
        report.set(format!("outcome/{index}").as_bytes(), b"ended", soon()).unwrap();
        std::thread::spawn(move || {
            // Exit when another process waits for the third rank.
            report.get(b"waits", soon()).unwrap();
            std::thread::sleep(Duration::from_millis(300));
            std::process::exit(0);
        });
        let session = Session::from_url_as(&variable("URL"), ranks[index], number("SIZE")).unwrap();
        let _ = session.with_options(|options| options.timeout(LONG).init_timeout(init)).world();
        return;
    }
    report.set(b"waits", b"", soon()).unwrap();
    let session = Session::from_url_as(&variable("URL"), ranks[index], number("SIZE")).unwrap();
    let joined = session.with_options(|options| options.timeout(LONG).init_timeout(init)).world();
    let said = joined.as_ref().map_or_else(ToString::to_string, |_| "joined".to_owned());
    report.set(format!("outcome/{index}").as_bytes(), said.as_bytes(), soon()).unwrap();
    // The world stays until all processes have their outcome.
    for other in 0..ranks.len() {
        report.get(format!("outcome/{other}").as_bytes(), soon()).unwrap();
    }
}

fn tcp() -> String {
    format!("tcp://127.0.0.1:{}", free_port())
}

struct File(PathBuf);

impl File {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("convoke-meeting-{}-{name}", std::process::id())))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The timeout of ranks of which some are absent.
const SHORT: Duration = Duration::from_millis(1500);

// A process of `Spawn` runs its test up to the call that started it, so each test has one such call.

#[test]
fn every_rank_names_an_unjoined_rank_with_host_and_advice() {
    let url = tcp();
    let place = url.strip_prefix("tcp://").unwrap();
    let those = Processes { url: &url, size: 3, ranks: &[0, 2], init: SHORT, first: 0, ends: None };
    for said in those.outcomes() {
        assert!(said.contains("rank(s) 1 of 3 did not join within 1500 ms"), "{said}");
        assert!(said.contains(&format!("at {place}, where rank 0 serves the store")), "{said}");
        assert!(
            said.contains(&format!("start every rank with tcp://{place} and 3 as the number of ranks")),
            "{said}"
        );
    }
}

#[test]
fn other_ranks_report_a_missing_store_without_rank_0() {
    let url = tcp();
    let place = url.strip_prefix("tcp://").unwrap();
    let those = Processes { url: &url, size: 3, ranks: &[1, 2], init: SHORT, first: 0, ends: None };
    for said in those.outcomes() {
        assert!(said.contains(&format!("no store at {place}")), "{said}");
        assert!(said.contains("rank 0 serves it; is it running, and started with tcp://"), "{said}");
    }
}

/// Checks that all report at once that two processes, the second in a row among them, have rank `twice`.
#[track_caller]
fn assert_duplicate_is_reported(url: &str, ranks: &[usize], twice: usize) {
    let since = Instant::now();
    let all = Processes { url, size: 3, ranks, init: LONG, first: 0, ends: None }.outcomes();
    assert!(since.elapsed() < PROMPT_LIMIT, "took {:?}", since.elapsed());
    let twice = format!("two processes have rank {twice}: process ");
    for said in all {
        assert!(said.contains(&twice) && said.contains("its own RANK"), "{said}");
    }
}

#[test]
fn duplicate_rank_is_reported_to_all_ranks_at_once() {
    assert_duplicate_is_reported(&tcp(), &[0, 1, 1], 1);
}

#[test]
fn duplicate_rank_is_reported_to_all_ranks_using_a_file() {
    let file = File::new("twice");
    assert_duplicate_is_reported(&format!("file://{}", file.0.display()), &[0, 1, 1], 1);
}

#[test]
fn second_rank_0_is_reported_to_all_ranks_using_file() {
    let file = File::new("zero");
    assert_duplicate_is_reported(&format!("file://{}", file.0.display()), &[0, 0, 1], 0);
}

#[test]
fn second_job_at_a_busy_port_fails_and_first_continues() {
    let url = tcp();
    let since = Instant::now();
    let ranks = [0, 1, 0, 1];
    let all = Processes { url: &url, size: 2, ranks: &ranks, init: LONG, first: 2, ends: None }.outcomes();
    assert!(since.elapsed() < PROMPT_LIMIT, "took {:?}", since.elapsed());
    assert_eq!(all[..2], ["joined", "joined"]);
    assert!(all[2].contains("cannot serve the store at") && all[2].contains("in use"), "{}", all[2]);
    let said = "a world of 2 ranks, of which rank 0 is process ";
    assert!(
        all[3].contains(said) && all[3].contains("has formed without this process (rank 1 of 2)"),
        "{}",
        all[3]
    );
}

#[test]
fn lost_store_error_states_that_rank_0_exited() {
    let url = tcp();
    let since = Instant::now();
    let all =
        Processes { url: &url, size: 3, ranks: &[0, 1], init: LONG, first: 0, ends: Some(0) }.outcomes();
    assert!(since.elapsed() < PROMPT_LIMIT, "took {:?}", since.elapsed());
    assert!(all[1].contains("was lost during ") && all[1].contains("its process has ended"), "{}", all[1]);
    assert!(all[1].contains("; rank 0 serves it"), "{}", all[1]);
}

#[test]
fn rejoining_an_active_world_is_reported_on_all_ranks() {
    let file = File::new("again");
    let by_file = format!("file://{}", file.0.display());
    for url in [tcp(), by_file] {
        let join = |rank| {
            let session = Session::from_url_as(&url, rank, 2).unwrap();
            session.with_options(|options| options.timeout(LONG).init_timeout(LONG)).world()
        };
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let join = &join;
                scope.spawn(move || {
                    let world = join(rank).unwrap();
                    let group = world.subgroup(&[0, 1]).unwrap().unwrap();
                    let again = join(rank).unwrap_err();
                    assert!(matches!(&again, CommError::AlreadyJoined { .. }), "{again}");
                    assert!(
                        again.to_string().contains("drop it and all groups that come from it"),
                        "{again}"
                    );
                    drop(world);
                    assert!(join(rank).is_err(), "a group of it lives");
                    group.barrier().unwrap();
                    drop(group);
                    join(rank).unwrap().barrier().unwrap();
                });
            }
        });
    }
}
