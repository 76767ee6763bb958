//! Errors of the command line and the configuration.

/// An error of the command line or configuration, because of which nothing can be started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub(crate) struct CliError {
    /// The whole text for stderr, beginning with `convoke: error: ` and ending with a newline.
    pub(crate) text: String,
    /// Exit code: 2 for usage errors, 1 for values that make no sense.
    pub(crate) code: u8,
    /// True if this host is the reason, such as a host without GPUs. The flags may be right on other hosts.
    pub(crate) is_of_host: bool,
}

impl CliError {
    /// Creates the error for a command line that cannot be parsed: exit code 2.
    pub(crate) fn usage(message: impl AsRef<str>) -> Self {
        Self { code: 2, ..Self::value(message) }
    }

    /// Creates the error for a value that can be parsed but makes no sense: exit code 1.
    pub(crate) fn value(message: impl AsRef<str>) -> Self {
        Self { text: format!("convoke: error: {}\n", message.as_ref()), code: 1, is_of_host: false }
    }

    /// Marks the error as one of this host.
    pub(crate) fn of_host(self) -> Self {
        Self { is_of_host: true, ..self }
    }

    /// Returns the text without its begin and end.
    pub(crate) fn message(&self) -> &str {
        self.text.trim_start_matches("convoke: error: ").trim_end()
    }
}
