//! The faults of elastic jobs.

use std::time::Duration;

use convoke_launcher_tests::harness::ProcessOutput;
use convoke_launcher_tests::hosts::Hosts;
use convoke_launcher_tests::worker_command;
use convoke_testkit::is_full_test_run;
use convoke_testkit::{skip, wait_until};

use super::cluster::{Backend, Cluster, FaultTimes, Round};
use super::table::{Row, find_line, write_row};
use Backend::{C10d, Etcd, File};

const ALL_BACKENDS: &[Backend] = &[C10d, File, Etcd(1), Etcd(3)];
/// The documentation promises 4 s to detect a silent node, and one further second until all workers run
/// again. The remainder is an allowance for a busy machine.
const SILENT_NODE_LIMIT: Duration = Duration::from_secs(4 + 6);
/// The documentation promises 0.5 s to detect the death of a process.
const DEATH_LIMIT: Duration = Duration::from_millis(500 + 5500);
const RESTART_LIMIT: Duration = Duration::from_secs(1 + 6);
/// A silence that is long enough for the others to declare a node lost.
const LONG_OUTAGE: Duration = Duration::from_secs(5);

/// Phrases with which a node reports the end of a round.
const NEW_ROUND_PHRASES: &[&str] = &["start a new round", "the rendezvous answered no heartbeat"];

const RUNS_ON: &str = "runs on";
const GOES_ON: &str = "goes on without it";
const NEW_ROUND: &str = "begins anew";
const ENDS: &str = "ends, exit code 1";

/// Runs `case` with each backend of `all`, or in the short form with each of `short`.
fn for_each_backend(
    fault: &str,
    short: &[Backend],
    all: &[Backend],
    case: impl Fn(Backend) -> Result<Row, String>,
) {
    for &backend in if is_full_test_run() { all } else { short } {
        match case(backend) {
            Ok(times) => write_row(fault, backend, &times),
            Err(why) => skip(format!("{fault} ({}): {why}", backend.name())),
        }
    }
}

fn check_times(times: &FaultTimes, detected: Duration) {
    assert!(times.detected.is_some_and(|time| time < detected), "{times:?}");
    assert!(times.restarted.is_none_or(|time| time < detected + RESTART_LIMIT), "{times:?}");
}

/// Starts three nodes of "2:3" and waits for their workers.
fn start_three(backend: Backend) -> Result<(Cluster, Round), String> {
    start_three_with(backend, "--max-restarts=0")
}

fn start_three_with(backend: Backend, argument: &str) -> Result<(Cluster, Round), String> {
    let mut cluster = Cluster::new(backend, 3, "2:3")?.with_argument(argument);
    cluster.start_all(3);
    let round = cluster.wait_for_round(3);
    Ok((cluster, round))
}

fn kill_command(pid: i32) -> String {
    format!("kill -9 {pid}")
}

/// Asserts that no node notices the fault, and that the job finishes.
fn expect_unnoticed(
    mut cluster: Cluster,
    round: &Round,
    fault: impl FnOnce(&mut Cluster),
    lasts: Duration,
    undo: impl FnOnce(&mut Cluster),
) -> Row {
    fault(&mut cluster);
    cluster.expect_undisturbed(round, lasts);
    undo(&mut cluster);
    cluster.expect_undisturbed(round, Duration::from_secs(1));
    cluster.finish();
    Row { outcome: RUNS_ON, times: FaultTimes::default(), message: String::new() }
}

/// Asserts that node `lost` is lost by `fault`, and that the two others go on.
fn expect_survival(
    mut cluster: Cluster,
    round: &Round,
    lost: usize,
    limit: Duration,
    fault: impl FnOnce(&mut Cluster),
) -> Row {
    let survivors: Vec<usize> = round.keys().copied().filter(|&host| host != lost).collect();
    let (times, after) = cluster.expect_new_round(round, fault, &survivors, 2);
    check_times(&times, limit);
    assert!(after.values().all(|up| up.restarts == 0), "a loss uses no restart: {after:?}");
    for host in &survivors {
        if let (Some(before), Some(now)) = (round.get(host), after.get(host)) {
            assert!(before.rank >= 2 || before.rank == now.rank, "{round:?}, {after:?}");
        }
    }
    cluster.remove_node(lost);
    let message = find_line(&cluster.nodes[&survivors[0]].stderr(), NEW_ROUND_PHRASES);
    cluster.finish();
    Row { outcome: GOES_ON, times, message }
}

fn expect_all_fail(
    mut cluster: Cluster,
    limit: Duration,
    hosts: &[usize],
    what: &str,
    fault: impl FnOnce(&mut Cluster),
) -> Row {
    let (times, ended) = cluster.expect_failure(fault, hosts);
    check_times(&times, limit);
    let message: Vec<String> =
        ended.iter().map(|ProcessOutput { stderr, .. }| find_line(stderr, &[what])).collect();
    Row { outcome: ENDS, times, message: message[message.len() - 1].clone() }
}

#[test]
fn job_survives_a_killed_worker() {
    for_each_backend("worker: SIGKILL", &[C10d, Etcd(1)], ALL_BACKENDS, |backend| {
        let (mut cluster, round) = start_three_with(backend, "--max-restarts=1")?;
        let victim = round[&2].worker;
        let (times, _) =
            cluster.expect_new_round(&round, |cluster| cluster.exec(2, &kill_command(victim)), &[1, 3], 3);
        check_times(&times, DEATH_LIMIT);
        let message = find_line(&cluster.nodes[&1].stderr(), NEW_ROUND_PHRASES);
        cluster.finish();
        Ok(Row { outcome: NEW_ROUND, times, message })
    });
    for_each_backend("worker: SIGKILL, `--max-restarts=0`", &[C10d], ALL_BACKENDS, |backend| {
        let (cluster, round) = start_three(backend)?;
        let victim = round[&2].worker;
        Ok(expect_all_fail(cluster, DEATH_LIMIT, &[1, 2, 3], "SIGKILL", |cluster| {
            cluster.exec(2, &kill_command(victim))
        }))
    });
}

#[test]
fn job_survives_a_stopped_worker() {
    for_each_backend("worker: SIGSTOP for 5 s", &[], ALL_BACKENDS, |backend| {
        let (cluster, round) = start_three(backend)?;
        let victim = round[&2].worker;
        let fault = |cluster: &mut Cluster| cluster.exec(2, &format!("kill -STOP {victim}"));
        Ok(expect_unnoticed(cluster, &round, fault, LONG_OUTAGE, |cluster| {
            cluster.exec(2, &format!("kill -CONT {victim}"))
        }))
    });
}

#[test]
fn job_survives_a_killed_launcher() {
    for_each_backend("launcher: SIGKILL", &[C10d, File, Etcd(1)], ALL_BACKENDS, |backend| {
        let (cluster, round) = start_three(backend)?;
        let victim = round[&3].launcher;
        Ok(expect_survival(cluster, &round, 3, DEATH_LIMIT, |cluster| cluster.exec(3, &kill_command(victim))))
    });
    for_each_backend(
        "launcher of the coordinator: SIGKILL",
        &[C10d, File, Etcd(1)],
        ALL_BACKENDS,
        |backend| {
            let (cluster, round) = start_three(backend)?;
            let victim = round[&1].launcher;
            let fault = |cluster: &mut Cluster| cluster.exec(1, &kill_command(victim));
            Ok(if backend.has_fixed_coordinator() {
                expect_all_fail(cluster, DEATH_LIMIT, &[2, 3], "is lost", fault)
            } else {
                expect_survival(cluster, &round, 1, DEATH_LIMIT, fault)
            })
        },
    );
    for_each_backend("guard: SIGKILL", &[], ALL_BACKENDS, |backend| {
        let (cluster, round) = start_three(backend)?;
        let victim = round[&3].guard;
        Ok(expect_survival(cluster, &round, 3, DEATH_LIMIT, |cluster| cluster.exec(3, &kill_command(victim))))
    });
}

#[test]
fn job_survives_a_launcher_stopped_by_signal() {
    for_each_backend("launcher: SIGTERM", &[], ALL_BACKENDS, |backend| {
        let (cluster, round) = start_three(backend)?;
        let node = round[&3].launcher;
        Ok(expect_survival(cluster, &round, 3, DEATH_LIMIT, |cluster| {
            cluster.exec(3, &format!("kill -TERM {node}"))
        }))
    });
    for_each_backend("launcher of the coordinator: SIGTERM", &[], ALL_BACKENDS, |backend| {
        let (cluster, round) = start_three(backend)?;
        let node = round[&1].launcher;
        let stop = |cluster: &mut Cluster| cluster.exec(1, &format!("kill -TERM {node}"));
        if backend.has_fixed_coordinator() {
            return Ok(expect_all_fail(cluster, DEATH_LIMIT, &[2, 3], "was stopped by", stop));
        }
        Ok(expect_survival(cluster, &round, 1, DEATH_LIMIT, stop))
    });
}

#[test]
fn job_survives_a_frozen_launcher() {
    for_each_backend("launcher: SIGSTOP for 1 s", &[], ALL_BACKENDS, |backend| {
        let (cluster, round) = start_three(backend)?;
        let node = round[&3].launcher;
        let fault = |cluster: &mut Cluster| cluster.exec(3, &format!("kill -STOP {node}"));
        let undo = |cluster: &mut Cluster| cluster.resume(3, node);
        Ok(expect_unnoticed(cluster, &round, fault, Duration::from_secs(1), undo))
    });
    for_each_backend("launcher: SIGSTOP until it is given up", &[], ALL_BACKENDS, |backend| {
        let (mut cluster, round) = start_three(backend)?;
        let node = round[&3].launcher;
        let stop = |cluster: &mut Cluster| cluster.exec(3, &format!("kill -STOP {node}"));
        let (times, after) = cluster.expect_new_round(&round, stop, &[1, 2], 2);
        check_times(&times, SILENT_NODE_LIMIT);
        let message = find_line(&cluster.nodes[&1].stderr(), NEW_ROUND_PHRASES);
        let wake = |cluster: &mut Cluster| cluster.resume(3, node);
        if backend.has_fixed_coordinator() {
            wake(&mut cluster);
            cluster.nodes.remove(&3).unwrap().wait().expect_exit_code(1);
        } else {
            cluster.expect_new_round(&after, wake, &[1, 2], 3);
        }
        cluster.finish();
        Ok(Row { outcome: GOES_ON, times, message })
    });
}

#[test]
fn job_survives_a_host_power_failure() {
    for_each_backend("host loses its power", &[C10d, Etcd(1)], ALL_BACKENDS, |backend| {
        let (cluster, round) = start_three(backend)?;
        Ok(expect_survival(cluster, &round, 3, SILENT_NODE_LIMIT, |cluster| {
            cluster.run_testbed(&["kill-host", "3"])
        }))
    });
    for_each_backend("host of the coordinator loses its power", &[Etcd(1)], ALL_BACKENDS, |backend| {
        let (cluster, round) = start_three(backend)?;
        let fault = |cluster: &mut Cluster| cluster.run_testbed(&["kill-host", "1"]);
        Ok(if backend.has_fixed_coordinator() {
            expect_all_fail(cluster, SILENT_NODE_LIMIT, &[2, 3], "is lost", fault)
        } else {
            expect_survival(cluster, &round, 1, SILENT_NODE_LIMIT, fault)
        })
    });
}

#[test]
fn job_waits_while_too_few_nodes_remain() {
    for_each_backend("two of three hosts lose their power, one comes back", &[], ALL_BACKENDS, |backend| {
        let (mut cluster, round) = start_three(backend)?;
        cluster.run_testbed(&["kill-host", "2"]);
        cluster.run_testbed(&["kill-host", "3"]);
        cluster.wait_for_output(1, "1 of 2 to 3 nodes have joined");
        let message = find_line(&cluster.nodes[&1].stderr(), &["1 of 2 to 3"]);
        cluster.remove_node(2);
        cluster.remove_node(3);
        let (times, after) = cluster.expect_new_round(
            &round,
            |cluster| {
                cluster.run_testbed(&["boot", "2"]);
                cluster.start(2);
            },
            &[],
            2,
        );
        assert!(times.restarted.is_some_and(|time| time < RESTART_LIMIT + DEATH_LIMIT), "{times:?}");
        assert_eq!(after[&1].rank, round[&1].rank);
        cluster.finish();
        Ok(Row { outcome: "waits, then goes on", times, message })
    });
}

/// Asserts the outcome if a host is cut off in some way and then returns.
fn check_cut_off(fault: &str, short: &[Backend], cut: &[&str], host: usize) {
    for_each_backend(fault, short, ALL_BACKENDS, |backend| {
        if matches!(cut[0], "mute" | "deaf") {
            Hosts::check_tap_links()?;
        }
        let (mut cluster, round) = start_three(backend)?;
        let survivors: Vec<usize> = [1, 2, 3].into_iter().filter(|&other| other != host).collect();
        let ended = |cluster: &mut Cluster, hosts: &[usize]| {
            for host in hosts {
                cluster.nodes.remove(host).unwrap().wait().expect_exit_code(1);
            }
        };
        if host == 1 && backend.has_fixed_coordinator() {
            let row = {
                let (times, all) = cluster.expect_failure(|cluster| cluster.run_testbed(cut), &survivors);
                check_times(&times, SILENT_NODE_LIMIT);
                Row { outcome: ENDS, times, message: find_line(&all[0].stderr, &["is lost"]) }
            };
            return Ok(row);
        }
        let (times, after) =
            cluster.expect_new_round(&round, |cluster| cluster.run_testbed(cut), &survivors, 2);
        check_times(&times, SILENT_NODE_LIMIT);
        let message = find_line(&cluster.nodes[&survivors[0]].stderr(), NEW_ROUND_PHRASES);
        // The workers of the host that was cut off must have ended before the next round started.
        let worker = round[&host].worker;
        cluster.exec(host, &format!("! kill -0 {worker} 2> /dev/null"));
        if backend.has_fixed_coordinator() {
            ended(&mut cluster, &[host]);
        } else {
            let back = cluster
                .expect_new_round(
                    &after,
                    |cluster| cluster.run_testbed(&["heal", &host.to_string()]),
                    &survivors,
                    3,
                )
                .1;
            assert!(back.values().all(|up| up.restarts == 0), "{back:?}");
        }
        cluster.finish();
        Ok(Row { outcome: GOES_ON, times, message })
    });
}

#[test]
fn job_survives_a_disconnected_host() {
    check_cut_off("host is cut off, then back", &[C10d, Etcd(1)], &["partition", "3"], 3);
    check_cut_off("host of the coordinator is cut off, then back", &[], &["partition", "1"], 1);
}

#[test]
fn job_survives_a_disconnected_host_with_a_hanging_worker() {
    for_each_backend("host is cut off while its worker does not stop", &[Etcd(1)], ALL_BACKENDS, |backend| {
        let (mut cluster, round) = start_three_with(backend, "--max-restarts=1")?;
        let (victim, stubborn) = (round[&2].worker, round[&3].worker);
        std::fs::write(cluster.job.path("stubborn.h3"), "").unwrap();
        let fault = |cluster: &mut Cluster| {
            cluster.exec(2, &kill_command(victim));
            let is_told = |line: &str| line.starts_with("stop") && line.ends_with(" 3");
            wait_until("the worker on h3 is told to stop", || {
                cluster.log().lines().any(is_told).then_some(())
            });
            cluster.run_testbed(&["partition", "3"]);
        };
        let (times, _) = cluster.expect_new_round(&round, fault, &[1, 2], 2);
        check_times(&times, SILENT_NODE_LIMIT);
        // Without the cut, the launcher would give this worker 30 s after SIGTERM.
        cluster.exec(3, &format!("! kill -0 {stubborn} 2> /dev/null"));
        let message = find_line(&cluster.nodes[&1].stderr(), NEW_ROUND_PHRASES);
        cluster.remove_node(3);
        cluster.finish();
        Ok(Row { outcome: GOES_ON, times, message })
    });
}

#[test]
fn job_survives_a_one_way_network_failure() {
    check_cut_off("nobody hears a host, which hears all", &[], &["mute", "3"], 3);
    check_cut_off("a host hears nobody, all hear it", &[], &["deaf", "3"], 3);
}

#[test]
fn job_survives_a_network_failure_between_two_hosts() {
    check_cut_off("path from a host to the coordinator is cut, then back", &[], &["partition", "3", "1"], 3);
    for_each_backend("path between two other hosts is cut", &[], ALL_BACKENDS, |backend| {
        let (cluster, round) = start_three(backend)?;
        let fault = |cluster: &mut Cluster| cluster.run_testbed(&["partition", "2", "3"]);
        Ok(expect_unnoticed(cluster, &round, fault, LONG_OUTAGE, |cluster| {
            cluster.run_testbed(&["heal", "2"])
        }))
    });
}

#[test]
fn job_survives_a_slow_or_flapping_link() {
    for_each_backend("link of 150 ms each way that loses 2 % of its frames", &[], ALL_BACKENDS, |backend| {
        Hosts::check_tap_links()?;
        let (cluster, round) = start_three(backend)?;
        let fault = |cluster: &mut Cluster| cluster.run_testbed(&["delay", "3", "150", "2"]);
        Ok(expect_unnoticed(cluster, &round, fault, 3 * LONG_OUTAGE, |_| {}))
    });
    for_each_backend(
        "link of the coordinator of 150 ms each way that loses 2 %",
        &[],
        ALL_BACKENDS,
        |backend| {
            Hosts::check_tap_links()?;
            let (cluster, round) = start_three(backend)?;
            let fault = |cluster: &mut Cluster| cluster.run_testbed(&["delay", "1", "150", "2"]);
            Ok(expect_unnoticed(cluster, &round, fault, 3 * LONG_OUTAGE, |_| {}))
        },
    );
    for_each_backend("link that is down for a second, three times", &[], ALL_BACKENDS, |backend| {
        let (cluster, round) = start_three(backend)?;
        let flap = |cluster: &mut Cluster| {
            for _ in 0..3 {
                cluster.run_testbed(&["partition", "3"]);
                std::thread::sleep(Duration::from_secs(1));
                cluster.run_testbed(&["heal", "3"]);
                // Nodes probe their neighbours once a second.
                std::thread::sleep(Duration::from_secs(2));
            }
        };
        Ok(expect_unnoticed(cluster, &round, flap, Duration::from_secs(1), |_| {}))
    });
}

#[test]
fn joining_nodes_enter_the_running_job() {
    for_each_backend("a node comes late", &[], ALL_BACKENDS, |backend| {
        let mut cluster = Cluster::new(backend, 3, "2:3")?.with_conf("last_call_timeout=1,join_timeout=100");
        cluster.start_all(2);
        let round = cluster.wait_for_round(2);
        let (times, after) = cluster.expect_new_round(&round, |cluster| cluster.start(3), &[1, 2], 3);
        check_times(&times, DEATH_LIMIT);
        assert!(after[&1].rank == round[&1].rank && after[&2].rank == round[&2].rank, "{after:?}");
        let message = find_line(&cluster.nodes[&1].stderr(), NEW_ROUND_PHRASES);
        cluster.finish();
        Ok(Row { outcome: NEW_ROUND, times, message })
    });
    for_each_backend(
        "a node comes too much, and takes the place of one that is lost",
        &[Etcd(1)],
        ALL_BACKENDS,
        |backend| {
            let mut cluster = Cluster::new(backend, 4, "2:3")?.with_argument("--max-restarts=0");
            cluster.start_all(3);
            let round = cluster.wait_for_round(3);
            cluster.start(4);
            cluster.wait_for_output(4, "waits as a standby node");
            cluster.expect_undisturbed(&round, Duration::from_secs(1));
            let victim = round[&2].launcher;
            let (times, after) = cluster.expect_new_round(
                &round,
                |cluster| cluster.exec(2, &kill_command(victim)),
                &[1, 3],
                3,
            );
            check_times(&times, DEATH_LIMIT);
            assert_eq!(after[&4].rank, round[&2].rank, "{after:?}");
            cluster.remove_node(2);
            let message = find_line(&cluster.nodes[&4].stderr(), &["waits as a standby node"]);
            cluster.finish();
            Ok(Row { outcome: NEW_ROUND, times, message })
        },
    );
    for_each_backend("a node that is killed and started again, three times", &[], ALL_BACKENDS, |backend| {
        let (mut cluster, mut round) = start_three(backend)?;
        let mut times = FaultTimes::default();
        for _ in 0..3 {
            let victim = round[&3].launcher;
            let (lost, after) = cluster.expect_new_round(
                &round,
                |cluster| cluster.exec(3, &kill_command(victim)),
                &[1, 2],
                2,
            );
            check_times(&lost, DEATH_LIMIT);
            cluster.remove_node(3);
            let (come, back) = cluster.expect_new_round(&after, |cluster| cluster.start(3), &[1, 2], 3);
            check_times(&come, DEATH_LIMIT);
            (times, round) = (come, back);
        }
        cluster.finish();
        Ok(Row { outcome: NEW_ROUND, times, message: String::new() })
    });
}

#[test]
fn job_survives_a_full_disk() {
    for_each_backend("disk with a node's logs is full", &[], ALL_BACKENDS, |backend| {
        let mut cluster = Cluster::new(backend, 3, "2:3")?.with_argument("--max-restarts=0");
        let logs = cluster.job.path("logs");
        std::fs::create_dir(&logs).unwrap();
        let (logs, fill) = (logs.display().to_string(), "cat /dev/zero > filled 2> /dev/null || true");
        let full = format!("mount -t tmpfs -o size=64k none {logs} && cd {logs} && {fill}");
        cluster = cluster.with_argument(&format!("--log-dir={logs}")).with_argument("--redirects=3");
        cluster.exec(2, &full);
        cluster.start_all(3);
        let round = cluster.wait_for_round(3);
        let victim = round[&3].launcher;
        Ok(expect_survival(cluster, &round, 3, DEATH_LIMIT, |cluster| cluster.exec(3, &kill_command(victim))))
    });
}

#[test]
fn job_survives_different_clocks() {
    const LIBFAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";
    for_each_backend("clocks of the hosts differ by hours", &[], ALL_BACKENDS, |backend| {
        if !std::path::Path::new(LIBFAKETIME).exists() {
            return Err("no libfaketime".to_owned());
        }
        let mut cluster = Cluster::new(backend, 3, "2:3")?.with_argument("--max-restarts=0");
        for (host, offset) in [(1, "+0"), (2, "+5h"), (3, "-7h")] {
            let mut command = cluster.command(host);
            command
                .env("LD_PRELOAD", LIBFAKETIME)
                .env("FAKETIME", offset)
                .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
            cluster.start_as(host, command);
            if host == 1 {
                cluster.wait_for_output(1, "nodes have joined");
            }
        }
        let round = cluster.wait_for_round(3);
        let victim = round[&3].launcher;
        // The test measures this time itself, because the clocks of some hosts are wrong.
        let fault = |cluster: &mut Cluster| cluster.exec(3, &kill_command(victim));
        let start = std::time::Instant::now();
        fault(&mut cluster);
        let after = cluster.wait_for_round(2);
        let restarted = Some(start.elapsed());
        assert!(after.contains_key(&1) && after.contains_key(&2), "{after:?}");
        cluster.remove_node(3);
        let message = find_line(&cluster.nodes[&1].stderr(), NEW_ROUND_PHRASES);
        cluster.finish();
        Ok(Row { outcome: GOES_ON, times: FaultTimes { detected: None, restarted }, message })
    });
}

#[test]
fn job_survives_an_etcd_failure() {
    let three_members = &[Etcd(3)];
    for_each_backend("etcd: SIGKILL of its leader", &[Etcd(3)], three_members, |backend| {
        let (cluster, round) = start_three(backend)?;
        let victim = round[&3].launcher;
        Ok(expect_survival(cluster, &round, 3, DEATH_LIMIT, |cluster| {
            cluster.etcd(&["kill", "leader"]);
            cluster.exec(3, &kill_command(victim));
        }))
    });
    for_each_backend("etcd: SIGKILL of the member that is asked first", &[], three_members, |backend| {
        let (cluster, round) = start_three(backend)?;
        Ok(expect_unnoticed(
            cluster,
            &round,
            |cluster| drop(cluster.etcd(&["kill", "1"])),
            LONG_OUTAGE,
            |_| {},
        ))
    });
    for_each_backend(
        "etcd: its leader hangs, and the coordinator is killed",
        &[],
        three_members,
        |backend| {
            let (cluster, round) = start_three(backend)?;
            let victim = round[&1].launcher;
            Ok(expect_survival(cluster, &round, 1, SILENT_NODE_LIMIT, |cluster| {
                cluster.etcd(&["pause", "leader"]);
                cluster.exec(1, &kill_command(victim));
            }))
        },
    );
    for_each_backend("etcd: out of reach for 10 s", &[], &[Etcd(1), Etcd(3)], |backend| {
        let (cluster, round) = start_three(backend)?;
        let members = if backend == Etcd(1) { 1 } else { 3 };
        let kill = |cluster: &mut Cluster| {
            (1..=members).for_each(|member| drop(cluster.etcd(&["kill", &member.to_string()])));
        };
        let mut row = expect_unnoticed(cluster, &round, kill, 2 * LONG_OUTAGE, |_| {});
        row.message = "etcd at …; workers keep running, and membership changes wait".to_owned();
        Ok(row)
    });
    for_each_backend(
        "etcd: out of reach while a launcher is killed, then back",
        &[Etcd(1)],
        &[Etcd(1)],
        |backend| {
            let (mut cluster, round) = start_three(backend)?;
            let victim = round[&3].launcher;
            cluster.etcd(&["kill", "1"]);
            cluster.exec(3, &kill_command(victim));
            cluster.wait_for_output(1, "membership changes wait");
            let (times, _) =
                cluster.expect_new_round(&round, |cluster| drop(cluster.etcd(&["restart", "1"])), &[1, 2], 2);
            assert!(times.restarted.is_some_and(|time| time < RESTART_LIMIT + RESTART_LIMIT), "{times:?}");
            cluster.remove_node(3);
            let message = find_line(&cluster.nodes[&1].stderr(), &["membership changes wait"]);
            cluster.finish();
            Ok(Row {
                outcome: "goes on when etcd does",
                times: FaultTimes { detected: None, ..times },
                message,
            })
        },
    );
    for_each_backend("etcd: restarted", &[], &[Etcd(1)], |backend| {
        let (cluster, round) = start_three(backend)?;
        let restart = |cluster: &mut Cluster| {
            cluster.etcd(&["kill", "1"]);
            cluster.etcd(&["restart", "1"]);
        };
        Ok(expect_unnoticed(cluster, &round, restart, LONG_OUTAGE, |_| {}))
    });
    for_each_backend("etcd: out of reach of the coordinator for 10 s", &[], &[Etcd(1), Etcd(3)], |backend| {
        let (cluster, round) = start_three(backend)?;
        let cut = |cluster: &mut Cluster| cluster.run_testbed(&["partition", "1", "0"]);
        Ok(expect_unnoticed(cluster, &round, cut, 2 * LONG_OUTAGE, |cluster| {
            cluster.run_testbed(&["heal", "1"])
        }))
    });
    for_each_backend("etcd: out of reach of another node for 10 s", &[], &[Etcd(1)], |backend| {
        let (cluster, round) = start_three(backend)?;
        let cut = |cluster: &mut Cluster| cluster.run_testbed(&["partition", "3", "0"]);
        Ok(expect_unnoticed(cluster, &round, cut, 2 * LONG_OUTAGE, |cluster| {
            cluster.run_testbed(&["heal", "3"])
        }))
    });
    for_each_backend("etcd: compacted, then the coordinator is killed", &[], &[Etcd(1)], |backend| {
        let (cluster, round) = start_three(backend)?;
        let victim = round[&1].launcher;
        for _ in 0..20 {
            cluster.etcd(&["ctl", "put", "/other", "x"]);
        }
        let status = cluster.etcd(&["ctl", "endpoint", "status", "-w", "fields"]);
        let revision = status.lines().find_map(|line| line.strip_prefix("\"Revision\" : ")).unwrap();
        cluster.etcd(&["ctl", "compact", revision.trim()]);
        Ok(expect_survival(cluster, &round, 1, DEATH_LIMIT, |cluster| cluster.exec(1, &kill_command(victim))))
    });
    for_each_backend("etcd: the coordinator's lease is revoked", &[], &[Etcd(1)], |backend| {
        let (cluster, round) = start_three(backend)?;
        let revoke = |cluster: &mut Cluster| {
            let leases = cluster.etcd(&["ctl", "lease", "list"]);
            for lease in leases.lines().skip(1) {
                cluster.etcd(&["ctl", "lease", "revoke", lease.trim()]);
            }
        };
        Ok(expect_unnoticed(cluster, &round, revoke, LONG_OUTAGE, |_| {}))
    });
}

/// Without the token, no client can join, stop or disturb a job, or make its rendezvous hold much memory.
#[test]
fn unauthenticated_peers_are_refused() {
    for_each_backend(
        "10,000 half-open connections, wrong tokens, replayed and damaged words",
        &[C10d],
        &[C10d],
        |backend| {
            let mut cluster = Cluster::new(backend, 3, "2:2")?.with_argument("--max-restarts=0");
            let unauthenticated = worker_command("unauthenticated").join(" ");
            let node = |cluster: &mut Cluster, host: usize, token: Option<&str>| {
                let mut command = cluster.command(host);
                token.map(|token| command.env("CONVOKE_TOKEN", token));
                cluster.start_as(host, command);
            };
            node(&mut cluster, 1, Some("secret"));
            cluster.wait_for_output(1, "nodes have joined");
            node(&mut cluster, 2, Some("secret"));
            let round = cluster.wait_for_round(2);

            // A legitimate node connects through a proxy that records its traffic.
            let recording = cluster.job.path("recording").display().to_string();
            let record = format!(
                "{unauthenticated} record 10.77.0.3:7000 h1:29400 {recording} > /dev/null 2>&1 & echo $! > {recording}.pid"
            );
            cluster.exec(3, &record);
            wait_until("the recorder", || cluster.succeeds(3, "grep -q :1B58 /proc/net/tcp").then_some(()));
            let endpoint = std::mem::replace(&mut cluster.endpoint, "10.77.0.3:7000".to_owned());
            node(&mut cluster, 3, Some("secret"));
            cluster.wait_for_output(3, "waits as a standby node");
            cluster.endpoint = endpoint;
            cluster.signal(3, "TERM");
            cluster.nodes.remove(&3).unwrap().wait();
            cluster.exec(3, &format!("kill $(cat {recording}.pid)"));

            for token in [None, Some("guessed")] {
                node(&mut cluster, 3, token);
                cluster.wait_for_output(3, "CONVOKE_TOKEN");
                cluster.signal(3, "TERM");
                cluster.nodes.remove(&3).unwrap().wait();
            }
            cluster.exec(3, &format!("{unauthenticated} replay h1:29400 {recording}"));
            let before = peak_memory(&cluster, round[&1].launcher);
            cluster.exec(3, &format!("{unauthenticated} flood h1:29400 10000"));
            let grown = peak_memory(&cluster, round[&1].launcher).saturating_sub(before);
            assert!(grown < 32 << 10, "it has grown by {grown} KiB");
            cluster.expect_undisturbed(&round, Duration::from_secs(1));
            cluster.finish();
            let message = format!("{:.1} MiB more", grown as f64 / 1024.0);
            Ok(Row { outcome: RUNS_ON, times: FaultTimes::default(), message })
        },
    );
}

/// Returns the peak memory of a process of h1, in KiB.
fn peak_memory(cluster: &Cluster, pid: i32) -> usize {
    let status = cluster.output_of(1, &format!("grep VmHWM /proc/{pid}/status"));
    status.split_whitespace().nth(1).unwrap().parse().unwrap()
}
