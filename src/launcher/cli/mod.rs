//! The command line: torchrun's grammar, its `PET_` variables, and help.
//!
//! `flags` is the table of all flags. `grammar` splits the command line into flags and SCRIPT, `parsed_args`
//! merges the flags with the `PET_` variables. [`crate::config`] interprets the values of the [`ParsedArgs`].

mod error;
mod flags;
mod grammar;
mod help;
mod parsed_args;
mod suggest;
#[cfg(test)]
mod tests;
mod values;

use std::ffi::{OsStr, OsString};
use std::path::Path;

pub(crate) use error::CliError;
pub(crate) use grammar::Command;
use grammar::Request;
pub(crate) use help::VERSION;
pub(crate) use parsed_args::{Env, ParsedArgs, Value};
pub(crate) use suggest::choice as suggest_choice;
pub(crate) use values::{float, integer};

/// Name of the launcher that this program replaces.
const TORCHRUN: &str = "torchrun";

/// What the command line asks for, with the texts to print.
#[derive(Debug)]
pub(crate) enum Invocation {
    /// `--help`: this text on stdout, exit code 0.
    Help(String),
    /// `--version`: this text on stdout, exit code 0.
    Version(String),
    /// `--print-completion`, `--print-man`: this text on stdout, exit code 0.
    Printed(String),
    /// Run a program with these flags. With `--dry-run` nothing is started.
    Run(ParsedArgs),
}

/// Parses a command line, whose first word is the program's own name, and the environment. The word `check` is
/// not among `args`.
pub(crate) fn parse(
    mut args: impl Iterator<Item = OsString>,
    command: Command,
    env: Env<'_>,
) -> Result<Invocation, CliError> {
    let name = program_name(args.next().as_deref());
    match grammar::read(args, command).map_err(CliError::usage)? {
        Request::Help => Ok(Invocation::Help(help::text(name))),
        Request::Version => Ok(Invocation::Version(help::version(name))),
        Request::Completion(shell) => completion(name, &shell),
        Request::Man => Ok(Invocation::Printed(help::man(name))),
        Request::Run(words) => ParsedArgs::new(words, name == TORCHRUN, env).map(Invocation::Run),
    }
}

/// Returns the program's name in help and completions: `torchrun` if called by that name, else `convoke`.
fn program_name(word: Option<&OsStr>) -> &'static str {
    let torchrun = word.map(Path::new).and_then(Path::file_name).is_some_and(|name| name == TORCHRUN);
    if torchrun { TORCHRUN } else { "convoke" }
}

fn completion(name: &'static str, shell: &OsStr) -> Result<Invocation, CliError> {
    shell.to_str().and_then(|shell| help::completion(name, shell)).map(Invocation::Printed).ok_or_else(|| {
        let shell = shell.display();
        CliError::usage(format!(
            "--print-completion={shell}: no such shell; write bash, zsh, fish, elvish or powershell"
        ))
    })
}
