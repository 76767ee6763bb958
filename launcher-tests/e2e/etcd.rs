//! Jobs with a real etcd as rendezvous: TLS and authentication, and the errors if etcd refuses or cannot be
//! reached.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use convoke_launcher_tests::harness::{Job, ProcessOutput};
use convoke_launcher_tests::hosts::{Hosts, missing_requirement};
use convoke_testkit::{free_port, free_ports, skip};

/// A permanent error must be reported at once; the limit includes an allowance for a busy machine.
const ERROR_LIMIT: Duration = Duration::from_secs(10);

/// Number of ports of one etcd, counted from the base of `etcd.sh`: 3 client ports, and 3 peer ports ten
/// numbers later.
const ETCD_PORTS: u16 = 14;

/// An etcd on loopback; dropping this value stops it.
struct Etcd {
    state: tempfile::TempDir,
    settings: Vec<(String, String)>,
    pub endpoint: String,
}

impl Etcd {
    /// Starts etcd with these settings of `etcd.sh`. Reports a skipped test and returns `None` if etcd
    /// cannot run here.
    fn up(settings: &[(&str, &str)]) -> Option<Self> {
        if let Some(why) = missing_requirement(&["etcd", "etcdctl", "openssl"]) {
            skip(format!("etcd: {why}"));
            return None;
        }
        let base = free_ports(ETCD_PORTS);
        let mut settings: Vec<_> =
            settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        settings.push(("TB_ETCD_PORT_BASE".to_owned(), base.to_string()));
        let state = tempfile::Builder::new().prefix("convoke-etcd-").tempdir().unwrap();
        let etcd = Self { state, settings, endpoint: format!("127.0.0.1:{}", base + 1) };
        etcd.run_script(&["up", "1"]);
        Some(etcd)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(Hosts::script().with_file_name("etcd.sh"));
        command.args(arguments).env("TESTBED_DIR", self.state.path()).envs(self.settings.iter().cloned());
        command
    }

    fn run_script(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.state.path().join("etcd/tls").join(name)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.command(&["down"]).output();
    }
}

/// Runs a job of one node with these settings and variables.
fn run(job: &Job, endpoint: &str, conf: &str, variables: &[(&str, &str)], worker: &Path) -> ProcessOutput {
    let conf = format!("--rdzv-conf=last_call_timeout=1,join_timeout=60{conf}");
    let arguments = ["--rdzv-backend=etcd-v2", "--rdzv-id=job", "--nnodes=1", &conf];
    let mut command = job.command(arguments);
    command.args(["--rdzv-endpoint", endpoint]).arg(worker).envs(variables.iter().copied());
    job.start(command).wait()
}

/// Asserts that the launcher ended promptly with exit code 1, and that its error contains `words`.
fn expect(ended: ProcessOutput, since: Instant, words: &[&str]) {
    let ended = ended.expect_exit_code(1);
    assert!(since.elapsed() < ERROR_LIMIT, "took {:?}", since.elapsed());
    for word in words {
        assert!(ended.stderr.contains(word), "no \"{word}\" in\n{}", ended.stderr);
    }
}

#[test]
fn refused_certificate_is_reported_as_such() {
    let Some(etcd) = Etcd::up(&[("TB_ETCD_TLS", "mutual")]) else { return };
    let job = Job::new();
    let worker = job.script("echo ran\n");
    let (ca, other) = (etcd.file("ca.pem"), etcd.file("other-ca.pem"));
    let identity = |name: &str| {
        let file = |end: &str| etcd.file(&format!("{name}{end}.pem")).display().to_string();
        format!(",ssl_cert={},ssl_cert_key={}", file(""), file("-key"))
    };
    let https = |ca: &Path, identity: &str| format!(",protocol=https,ca_cert={}{identity}", ca.display());
    let start = |conf: &str| {
        let since = Instant::now();
        (run(&job, &etcd.endpoint, conf, &[], &worker), since)
    };

    let (ended, since) = start(&https(&other, &identity("client")));
    expect(ended, since, &["the certificate of etcd at 127.0.0.1", "is refused", "try: the CA"]);
    for identity in [String::new(), identity("other-client")] {
        let (ended, since) = start(&https(&ca, &identity));
        expect(ended, since, &["etcd at 127.0.0.1", "refuses our certificate", "try: a certificate"]);
    }
    let (ended, since) = start(&https(Path::new("/no/such.pem"), ""));
    expect(ended, since, &["CA certificate /no/such.pem: No such file"]);

    let ended = run(&job, &etcd.endpoint, &https(&ca, &identity("client")), &[], &worker).expect_exit_code(0);
    assert_eq!(ended.stdout, "ran\n");
    // The options of torchrun's other etcd backend have other names.
    let names = https(&ca, &identity("client")).replace("ca_cert", "cacert").replace("ssl_cert", "cert");
    let names = names.replace("cert_key", "key");
    let ended = run(&job, &etcd.endpoint, &names, &[], &worker).expect_exit_code(1);
    assert!(ended.stderr.contains("has ended successfully"), "{}", ended.stderr);
}

#[test]
fn refused_password_is_reported_as_such() {
    let Some(etcd) = Etcd::up(&[("TB_ETCD_AUTH", "1")]) else { return };
    let job = Job::new();
    let worker = job.script("env | grep ETCD\necho ran\n");
    let user = ("CONVOKE_ETCD_USER", "convoke");
    let start = |variables: &[(&str, &str)], conf: &str| {
        let since = Instant::now();
        (run(&job, &etcd.endpoint, conf, variables, &worker), since)
    };
    let (ended, since) = start(&[user, ("CONVOKE_ETCD_PASSWORD", "wrong")], "");
    expect(ended, since, &["refuses user convoke or the password", "CONVOKE_ETCD_PASSWORD"]);
    let (ended, since) = start(&[], "");
    expect(ended, since, &["requires a user and a password"]);
    let (ended, since) = start(&[user], "");
    expect(ended, since, &["CONVOKE_ETCD_USER is set without CONVOKE_ETCD_PASSWORD"]);
    let right = [user, ("CONVOKE_ETCD_PASSWORD", "convokepw")];
    let (ended, since) = start(&right, ",etcd_prefix=/elsewhere");
    expect(ended, since, &["does not let user convoke read and write there", "etcd_prefix"]);

    std::fs::write(job.path("password"), "convokepw\n").unwrap();
    let file = job.path("password").display().to_string();
    let ended = run(&job, &etcd.endpoint, "", &[user, ("CONVOKE_ETCD_PASSWORD_FILE", &file)], &worker);
    assert_eq!(ended.expect_exit_code(0).stdout, "ran\n", "workers do not get the password");
    let ended = run(&job, &etcd.endpoint, "", &right, &worker).expect_exit_code(1);
    assert!(ended.stderr.contains("has ended successfully"), "{}", ended.stderr);
}

#[test]
fn foreign_service_at_etcd_address_is_reported_with_its_answer() {
    let Some(etcd) = Etcd::up(&[]) else { return };
    let job = Job::new();
    let worker = job.script("echo ran\n");
    let dead = format!("127.0.0.1:{}", free_port());
    // The first endpoint of the list is dead; the launcher must use the second one.
    let ended = run(&job, &format!("{dead},{}", etcd.endpoint), "", &[], &worker).expect_exit_code(0);
    assert_eq!(ended.stdout, "ran\n");
    let ended = run(&job, &dead, ",join_timeout=1", &[], &worker).expect_exit_code(1);
    assert!(ended.stderr.contains(&dead) && ended.stderr.contains("refused"), "{}", ended.stderr);
    assert!(ended.stderr.contains("within 1 s"), "{}", ended.stderr);
    let user = [("CONVOKE_ETCD_USER", "x"), ("CONVOKE_ETCD_PASSWORD", "y")];
    let ended = run(&job, &etcd.endpoint, "", &user, &worker).expect_exit_code(1);
    assert!(ended.stderr.contains("has authentication disabled"), "{}", ended.stderr);
    let ended = run(&job, &etcd.endpoint, ",protocol=https,join_timeout=1", &[], &worker).expect_exit_code(1);
    assert!(ended.stderr.contains(&etcd.endpoint), "{}", ended.stderr);
}

#[test]
fn jobs_in_one_etcd_ignore_records_of_each_other() {
    let Some(etcd) = Etcd::up(&[]) else { return };
    let job = Job::new();
    let worker = job.script("[ ! -e \"$JOB/broken\" ] || exit 3\necho ran\n");
    let run = |id: &[&str], nodes: &str| {
        let mut command =
            job.command(["--rdzv-backend=etcd", "--rdzv-endpoint", &etcd.endpoint, "--nnodes", nodes]);
        command.args(id).arg("--rdzv-conf=last_call_timeout=1,join_timeout=60").arg(&worker);
        job.start(command).wait()
    };
    let broken = job.path("broken");
    for id in [&[][..], &["--rdzv-id=queued"]] {
        std::fs::write(&broken, "").unwrap();
        run(id, "1").expect_exit_code(1);
        run(id, "1:2").expect_exit_code(1);
        std::fs::remove_file(&broken).unwrap();
        assert_eq!(run(id, "1").expect_exit_code(0).stdout, "ran\n", "{id:?} may be queued again");
    }
    assert_eq!(run(&[], "1:3").expect_exit_code(0).stdout, "ran\n", "who names no job means no certain one");
    let late = run(&["--rdzv-id=queued"], "1").expect_exit_code(1).stderr;
    assert!(late.contains("the job with --rdzv-id=queued at etcd"), "{late}");
}

/// The launcher must not overwrite keys of another version or another program.
#[test]
fn launcher_does_not_change_foreign_etcd_keys() {
    let Some(etcd) = Etcd::up(&[]) else { return };
    let job = Job::new();
    let worker = job.script("echo ran\n");
    etcd.run_script(&["ctl", "put", "/convoke/job/coordinator", r#"{"version":77}"#]);
    let since = Instant::now();
    expect(
        run(&job, &etcd.endpoint, "", &[], &worker),
        since,
        &["the entry has version 77", "another --rdzv-id"],
    );
    assert!(etcd.run_script(&["ctl", "get", "/convoke/job/coordinator"]).contains("77"));
}

#[test]
fn nodes_of_a_check_meet_by_etcd() {
    let Some(etcd) = Etcd::up(&[]) else { return };
    let job = Job::new();
    let start = || {
        job.start(job.command([
            "check",
            "--nnodes=2",
            "--wait=30",
            "--rdzv-backend=etcd",
            "--rdzv-endpoint",
            &etcd.endpoint,
            "true",
        ]))
    };
    let (one, other) = (start(), start());
    for ended in [one.wait(), other.wait()] {
        let text = format!("{}{}", ended.stdout, ended.stderr);
        assert!(text.contains("convoke check: 2 nodes checked in "), "{text}");
    }
}
