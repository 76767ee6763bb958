//! Builds the workers' command line from SCRIPT.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::file::{FileKind, Shebang};
use super::machine::{Machine, in_path, is_executable};
use super::settings::{LocalRankArgument, Program};
use crate::cli::{CliError, Env, ParsedArgs};

/// Python code for `--run-path`: runs SCRIPT as `__main__` in the worker's own interpreter, with `argv[0]` as
/// torchrun sets it.
const RUN_PATH: &str =
    "import runpy,sys; sys.argv=sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')";

/// File name endings of other languages, with the interpreters that run such files.
const OTHER_LANGUAGES: &[(&str, &str)] = &[
    (".sh", "sh"),
    (".bash", "bash"),
    (".zsh", "zsh"),
    (".ksh", "ksh"),
    (".csh", "csh"),
    (".pl", "perl"),
    (".rb", "ruby"),
    (".lua", "lua"),
    (".jl", "julia"),
    (".js", "node"),
    (".R", "Rscript"),
];

pub(super) fn program(args: &ParsedArgs, env: Env<'_>, machine: &Machine) -> Result<Program, CliError> {
    let form = local_rank_form(args)?;
    let (module, no_python, run_path) =
        (args.is_on("module"), args.is_on("no-python"), args.is_on("run-path"));
    let script = &args.script;
    let mut argv: Vec<OsString> = Vec::new();
    let (mut assumed_python, mut is_python) = (false, run_path);
    let mut title = script.display().to_string();
    if run_path {
        argv.extend([python(env, machine)?, "-u".into(), "-c".into(), RUN_PATH.into(), script.clone()]);
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
    } else {
        match if module { None } else { own_command(script, env)? } {
            Some(words) => argv.extend(words),
            None => {
                if let Some(python) = env("PYTHON_EXEC").filter(|python| !python.is_empty()) {
                    title = python.display().to_string();
                }
                is_python = true;
                argv.extend([python(env, machine)?, "-u".into()]);
                argv.extend(module.then(|| "-m".into()));
                assumed_python = !module
                    && !script.as_bytes().ends_with(b".py")
                    && FileKind::of(Path::new(script)) == FileKind::Absent;
                argv.push(script.clone());
            }
        }
    }
    let index = argv.len();
    argv.extend(args.arguments.iter().cloned());
    let local_rank_argument = form.map(|(dash, underscore)| LocalRankArgument { index, dash, underscore });
    Ok(Program { argv, local_rank_argument, title, assumed_python, is_python })
}

/// Returns the command that runs SCRIPT without the chosen Python; `None` if that runs it.
///
/// - It is executed itself if it is an ELF file, or a file with a `#!` line and execute permission that does
///   not end in `.py`.
/// - It is also executed itself if there is no such file but PATH has a program of this name.
/// - The interpreter of its `#!` line runs it if only the permission is missing.
/// - Otherwise Python runs it.
fn own_command(script: &OsStr, env: Env<'_>) -> Result<Option<Vec<OsString>>, CliError> {
    let here = || {
        // A name without a slash would be searched in PATH instead of the current folder.
        let mut path = OsString::from(if script.as_bytes().contains(&b'/') { "" } else { "./" });
        path.push(script);
        path
    };
    let refused = |why: String| Err(CliError::value(format!("{} {why}", script.display())));
    let is_named_python = script.as_bytes().ends_with(b".py");
    match FileKind::of(Path::new(script)) {
        FileKind::Elf(_) => Ok(Some(vec![here()])),
        FileKind::Script(_) if is_named_python => Ok(None),
        FileKind::Script(shebang) if shebang.has_cr && !shebang.is_python() => {
            let (word, name) = (shebang.last_argument().display(), script.display());
            refused(format!(
                "has Windows line endings: by its #! line its interpreter is `{word}\\r`; dos2unix {name} converts them"
            ))
        }
        FileKind::Script(shebang) if shebang.is_executable && !shebang.has_cr => Ok(Some(vec![here()])),
        FileKind::Script(shebang) if shebang.is_python() || shebang.interpreter.is_empty() => Ok(None),
        FileKind::Script(Shebang { interpreter, argument, .. }) => {
            Ok(Some(std::iter::once(interpreter).chain(argument).chain([here()]).collect()))
        }
        FileKind::Folder { has_main: true } => Ok(None),
        FileKind::Folder { has_main: false } => refused(
            "is a folder without a __main__.py; name the script in it, or -m and the name of a package"
                .to_owned(),
        ),
        // PATH has a program of this name, for example if the current folder belongs to another user.
        FileKind::Dangling(_) | FileKind::Unreadable(_) if in_path(script, env).is_some() => {
            Ok(Some(vec![script.to_owned()]))
        }
        FileKind::Dangling(target) => {
            refused(format!("is a link to {}, which is not there", target.display()))
        }
        FileKind::Unreadable(kind) => {
            let why = io::Error::from(kind);
            refused(format!("cannot be read: {why}; chmod a+r for the file, a+x for the folders above it"))
        }
        FileKind::Other => other_language_message(script).map_or(Ok(None), refused),
        FileKind::Absent if script.as_bytes().ends_with(b"\r") => Err(CliError::value(format!(
            "{script:?} ends with a carriage return: the file in which convoke is called has Windows \
             line endings; dos2unix converts them"
        ))),
        FileKind::Absent => Ok(in_path(script, env).map(|_| vec![script.to_owned()])),
    }
}

/// Explains why Python cannot run a file without a `#!` line, if its name ends as in another language.
fn other_language_message(script: &OsStr) -> Option<String> {
    if script.as_bytes().ends_with(b".ipynb") {
        let name = script.display();
        return Some(format!("is a notebook; `jupyter nbconvert --to script {name}` makes a script of it"));
    }
    let is_it = |(ending, _): &&(&str, &str)| script.as_bytes().ends_with(ending.as_bytes());
    let (ending, interpreter) = OTHER_LANGUAGES.iter().find(is_it)?;
    Some(format!(
        "would be run by Python, but ends in {ending} and has no #! line; write convoke [FLAGS] --no-python \
         {interpreter} {}, or add the line",
        script.display()
    ))
}

/// Returns the Python interpreter to use. It is PYTHON_EXEC, else the Python of the virtual environment that
/// contains the launcher, else that of VIRTUAL_ENV, else `python` or `python3` in PATH.
fn python(env: Env<'_>, machine: &Machine) -> Result<OsString, CliError> {
    if let Some(python) = env("PYTHON_EXEC").filter(|python| !python.is_empty()) {
        return Ok(python);
    }
    let is_environment = |folder: &&PathBuf| {
        let above = folder.parent();
        above.is_some_and(|above| above.join("pyvenv.cfg").is_file() || above.join("conda-meta").is_dir())
    };
    let active = env("VIRTUAL_ENV").filter(|folder| !folder.is_empty());
    let active = active.map(|folder| Path::new(&folder).join("bin"));
    let folders = machine.launcher.iter().filter(is_environment).chain(&active);
    let names = ["python", "python3"];
    let mut inside = folders.flat_map(|folder| names.map(|name| folder.join(name)));
    let found = inside.find(|path| is_executable(path));
    let found = found.or_else(|| names.iter().find_map(|name| in_path(OsStr::new(name), env)));
    found.map(Into::into).ok_or_else(|| {
        CliError::value(
            "no Python: neither python nor python3 is in PATH; set PYTHON_EXEC=/path/to/python, \
             or add --no-python if SCRIPT is a program",
        )
    })
}

/// Reads `--pass-local-rank` and `--use-env`. Returns whether to pass `--local-rank` and `--local_rank`;
/// `None` if neither.
fn local_rank_form(args: &ParsedArgs) -> Result<Option<(bool, bool)>, CliError> {
    let use_env = match args.get("use-env") {
        None => false,
        Some(value) => match value.text.to_str().map(str::to_lowercase).as_deref() {
            Some("" | "true" | "1" | "yes") => true,
            Some("false" | "0" | "no") => false,
            _ => return Err(value.usage_error("neither true nor false", "True")),
        },
    };
    let form = match args.get("pass-local-rank") {
        None => None,
        Some(value) => match value.text.to_str() {
            Some("" | "dash") => Some((true, false)),
            Some("underscore") => Some((false, true)),
            Some("both") => Some((true, true)),
            _ => return Err(value.usage_error("no such form", "dash|underscore|both")),
        },
    };
    Ok(form.filter(|_| !use_env))
}
