//! Build script: passes the commit, the target and the lack of etcd to the program, which prints them for
//! `--version`.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let target = std::env::var("TARGET").unwrap_or_else(|_| "unknown target".to_owned());
    println!("cargo:rustc-env=CONVOKE_TARGET={target}");
    let has_etcd = std::env::var_os("CARGO_FEATURE_ETCD").is_some();
    println!("cargo:rustc-env=CONVOKE_WITHOUT={}", if has_etcd { "" } else { ", without etcd" });
    println!("cargo:rerun-if-env-changed=CONVOKE_COMMIT");
    let given = std::env::var("CONVOKE_COMMIT").ok();
    let commit = given.or_else(commit).unwrap_or_else(|| "unknown commit".to_owned());
    println!("cargo:rustc-env=CONVOKE_COMMIT={commit}");
}

/// Returns the commit that is checked out; `None` outside a repository, as in a source archive.
fn commit() -> Option<String> {
    // Git writes this file with every commit and checkout. Cargo then runs this script again.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    if Path::new(&log).exists() {
        println!("cargo:rerun-if-changed={log}");
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
