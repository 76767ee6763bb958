//! Errors of the command line and the configuration.

/// An error of the command line or configuration, because of which nothing can be started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub(crate) struct CliError {
    /// The whole text for stderr, beginning with `convoke: error: ` and ending with a newline.
    pub(crate) text: String,
    /// Exit code: 2 for usage errors, 1 for values that make no sense.
    pub(crate) code: u8,
}

impl CliError {
    /// Creates the error for a command line that cannot be parsed: exit code 2.
    pub(crate) fn usage(message: impl AsRef<str>) -> Self {
        Self { text: format!("convoke: error: {}\n", message.as_ref()), code: 2 }
    }

    /// Creates the error for a value that can be parsed but makes no sense: exit code 1.
    pub(crate) fn value(message: impl AsRef<str>) -> Self {
        Self { text: format!("convoke: error: {}\n", message.as_ref()), code: 1 }
    }
}
