//! The `convoke` launcher has torchrun's command line. Its workers never outlive it, and it reports failures
//! in the order in which they happened. `docs/internals/architecture.md` is the map of this crate.
//!
//! The launcher is a library only so that tests can build the binary as their own; [`main`] is the only entry
//! point.

#[cfg(not(target_os = "linux"))]
compile_error!("convoke runs on Linux only: it relies on subreapers, pidfds and /proc");

mod agent;
mod cause;
mod check;
#[allow(unsafe_code)]
mod child;
mod cli;
mod config;
mod drain_command;
mod dry_run;
mod events;
mod fault;
mod flight;
mod formatting;
mod gpus;
mod guard;
mod helper_program;
mod host_name;
mod hosts;
mod limits;
mod logs;
mod membership;
mod messages;
#[allow(unsafe_code)]
mod os;
mod rendezvous;
mod report;
mod scheduler;
mod supervise;

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use cli::{CliError, Command, Invocation};
use config::Machine;
use limits::Limits;
use messages::print_message;
use os::Forked;

/// The whole program: reads the command line and the environment, runs the job, and returns the exit
/// code that docs/reference/cli.md states.
#[must_use]
pub fn main() -> ExitCode {
    agent::block_signals();
    if let Some(code) = drain_command::run(std::env::args_os().skip(1)) {
        return code;
    }
    if std::env::args_os().nth(1).is_some_and(|word| word == "--agent") {
        return hosts::run_agent();
    }
    if !hosts::end_with_agent() {
        return ExitCode::FAILURE;
    }
    let env = |name: &str| std::env::var_os(name);
    let (words, command) = command(std::env::args_os().collect());
    let refuse = |error: CliError| refuse(error, command);
    let mut args = match cli::parse(words.into_iter(), command, &env) {
        Ok(Invocation::Run(args)) => args,
        Ok(Invocation::Help(text) | Invocation::Version(text) | Invocation::Printed(text)) => {
            return print(&text);
        }
        Err(error) => return refuse(error),
    };
    let check = match (command == Command::Check).then(|| check::Options::new(&args, &env)).transpose() {
        Ok(check) => check,
        Err(error) => return refuse(error),
    };
    match hosts::hosts_job(&args, check.is_some()) {
        Ok(Some(job)) if args.is_on("dry-run") => return print(&job.describe()),
        Ok(Some(job)) => {
            return match &check {
                None => hosts::run(&job),
                Some(options) => {
                    let hosts::Collected { output, unreachable, code } = hosts::run_and_collect(&job);
                    check::finish_remote(&output, &unreachable, options, code)
                }
            };
        }
        Ok(None) => {}
        Err(error) => return refuse(error),
    }
    if args.script.is_empty() {
        args.script = check::NO_PROGRAM.into();
    }
    let mut machine = Machine::detect();
    if check.is_some() {
        machine.driver_timeout = check::DRIVER_TIMEOUT;
    }
    let mut config = config::build::config(&args, &env, &machine);
    // A check goes on without the flags that this host cannot fulfil, so that the report names it.
    let unfulfilled = config.as_ref().err().filter(|error| check.is_some() && error.is_of_host).cloned();
    if unfulfilled.is_some() {
        args.remove(config::build::OF_DEVICES);
        config = config::build::config(&args, &env, &machine);
    }
    let config = match config {
        Ok(config) => config,
        Err(mut error) => {
            // The scheduler would start the same command line again.
            if args.get("exit-codes").is_some_and(|value| value.text == "scheduler") {
                error.code = agent::WOULD_FAIL_AGAIN;
            }
            return refuse(error);
        }
    };
    warn(&config.warnings);
    if args.is_on("dry-run") {
        return print(&dry_run::text(&config, &env));
    }
    if config.as_gloo
        && let Err(error) = config::package::check(&config.program)
    {
        return refuse(error);
    }
    let limits = Limits::raise();
    if let Some(options) = &check {
        return check::run(&config, options, &limits, &machine, unfulfilled.as_ref());
    }
    match limits.check(&config) {
        Ok(warnings) if config::is_quiet(&env) => drop(warnings),
        Ok(warnings) => warn(&warnings),
        Err(error) => {
            print_message(&format!("error: {error}"));
            return ExitCode::FAILURE;
        }
    }
    fault::init("launcher");
    match os::fork_guard() {
        Ok(Forked::Guard { socket }) => guard::run(socket, limits),
        Ok(Forked::Launcher { guard, socket }) => agent::run(config, guard, socket),
        Err(error) => {
            let what = "the guard process";
            let why = match error.raw_os_error() {
                Some(errno) => agent::process_creation_error(what, errno).to_string(),
                None => format!("{what}: {error}"),
            };
            print_message(&format!("error: cannot start {why}"));
            ExitCode::FAILURE
        }
    }
}

/// Returns the command line without the word `check`, and what it starts. A file called `check` is a program to
/// launch.
fn command(mut words: Vec<OsString>) -> (Vec<OsString>, Command) {
    if words.get(1).is_some_and(|word| word == "check") && !Path::new("check").exists() {
        words.remove(1);
        return (words, Command::Check);
    }
    (words, Command::Job)
}

/// Prints an error of the command line or configuration. Returns its exit code. A check has 2 for each of them,
/// because 1 says that it has found a failure.
fn refuse(error: CliError, command: Command) -> ExitCode {
    let code = if command == Command::Check { check::NOT_DONE } else { error.code };
    let _ = std::io::stderr().write_all(error.text.as_bytes());
    ExitCode::from(code)
}

fn print(text: &str) -> ExitCode {
    // If the reader of stdout has closed it (`convoke --help | head`), the write fails, which is no error.
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

fn warn(warnings: &[String]) {
    for warning in warnings {
        print_message(&format!("warning: {warning}"));
    }
}
