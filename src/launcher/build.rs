//! Build script: passes the commit, the target and the lack of etcd to the program, which prints them for
//! `--version`. It also links the unwinder of libgcc into the program.

use std::path::{Path, PathBuf};
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
    link_unwinder();
}

/// Links libgcc's unwinder statically where the system's compiler is the linker, which has it as an archive. Without
/// the shared library libgcc_s a launcher starts 0.3 to 0.7 ms earlier, because each fork copies fewer mappings, and
/// the program needs no library but the C library.
///
/// The standard library asks for `-lgcc_s`. The linker finds this script of that name first.
fn link_unwinder() {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let is_gnu = variable("CARGO_CFG_TARGET_OS") == "linux" && variable("CARGO_CFG_TARGET_ENV") == "gnu";
    let has_own_linker = std::env::var_os("RUSTC_LINKER").is_some();
    if !is_gnu || has_own_linker || variable("TARGET") != variable("HOST") || !has_static_unwinder() {
        return;
    }
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    std::fs::write(folder.join("libgcc_s.so"), "INPUT(-lgcc_eh -lgcc)\n").expect("OUT_DIR is writable");
    println!("cargo:rustc-link-search=native={}", folder.display());
}

/// Returns true if the system's compiler has the static form of its unwinder.
fn has_static_unwinder() -> bool {
    let output = Command::new("cc").arg("-print-file-name=libgcc_eh.a").output();
    // The compiler prints the bare name of a file that it does not have.
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).trim().starts_with('/'))
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
