//! Subprocess tests: ignored tests that another test runs in processes of their own.

use std::process::{Command, Output};

/// Builds a command that runs only the ignored test `name` of this test binary.
#[must_use]
pub fn subprocess_test(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    command
}

/// Returns the value of a variable of a subprocess test. Panics if it is unset, because then no test
/// started it.
#[must_use]
pub fn subprocess_variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is unset: another test starts this one"))
}

/// Panics unless the process ran one test and this test passed. The stdout of the process must be
/// a pipe.
pub fn assert_one_passed(output: &Output) {
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{}: {text}", output.status);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "a subprocess test of the tests below"]
    fn variable_is_set_in_the_subprocess() {
        assert_eq!(subprocess_variable("TESTKIT_SUBPROCESS"), "well");
    }

    #[test]
    fn subprocess_test_runs_in_its_own_process() {
        assert_one_passed(
            &subprocess_test("subprocess::tests::variable_is_set_in_the_subprocess")
                .env("TESTKIT_SUBPROCESS", "well")
                .output()
                .unwrap(),
        );
    }

    #[test]
    #[should_panic(expected = "another test starts this one")]
    fn subprocess_test_fails_if_no_test_starts_it() {
        assert_one_passed(
            &subprocess_test("subprocess::tests::variable_is_set_in_the_subprocess")
                .env_remove("TESTKIT_SUBPROCESS")
                .output()
                .unwrap(),
        );
    }

    #[test]
    #[should_panic(expected = "0 passed")]
    fn missing_subprocess_test_fails() {
        assert_one_passed(&subprocess_test("subprocess::tests::renamed").output().unwrap());
    }
}
