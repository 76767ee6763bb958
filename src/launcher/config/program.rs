//! From SCRIPT to the command of the workers.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::machine::{FileKind, file_kind, in_path};
use super::{LocalRankArgument, Program};
use crate::cli::{CliError, Given};

type Env<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Runs SCRIPT as `__main__` in an interpreter of its own, with `argv[0]` as torchrun gives it.
const RUN_PATH: &str =
    "import runpy,sys; sys.argv=sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')";

/// Decides how SCRIPT is executed.
///
/// # Errors
/// Flags that contradict each other, or no Python in PATH: exit code 1.
pub(super) fn program(given: &Given, env: Env<'_>) -> Result<Program, CliError> {
    let form = local_rank_form(given)?;
    let (module, no_python, run_path) =
        (given.is_on("module"), given.is_on("no-python"), given.is_on("run-path"));
    let script = &given.script;
    let mut argv: Vec<OsString> = Vec::new();
    let mut guessed = false;
    let mut title = script.display().to_string();
    if run_path {
        argv.extend([python(env)?, "-u".into(), "-c".into(), RUN_PATH.into(), script.clone()]);
    } else if no_python {
        if module {
            return Err(CliError::value("--module and --no-python exclude each other; remove one of them"));
        }
        if form.is_some() {
            return Err(CliError::value(
                "--no-python with --pass-local-rank: the program would get an argument that only scripts expect; \
                 add --use-env",
            ));
        }
        argv.push(script.clone());
    } else if let Some(direct) = (!module).then(|| executable(script, env)).flatten() {
        argv.push(direct);
    } else {
        if let Some(python) = env("PYTHON_EXEC").filter(|python| !python.is_empty()) {
            title = python.display().to_string();
        }
        argv.extend([python(env)?, "-u".into()]);
        argv.extend(module.then(|| "-m".into()));
        guessed = !module
            && !script.as_bytes().ends_with(b".py")
            && matches!(file_kind(Path::new(script)), FileKind::Absent);
        argv.push(script.clone());
    }
    let index = argv.len();
    argv.extend(given.arguments.iter().cloned());
    let local_rank_argument = form.map(|(dash, underscore)| LocalRankArgument { index, dash, underscore });
    Ok(Program { argv, local_rank_argument, title, guessed })
}

/// What to execute if SCRIPT is a program by itself: an ELF file, an executable `#!` file that does not end in
/// `.py`, or no file here but a program in PATH.
fn executable(script: &OsStr, env: Env<'_>) -> Option<OsString> {
    let here = || {
        // A bare name would be looked for in PATH, not here.
        let mut path = OsString::from(if script.as_bytes().contains(&b'/') { "" } else { "./" });
        path.push(script);
        path
    };
    match file_kind(Path::new(script)) {
        FileKind::Elf => Some(here()),
        FileKind::Executable if !script.as_bytes().ends_with(b".py") => Some(here()),
        FileKind::Executable | FileKind::Other => None,
        FileKind::Absent => in_path(script, env).map(|_| script.to_owned()),
    }
}

/// The interpreter: PYTHON_EXEC, else `python` or `python3` in PATH.
fn python(env: Env<'_>) -> Result<OsString, CliError> {
    if let Some(python) = env("PYTHON_EXEC").filter(|python| !python.is_empty()) {
        return Ok(python);
    }
    let found = ["python", "python3"].iter().find_map(|name| in_path(OsStr::new(name), env));
    found.map(Into::into).ok_or_else(|| {
        CliError::value(
            "no Python: neither python nor python3 is in PATH; set PYTHON_EXEC=/path/to/python, \
             or add --no-python if SCRIPT is a program",
        )
    })
}

/// `--pass-local-rank` and `--use-env`: (dash, underscore), or `None`.
fn local_rank_form(given: &Given) -> Result<Option<(bool, bool)>, CliError> {
    let use_env = match given.get("use-env") {
        None => false,
        Some(value) => match value.text.to_str().map(str::to_lowercase).as_deref() {
            Some("" | "true" | "1" | "yes") => true,
            Some("false" | "0" | "no") => false,
            _ => return Err(CliError::usage(value.wrong("neither true nor false", "True"))),
        },
    };
    let form = match given.get("pass-local-rank") {
        None => None,
        Some(value) => match value.text.to_str() {
            Some("" | "dash") => Some((true, false)),
            Some("underscore") => Some((false, true)),
            Some("both") => Some((true, true)),
            _ => return Err(CliError::usage(value.wrong("no such form", "dash|underscore|both"))),
        },
    };
    Ok(form.filter(|_| !use_env))
}
