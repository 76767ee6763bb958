//! The places where NCCL may be. Pure: the caller provides environment variables and folder contents.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The environment variable that names the library; if it is set, no other place is tried.
pub(super) const LIBRARY_VARIABLE: &str = "CONVOKE_NCCL_SO";
/// The names of the library: with a number in run-time packages, without it in development packages.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// The path in a wheel, below `site-packages`.
const IN_WHEEL: &str = "nvidia/nccl/lib/libnccl.so.2";
/// The environment variables in which Python environments give their folders.
const ENVIRONMENTS: [&str; 2] = ["VIRTUAL_ENV", "CONDA_PREFIX"];
/// The installation prefixes of Python outside of virtual environments.
const SYSTEM: [&str; 3] = ["/usr/local", "/usr", "/opt/conda"];
/// The folders of packages below `lib/python3.*`.
const PACKAGES: [&str; 2] = ["site-packages", "dist-packages"];

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Candidate {
    /// A name for the system's loader, or a path.
    pub(super) path: PathBuf,
    /// If set, the path is a guess, and errors do not mention it if it does not exist.
    pub(super) guessed: bool,
}

/// Returns all places in the order in which they are tried. First are the names that the loader finds: in
/// `LD_LIBRARY_PATH`, in the system's folders, or already loaded, as by a Python program with PyTorch. The
/// wheels of Python follow.
pub(super) fn candidates(
    variable: impl Fn(&str) -> Option<OsString>,
    list: impl Fn(&Path) -> Vec<PathBuf>,
) -> Vec<Candidate> {
    let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
    if let Some(chosen) = variable(LIBRARY_VARIABLE) {
        return vec![Candidate { path: chosen.into(), guessed: false }];
    }
    let home = variable("HOME").map(|home| Path::new(&home).join(".local"));
    let prefixes = ENVIRONMENTS.iter().filter_map(|name| variable(name)).map(PathBuf::from);
    let prefixes = prefixes.chain(home).chain(SYSTEM.map(PathBuf::from));
    let mut wheels = Vec::new();
    for prefix in prefixes {
        let mut versions = list(&prefix.join("lib"));
        versions.retain(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"))
        });
        versions.sort_by_key(|path| minor(path));
        // The newest Python first.
        for version in versions.iter().rev() {
            wheels.extend(PACKAGES.map(|packages| version.join(packages).join(IN_WHEEL)));
        }
    }
    let names = NAMES.map(|name| Candidate { path: name.into(), guessed: false });
    names.into_iter().chain(wheels.into_iter().map(|path| Candidate { path, guessed: true })).collect()
}

/// The minor version of a folder: 12 of `python3.12`.
fn minor(folder: &Path) -> Option<u32> {
    folder.file_name()?.to_str()?.strip_prefix("python3.")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &[(&str, &str)], folders: &[(&str, &[&str])]) -> Vec<String> {
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
        };
        let list = |folder: &Path| {
            let entries =
                folders.iter().find(|(known, _)| Path::new(known) == folder).map(|(_, entries)| *entries);
            entries.unwrap_or_default().iter().map(|entry| folder.join(entry)).collect()
        };
        candidates(variable, list).iter().map(|candidate| candidate.path.display().to_string()).collect()
    }

    #[test]
    fn explicit_nccl_path_is_the_only_candidate() {
        assert_eq!(found(&[("CONVOKE_NCCL_SO", "/x/nccl.so"), ("VIRTUAL_ENV", "/v")], &[]), ["/x/nccl.so"]);
        assert_eq!(found(&[("CONVOKE_NCCL_SO", "")], &[]), ["libnccl.so.2", "libnccl.so"]);
    }

    #[test]
    fn nccl_wheels_are_searched_in_python_site_packages() {
        let found = found(
            &[("VIRTUAL_ENV", "/venv"), ("HOME", "/home/me")],
            &[
                ("/venv/lib", &["python3.11", "libx.so", "python3.9", "python3.12"]),
                ("/home/me/.local/lib", &["python3.9"]),
                ("/usr/lib", &["python3", "x86_64-linux-gnu"]),
            ],
        );
        let wheel = |at: &str| format!("{at}/nvidia/nccl/lib/libnccl.so.2");
        assert_eq!(found[..3], ["libnccl.so.2", "libnccl.so", &wheel("/venv/lib/python3.12/site-packages")]);
        assert!(found.contains(&wheel("/venv/lib/python3.11/site-packages")));
        assert!(found.contains(&wheel("/home/me/.local/lib/python3.9/site-packages")));
        assert_eq!(found.last(), Some(&wheel("/usr/lib/python3/dist-packages")));
    }
}
