//! `convoke check` on simulated hosts: each mistake of its table is made on one host, and named with a remedy.

use std::fs;

use convoke_launcher_tests::harness::Job;
use convoke_testkit::{gpu, is_full_test_run};

use crate::checked_hosts::{Checked, LIMIT, LIMIT_WITH_PAIRS, Mistake, flag, mistake};

#[test]
fn eight_healthy_hosts_give_no_problem() {
    let Some(checked) = Checked::up_or_skip(8, "checks of healthy hosts") else { return };
    for _ in 0..if is_full_test_run() { 100 } else { 3 } {
        checked.assert_healthy();
    }
    let result = checked.check("--net", None);
    let text = &result.nodes[0].stdout;
    assert!(text.contains("convoke check: throughput of 56 pairs: median "), "{text}");
    assert!(!text.contains("FAIL") && !text.contains("WARN"), "{text}");
    assert!(result.took < LIMIT_WITH_PAIRS, "{:?}", result.took);
}

#[test]
fn wrong_addresses_and_names_are_named() {
    let Some(checked) = Checked::up_or_skip(3, "checks of addresses") else { return };
    let own_name = mistake(
        2,
        "sed 's/.* h2$/127.0.1.1 h2/' /etc/hosts > $JOB/hosts; mount --bind $JOB/hosts /etc/hosts",
    );
    checked.assert_named(&own_name, "WARN", "h2", &["its own name h2 means 127.0.1.1"]);
    let unknown = mistake(2, "grep -v 'h2$' /etc/hosts > $JOB/hosts; mount --bind $JOB/hosts /etc/hosts");
    checked.assert_named(&unknown, "WARN", "h2", &["its own name h2 has no address"]);
    let interface = mistake(3, "export NCCL_SOCKET_IFNAME=ib0");
    checked.assert_named(&interface, "FAIL", "h3", &["NCCL_SOCKET_IFNAME=ib0 names no interface", "eth0"]);
    // The address of node 0 belongs to another host, on node 0 itself.
    let result = checked.check("", Some(&flag(1, "--master-addr=h2")));
    result.assert_names("FAIL", "h1", &["h2 is no address of this host"]);
    // A name server that says nothing, for a name that only it could know.
    fs::write(checked.job.path("table"), "h3 SILENCE\n").unwrap();
    let ask = checked.start_name_server();
    let silent = mistake(3, ask);
    checked.assert_named(&silent, "FAIL", "h3", &["the name server gave no answer in 2.5 s"]);
    fs::write(checked.job.path("table"), "h3 10.77.0.3/1.3\n").unwrap();
    checked.assert_named(&mistake(3, ask), "WARN", "h3", &["looking up h3 took 1."]);
}

#[test]
fn blocked_and_taken_ports_are_named() {
    let Some(checked) = Checked::up_or_skip(3, "checks of ports") else { return };
    // Packets that open a TCP connection from h1 to h3 are lost, except at the job's port.
    let cut = "ip link add null0 type ifb; tc qdisc add dev eth0 clsact; tc filter add dev eth0 ingress protocol ip prio 9 u32 \
               match ip src 10.77.0.1/32 match ip protocol 6 0xff match u8 0x02 0x12 at 33 action mirred egress redirect dev null0";
    let heal = "tc qdisc del dev eth0 clsact; ip link del null0";
    checked.on(3, cut);
    let result = checked.check("", None);
    result.assert_names("FAIL", "h3", &["h1 cannot reach 10.77.0.3:", "(no answer in 1.5 s; h3 reaches h1)"]);
    assert!(result.took < LIMIT, "{:?}", result.took);
    checked.on(3, heal);
    // The other way round: h3 does not reach node 0, so it does not come at all.
    let blocked = "ip link add null0 type ifb; tc qdisc add dev eth0 clsact; tc filter add dev eth0 ingress protocol ip prio 9 u32 \
                   match ip src 10.77.0.3/32 match ip protocol 6 0xff action mirred egress redirect dev null0";
    checked.on(1, blocked);
    let result = checked.check("", None);
    result.assert_names("FAIL", "node 2", &["did not come to the check within 3 s"]);
    let own = &result.nodes[2].stdout;
    assert!(own.contains("FAIL h3: node 0 cannot be reached at h1:29500 within 3 s"), "{}", result.text());
    assert!(own.contains("     try: ") && own.contains("firewall"), "{own}");
    assert!(result.took < LIMIT, "{:?}", result.took);
    checked.on(1, heal);
    let taken = "python3 -c 'import socket, time; s = socket.create_server((\"\", 29500)); print(\"ready\", flush=True); s.accept(); \
                 time.sleep(60)' > $JOB/taken.out 2>&1 </dev/null & echo $! > $JOB/taken.pid; \
                 until grep -q ready $JOB/taken.out; do sleep 0.01; done";
    let result = checked.check("", Some(&mistake(1, taken)));
    result.assert_names("FAIL", "h1", &["29500 is in use by python3 (pid "]);
    let other = &result.nodes[1].stdout;
    assert!(other.contains("FAIL h2: node 0 cannot be reached at h1:29500"), "{}", result.text());
    assert!(other.contains("another program answers there"), "{}", result.text());
    assert!(result.took < LIMIT, "{:?}", result.took);
    checked.on(1, "kill $(cat $JOB/taken.pid)");
    checked.assert_healthy();
}

#[test]
fn wrong_layouts_and_unequal_hosts_are_named() {
    let Some(checked) = Checked::up_or_skip(3, "checks of layouts") else { return };
    checked.assert_named(&flag(2, "--nnodes=4"), "FAIL", "h2", &["--nnodes is 4, 3 on h1, h3"]);
    checked.assert_named(
        &flag(2, "--nproc-per-node=2"),
        "WARN",
        "h2",
        &["workers per node is 2, 1 on h1, h3"],
    );
    let result =
        checked.assert_named(&flag(3, "--node-rank=1"), "FAIL", "node 2", &["did not come to the check"]);
    let duplicate =
        result.nodes.iter().find(|node| node.stdout.contains("node rank 1 is taken: pid ")).unwrap();
    assert_eq!(duplicate.status.code(), Some(1));
    checked.assert_named(
        &mistake(2, "export NCCL_DEBUG=INFO"),
        "WARN",
        "h2",
        &["$NCCL_DEBUG is INFO, missing on h1, h3"],
    );
    let script =
        mistake(3, "echo '#!/bin/sh' > $JOB/old; chmod +x $JOB/old; mount --bind $JOB/old worker.sh");
    checked.assert_named(&script, "FAIL", "h3", &["hash of worker.sh is "]);
    let python = "printf '#!/bin/sh\\nprintf \"torch\\\\t2.6.0\\\\n\"\\n' > $JOB/python; chmod +x $JOB/python; export PYTHON_EXEC=$JOB/python";
    let result = checked.check("train.py", Some(&mistake(2, python)));
    result.assert_names("FAIL", "h2", &["torch is 2.6.0, "]);
    let missing = Mistake { host: 2, before: "mkdir -p $JOB/empty; cd $JOB/empty", flags: "train.py" };
    checked.assert_named(&missing, "FAIL", "h2", &["train.py cannot be read in ", "/empty"]);
    let no_python = Mistake { host: 3, before: "export PYTHON_EXEC=/no/python3", flags: "train.py" };
    checked.assert_named(&no_python, "FAIL", "h3", &["/no/python3"]);
}

#[test]
fn limits_disks_and_shared_memory_are_named() {
    let Some(checked) = Checked::up_or_skip(3, "checks of limits") else { return };
    let small = mistake(2, "mount -t tmpfs -o size=20m tmpfs /dev/shm");
    checked.assert_named(&small, "FAIL", "h2", &["/dev/shm has 20 MiB free of 20 MiB"]);
    let docker = mistake(2, "mount -t tmpfs -o size=64m tmpfs /dev/shm");
    checked.assert_named(&docker, "WARN", "h2", &["/dev/shm has 64 MiB free of 64 MiB"]);
    let few = mistake(3, "ulimit -n 1000");
    checked.assert_named(&few, "WARN", "h3", &["a process may open 1000 files"]);
    let none = mistake(3, "ulimit -n 30");
    checked.assert_named(&none, "FAIL", "h3", &["open files, and 30 are allowed"]);
    // A host with RDMA devices, whose processes may not lock memory.
    let locked = "mkdir $JOB/dev; mount -t tmpfs tmpfs $JOB/dev; cp -a /dev/null /dev/zero /dev/urandom $JOB/dev; \
                  mkdir $JOB/dev/infiniband $JOB/dev/shm; mount --rbind /dev/shm $JOB/dev/shm; mount --rbind $JOB/dev /dev; ulimit -l 64";
    checked.assert_named(&mistake(2, locked), "WARN", "h2", &["workers may lock 64 KiB of memory"]);
    let full = mistake(
        3,
        "mkdir $JOB/full; mount -t tmpfs -o size=64k tmpfs $JOB/full; cat /dev/zero > $JOB/full/fill 2> /dev/null || true; export TMPDIR=$JOB/full",
    );
    checked.assert_named(
        &full,
        "FAIL",
        "h3",
        &["cannot write temporary files (TMPDIR) to ", "no space is left"],
    );
    let inodes = mistake(
        3,
        "mkdir -p $JOB/few; mount -t tmpfs -o nr_inodes=100 tmpfs $JOB/few; export TMPDIR=$JOB/few",
    );
    checked.assert_named(&inodes, "WARN", "h3", &[" inodes left"]);
    let read_only = Mistake {
        host: 2,
        before: "mkdir -p $JOB/ro; mount -t tmpfs -o ro tmpfs $JOB/ro",
        flags: "--log-dir=ro/logs",
    };
    checked.assert_named(
        &read_only,
        "FAIL",
        "h2",
        &["cannot write log files (--log-dir) to ro/logs: the file system is read-only"],
    );
    let cache = mistake(2, "export HF_HOME=/proc/cache");
    checked.assert_named(
        &cache,
        "FAIL",
        "h2",
        &["cannot write Hugging Face's cache (HF_HOME) to /proc/cache"],
    );
}

#[test]
fn gpus_and_infiniband_ports_with_problems_are_named() {
    let Some(checked) = Checked::up_or_skip(3, "checks of GPUs") else { return };
    let library = format!("export LD_LIBRARY_PATH={}", gpu::libraries().display());
    let with_gpus = |own: &str| format!("{library} SIMULATED_GPUS=2 CONVOKE_KMSG=/dev/null {own}");
    // All hosts have two GPUs; one host has a problem.
    let check =
        |own: &str| checked.check_each(|host| (with_gpus(if host == 2 { own } else { "" }), String::new()));
    check("SIMULATED_GPUS=1").assert_names("WARN", "h2", &["GPUs is 1, 2 on h1, h3"]);
    check("SIMULATED_DRIVER=550.54").assert_names("WARN", "h2", &["GPU driver is 550.54, 570.00 on h1, h3"]);
    check("SIMULATED_ECC=3").assert_names(
        "FAIL",
        "h2",
        &["GPU 0 (0000:01:00.0) has had 3 uncorrected memory errors"],
    );
    check("SIMULATED_PROCESS=1").assert_names("FAIL", "h2", &["GPU 0 (0000:01:00.0) is in use by pid 1 ("]);
    check("SIMULATED_THROTTLE=64").assert_names(
        "WARN",
        "h2",
        &["GPU 0 (0000:01:00.0) is slowed down: it is too hot"],
    );
    let log = "3,1,99999999999999999,-;NVRM: Xid (PCI:0000:02:00): 79, pid=1, GPU has fallen off the bus.\n";
    fs::write(checked.job.path("kmsg"), log).unwrap();
    let kmsg = format!("CONVOKE_KMSG={}", checked.job.path("kmsg").display());
    check(&kmsg).assert_names(
        "FAIL",
        "h2",
        &["the driver reported Xid 79 on 0000:02:00.0 within the last day"],
    );
    let port = "mkdir -p $JOB/class.$(hostname); mount -t tmpfs tmpfs $JOB/class.$(hostname); cd $JOB/class.$(hostname); mkdir net; mount --rbind /sys/class/net net; \
                mkdir -p infiniband/mlx5_0/ports/1; echo '100 Gb/sec (2X HDR)' > infiniband/mlx5_0/ports/1/rate; \
                echo STATE > infiniband/mlx5_0/ports/1/state; echo FIRMWARE > infiniband/mlx5_0/fw_ver; mount --rbind . /sys/class; cd $JOB";
    let with_port = |state: &str, firmware: &str| port.replace("STATE", state).replace("FIRMWARE", firmware);
    let infiniband = |state: &str, firmware: &str| {
        checked.check_each(|host| {
            let (state, firmware) = if host == 3 { (state, firmware) } else { ("'4: ACTIVE'", "28.1") };
            (with_port(state, firmware), String::new())
        })
    };
    let down = infiniband("'1: DOWN'", "28.1");
    down.assert_names(
        "FAIL",
        "h3",
        &["InfiniBand port mlx5_0/1 is DOWN, ACTIVE, 100 Gb/sec (2X HDR) on h1, h2"],
    );
    down.assert_names("FAIL", "h3", &["no InfiniBand port is active"]);
    infiniband("'4: ACTIVE'", "27.9").assert_names(
        "WARN",
        "h3",
        &["InfiniBand firmware mlx5_0 is 27.9, 28.1 on h1, h2"],
    );
}

#[test]
fn small_mtu_slow_link_and_wrong_clock_are_named() {
    let Some(checked) = Checked::up_or_skip(3, "checks of links") else { return };
    checked.on(2, "ip link set eth0 mtu 1400");
    let result = checked.check("", None);
    result.assert_names(
        "FAIL",
        "h2",
        &["packets of 1500 bytes from h1 do not arrive", "eth0 of h2 has MTU 1400"],
    );
    assert!(result.took < LIMIT, "{:?}", result.took);
    checked.on(2, "ip link set eth0 mtu 1500");
    // The switch drops large frames to h2, so connections open and then hang.
    let switch =
        |mtu: &str| checked.hosts.run_script(["exec", "0", "ip", "link", "set", "h2", "mtu", mtu]).unwrap();
    switch("1300");
    let result = checked.check("", None);
    result.assert_names("FAIL", "h2", &["h1 connects, but 2048 KiB did not get through in time"]);
    assert!(result.took < LIMIT, "{:?}", result.took);
    switch("1500");
    checked.hosts.run_script(["rate", "3", "40"]).unwrap();
    let result = checked.check("--net", None);
    result.assert_names("WARN", "h3", &["its connections carry ", " MB/s, those of the other hosts "]);
    assert!(result.took < LIMIT_WITH_PAIRS, "{:?}", result.took);
    checked.hosts.run_script(["rate", "3", "0"]).unwrap();
    let source = "#define _GNU_SOURCE\n#include <sys/syscall.h>\n#include <time.h>\n#include <unistd.h>\n\
                  int clock_gettime(clockid_t clock, struct timespec *now) {\n  int result = (int)syscall(SYS_clock_gettime, clock, now);\n  \
                  if (clock == CLOCK_REALTIME) now->tv_sec += 3600;\n  return result;\n}\n";
    fs::write(checked.job.path("clock.c"), source).unwrap();
    checked.on(0, "cd $JOB && cc -shared -fPIC -o clock.so clock.c");
    let late = mistake(2, "export LD_PRELOAD=$JOB/clock.so");
    checked.assert_named(&late, "WARN", "h2", &["its clock is 3", " s ahead of that of the others"]);
}

#[test]
fn report_is_json_on_demand_and_failed_hosts_go_to_a_file() {
    let Some(checked) = Checked::up_or_skip(3, "reports of checks") else { return };
    let small = mistake(2, "mount -t tmpfs -o size=20m tmpfs /dev/shm");
    let result = checked.check("--json --failed-hosts=failed", Some(&small));
    let report: serde_json::Value = serde_json::from_str(&result.nodes[0].stdout).unwrap();
    assert_eq!(report["healthy"], false);
    assert_eq!(report["problems"][0]["hosts"], serde_json::json!(["h2"]));
    assert_eq!(report["problems"][0]["check"], "shared memory");
    assert_eq!(fs::read_to_string(checked.job.path("failed")).unwrap(), "h2\n");
    assert!(result.nodes.iter().all(|node| node.status.code() == Some(1)), "{}", result.text());
    assert_eq!(result.nodes[1].stdout, "", "node 0 speaks for all");
}

#[test]
fn nodes_of_an_elastic_job_meet_by_their_endpoint_or_file() {
    let job = Job::new();
    let port = convoke_testkit::free_port();
    let (host, file) = (format!("127.0.0.1:{port}"), job.path("rdzv").display().to_string());
    for flags in [
        vec!["--rdzv-backend=c10d", "--rdzv-endpoint", &host],
        vec!["--rdzv-backend=c10d", "--rdzv-endpoint", &file, "--rdzv-conf=store_type=file"],
    ] {
        // Twice, because the file keeps what the first check has written.
        for _ in 0..2 {
            let start = || {
                job.start(
                    job.command([&["check", "--nnodes=2:3", "--wait=30"][..], &flags, &["true"]].concat()),
                )
            };
            let (one, other) = (start(), start());
            for ended in [one.wait(), other.wait()] {
                let text = format!("{}{}", ended.stdout, ended.stderr);
                assert!(text.contains("convoke check: 2 nodes checked in "), "{flags:?}: {text}");
            }
        }
    }
}

#[test]
fn wrong_flags_and_a_list_that_cannot_be_written_have_their_own_exit_code() {
    let job = Job::new();
    let wrong = job.run(["check", "--wait=soon"]).expect_exit_code(2);
    assert!(wrong.stderr.contains("--wait=soon: not a number; write --wait=60"), "{}", wrong.stderr);
    let layout = job.run(["check", "--nnodes=2:1"]).expect_exit_code(2);
    assert!(layout.stderr.contains("the minimum is above the maximum"), "{}", layout.stderr);
    let list = job.run(["check", "--failed-hosts=/proc/no/list"]).expect_exit_code(2);
    assert!(list.stderr.contains("cannot write --failed-hosts=/proc/no/list"), "{}", list.stderr);
    // A program of this name is launched.
    fs::write(job.path("check"), "#!/bin/sh\necho it ran\n").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(job.path("check"), mode).unwrap();
    let ran = job.run(["check"]).expect_exit_code(0);
    assert!(ran.stdout.contains("it ran"), "{}{}", ran.stdout, ran.stderr);
}
