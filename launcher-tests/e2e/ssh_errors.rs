//! Hosts that ssh does not reach, or on which convoke does not start: each is named in time, and nobody is asked.

use std::fs;
use std::time::{Duration, Instant};

use convoke_launcher_tests::harness::ProcessOutput;
use convoke_launcher_tests::path_argument;
use convoke_testkit::programs::{repository_root, user_program};

use crate::ssh_hosts::{SshHosts, convoke_of_another_version};

/// Time that the documentation gives a host to let convoke connect.
const CONNECTED: Duration = Duration::from_secs(10);
/// More time, which a busy machine may need.
const MARGIN: Duration = Duration::from_secs(5);
const IT_RUNS: &[&str] = &["sh", "-c", "echo it ran"];

/// Checks that no job has started, and that one message names the hosts, the class and the remedy.
fn assert_named(ended: &ProcessOutput, hosts: &str, texts: &[&str]) {
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert_eq!(ended.stdout, "", "no job starts before all hosts are there");
    let whole = format!("convoke: error: no launcher could be started on {hosts} hosts\n");
    assert!(ended.stderr.contains(&whole), "{}", ended.stderr);
    for text in texts {
        assert!(ended.stderr.contains(text), "{text}:\n{}", ended.stderr);
    }
}

#[test]
fn host_that_wants_a_password_is_named_and_nobody_is_asked() {
    let Some(ssh) = SshHosts::up_or_skip(2, "hosts that want a password") else { return };
    ssh.stop_sshd(2);
    let asks = "-o PasswordAuthentication=yes -o KbdInteractiveAuthentication=yes -o AuthorizedKeysFile=none";
    ssh.start_sshd(2, asks);
    ssh.program("askpass", "echo > $JOB/asked; echo wrong");
    let run = |words: &[&str]| {
        let mut command = ssh.command_on_h0(words);
        command.env("SSH_ASKPASS", ssh.path("askpass")).env("SSH_ASKPASS_REQUIRE", "force");
        ssh.job.start(command).wait()
    };
    let config = path_argument(ssh.path("ssh_config"));
    assert_eq!(run(&["ssh", "-F", &config, "h2", "true"]).status.code(), Some(255));
    fs::remove_file(ssh.path("asked")).expect("ssh itself asks");

    let began = Instant::now();
    let shell = format!("--rsh=ssh -F {config}");
    let convoke = path_argument(user_program("convoke"));
    let ended = run(&[&[&convoke, "--hosts=h[1-2]", &shell], IT_RUNS].concat());
    let texts = [
        "  h2 does not let you in without a password (root@h2: Permission denied (publickey,password",
        "try: put your public key there (ssh-copy-id HOST), or start ssh-agent; convoke never asks for passwords",
    ];
    assert_named(&ended, "1 of 2", &texts);
    assert!(!ssh.path("asked").exists(), "convoke asks nobody");
    assert!(began.elapsed() < CONNECTED, "{:?}", began.elapsed());
}

#[test]
fn hosts_that_do_not_answer_are_named_in_time() {
    let Some(ssh) = SshHosts::up_or_skip(4, "hosts that do not answer") else { return };
    let remedy = "try: is the host up, and is its ssh port open in the firewall?";
    // Packets to the port of ssh are dropped on h2. Something that says nothing has the port on h3.
    ssh.on(
        2,
        "ip link add null0 type ifb && tc qdisc add dev eth0 clsact && tc filter add dev eth0 ingress protocol ip prio 9 u32 \
         match ip protocol 6 0xff match ip dport 22 0xffff action mirred egress redirect dev null0",
    );
    ssh.stop_sshd(3);
    let silent = "import socket, time; s = socket.create_server((\"\", 22)); print(\"ready\", flush=True); time.sleep(1000)";
    let out = ssh.path("silent.out").display().to_string();
    ssh.on(
        3,
        &format!(
            "(exec python3 -c '{silent}' > {out} 2>&1 < /dev/null &); until grep -q ready {out}; do sleep 0.01; done"
        ),
    );
    let began = Instant::now();
    let ended = ssh.start("h[1-3]", IT_RUNS).wait();
    assert_named(&ended, "2 of 3", &["  h2, h3 did not answer (", remedy]);
    assert!(began.elapsed() < CONNECTED + MARGIN, "{:?}", began.elapsed());

    // The login script of h4 never ends.
    fs::write(ssh.path("noise"), "if [ \"$(hostname)\" = h4 ]; then sleep 1000; fi\n").unwrap();
    let began = Instant::now();
    let ended = ssh.start("h1,h4", &[&["--start-timeout=4"], IT_RUNS].concat()).wait();
    assert_named(&ended, "1 of 2", &["  h4 did not answer (no answer within 4 s)", remedy]);
    assert!(began.elapsed() < Duration::from_secs(4) + MARGIN, "{:?}", began.elapsed());
}

#[test]
fn host_with_another_version_is_named_and_a_copy_of_this_one_helps() {
    let Some(ssh) = SshHosts::up_or_skip(2, "hosts with another version") else { return };
    let other = ssh.path("other-convoke");
    let versions = convoke_of_another_version(&other);
    ssh.on(2, &format!("mount --bind {} {}", other.display(), user_program("convoke").display()));
    let ended = ssh.start("h[1-2]", IT_RUNS).wait();
    let [here, there] = &versions;
    let texts = [
        &*format!("  h2 has another version of convoke ({there} there, {here} here)"),
        "try: install one version on all hosts, or give --copy-binary",
    ];
    assert_named(&ended, "1 of 2", &texts);
    let ended = ssh.start("h[1-2]", &[&["--copy-binary"], IT_RUNS].concat()).wait().expect_exit_code(0);
    assert_eq!(ended.stdout.matches("it ran").count(), 2, "{}{}", ended.stdout, ended.stderr);
}

/// sshd of the jump host h7 takes one connection at a time before it knows the user, and drops the others.
#[test]
fn connections_that_a_jump_host_drops_are_tried_again_until_all_hosts_are_there() {
    let Some(ssh) = SshHosts::up_or_skip(7, "jump hosts that drop connections") else { return };
    let jump =
        format!("Match originalhost h1,h2,h3,h4,h5,h6\n  ProxyCommand ssh -F {} -W %h:%p h7\n", "CONFIG");
    let config = fs::read_to_string(ssh.path("ssh_config")).unwrap();
    fs::write(ssh.path("jump_config"), &config).unwrap();
    let jump = jump.replace("CONFIG", &ssh.path("jump_config").display().to_string());
    fs::write(ssh.path("ssh_config"), config + &jump).unwrap();
    ssh.stop_sshd(7);
    let log = ssh.path("sshd.log");
    let drops = || fs::read_to_string(&log).unwrap().matches("MaxStartups").count();
    ssh.start_sshd(7, &format!("-E {} -o LogLevel=VERBOSE -o MaxStartups=1:100:1", log.display()));
    let ended = ssh.start("h[1-6]", IT_RUNS).wait().expect_exit_code(0);
    assert_eq!(ended.stdout.matches("it ran").count(), 6, "{}{}", ended.stdout, ended.stderr);
    assert!(drops() > 0, "{}", fs::read_to_string(&log).unwrap());

    // A connection of somebody else, who never logs in, takes the only place.
    let hold = "import socket, time; s = socket.create_connection((\"h7\", 22)); s.recv(1); print(\"ready\", flush=True); \
                time.sleep(1000)";
    let out = ssh.path("hold.out").display().to_string();
    ssh.on(
        0,
        &format!(
            "(exec python3 -c '{hold}' > {out} 2>&1 < /dev/null &); until grep -q ready {out}; do sleep 0.01; done"
        ),
    );
    let before = drops();
    let began = Instant::now();
    let ended = ssh.start("h[1-2]", IT_RUNS).wait();
    let texts = [
        "  h1, h2 closed the connection at once (",
        "try: too many connections at a time (MaxStartups of sshd), or a login script that ends the session?",
    ];
    assert_named(&ended, "2 of 2", &texts);
    assert!(drops() >= before + 4, "each connection is tried more than once");
    assert!(began.elapsed() < CONNECTED + MARGIN, "{:?}", began.elapsed());
    let ended = ssh.start("h[1-2]", &[&["--start-timeout=2"], IT_RUNS].concat()).wait();
    assert_named(&ended, "2 of 2", &["  h1, h2 closed the connection at once (each time within 2 s)"]);
}

#[test]
fn commands_with_hosts_run_as_they_stand_in_the_guides() {
    let Some(ssh) = SshHosts::up_or_skip(8, "commands of the guide to hosts") else { return };
    let path = ssh.path_with_programs();
    let script = "import os\nos.write(1, 'rank {RANK} of {WORLD_SIZE}\\n'.format_map(os.environ).encode())\n";
    fs::write(ssh.path("train.py"), script).unwrap();
    let commands = |page: &str, begin: &str| {
        let text = fs::read_to_string(repository_root().join("docs").join(page)).unwrap();
        let lines = text.lines().filter(|line| line.starts_with(begin));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let run = |line: &str| {
        let mut command = ssh.command_on_h0(&["sh", "-c", line]);
        command.env("PATH", &path);
        ssh.job.start(command).wait().expect_exit_code(0)
    };
    let [first, ..] = &commands("guides/hosts.md", "convoke --hosts=")[..] else { panic!("no command") };
    let ended = run(first);
    let mut lines: Vec<_> = ended.stdout.lines().collect();
    lines.sort_unstable();
    let wanted: Vec<_> = (0..8).map(|rank| format!("[h{}] rank {rank} of 8", rank / 4 + 1)).collect();
    assert_eq!(lines, wanted, "{}", ended.stderr);

    let [check] = &commands("reference/check.md", "convoke check --hosts=")[..] else { panic!("no command") };
    let ended = run(check);
    assert!(ended.stdout.contains("convoke check: 8 nodes checked in "), "{}{}", ended.stdout, ended.stderr);
    run("ssh -o BatchMode=yes h2 true");
}
