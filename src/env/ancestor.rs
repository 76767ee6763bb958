//! The ancestors of this process.

use std::fs;
use std::os::unix::process::parent_id;

/// Most ancestors that are examined.
const MAX_ANCESTORS: usize = 32;

/// Returns the pids of this process's ancestors, its parent first, as far as /proc shows them.
pub fn ancestors() -> impl Iterator<Item = u32> {
    std::iter::successors(Some(parent_id()), |&pid| parent_of(pid)).take(MAX_ANCESTORS)
}

/// Returns the pid of the nearest ancestor whose environment does not have `variable`.
///
/// This ancestor is the program that set the variable for its children. Returns `None` if /proc does
/// not show the environment of an ancestor that is nearer.
pub(crate) fn nearest_ancestor_without(variable: &str) -> Option<u32> {
    let sets =
        |entry: &[u8]| entry.strip_prefix(variable.as_bytes()).is_some_and(|rest| rest.starts_with(b"="));
    for pid in ancestors() {
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        if !environment.split(|&byte| byte == 0).any(sets) {
            return Some(pid);
        }
    }
    None
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program, in parentheses, may contain any characters, so the fields are counted
    // from the end of the name.
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok().filter(|&parent| parent != 0)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn unset_variable_selects_the_parent_process() {
        assert_eq!(nearest_ancestor_without("CONVOKE_NO_SUCH_VARIABLE"), Some(parent_id()));
        assert_eq!(parent_of(std::process::id()), Some(parent_id()));
    }

    const PASSED_ON: &str = "CONVOKE_TEST_PASSED_ON";
    const ABOVE: &str = "CONVOKE_TEST_ABOVE";

    #[test]
    #[ignore = "a subprocess test of ancestor_search_skips_processes_that_inherit_the_variable"]
    fn subprocess_below_a_shell_that_inherits_the_variable() {
        let above = convoke_testkit::subprocess_variable(ABOVE).parse().unwrap();
        assert_ne!(parent_id(), above);
        assert_eq!(nearest_ancestor_without(PASSED_ON), Some(above));
    }

    #[test]
    fn ancestor_search_skips_processes_that_inherit_the_variable() {
        let command = convoke_testkit::subprocess_test(
            "ancestor::tests::subprocess_below_a_shell_that_inherits_the_variable",
        );
        // The shell does not exec the test process, because `exit` follows it.
        let mut shell = Command::new("sh");
        shell.args(["-c", "\"$0\" \"$@\"; exit $?"]).arg(command.get_program()).args(command.get_args());
        shell.env(PASSED_ON, "1").env(ABOVE, std::process::id().to_string());
        convoke_testkit::assert_one_passed(&shell.output().unwrap());
    }
}
