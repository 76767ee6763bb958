//! Jobs that `--hosts` starts by ssh, on simulated hosts with a real sshd each.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use convoke_launcher_tests::hosts::Hosts;
use convoke_launcher_tests::{path_argument, worker_command};
use convoke_testkit::programs::{repository_root, user_program};

use crate::ssh_hosts::{ENDED, SshHosts};

#[test]
fn job_on_hosts_needs_nothing_but_ssh() {
    let Some(ssh) = SshHosts::up_or_skip(4, "jobs on hosts by ssh") else { return };
    // A login script that prints.
    fs::write(ssh.path("noise"), "echo 'Welcome to this host! You have mail.'\necho careful >&2\n").unwrap();
    let [program, role] = worker_command("group");
    let ended = ssh.start("h[1-4]:2", &[&program, &role]).wait().expect_exit_code(0);
    let mut lines: Vec<_> = ended.stdout.lines().collect();
    lines.sort_unstable();
    let wanted: Vec<_> = (0..8)
        .map(|rank| format!("[h{}] rank {rank} of 8, {} of 2 here, sum 36", rank / 2 + 1, rank % 2))
        .collect();
    assert_eq!(lines, wanted, "{}", ended.stderr);
    // The own host needs no ssh, and slots of a host file count.
    fs::write(ssh.path("hostfile"), "# two nodes\nh0 slots=1\nh2 slots=3\n").unwrap();
    let file = format!("--hostfile={}", ssh.path("hostfile").display());
    let mut command = ssh.job.command_for_program(Hosts::script(), ["exec", "0"]);
    command
        .arg(user_program("convoke"))
        .args([&file, &format!("--rsh=ssh -F {}", ssh.path("ssh_config").display())]);
    let ended = ssh
        .job
        .start({
            command.args([program, role]).env("TESTBED_DIR", ssh.hosts.state_dir());
            command
        })
        .wait();
    let ended = ended.expect_exit_code(0);
    assert_eq!(ended.stdout.matches("of 4, ").count(), 4, "{}{}", ended.stdout, ended.stderr);
    assert_eq!(ended.stdout.matches("[h2] ").count(), 3, "{}", ended.stdout);
}

#[test]
fn words_variables_and_exit_codes_arrive_unchanged() {
    let Some(ssh) = SshHosts::up_or_skip(2, "words and variables by ssh") else { return };
    let odd = "a 'b' \"c\" $HOME ; `x` \\ é *";
    let script = "printf '%s|%s|%s\\n' \"$1\" \"$ODD\" \"$CONVOKE_TOKEN\"";
    let words = [&format!("--env=ODD={odd}"), "sh", "-c", script, "sh", odd];
    let ended = ssh.start("h1,h2", &words).wait().expect_exit_code(0);
    let lines: Vec<_> = ended.stdout.lines().map(|line| line.split_once("] ").unwrap().1).collect();
    assert_eq!(lines.len(), 2, "{}{}", ended.stdout, ended.stderr);
    assert_eq!(lines[0], lines[1], "both have one token");
    assert!(
        lines[0].starts_with(&format!("{odd}|{odd}|")) && lines[0].len() > 60 + 2 * odd.len(),
        "{}",
        lines[0]
    );
    // Nothing of it stands in a command line.
    let launcher = ssh.start_sleepers();
    for host in 1..3 {
        let commands = ssh.on(host, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '");
        assert!(!commands.contains("CONVOKE_TOKEN") && !commands.contains("JOB="), "{commands}");
    }
    ssh.signal_head(Signal::SIGTERM);
    assert_eq!(launcher.wait().status.code(), Some(1));

    let ended =
        ssh.start("h1,h2", &["sh", "-c", "[ $RANK = 1 ] && exit 3; sleep 1000"]).wait().expect_exit_code(1);
    assert!(ended.stderr.contains("exitcode  : 3"), "{}", ended.stderr);
    let imports = "echo \"ModuleNotFoundError: No module named 'x'\" >&2; exit 1";
    let ended = ssh.start("h1,h2", &["--exit-codes=scheduler", "sh", "-c", imports]).wait();
    assert_eq!(ended.status.code(), Some(78), "{}", ended.stderr);
}

#[test]
fn all_hosts_that_fail_are_named_at_once_by_class() {
    let Some(ssh) = SshHosts::up_or_skip(5, "hosts that ssh does not reach") else { return };
    let program = path_argument(user_program("convoke"));
    // Another host key, no permission, no sshd, no such folder.
    ssh.stop_sshd(2);
    let other = Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-f"])
        .arg(ssh.path("other_key"))
        .status();
    assert!(other.unwrap().success());
    ssh.start_sshd(2, &format!("-h {}", ssh.path("other_key").display()));
    let config = fs::read_to_string(ssh.path("sshd_config")).unwrap();
    let config: String =
        config.lines().filter(|line| !line.starts_with("HostKey")).map(|line| format!("{line}\n")).collect();
    fs::write(ssh.path("sshd_config"), config).unwrap();
    ssh.stop_sshd(2);
    ssh.start_sshd(2, &format!("-h {}", ssh.path("other_key").display()));
    ssh.stop_sshd(3);
    ssh.start_sshd(3, &format!("-h {} -o AuthorizedKeysFile=none", ssh.path("host_key").display()));
    ssh.stop_sshd(4);
    ssh.on(5, &format!("mount -t tmpfs none {}", ssh.path("tmp").display()));
    let words = [&program[..], "--hosts=h[1-5],nohost", "--start-timeout=30"];
    let mut command = ssh.job.command_for_program(
        Hosts::script(),
        [&["exec", "0", "sh", "-c", "mkdir -p tmp/here; cd tmp/here; exec \"$@\"", "sh"][..], &words]
            .concat(),
    );
    command.arg(format!("--rsh=ssh -F {}", ssh.path("ssh_config").display())).args([
        "sh",
        "-c",
        "echo it ran",
    ]);
    let began = Instant::now();
    let ended = ssh
        .job
        .start({
            command.env("TESTBED_DIR", ssh.hosts.state_dir());
            command
        })
        .wait();
    assert_eq!(ended.status.code(), Some(1));
    assert!(!ended.stdout.contains("it ran"), "no job starts before all hosts are there: {}", ended.stdout);
    for text in [
        "no launcher could be started on 5 of 6 hosts",
        "h2 has no known host key, or another one",
        "h3 does not let you in without a password",
        "h4 refused the connection",
        "h5 lacks the current directory",
        "no address is known for nohost",
    ] {
        assert!(ended.stderr.contains(text), "{text}:\n{}", ended.stderr);
    }
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[test]
fn nothing_is_left_on_any_host_whatever_ends_first() {
    let Some(ssh) = SshHosts::up_or_skip(4, "ends of jobs on hosts") else { return };
    // The head is killed.
    let launcher = ssh.start_sleepers();
    ssh.signal_head(Signal::SIGKILL);
    ssh.assert_nothing_left(Instant::now(), ENDED, 1..5);
    drop(launcher);

    // A session of sshd is killed; then an agent.
    for victim in ["sshd: root", "convoke --agent"] {
        for rank in 0..4 {
            fs::remove_file(ssh.path(&format!("up.{rank}"))).unwrap();
        }
        let launcher = ssh.start_sleepers();
        let began = Instant::now();
        let pattern = format!("[{}]{}", &victim[..1], &victim[1..]);
        ssh.on(3, &format!("kill -9 $(pgrep -f -- '{pattern}')"));
        ssh.assert_nothing_left(began, ENDED, 1..5);
        let ended = launcher.wait();
        assert_eq!(ended.status.code(), Some(1), "{victim}: {}", ended.stderr);
        assert!(
            ended.stderr.contains("h3 is lost") || ended.stderr.contains("node 2 (h3)"),
            "{victim}: {}",
            ended.stderr
        );
    }

    // Ctrl-C.
    (0..4).for_each(|rank| fs::remove_file(ssh.path(&format!("up.{rank}"))).unwrap());
    let launcher = ssh.start_sleepers();
    let began = Instant::now();
    ssh.signal_head(Signal::SIGINT);
    let ended = launcher.wait();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    ssh.assert_nothing_left(began, ENDED, 1..5);
}

/// Time without heartbeats after which launchers count each other as lost.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(3);

#[test]
fn partition_of_a_host_ends_the_job_everywhere() {
    let Some(ssh) = SshHosts::up_or_skip(4, "partitions of hosts") else { return };
    for host in [3, 1] {
        (0..4).for_each(|rank| drop(fs::remove_file(ssh.path(&format!("up.{rank}")))));
        let launcher = ssh.start_sleepers();
        let began = Instant::now();
        ssh.hosts.run_script(["partition", &host.to_string()]).unwrap();
        ssh.assert_nothing_left(began, HEARTBEAT_TIMEOUT + ENDED, 1..5);
        let ended = launcher.wait();
        assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
        assert!(
            ended.stderr.contains(&format!("(h{host}) is lost: its launcher was killed, or its host")),
            "{}",
            ended.stderr
        );
        assert!(
            ended.stderr.contains(&format!("error: h{host} is lost: no sign of life")),
            "{}",
            ended.stderr
        );
        assert!(began.elapsed() < Duration::from_secs(12), "{:?}", began.elapsed());
        ssh.hosts.run_script(["heal", &host.to_string()]).unwrap();
    }
}

#[test]
fn program_is_copied_to_hosts_that_lack_it() {
    let Some(ssh) = SshHosts::up_or_skip(2, "copies of the program by ssh") else { return };
    // The program lies where h0 alone has it.
    let folder = ssh.path("only-here");
    fs::create_dir(&folder).unwrap();
    let program = folder.join("convoke");
    ssh.on(
        0,
        &format!(
            "mount -t tmpfs none {0} && strip -o {0}/convoke {1}",
            folder.display(),
            user_program("convoke").display()
        ),
    );
    let run = |words: &[&str]| ssh.start_program(program.to_str().unwrap(), "h1,h2", words).wait();
    let missing = run(&["sh", "-c", "echo it ran"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(missing.stderr.contains("h1, h2 has no convoke"), "{}", missing.stderr);
    for time in ["first", "second"] {
        let ended = run(&["--copy-binary", "sh", "-c", "echo it ran"]).expect_exit_code(0);
        assert_eq!(ended.stdout.matches("it ran").count(), 2, "{time}: {}", ended.stderr);
    }
    let cached = fs::read_dir(ssh.path("cache/convoke")).unwrap().count();
    assert_eq!(cached, 1, "one copy for both times, and nothing half copied");
}

#[test]
fn check_on_hosts_reports_once_and_lists_hosts_that_failed() {
    let Some(ssh) = SshHosts::up_or_skip(3, "checks on hosts by ssh") else { return };
    let convoke = path_argument(user_program("convoke"));
    let check = |list: &str, flags: &[&str]| {
        let mut command = ssh.job.command_for_program(Hosts::script(), ["exec", "0", &convoke, "check"]);
        let shell = format!("--rsh=ssh -F {}", ssh.path("ssh_config").display());
        command.arg(format!("--hosts={list}")).arg(shell).args(flags).arg("true");
        command.env("TESTBED_DIR", ssh.hosts.state_dir());
        ssh.job.start(command).wait()
    };
    let healthy = check("h[1-3]", &[]).expect_exit_code(0);
    assert!(
        healthy.stdout.starts_with("convoke check: 3 nodes checked in "),
        "{}{}",
        healthy.stdout,
        healthy.stderr
    );
    ssh.on(3, "mount -t tmpfs -o size=20m tmpfs /dev/shm");
    let failed = check("h[1-3]", &["--json", "--failed-hosts=failed"]).expect_exit_code(1);
    let report: serde_json::Value = serde_json::from_str(&failed.stdout).unwrap();
    assert_eq!(report["problems"][0]["hosts"], serde_json::json!(["h3"]), "{report}");
    assert_eq!(fs::read_to_string(ssh.path("failed")).unwrap(), "h3\n");
    let unknown = check("h1,nohost", &["--failed-hosts=failed"]).expect_exit_code(1);
    assert!(unknown.stderr.contains("no address is known for nohost"), "{}", unknown.stderr);
    assert_eq!(fs::read_to_string(ssh.path("failed")).unwrap(), "nohost\n");
}

/// The batch systems themselves cannot be installed here. Scripts replace their commands, and take the same words.
#[test]
fn job_scripts_of_other_batch_systems_run_as_they_stand_in_the_guide() {
    let Some(ssh) = SshHosts::up_or_skip(2, "job scripts of other batch systems") else { return };
    let path = ssh.path_with_programs();
    std::os::unix::fs::symlink(user_program("digits"), ssh.path("bin/digits")).unwrap();
    let by_ssh = format!("exec /usr/bin/ssh -F {}", ssh.path("ssh_config").display());
    ssh.program("bin/oarsh", &format!("[ -n \"$OAR_JOB_ID\" ] || exit 255\n{by_ssh} \"$@\""));
    // It takes no flags, starts the words without a shell, and works inside of a job alone.
    let words = format!("{by_ssh} $host \"$(printf \"'%s' \" \"$@\")\"");
    ssh.program("bin/blaunch", &format!("[ -n \"$LSB_JOBID\" ] || exit 255\nhost=$1; shift\n{words}"));
    ssh.program("bin/flux", "[ \"$1\" = hostlist ] && echo 'h[1-2]'");
    fs::write(ssh.path("nodes"), "h1\nh1\nh2\nh2\n").unwrap();
    for script in ["pbs.sh", "lsf.sh", "oar.sh", "flux.sh"] {
        let file = repository_root().join("src/examples/jobs").join(script);
        let mut command = ssh.command_on_h0(&[file.to_str().unwrap()]);
        command.env("PATH", &path);
        for variable in ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "OAR_NODEFILE"] {
            command.env(variable, ssh.path("nodes"));
        }
        command.env("PBS_O_WORKDIR", ssh.job.dir.path()).env("LSB_JOBID", "7").env("OAR_JOB_ID", "7");
        let ended = ssh.job.start(command).wait().expect_exit_code(0);
        assert!(ended.stdout.contains("digits: 4 workers, "), "{script}: {}{}", ended.stdout, ended.stderr);
        assert!(ended.stdout.contains("accuracy"), "{script}: {}", ended.stdout);
    }
    let refused = ssh.start("h1", &["--rsh=pbs_tmrsh", "true"]).wait().expect_exit_code(1);
    assert!(refused.stderr.contains("it passes on neither input nor output"), "{}", refused.stderr);
}
