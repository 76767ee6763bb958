//! Tests that cannot run on this machine.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::{self, Write};

/// Reports that the test of this thread cannot run here, and the reason; the caller then returns. The line
/// goes to stderr and to the file that CONVOKE_SKIPS names. `scripts/check` prints this file at its end.
pub fn skip(reason: impl Display) {
    let thread = std::thread::current();
    let line = format!("SKIPPED {}: {reason}\n", thread.name().unwrap_or("?"));
    // The test harness captures the output of `eprintln!` and shows it only for failed tests.
    let _ = io::stderr().write_all(line.as_bytes());
    if let Some(file) = std::env::var_os("CONVOKE_SKIPS") {
        let mut file = OpenOptions::new().append(true).create(true).open(file).unwrap();
        file.write_all(line.as_bytes()).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{assert_one_passed, subprocess_test};

    #[test]
    #[ignore = "a subprocess test of skips_are_collected_in_a_file"]
    fn subprocess_that_skips_twice() {
        skip("no hosts");
        skip(format_args!("no {}", "mounts"));
    }

    #[test]
    fn skips_are_collected_in_a_file() {
        let file = std::env::temp_dir().join(format!("convoke-skips-{}", std::process::id()));
        let output = subprocess_test("skip::tests::subprocess_that_skips_twice")
            .env("CONVOKE_SKIPS", &file)
            .output()
            .unwrap();
        assert_one_passed(&output);
        let collected = fs::read_to_string(&file).unwrap();
        fs::remove_file(&file).unwrap();
        let name = "skip::tests::subprocess_that_skips_twice";
        assert_eq!(collected, format!("SKIPPED {name}: no hosts\nSKIPPED {name}: no mounts\n"));
        assert!(String::from_utf8_lossy(&output.stderr).contains(&collected));
    }
}
