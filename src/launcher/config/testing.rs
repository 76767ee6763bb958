//! The configuration that a command line gives, for tests.

use std::ffi::OsString;

use super::{Config, Machine, build};
use crate::cli::{self, CliError, Env, Invocation};

/// Parses a command line that runs a program and checks its values, as `main` does.
pub(crate) fn config_of(
    words: impl Iterator<Item = OsString>,
    env: Env<'_>,
    machine: &Machine,
) -> Result<Config, CliError> {
    match cli::parse(words, cli::Command::Job, env)? {
        Invocation::Run(args) => build::config(&args, env, machine),
        other => panic!("no program to run: {other:?}"),
    }
}
