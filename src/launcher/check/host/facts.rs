//! Collects the facts about this host that must be equal on all hosts: versions, program, layout, variables.

use std::fs;
use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::super::peer::NodeResult;
use super::super::problem::Problem;
use super::python::python_facts;
use crate::cli::VERSION;
use crate::config::{Config, Machine, in_path};
use crate::formatting::hex;

/// Begins of the names of variables that all nodes should have with one value.
const COMPARED: &[&str] =
    &["NCCL_", "GLOO_", "TORCH_", "OMP_", "CUDA_", "PYTORCH_", "PYTHONPATH", "HF_HOME", "UCX_", "CONVOKE_"];
/// Variables among those that may differ: they name devices of a host, or are of this start alone.
const MAY_DIFFER: &[&str] = &[
    "CUDA_VISIBLE_DEVICES",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "CONVOKE_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "CONVOKE_HOSTS_",
];
/// Parts of the names of variables whose values must not leave the host.
const SECRET: &[&str] = &["TOKEN", "PASSWORD", "SECRET", "KEY", "CREDENTIAL"];
/// Most bytes of a program that are read.
const MAX_PROGRAM: u64 = 64 << 20;

pub(super) fn check(config: &Config, machine: &Machine, host: &str) -> NodeResult {
    let mut result = NodeResult::default();
    let mut fact = |name: &str, value: String| drop(result.facts.insert(name.to_owned(), value));
    fact("convoke", VERSION.to_owned());
    let nodes = config.nodes;
    fact(
        "--nnodes",
        if nodes.min == nodes.max { nodes.max.to_string() } else { format!("{}:{}", nodes.min, nodes.max) },
    );
    fact("workers per node", config.nproc_per_node.to_string());
    fact("CPUs", machine.cpu_share().to_string());
    for (name, value) in std::env::vars_os() {
        let (name, value) = (name.to_string_lossy(), value.to_string_lossy());
        if is_compared(&name) {
            fact(&format!("${name}"), value.into_owned());
        }
    }
    let argv = &config.program.argv;
    if config.program.is_python {
        let python = argv.first().map(|word| word.to_string_lossy().into_owned());
        match python.as_deref().map_or(Err("there is no Python".to_owned()), python_facts) {
            Ok(facts) => result.facts.extend(facts),
            Err(error) => {
                let remedy = "install Python there, activate the environment, or name it with PYTHON_EXEC";
                result.problems.push(Problem::fail("program", host, error, remedy));
            }
        }
    }
    let (name, path) = match program_file(config) {
        Some(file) => file,
        None => return result,
    };
    match hash(&path) {
        Ok(hash) => drop(result.facts.insert(format!("hash of {name}"), hash)),
        Err(error) => {
            let folder = std::env::current_dir()
                .map_or_else(|_| "?".to_owned(), |folder| folder.display().to_string());
            let text = format!("{name} cannot be read in {folder}: {error}");
            let remedy = "copy it to all hosts, or start from a folder that all hosts share";
            result.problems.push(Problem::fail("program", host, text, remedy));
        }
    }
    result
}

/// Returns true if all nodes should have the variable with one value, and other nodes may see the value.
fn is_compared(name: &str) -> bool {
    let begins_with = |list: &[&str]| list.iter().any(|begin| name.starts_with(begin));
    begins_with(COMPARED) && !begins_with(MAY_DIFFER) && !SECRET.iter().any(|part| name.contains(part))
}

/// Returns the name and the path of the file that the user named: the script or the program. `None` for a module,
/// and if none was named.
fn program_file(config: &Config) -> Option<(String, std::path::PathBuf)> {
    let argv = &config.program.argv;
    let words = argv.iter().take(if config.program.is_python { usize::MAX } else { 1 });
    let is_script = |word: &&std::ffi::OsString| {
        !config.program.is_python || Path::new(word).extension().is_some_and(|end| end == "py")
    };
    let word = words.into_iter().find(is_script)?;
    if Path::new(word) == Path::new(super::super::NO_PROGRAM) {
        return None;
    }
    let path = in_path(word, &|name| std::env::var_os(name)).filter(|_| !config.program.is_python);
    let name = Path::new(word).file_name().unwrap_or(word).to_string_lossy().into_owned();
    Some((name, path.unwrap_or_else(|| word.into())))
}

/// Returns the begin of the SHA-256 of a file.
fn hash(path: &Path) -> std::io::Result<String> {
    let mut digest = Sha256::new();
    let mut file = fs::File::open(path)?.take(MAX_PROGRAM);
    let mut chunk = vec![0; 64 << 10];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hex(&digest.finalize()[..6])),
            count => digest.update(&chunk[..count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_and_names_of_devices_are_not_compared() {
        for name in ["NCCL_DEBUG", "CONVOKE_SHM", "PYTHONPATH", "OMP_NUM_THREADS"] {
            assert!(is_compared(name), "{name}");
        }
        for name in [
            "CONVOKE_TOKEN",
            "CONVOKE_TOKEN_FILE",
            "CONVOKE_ETCD_PASSWORD",
            "HF_HOME_TOKEN",
            "NCCL_SOCKET_IFNAME",
            "CUDA_VISIBLE_DEVICES",
            "HOME",
        ] {
            assert!(!is_compared(name), "{name}");
        }
    }
}
