//! Slurm's `scontrol`: runs it, and reads its output.

use std::time::Duration;

use crate::helper_program::output;

/// Runs `scontrol` and returns its output.
///
/// # Errors
/// It cannot be run, or does not answer within `timeout`. The error is a line.
pub(crate) fn scontrol(arguments: &[&str], timeout: Duration) -> Result<String, String> {
    output("scontrol", arguments, b"", timeout)
}

/// Returns the value of a field in the output, which has words of the form `NAME=VALUE`.
pub(crate) fn scontrol_field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.split_ascii_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_of_a_node_is_read_from_scontrol() {
        let text = "NodeName=h1 Arch=x86_64\n   NodeAddr=10.0.0.7 NodeHostName=h1 Version=22.05\n";
        assert_eq!(scontrol_field(text, "NodeAddr"), Some("10.0.0.7"));
        assert_eq!(scontrol_field("Node h9 not found", "NodeAddr"), None);
    }
}
