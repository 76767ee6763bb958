//! The flags that the user has set, on the command line or as `PET_` variables.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;

use super::error::CliError;
use super::flags::{self, Takes};
use super::grammar::RawArgs;
use super::values;

/// All flags that the user has set. Other flags have their defaults.
#[derive(Debug)]
pub(crate) struct ParsedArgs {
    values: BTreeMap<&'static str, Value>,
    /// The word SCRIPT: what to run.
    pub(crate) script: OsString,
    /// The arguments after SCRIPT.
    pub(crate) arguments: Vec<OsString>,
}

/// The value of one flag, and where it was set. Displays as the user would write it: `--nnodes=2`,
/// `PET_NNODES=2`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Value {
    /// The text that the user has given; empty for a switch.
    pub(crate) text: OsString,
    /// Name of the flag or variable that holds the value: `--nnodes` or `PET_NNODES`.
    pub(crate) name: String,
    /// True if the value is on the command line, false if it is in an environment variable.
    pub(crate) on_command_line: bool,
}

impl ParsedArgs {
    /// Merges the flags of the command line with the `PET_` variables. The command line has priority.
    ///
    /// # Errors
    /// A `PET_` variable of a switch is not an integer: exit code 1, as torchrun's.
    pub(crate) fn new(raw: RawArgs, env: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, CliError> {
        let mut values = BTreeMap::new();
        for flag in flags::all() {
            let variable = flag.variable().and_then(|name| env(&name).map(|text| (name, text)));
            if let Some((name, text)) = variable {
                let value = Value { text, name, on_command_line: false };
                match flag.takes {
                    Takes::Value(_) | Takes::MaybeValue(_) => {
                        values.insert(flag.name, value);
                    }
                    Takes::Nothing if value.switch()? => {
                        values.insert(flag.name, value);
                    }
                    Takes::Nothing => {}
                }
            }
            if let Some(text) = raw.flags.get(flag.name) {
                let text = text.clone().unwrap_or_default();
                values.insert(flag.name, Value { text, name: flag.dashed(), on_command_line: true });
            }
        }
        Ok(Self { values, script: raw.script, arguments: raw.arguments })
    }

    /// Returns the value of a flag, if the user has set it.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        debug_assert!(flags::named(name).is_some(), "no flag --{name}");
        self.values.get(name)
    }

    /// Returns whether the user has set a flag.
    pub(crate) fn is_on(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// Returns the value of a flag as text; empty if the user has not set it.
    ///
    /// # Errors
    /// The value is not UTF-8.
    pub(crate) fn text(&self, name: &str) -> Result<&str, CliError> {
        self.get(name).map_or(Ok(""), Value::as_str)
    }
}

impl Value {
    /// Returns the value as text.
    ///
    /// # Errors
    /// The value is not UTF-8.
    pub(crate) fn as_str(&self) -> Result<&str, CliError> {
        self.text.to_str().ok_or_else(|| CliError::value(format!("{self}: not valid UTF-8")))
    }

    /// Parses the value as Python's `int` does.
    ///
    /// # Errors
    /// A usage error (exit code 2) that shows `example` as a valid value.
    pub(crate) fn integer(&self, example: &str) -> Result<i128, CliError> {
        let number = self.text.to_str().and_then(values::integer);
        number.ok_or_else(|| CliError::usage(self.wrong("not an integer", example)))
    }

    /// Parses the value as Python's `float` does.
    ///
    /// # Errors
    /// A usage error (exit code 2) that shows `example` as a valid value.
    pub(crate) fn float(&self, example: &str) -> Result<f64, CliError> {
        let number = self.text.to_str().and_then(values::float);
        number.ok_or_else(|| CliError::usage(self.wrong("not a number", example)))
    }

    /// Formats an error about this value: `--flag=TEXT: what is wrong; write --flag=EXAMPLE`.
    pub(crate) fn wrong(&self, what: &str, example: &str) -> String {
        format!("{self}: {what}; write {}={example}", self.name)
    }

    /// Returns whether the environment variable of a switch turns it on.
    fn switch(&self) -> Result<bool, CliError> {
        match self.text.to_str().and_then(values::integer) {
            Some(number) => Ok(number != 0),
            None => Err(CliError::value(format!(
                "{self}: a switch is an integer; write {0}=1 or {0}=0",
                self.name
            ))),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, quoted(&self.text))
    }
}

/// Quotes a value for messages if it has blanks or control characters.
fn quoted(text: &OsStr) -> String {
    let text = text.to_string_lossy();
    if text.chars().any(|c| c.is_whitespace() || c.is_control()) {
        format!("{text:?}")
    } else {
        text.into_owned()
    }
}
