//! The faults of elastic jobs.

use std::time::Duration;

use convoke_launcher_tests::harness::Ended;
use convoke_launcher_tests::hosts::Hosts;
use convoke_launcher_tests::worker_of;
use convoke_testkit::is_full;
use convoke_testkit::{skip, wait_until};

use super::table::{Row, quote, row};
use super::world::{Backend, Round, Seen, World};
use Backend::{C10d, Etcd, File};

const ALL: &[Backend] = &[C10d, File, Etcd(1), Etcd(3)];
/// The documentation promises 4 s to detect a silent node, and one further second until all workers run
/// again. The remainder is an allowance for a busy machine.
const SILENT: Duration = Duration::from_secs(4 + 6);
/// The documentation promises 0.5 s to detect the death of a process.
const DEATH: Duration = Duration::from_millis(500 + 5500);
const AGAIN: Duration = Duration::from_secs(1 + 6);
/// A silence that is long enough for the others to declare a node lost.
const LONG: Duration = Duration::from_secs(5);

/// Phrases with which a node reports the end of a round.
const BEGINS: &[&str] = &["begin anew", "nobody was heard"];

const RUNS_ON: &str = "runs on";
const GOES_ON: &str = "goes on without it";
const BEGINS_ANEW: &str = "begins anew";
const ENDS: &str = "ends, exit code 1";

/// Runs `case` with each backend of `all`, or in the short form with each of `short`.
fn each(fault: &str, short: &[Backend], all: &[Backend], case: impl Fn(Backend) -> Result<Row, String>) {
    for &backend in if is_full() { all } else { short } {
        match case(backend) {
            Ok(seen) => row(fault, backend, &seen),
            Err(why) => skip(format!("{fault} ({}): {why}", backend.name())),
        }
    }
}

fn check(seen: &Seen, noticed: Duration) {
    assert!(seen.noticed.is_some_and(|time| time < noticed), "{seen:?}");
    assert!(seen.again.is_none_or(|time| time < noticed + AGAIN), "{seen:?}");
}

/// Starts three nodes of "2:3" and waits for their workers.
fn three(backend: Backend) -> Result<(World, Round), String> {
    three_with(backend, "--max-restarts=0")
}

fn three_with(backend: Backend, argument: &str) -> Result<(World, Round), String> {
    let mut world = World::new(backend, 3, "2:3")?.with(argument);
    world.start_all(3);
    let round = world.round(3);
    Ok((world, round))
}

fn kill(pid: i32) -> String {
    format!("kill -9 {pid}")
}

/// Asserts that no node notices the fault, and that the job finishes.
fn unnoticed(
    mut world: World,
    round: &Round,
    fault: impl FnOnce(&mut World),
    lasts: Duration,
    undo: impl FnOnce(&mut World),
) -> Row {
    fault(&mut world);
    world.nothing(round, lasts);
    undo(&mut world);
    world.nothing(round, Duration::from_secs(1));
    world.finish();
    Row { outcome: RUNS_ON, seen: Seen::default(), said: String::new() }
}

/// Asserts that node `lost` is lost by `fault`, and that the two others go on.
fn survived(
    mut world: World,
    round: &Round,
    lost: usize,
    limit: Duration,
    fault: impl FnOnce(&mut World),
) -> Row {
    let told: Vec<usize> = round.keys().copied().filter(|&host| host != lost).collect();
    let (seen, after) = world.again(round, fault, &told, 2);
    check(&seen, limit);
    assert!(after.values().all(|up| up.restarts == 0), "a loss uses no restart: {after:?}");
    for host in &told {
        if let (Some(before), Some(now)) = (round.get(host), after.get(host)) {
            assert!(before.rank >= 2 || before.rank == now.rank, "{round:?}, {after:?}");
        }
    }
    world.forget(lost);
    let said = quote(&world.nodes[&told[0]].stderr(), BEGINS);
    world.finish();
    Row { outcome: GOES_ON, seen, said }
}

fn all_end(
    mut world: World,
    limit: Duration,
    hosts: &[usize],
    what: &str,
    fault: impl FnOnce(&mut World),
) -> Row {
    let (seen, ended) = world.ends(fault, hosts);
    check(&seen, limit);
    let said: Vec<String> = ended.iter().map(|Ended { stderr, .. }| quote(stderr, &[what])).collect();
    Row { outcome: ENDS, seen, said: said[said.len() - 1].clone() }
}

#[test]
fn job_survives_a_killed_worker() {
    each("worker: SIGKILL", &[C10d, Etcd(1)], ALL, |backend| {
        let (mut world, round) = three_with(backend, "--max-restarts=1")?;
        let victim = round[&2].worker;
        let (seen, _) = world.again(&round, |world| world.on(2, &kill(victim)), &[1, 3], 3);
        check(&seen, DEATH);
        let said = quote(&world.nodes[&1].stderr(), BEGINS);
        world.finish();
        Ok(Row { outcome: BEGINS_ANEW, seen, said })
    });
    each("worker: SIGKILL, `--max-restarts=0`", &[C10d], ALL, |backend| {
        let (world, round) = three(backend)?;
        let victim = round[&2].worker;
        Ok(all_end(world, DEATH, &[1, 2, 3], "SIGKILL", |world| world.on(2, &kill(victim))))
    });
}

#[test]
fn job_survives_a_stopped_worker() {
    each("worker: SIGSTOP for 5 s", &[], ALL, |backend| {
        let (world, round) = three(backend)?;
        let victim = round[&2].worker;
        let fault = |world: &mut World| world.on(2, &format!("kill -STOP {victim}"));
        Ok(unnoticed(world, &round, fault, LONG, |world| world.on(2, &format!("kill -CONT {victim}"))))
    });
}

#[test]
fn job_survives_a_killed_launcher() {
    each("launcher: SIGKILL", &[C10d, File, Etcd(1)], ALL, |backend| {
        let (world, round) = three(backend)?;
        let victim = round[&3].launcher;
        Ok(survived(world, &round, 3, DEATH, |world| world.on(3, &kill(victim))))
    });
    each("launcher of the coordinator: SIGKILL", &[C10d, File, Etcd(1)], ALL, |backend| {
        let (world, round) = three(backend)?;
        let victim = round[&1].launcher;
        let fault = |world: &mut World| world.on(1, &kill(victim));
        Ok(if backend.is_fixed() {
            all_end(world, DEATH, &[2, 3], "is lost", fault)
        } else {
            survived(world, &round, 1, DEATH, fault)
        })
    });
    each("guard: SIGKILL", &[], ALL, |backend| {
        let (world, round) = three(backend)?;
        let victim = round[&3].guard;
        Ok(survived(world, &round, 3, DEATH, |world| world.on(3, &kill(victim))))
    });
}

#[test]
fn job_survives_a_launcher_stopped_by_signal() {
    each("launcher: SIGTERM", &[], ALL, |backend| {
        let (world, round) = three(backend)?;
        let node = round[&3].launcher;
        Ok(survived(world, &round, 3, DEATH, |world| world.on(3, &format!("kill -TERM {node}"))))
    });
    each("launcher of the coordinator: SIGTERM", &[], ALL, |backend| {
        let (world, round) = three(backend)?;
        let node = round[&1].launcher;
        let stop = |world: &mut World| world.on(1, &format!("kill -TERM {node}"));
        if backend.is_fixed() {
            return Ok(all_end(world, DEATH, &[2, 3], "was stopped by", stop));
        }
        Ok(survived(world, &round, 1, DEATH, stop))
    });
}

#[test]
fn job_survives_a_frozen_launcher() {
    each("launcher: SIGSTOP for 1 s", &[], ALL, |backend| {
        let (world, round) = three(backend)?;
        let node = round[&3].launcher;
        let fault = |world: &mut World| world.on(3, &format!("kill -STOP {node}"));
        let undo = |world: &mut World| world.wake(3, node);
        Ok(unnoticed(world, &round, fault, Duration::from_secs(1), undo))
    });
    each("launcher: SIGSTOP until it is given up", &[], ALL, |backend| {
        let (mut world, round) = three(backend)?;
        let node = round[&3].launcher;
        let stop = |world: &mut World| world.on(3, &format!("kill -STOP {node}"));
        let (seen, after) = world.again(&round, stop, &[1, 2], 2);
        check(&seen, SILENT);
        let said = quote(&world.nodes[&1].stderr(), BEGINS);
        let wake = |world: &mut World| world.wake(3, node);
        if backend.is_fixed() {
            wake(&mut world);
            world.nodes.remove(&3).unwrap().wait().expect(1);
        } else {
            world.again(&after, wake, &[1, 2], 3);
        }
        world.finish();
        Ok(Row { outcome: GOES_ON, seen, said })
    });
}

#[test]
fn job_survives_a_host_power_failure() {
    each("host loses its power", &[C10d, Etcd(1)], ALL, |backend| {
        let (world, round) = three(backend)?;
        Ok(survived(world, &round, 3, SILENT, |world| world.tell(&["kill-host", "3"])))
    });
    each("host of the coordinator loses its power", &[Etcd(1)], ALL, |backend| {
        let (world, round) = three(backend)?;
        let fault = |world: &mut World| world.tell(&["kill-host", "1"]);
        Ok(if backend.is_fixed() {
            all_end(world, SILENT, &[2, 3], "is lost", fault)
        } else {
            survived(world, &round, 1, SILENT, fault)
        })
    });
}

#[test]
fn job_waits_while_too_few_nodes_remain() {
    each("two of three hosts lose their power, one comes back", &[], ALL, |backend| {
        let (mut world, round) = three(backend)?;
        world.tell(&["kill-host", "2"]);
        world.tell(&["kill-host", "3"]);
        world.wait_until_said(1, "1 of 2 to 3 nodes are here");
        let said = quote(&world.nodes[&1].stderr(), &["1 of 2 to 3"]);
        world.forget(2);
        world.forget(3);
        let (seen, after) = world.again(
            &round,
            |world| {
                world.tell(&["boot", "2"]);
                world.start(2);
            },
            &[],
            2,
        );
        assert!(seen.again.is_some_and(|time| time < AGAIN + DEATH), "{seen:?}");
        assert_eq!(after[&1].rank, round[&1].rank);
        world.finish();
        Ok(Row { outcome: "waits, then goes on", seen, said })
    });
}

/// Asserts the outcome if a host is cut off in some way and then returns.
fn cut(fault: &str, short: &[Backend], cut: &[&str], host: usize) {
    each(fault, short, ALL, |backend| {
        if matches!(cut[0], "mute" | "deaf") {
            Hosts::can_have_wires()?;
        }
        let (mut world, round) = three(backend)?;
        let told: Vec<usize> = [1, 2, 3].into_iter().filter(|&other| other != host).collect();
        let ended = |world: &mut World, hosts: &[usize]| {
            for host in hosts {
                world.nodes.remove(host).unwrap().wait().expect(1);
            }
        };
        if host == 1 && backend.is_fixed() {
            let row = {
                let (seen, all) = world.ends(|world| world.tell(cut), &told);
                check(&seen, SILENT);
                Row { outcome: ENDS, seen, said: quote(&all[0].stderr, &["is lost"]) }
            };
            return Ok(row);
        }
        let (seen, after) = world.again(&round, |world| world.tell(cut), &told, 2);
        check(&seen, SILENT);
        let said = quote(&world.nodes[&told[0]].stderr(), BEGINS);
        // The workers of the host that was cut off must have ended before the next round started.
        let worker = round[&host].worker;
        world.on(host, &format!("! kill -0 {worker} 2> /dev/null"));
        if backend.is_fixed() {
            ended(&mut world, &[host]);
        } else {
            let back = world.again(&after, |world| world.tell(&["heal", &host.to_string()]), &told, 3).1;
            assert!(back.values().all(|up| up.restarts == 0), "{back:?}");
        }
        world.finish();
        Ok(Row { outcome: GOES_ON, seen, said })
    });
}

#[test]
fn job_survives_a_disconnected_host() {
    cut("host is cut off, then back", &[C10d, Etcd(1)], &["partition", "3"], 3);
    cut("host of the coordinator is cut off, then back", &[], &["partition", "1"], 1);
}

#[test]
fn job_survives_a_disconnected_host_with_a_hanging_worker() {
    each("host is cut off while its worker does not stop", &[Etcd(1)], ALL, |backend| {
        let (mut world, round) = three_with(backend, "--max-restarts=1")?;
        let (victim, stubborn) = (round[&2].worker, round[&3].worker);
        std::fs::write(world.job.path("stubborn.h3"), "").unwrap();
        let fault = |world: &mut World| {
            world.on(2, &kill(victim));
            let is_told = |line: &str| line.starts_with("stop") && line.ends_with(" 3");
            wait_until("the worker on h3 is told to stop", || world.log().lines().any(is_told).then_some(()));
            world.tell(&["partition", "3"]);
        };
        let (seen, _) = world.again(&round, fault, &[1, 2], 2);
        check(&seen, SILENT);
        // Without the cut, the launcher would give this worker 30 s after SIGTERM.
        world.on(3, &format!("! kill -0 {stubborn} 2> /dev/null"));
        let said = quote(&world.nodes[&1].stderr(), BEGINS);
        world.forget(3);
        world.finish();
        Ok(Row { outcome: GOES_ON, seen, said })
    });
}

#[test]
fn job_survives_a_one_way_network_failure() {
    cut("nobody hears a host, which hears all", &[], &["mute", "3"], 3);
    cut("a host hears nobody, all hear it", &[], &["deaf", "3"], 3);
}

#[test]
fn job_survives_a_network_failure_between_two_hosts() {
    cut("path from a host to the coordinator is cut, then back", &[], &["partition", "3", "1"], 3);
    each("path between two other hosts is cut", &[], ALL, |backend| {
        let (world, round) = three(backend)?;
        let fault = |world: &mut World| world.tell(&["partition", "2", "3"]);
        Ok(unnoticed(world, &round, fault, LONG, |world| world.tell(&["heal", "2"])))
    });
}

#[test]
fn job_survives_a_slow_or_flapping_link() {
    each("link of 150 ms each way that loses 2 % of its frames", &[], ALL, |backend| {
        Hosts::can_have_wires()?;
        let (world, round) = three(backend)?;
        let fault = |world: &mut World| world.tell(&["delay", "3", "150", "2"]);
        Ok(unnoticed(world, &round, fault, 3 * LONG, |_| {}))
    });
    each("link of the coordinator of 150 ms each way that loses 2 %", &[], ALL, |backend| {
        Hosts::can_have_wires()?;
        let (world, round) = three(backend)?;
        let fault = |world: &mut World| world.tell(&["delay", "1", "150", "2"]);
        Ok(unnoticed(world, &round, fault, 3 * LONG, |_| {}))
    });
    each("link that is down for a second, three times", &[], ALL, |backend| {
        let (world, round) = three(backend)?;
        let flap = |world: &mut World| {
            for _ in 0..3 {
                world.tell(&["partition", "3"]);
                std::thread::sleep(Duration::from_secs(1));
                world.tell(&["heal", "3"]);
                // Nodes probe their neighbours once a second.
                std::thread::sleep(Duration::from_secs(2));
            }
        };
        Ok(unnoticed(world, &round, flap, Duration::from_secs(1), |_| {}))
    });
}

#[test]
fn joining_nodes_enter_the_running_job() {
    each("a node comes late", &[], ALL, |backend| {
        let mut world = World::new(backend, 3, "2:3")?.with_conf("last_call_timeout=1,join_timeout=100");
        world.start_all(2);
        let round = world.round(2);
        let (seen, after) = world.again(&round, |world| world.start(3), &[1, 2], 3);
        check(&seen, DEATH);
        assert!(after[&1].rank == round[&1].rank && after[&2].rank == round[&2].rank, "{after:?}");
        let said = quote(&world.nodes[&1].stderr(), BEGINS);
        world.finish();
        Ok(Row { outcome: BEGINS_ANEW, seen, said })
    });
    each("a node comes too much, and takes the place of one that is lost", &[Etcd(1)], ALL, |backend| {
        let mut world = World::new(backend, 4, "2:3")?.with("--max-restarts=0");
        world.start_all(3);
        let round = world.round(3);
        world.start(4);
        world.wait_until_said(4, "waits as a spare");
        world.nothing(&round, Duration::from_secs(1));
        let victim = round[&2].launcher;
        let (seen, after) = world.again(&round, |world| world.on(2, &kill(victim)), &[1, 3], 3);
        check(&seen, DEATH);
        assert_eq!(after[&4].rank, round[&2].rank, "{after:?}");
        world.forget(2);
        let said = quote(&world.nodes[&4].stderr(), &["spare"]);
        world.finish();
        Ok(Row { outcome: BEGINS_ANEW, seen, said })
    });
    each("a node that is killed and started again, three times", &[], ALL, |backend| {
        let (mut world, mut round) = three(backend)?;
        let mut seen = Seen::default();
        for _ in 0..3 {
            let victim = round[&3].launcher;
            let (lost, after) = world.again(&round, |world| world.on(3, &kill(victim)), &[1, 2], 2);
            check(&lost, DEATH);
            world.forget(3);
            let (come, back) = world.again(&after, |world| world.start(3), &[1, 2], 3);
            check(&come, DEATH);
            (seen, round) = (come, back);
        }
        world.finish();
        Ok(Row { outcome: BEGINS_ANEW, seen, said: String::new() })
    });
}

#[test]
fn job_survives_a_full_disk() {
    each("disk with a node's logs is full", &[], ALL, |backend| {
        let mut world = World::new(backend, 3, "2:3")?.with("--max-restarts=0");
        let logs = world.job.path("logs");
        std::fs::create_dir(&logs).unwrap();
        let (logs, fill) = (logs.display().to_string(), "cat /dev/zero > filled 2> /dev/null || true");
        let full = format!("mount -t tmpfs -o size=64k none {logs} && cd {logs} && {fill}");
        world = world.with(&format!("--log-dir={logs}")).with("--redirects=3");
        world.on(2, &full);
        world.start_all(3);
        let round = world.round(3);
        let victim = round[&3].launcher;
        Ok(survived(world, &round, 3, DEATH, |world| world.on(3, &kill(victim))))
    });
}

#[test]
fn job_survives_different_clocks() {
    const FAKE: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";
    each("clocks of the hosts differ by hours", &[], ALL, |backend| {
        if !std::path::Path::new(FAKE).exists() {
            return Err("no libfaketime".to_owned());
        }
        let mut world = World::new(backend, 3, "2:3")?.with("--max-restarts=0");
        for (host, offset) in [(1, "+0"), (2, "+5h"), (3, "-7h")] {
            let mut command = world.command(host);
            command.env("LD_PRELOAD", FAKE).env("FAKETIME", offset).env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
            world.start_as(host, command);
            if host == 1 {
                world.wait_until_said(1, "nodes are here");
            }
        }
        let round = world.round(3);
        let victim = round[&3].launcher;
        // The test measures this time itself, because the clocks of some hosts are wrong.
        let fault = |world: &mut World| world.on(3, &kill(victim));
        let start = std::time::Instant::now();
        fault(&mut world);
        let after = world.round(2);
        let again = Some(start.elapsed());
        assert!(after.contains_key(&1) && after.contains_key(&2), "{after:?}");
        world.forget(3);
        let said = quote(&world.nodes[&1].stderr(), BEGINS);
        world.finish();
        Ok(Row { outcome: GOES_ON, seen: Seen { noticed: None, again }, said })
    });
}

#[test]
fn job_survives_an_etcd_failure() {
    let three_members = &[Etcd(3)];
    each("etcd: SIGKILL of its leader", &[Etcd(3)], three_members, |backend| {
        let (world, round) = three(backend)?;
        let victim = round[&3].launcher;
        Ok(survived(world, &round, 3, DEATH, |world| {
            world.etcd(&["kill", "leader"]);
            world.on(3, &kill(victim));
        }))
    });
    each("etcd: SIGKILL of the member that is asked first", &[], three_members, |backend| {
        let (world, round) = three(backend)?;
        Ok(unnoticed(world, &round, |world| drop(world.etcd(&["kill", "1"])), LONG, |_| {}))
    });
    each("etcd: its leader hangs, and the coordinator is killed", &[], three_members, |backend| {
        let (world, round) = three(backend)?;
        let victim = round[&1].launcher;
        Ok(survived(world, &round, 1, SILENT, |world| {
            world.etcd(&["pause", "leader"]);
            world.on(1, &kill(victim));
        }))
    });
    each("etcd: out of reach for 10 s", &[], &[Etcd(1), Etcd(3)], |backend| {
        let (world, round) = three(backend)?;
        let members = if backend == Etcd(1) { 1 } else { 3 };
        let kill = |world: &mut World| {
            (1..=members).for_each(|member| drop(world.etcd(&["kill", &member.to_string()])));
        };
        let mut row = unnoticed(world, &round, kill, 2 * LONG, |_| {});
        row.said = "etcd at …; workers run on, and changes of membership wait".to_owned();
        Ok(row)
    });
    each("etcd: out of reach while a launcher is killed, then back", &[Etcd(1)], &[Etcd(1)], |backend| {
        let (mut world, round) = three(backend)?;
        let victim = round[&3].launcher;
        world.etcd(&["kill", "1"]);
        world.on(3, &kill(victim));
        world.wait_until_said(1, "changes of membership wait");
        let (seen, _) = world.again(&round, |world| drop(world.etcd(&["restart", "1"])), &[1, 2], 2);
        assert!(seen.again.is_some_and(|time| time < AGAIN + AGAIN), "{seen:?}");
        world.forget(3);
        let said = quote(&world.nodes[&1].stderr(), &["changes of membership wait"]);
        world.finish();
        Ok(Row { outcome: "goes on when etcd does", seen: Seen { noticed: None, ..seen }, said })
    });
    each("etcd: restarted", &[], &[Etcd(1)], |backend| {
        let (world, round) = three(backend)?;
        let restart = |world: &mut World| {
            world.etcd(&["kill", "1"]);
            world.etcd(&["restart", "1"]);
        };
        Ok(unnoticed(world, &round, restart, LONG, |_| {}))
    });
    each("etcd: out of reach of the coordinator for 10 s", &[], &[Etcd(1), Etcd(3)], |backend| {
        let (world, round) = three(backend)?;
        let cut = |world: &mut World| world.tell(&["partition", "1", "0"]);
        Ok(unnoticed(world, &round, cut, 2 * LONG, |world| world.tell(&["heal", "1"])))
    });
    each("etcd: out of reach of another node for 10 s", &[], &[Etcd(1)], |backend| {
        let (world, round) = three(backend)?;
        let cut = |world: &mut World| world.tell(&["partition", "3", "0"]);
        Ok(unnoticed(world, &round, cut, 2 * LONG, |world| world.tell(&["heal", "3"])))
    });
    each("etcd: compacted, then the coordinator is killed", &[], &[Etcd(1)], |backend| {
        let (world, round) = three(backend)?;
        let victim = round[&1].launcher;
        for _ in 0..20 {
            world.etcd(&["ctl", "put", "/other", "x"]);
        }
        let status = world.etcd(&["ctl", "endpoint", "status", "-w", "fields"]);
        let revision = status.lines().find_map(|line| line.strip_prefix("\"Revision\" : ")).unwrap();
        world.etcd(&["ctl", "compact", revision.trim()]);
        Ok(survived(world, &round, 1, DEATH, |world| world.on(1, &kill(victim))))
    });
    each("etcd: the coordinator's lease is revoked", &[], &[Etcd(1)], |backend| {
        let (world, round) = three(backend)?;
        let revoke = |world: &mut World| {
            let leases = world.etcd(&["ctl", "lease", "list"]);
            for lease in leases.lines().skip(1) {
                world.etcd(&["ctl", "lease", "revoke", lease.trim()]);
            }
        };
        Ok(unnoticed(world, &round, revoke, LONG, |_| {}))
    });
}

/// Without the token, no client can join, stop or disturb a job, or make its rendezvous hold much memory.
#[test]
fn unauthenticated_peers_are_refused() {
    each(
        "10,000 half-open connections, wrong tokens, replayed and damaged words",
        &[C10d],
        &[C10d],
        |backend| {
            let mut world = World::new(backend, 3, "2:2")?.with("--max-restarts=0");
            let intruder = worker_of("intruder").join(" ");
            let node = |world: &mut World, host: usize, token: Option<&str>| {
                let mut command = world.command(host);
                token.map(|token| command.env("CONVOKE_TOKEN", token));
                world.start_as(host, command);
            };
            node(&mut world, 1, Some("secret"));
            world.wait_until_said(1, "nodes are here");
            node(&mut world, 2, Some("secret"));
            let round = world.round(2);

            // A legitimate node connects through a proxy that records its traffic.
            let tape = world.job.path("tape").display().to_string();
            let record = format!(
                "{intruder} record 10.77.0.3:7000 h1:29400 {tape} > /dev/null 2>&1 & echo $! > {tape}.pid"
            );
            world.on(3, &record);
            wait_until("the recorder", || world.tries(3, "grep -q :1B58 /proc/net/tcp").then_some(()));
            let endpoint = std::mem::replace(&mut world.endpoint, "10.77.0.3:7000".to_owned());
            node(&mut world, 3, Some("secret"));
            world.wait_until_said(3, "waits as a spare");
            world.endpoint = endpoint;
            world.signal(3, "TERM");
            world.nodes.remove(&3).unwrap().wait();
            world.on(3, &format!("kill $(cat {tape}.pid)"));

            for token in [None, Some("guessed")] {
                node(&mut world, 3, token);
                world.wait_until_said(3, "CONVOKE_TOKEN");
                world.signal(3, "TERM");
                world.nodes.remove(&3).unwrap().wait();
            }
            world.on(3, &format!("{intruder} replay h1:29400 {tape}"));
            let before = memory(&world, round[&1].launcher);
            world.on(3, &format!("{intruder} flood h1:29400 10000"));
            let grown = memory(&world, round[&1].launcher).saturating_sub(before);
            assert!(grown < 32 << 10, "it has grown by {grown} KiB");
            world.nothing(&round, Duration::from_secs(1));
            world.finish();
            let said = format!("{:.1} MiB more", grown as f64 / 1024.0);
            Ok(Row { outcome: RUNS_ON, seen: Seen::default(), said })
        },
    );
}

/// Returns the peak memory of a process of h1, in KiB.
fn memory(world: &World, pid: i32) -> usize {
    let status = world.says(1, &format!("grep VmHWM /proc/{pid}/status"));
    status.split_whitespace().nth(1).unwrap().parse().unwrap()
}
