//! Launchers that srun starts on a real Slurm cluster: they meet without an address, and say what is wrong with
//! a layout that cannot work.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use convoke_launcher_tests::harness::{Job, ProcessOutput};
use convoke_launcher_tests::slurm::Slurm;
use convoke_launcher_tests::{group_line, path_argument, worker_command};
use convoke_testkit::programs::{repository_root, user_program};
use convoke_testkit::{Random, skip, wait_until};

/// Time in which a launcher must refuse a layout, with a margin for a busy machine.
const AT_ONCE: Duration = Duration::from_secs(20);

fn launcher() -> String {
    path_argument(user_program("convoke"))
}

fn rank_lines(ended: &ProcessOutput) -> Vec<String> {
    let lines = ended.stdout.lines().filter(|line| line.starts_with("rank "));
    let mut lines: Vec<_> = lines.map(str::to_owned).collect();
    lines.sort();
    lines
}

/// Lines of `test-worker group` for nodes with equally many workers.
fn expected(nodes: usize, each: usize) -> Vec<String> {
    let size = nodes * each;
    (0..size).map(|rank| group_line(rank, size, rank % each, each)).collect()
}

#[test]
fn launchers_under_srun_meet_without_an_address() {
    let Some(slurm) = Slurm::up_or_skip(4, "launchers under srun") else { return };
    let ([program, role], convoke, job) = (worker_command("group"), launcher(), Job::new());
    let srun = ["srun", "--ntasks-per-node=1"];
    let step = |before: &[&str], flags: &[&str]| {
        let words = [&srun[..], before, &[&convoke], flags, &[&program, &role]].concat();
        slurm.run(&job, &words, &[])
    };
    let ended = step(&["-N4"], &[]).expect_exit_code(0);
    assert_eq!(rank_lines(&ended), expected(4, 1), "{}", ended.stderr);
    let said: Vec<_> = ended.stderr.lines().filter(|line| line.starts_with("convoke:")).collect();
    assert!(said.len() == 1 && said[0].contains(": 4 nodes, node 0 is h1:"), "{said:?}");
    let ended = step(&["-N2"], &["--nproc-per-node=2"]).expect_exit_code(0);
    assert_eq!(rank_lines(&ended), expected(2, 2), "{}", ended.stderr);
    let ended = step(&["-N3", "--no-kill"], &["--nnodes=2:3"]).expect_exit_code(0);
    assert_eq!(rank_lines(&ended), expected(3, 1), "{}", ended.stderr);
    let ended = step(&["-N1"], &["--nproc-per-node=2"]).expect_exit_code(0);
    assert_eq!(rank_lines(&ended), expected(1, 2), "{}", ended.stderr);
    // With --nnodes=1 each launcher has a job of its own, as under torchrun.
    let ended = step(&["-N2"], &["--nnodes=1"]).expect_exit_code(0);
    assert_eq!(rank_lines(&ended), vec!["rank 0 of 1, 0 of 1 here, sum 1"; 2], "{}", ended.stderr);

    // One step over both groups of a heterogeneous job.
    let parts = ["-N1", &convoke, &program, &role, ":", "-N1", &convoke, &program, &role];
    let ended = slurm.run(&job, &[&srun[..1], &parts].concat(), &[]).expect_exit_code(0);
    assert_eq!(rank_lines(&ended), expected(2, 1), "{}", ended.stderr);

    // srun in the shell of salloc, twice at once on the same nodes.
    let inner = format!("srun --overlap --ntasks-per-node=1 {convoke} {program} {role}");
    let both = format!("{inner} & {inner}; wait");
    let ended = slurm.run(&job, &["salloc", "-Q", "-N2", "sh", "-c", &both], &[]).expect_exit_code(0);
    let twice: Vec<_> = expected(2, 1).into_iter().flat_map(|line| [line.clone(), line]).collect();
    assert_eq!(rank_lines(&ended), twice, "{}", ended.stderr);
}

#[test]
fn layouts_that_cannot_work_are_refused_at_once() {
    let Some(slurm) = Slurm::up_or_skip(2, "wrong layouts under srun") else { return };
    let ([program, role], convoke, job) = (worker_command("group"), launcher(), Job::new());
    let refused = |words: &[&str], text: &str| {
        let began = Instant::now();
        let ended = slurm.run(&job, words, &[]);
        assert_ne!(ended.status.code(), Some(0), "{words:?}");
        assert!(ended.stderr.contains(text), "{words:?}: {}", ended.stderr);
        assert!(began.elapsed() < AT_ONCE, "{words:?}: {:?}", began.elapsed());
        ended.stderr
    };
    let run = [convoke.as_str(), &program, &role];
    let many = refused(
        &[&["srun", "-N2", "-n4"], &run[..]].concat(),
        "try: srun --ntasks-per-node=1, and --nproc-per-node=",
    );
    assert_eq!(many.matches("convoke: error").count(), 1, "one task says it: {many}");
    refused(&[&["salloc", "-Q", "-N2"], &run[..]].concat(), "try: put srun before it");
    let script = job.path("batch.sh");
    fs::write(
        &script,
        format!("#!/bin/sh\nexec {} > {} 2>&1\n", run.join(" "), job.path("batch.out").display()),
    )
    .unwrap();
    let ended = slurm.run(&job, &["sbatch", "--wait", "-N2", script.to_str().unwrap()], &[]);
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    let said = fs::read_to_string(job.path("batch.out")).unwrap();
    assert!(said.contains("has 2 nodes, but its batch script starts convoke once"), "{said}");
    refused(
        &["srun", "-N2", "--ntasks-per-node=1", &convoke, "--nnodes=4", &program, &role],
        "has 2 nodes; write --nnodes=2",
    );

    // A batch script replaces $SLURM_NODEID before srun starts, so both nodes take rank 0. Neither waits.
    let flags = ["--nnodes=2", "--node-rank=0", "--master-addr=h1", "--master-port=20000"];
    let words = [&["srun", "-N2", "--ntasks-per-node=1", &convoke], &flags[..], &run[1..]].concat();
    let both = refused(&words, "replaces $SLURM_NODEID by its own node's rank");
    assert!(both.contains("so this node ends as well"), "{both}");
}

#[test]
fn node_0_is_found_whatever_its_name_and_port_lead_to() {
    let Some(slurm) = Slurm::up_or_skip(2, "names and ports under srun") else { return };
    let ([program, role], convoke, job) = (worker_command("group"), launcher(), Job::new());
    let srun = ["srun", "-N2", "--ntasks-per-node=1"];
    let check = |before: &[&str], what: &str| {
        let ended = slurm.run(&job, &[&srun[..], before, &[&convoke, &program, &role]].concat(), &[]);
        assert_eq!(rank_lines(&ended), expected(2, 1), "{what}: {}", ended.stderr);
        ended.stderr
    };
    // The next job's first port is held by a program that says nothing, its second by another job's store.
    let id = slurm.run(&job, &["srun", "-N1", "printenv", "SLURM_JOB_ID"], &[]).expect_exit_code(0).stdout;
    let next: u32 = id.trim().parse::<u32>().unwrap() + 1;
    let ports = convoke_env::job_ports(&format!("slurm-{next}.0.0"), 8);
    let store = path_argument(user_program("convoke-store"));
    let strangers = format!(
        "setsid python3 -c 'import socket,time; s=socket.create_server((\"\",{})); time.sleep(600)' < /dev/null > /dev/null 2>&1 & \
         setsid {store} --host 0.0.0.0 --port {} < /dev/null > /dev/null 2>&1 & \
         while ! ss -Hltn | grep -q :{} || ! ss -Hltn | grep -q :{}; do sleep 0.02; done",
        ports[0], ports[1], ports[0], ports[1]
    );
    let _ = slurm.on_node(1, &strangers);
    let said = check(&[], "ports held by strangers");
    assert!(said.contains(&format!("node 0 is h1:{}", ports[2])), "{ports:?}: {said}");

    slurm.edit_hosts(1, "s/^.* h1$/127.0.1.1 h1/");
    check(&[], "the name of node 0 is 127.0.1.1 there");
    slurm.edit_hosts(2, "/ h1$/d");
    check(&[], "the name of node 0 is unknown elsewhere");
    slurm.edit_hosts(1, "/ h1$/d");
    let said = check(&[], "the name of node 0 is unknown everywhere");
    assert!(said.contains("its workers use 10.77.0.1"), "{said}");

    // As in a container without Slurm's tools.
    check(&["env", "PATH=/none", "MASTER_ADDR=10.77.0.1"], "no scontrol, but MASTER_ADDR");
    let words =
        [&srun[..], &["env", "PATH=/none", &convoke, "--rdzv-conf=timeout=2", &program, &role]].concat();
    let ended = slurm.run(&job, &words, &[]).expect_exit_code(1);
    assert!(
        ended.stderr.contains("this host finds no address of h1: add it to DNS or /etc/hosts"),
        "{}",
        ended.stderr
    );
    assert!(ended.stderr.contains("see what the launchers on node 1 print"), "{}", ended.stderr);
}

#[test]
fn workers_of_a_slurm_job_share_a_token_that_munge_protects() {
    let Some(slurm) = Slurm::up_or_skip(2, "the token of a Slurm job") else { return };
    let (convoke, job) = (launcher(), Job::new());
    let [program, role] = worker_command("channel");
    let file = job.path("hello");
    let hellos = |flags: &str, variables: &[(&str, &str)]| {
        let words = [
            "srun",
            "-N2",
            "--ntasks-per-node=1",
            &convoke,
            flags,
            &program,
            &role,
            file.to_str().unwrap(),
            "1",
        ];
        let ended = slurm.run(&job, &words, variables).expect_exit_code(0);
        assert!(!ended.stderr.contains("whoever can reach"), "{}", ended.stderr);
        [0, 1].map(|rank| {
            let hello = job.path(&format!("hello.{rank}"));
            let text = fs::read_to_string(&hello).unwrap();
            fs::remove_file(hello).unwrap();
            text
        })
    };
    // A static job, and an elastic one.
    assert_eq!(hellos("--nproc-per-node=1", &[]), ["hello same_generation=true token=32\n"; 2]);
    assert_eq!(hellos("--nnodes=1:2", &[]), ["hello same_generation=true token=32\n"; 2]);
    // Ranks with different tokens form no group.
    let [program, role] = worker_command("group");
    let words = ["srun", "-N2", "--ntasks-per-node=1", &convoke, &program, &role];
    let ended = slurm.run(&job, &words, &[]).expect_exit_code(0);
    assert_eq!(rank_lines(&ended), expected(2, 1), "{}", ended.stderr);
    for flags in ["--nproc-per-node=1", "--nnodes=1:2"] {
        assert_eq!(hellos(flags, &[("CONVOKE_TOKEN", "own")]), ["hello same_generation=true token=3\n"; 2]);
    }
    // The second node cannot decode the token.
    let _ = slurm.on_node(2, "mount --bind /bin/false /usr/bin/unmunge");
    for flags in [&["--nproc-per-node=1"][..], &["--nnodes=2:3", "--rdzv-conf=join_timeout=5"]] {
        let words = [&["srun", "-N2", "--ntasks-per-node=1", &convoke], flags, &["true"]].concat();
        let ended = slurm.run(&job, &words, &[]);
        assert!(!ended.status.success(), "{}", ended.stderr);
        assert!(ended.stderr.contains("which this node cannot decode: MUNGE refuses it"), "{}", ended.stderr);
        assert!(ended.stderr.contains("start munged here, or set CONVOKE_TOKEN"), "{}", ended.stderr);
    }
}

#[test]
fn spare_node_of_the_allocation_replaces_a_host_that_has_failed_twice() {
    let Some(slurm) = Slurm::up_or_skip(3, "spare nodes of a Slurm job") else { return };
    let (convoke, job) = (launcher(), Job::new());
    // The host that rank 1 has at first fails whenever it is used. It first fails when the spare node has joined.
    let worker = job.script(
        "until [ -e spare ]; do sleep 0.02; done\n\
         if [ $RANK = 1 ] && ! [ -e bad ]; then hostname > bad; fi\n\
         if [ $RANK = 1 ] && [ \"$(hostname)\" = \"$(cat bad)\" ]; then echo >> failures; exit 1; fi\n\
         until [ -e done ]; do sleep 0.02; done\n",
    );
    let flags = ["--nnodes=1:2", "--max-restarts=5", worker.to_str().unwrap()];
    let words = [&["srun", "-N3", "--ntasks-per-node=1", "--no-kill", &convoke][..], &flags].concat();
    let launcher = slurm.start(&job, &words, &[]);
    wait_until("a node to wait as the spare one", || {
        launcher.stderr().contains("waits as a standby node").then_some(())
    });
    fs::write(job.path("spare"), "").unwrap();
    wait_until("the host to be replaced", || {
        let replaced = "a spare node has replaced this one, because this host has ended two rounds";
        launcher.stderr().contains(replaced).then_some(())
    });
    fs::write(job.path("done"), "").unwrap();
    let ended = launcher.wait().expect_exit_code(0);
    assert_eq!(fs::read_to_string(job.path("failures")).unwrap(), "\n\n", "{}", ended.stderr);
}

/// Returns the code blocks of a guide in this language that begin so.
fn blocks_of(guide: &str, language: &str, begin: &str) -> Vec<String> {
    let text = fs::read_to_string(repository_root().join("docs/guides").join(guide)).unwrap();
    let blocks = text.split("```").skip(1).step_by(2).filter_map(|block| block.strip_prefix(language));
    blocks.filter(|block| block.starts_with(begin)).map(str::to_owned).collect()
}

pub fn jobs() -> PathBuf {
    repository_root().join("src/examples/jobs")
}

#[test]
fn job_scripts_of_the_guides_are_the_files_of_the_examples() {
    let mut blocks =
        [("slurm.md", "sh\n", "#!"), ("hosts.md", "sh\n", "#!"), ("kubernetes.md", "yaml\n", "#")]
            .map(|(guide, language, begin)| blocks_of(guide, language, begin))
            .concat();
    let files = fs::read_dir(jobs()).unwrap().map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap());
    let mut files: Vec<String> = files.collect();
    files.sort();
    blocks.sort();
    assert_eq!(files, blocks);
}

#[test]
fn job_scripts_run_as_they_stand_in_the_guide() {
    let Some(slurm) = Slurm::up_or_skip(3, "job scripts of Slurm") else { return };
    let job = Job::new();
    // The scripts call these programs, as an installation has them.
    let bin = job.path("bin");
    fs::create_dir(&bin).unwrap();
    for (name, path) in [("convoke", user_program("convoke")), ("digits", user_program("digits"))] {
        std::os::unix::fs::symlink(path, bin.join(name)).unwrap();
    }
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let submit = |script: &str, tasks: usize| {
        let script = jobs().join(script);
        let output = format!("{}/out.%A.%a.%j", job.dir.path().display());
        let words = ["sbatch", "--wait", "-o", &output, script.to_str().unwrap()];
        let submitted = slurm.run(&job, &words, &[("PATH", &path)]);
        let outputs = fs::read_dir(job.dir.path()).unwrap().filter_map(|entry| {
            let path = entry.unwrap().path();
            path.file_name()?.to_str()?.starts_with("out.").then_some(path)
        });
        let outputs: Vec<String> = outputs
            .map(|path| {
                let text = fs::read_to_string(&path).unwrap();
                fs::remove_file(path).unwrap();
                text
            })
            .collect();
        assert_eq!(submitted.status.code(), Some(0), "{script:?}: {}{outputs:?}", submitted.stderr);
        assert_eq!(outputs.len(), tasks, "{outputs:?}");
        outputs
    };
    let trained = |text: &String| {
        assert!(text.contains(" nodes, node 0 is h1:") || text.contains("epoch"), "{text}");
        assert!(text.contains("accuracy"), "{text}");
    };
    submit("slurm.sh", 1).iter().for_each(trained);
    submit("slurm-array.sh", 2).iter().for_each(trained);
    submit("slurm-elastic.sh", 1).iter().for_each(trained);
    // A node with little shared memory is left out.
    let _ = slurm.on_node(2, "mount -t tmpfs -o size=20m tmpfs /dev/shm");
    let checked = submit("slurm-check.sh", 1);
    assert!(checked[0].contains("FAIL h2: /dev/shm has 20 MiB free of 20 MiB"), "{checked:?}");
    assert!(checked[0].contains("accuracy"), "{checked:?}");
    assert_eq!(fs::read_to_string(job.path("failed")).unwrap(), "h2\n");
    let _ = slurm.on_node(2, "umount /dev/shm");
    // No node is left out if all are healthy.
    let healthy = submit("slurm-check.sh", 1);
    assert!(!healthy[0].contains("FAIL") && healthy[0].contains("accuracy"), "{healthy:?}");
    assert_eq!(fs::read_to_string(job.path("failed")).unwrap(), "");

    // The script for PyTorch, with DDP where PyTorch is installed.
    let venv = std::env::var("CONVOKE_TORCH_VENV")
        .map_or_else(|_| repository_root().join("target/torch"), PathBuf::from);
    let python = venv.join("bin/python");
    let is_there = python.exists();
    if !is_there {
        skip(format!("DDP under srun: no PyTorch in {}", venv.display()));
    }
    let train = if is_there {
        include_str!("ddp_under_slurm.py")
    } else {
        "import os; os.write(1, b'the same on 4 ranks\\n')"
    };
    fs::write(job.path("train.py"), train).unwrap();
    let interpreter = if is_there { path_argument(python) } else { "python3".to_owned() };
    let script = fs::read_to_string(jobs().join("slurm-pytorch.sh")).unwrap();
    let own = job.path("slurm-pytorch.sh");
    fs::write(&own, script).unwrap();
    let output = job.path("torch.out");
    let words = ["sbatch", "--wait", "-o", output.to_str().unwrap(), own.to_str().unwrap()];
    let ended = slurm.run(&job, &words, &[("PATH", &path), ("PYTHON_EXEC", &interpreter)]);
    let said = fs::read_to_string(&output).unwrap();
    assert_eq!(ended.status.code(), Some(0), "{}{said}", ended.stderr);
    assert!(said.contains("the same on 4 ranks"), "{said}");
}

/// Returns a list of up to 4 entries with names, ranges and blanks.
fn random_list(random: &mut Random) -> String {
    let number = |random: &mut Random| {
        let width = random.below(4) + 1;
        format!("{:0width$}", random.below(120))
    };
    let range = |random: &mut Random| match random.below(3) {
        0 => number(random),
        _ => {
            let first = number(random);
            let last = first.parse::<usize>().unwrap() + random.below(12);
            format!("{first}-{last}")
        }
    };
    let entry = |random: &mut Random| {
        let mut text = ["h", "rack", "gpu-", "n.", "a0b"][random.below(5)].to_owned();
        for _ in 0..random.below(3) {
            let ranges: Vec<_> = (0..=random.below(3)).map(|_| range(random)).collect();
            text += &format!("{}[{}]", ["", "x", "-"][random.below(3)], ranges.join(","));
        }
        if text.ends_with(']') { text } else { text + &number(random) }
    };
    let entries: Vec<_> = (0..=random.below(4)).map(|_| entry(random)).collect();
    entries.join([",", ", ", ",,"][random.below(3)])
}

#[test]
fn host_lists_are_expanded_as_scontrol_expands_them() {
    let Some(slurm) = Slurm::up_or_skip(1, "host lists of Slurm") else { return };
    let job = Job::new();
    let mut random = Random::new("host lists");
    let lists: Vec<String> = (0..10_000).map(|_| random_list(&mut random)).collect();
    // One call expands many lists; a host that no list has separates them.
    for some in lists.chunks(1000) {
        let joined = some.join(",between,");
        let shown = slurm.run(&job, &["scontrol", "show", "hostnames", &joined], &[]).expect_exit_code(0);
        let shown: Vec<&str> = shown.stdout.lines().collect();
        for (list, hosts) in some.iter().zip(shown.split(|host| *host == "between")) {
            assert_eq!(convoke_env::slurm::hosts(list).unwrap(), hosts, "{list}");
        }
        assert_eq!(shown.iter().filter(|host| **host == "between").count(), some.len() - 1);
    }
}
