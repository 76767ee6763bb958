//! The flags that the user has set, on the command line or as `PET_` variables.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;

use super::error::CliError;
use super::flags::{self, Takes};
use super::grammar::RawArgs;
use super::values;

/// The lookup of an environment variable.
pub(crate) type Env<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// All flags that the user has set. Other flags have their defaults.
#[derive(Debug)]
pub(crate) struct ParsedArgs {
    values: BTreeMap<&'static str, Value>,
    /// Empty if `convoke check` is called without a script.
    pub(crate) script: OsString,
    pub(crate) arguments: Vec<OsString>,
    /// True if this program was called by the name `torchrun`.
    pub(crate) is_called_torchrun: bool,
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
    pub(crate) fn new(raw: RawArgs, is_called_torchrun: bool, env: Env<'_>) -> Result<Self, CliError> {
        let mut values = BTreeMap::new();
        for flag in flags::all() {
            if let Some((name, text)) = flag.variable().and_then(|name| env(&name).map(|text| (name, text))) {
                let value = Value { text, name, on_command_line: false };
                if flag.takes != Takes::Nothing || value.switch()? {
                    values.insert(flag.name, value);
                }
            }
            if let Some(text) = raw.flags.get(flag.name) {
                let text = text.clone().unwrap_or_default();
                values.insert(flag.name, Value { text, name: flag.dashed(), on_command_line: true });
            }
        }
        Ok(Self { values, script: raw.script, arguments: raw.arguments, is_called_torchrun })
    }

    /// Returns the words of the command line, without the launcher's name and these flags. Variables are not
    /// among them.
    pub(crate) fn words_without(&self, left_out: &[&str]) -> Vec<OsString> {
        let mut words = Vec::new();
        for flag in flags::all().filter(|flag| !left_out.contains(&flag.name)) {
            let Some(value) = self.values.get(flag.name).filter(|value| value.on_command_line) else {
                continue;
            };
            let mut word = OsString::from(flag.dashed());
            let is_switch = match flag.takes {
                Takes::Nothing => true,
                Takes::Value(_) => false,
                Takes::MaybeValue(_) => value.text.is_empty(),
            };
            if !is_switch {
                word.push("=");
                word.push(&value.text);
            }
            words.push(word);
        }
        if !self.script.is_empty() {
            // SCRIPT may look like a flag.
            words.push("--".into());
            words.push(self.script.clone());
            words.extend(self.arguments.iter().cloned());
        }
        words
    }

    /// Returns the value of a flag, if the user has set it.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        debug_assert!(flags::named(name).is_some(), "no flag --{name}");
        self.values.get(name)
    }

    /// Returns the value of a flag, if the user has set it to a text that is not empty.
    pub(crate) fn get_nonempty(&self, name: &str) -> Option<&Value> {
        self.get(name).filter(|value| !value.text.is_empty())
    }

    pub(crate) fn is_on(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// Returns the value of a flag as text; empty if the user has not set it.
    pub(crate) fn text(&self, name: &str) -> Result<&str, CliError> {
        self.text_or(name, "")
    }

    /// Returns the value of a flag as text; `default` if the user has not set it.
    pub(crate) fn text_or<'a>(&'a self, name: &str, default: &'a str) -> Result<&'a str, CliError> {
        self.get(name).map_or(Ok(default), Value::as_str)
    }

    /// Removes flags, so that they have their defaults.
    pub(crate) fn remove(&mut self, names: &[&str]) {
        self.values.retain(|name, _| !names.contains(name));
    }

    /// Creates the error about the value of a flag that is set, as [`Value::error`] does.
    pub(crate) fn error(&self, name: &str, what: &str, example: &str) -> CliError {
        self.get(name).expect("only a flag that is set has a wrong value").error(what, example)
    }
}

impl Value {
    pub(crate) fn as_str(&self) -> Result<&str, CliError> {
        self.text.to_str().ok_or_else(|| CliError::value(format!("{self}: not valid UTF-8")))
    }

    /// Parses the value as Python's `int` does. The usage error shows `example`.
    pub(crate) fn integer(&self, example: &str) -> Result<i128, CliError> {
        let number = self.text.to_str().and_then(values::integer);
        number.ok_or_else(|| self.usage_error("not an integer", example))
    }

    /// Parses the value as Python's `float` does. The usage error shows `example`.
    pub(crate) fn float(&self, example: &str) -> Result<f64, CliError> {
        let number = self.text.to_str().and_then(values::float);
        number.ok_or_else(|| self.usage_error("not a number", example))
    }

    /// Creates an error about this value, which makes no sense (exit code 1): `--flag=TEXT: what is wrong;
    /// write --flag=EXAMPLE`.
    pub(crate) fn error(&self, what: &str, example: &str) -> CliError {
        CliError::value(self.wrong(what, example))
    }

    /// Creates an error in the form of [`Self::error`] about a value that cannot be parsed (exit code 2).
    pub(crate) fn usage_error(&self, what: &str, example: &str) -> CliError {
        CliError::usage(self.wrong(what, example))
    }

    fn wrong(&self, what: &str, example: &str) -> String {
        format!("{self}: {what}; write {}={example}", self.name)
    }

    /// Returns whether the environment variable of a switch turns it on.
    fn switch(&self) -> Result<bool, CliError> {
        let number = self.text.to_str().and_then(values::integer);
        number.map(|number| number != 0).ok_or_else(|| {
            CliError::value(format!("{self}: a switch is an integer; write {0}=1 or {0}=0", self.name))
        })
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
