//! Asks the job's Python for its version and those of the packages that all hosts must share.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::helper_program;

/// Prints one line for each fact: a name, a tab and a value. Imports no package, because that takes seconds.
const CODE: &str = "\
import sys, importlib.metadata as m
print('Python\\t' + sys.version.split()[0])
for name, packages in (('torch', ['torch']), ('NCCL', ['nvidia-nccl-cu12', 'nvidia-nccl-cu13', 'nvidia-nccl-cu11'])):
    for package in packages:
        try:
            print(name + '\\t' + m.version(package))
            break
        except m.PackageNotFoundError:
            pass
";
const TIMEOUT: Duration = Duration::from_millis(2300);

/// Returns the facts of the interpreter `python`.
///
/// # Errors
/// The interpreter cannot be run, or does not answer. The error is a line.
pub(super) fn python_facts(python: &str) -> Result<BTreeMap<String, String>, String> {
    let output = helper_program::output(python, &["-c", CODE], b"", TIMEOUT)?;
    let facts: BTreeMap<_, _> = output
        .lines()
        .filter_map(|line| line.split_once('\t'))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    if facts.is_empty() { Err(format!("{python} does not run")) } else { Ok(facts) }
}
