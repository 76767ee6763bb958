//! Explains why a worker could not start its program. Turns the errno of the failed step, the program file
//! and the limits into a sentence and a remedy. Pure.

use std::fmt;
use std::io;

use convoke_env::host::cgroup::TaskLimit;
use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use super::Class;
use crate::config::FileKind;

/// Longest single argument or variable that the kernel passes to a program.
const ARGUMENT_MAX_BYTES: usize = 128 << 10;

/// The step of a program's start that the system refused to the guard, and its errno.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StartFailure {
    pub(crate) step: StartStep,
    pub(crate) errno: i32,
}

/// A step in which the guard starts a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum StartStep {
    /// Creating the process, and the pipe on which it reports failures.
    Fork,
    Bind,
    Exec,
}

/// Facts about the program and the limits, collected after the start failed.
#[derive(Debug, Clone, Default)]
pub(crate) struct StartContext {
    /// Name of the program in the worker's command line.
    pub(crate) program: String,
    /// The file at the program's path, if one exists.
    pub(crate) file: Option<ProgramFile>,
    /// True if a file of this name is in the current folder, where programs are not searched.
    pub(crate) in_current_folder: bool,
    /// Bytes of the program's arguments and of its environment variables; name and bytes of the largest
    /// variable.
    pub(crate) argument_bytes: usize,
    pub(crate) variable_bytes: usize,
    pub(crate) largest: Option<(String, usize)>,
    /// The limit on tasks that leaves the least room for further ones.
    pub(crate) tasks: Option<TaskLimit>,
    /// Limits of `ulimit -u` and `ulimit -n`; `None` if unlimited.
    pub(crate) process_limit: Option<u64>,
    pub(crate) descriptor_limit: Option<u64>,
}

/// The file of the program that could not be started.
#[derive(Debug, Clone)]
pub(crate) struct ProgramFile {
    pub(crate) path: String,
    pub(crate) kind: FileKind,
    pub(crate) is_executable: bool,
    /// True if the file system is mounted noexec, so that no program on it may run.
    pub(crate) is_noexec: bool,
}

/// The reason why a worker could not be started, and the remedy. Display prints both.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NotStarted {
    pub(crate) class: Class,
    pub(crate) reason: String,
    pub(crate) advice: String,
}

impl fmt::Display for NotStarted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n  try: {}", self.reason, self.advice)
    }
}

/// Derives the reason and the remedy from the step that failed and its errno.
pub(crate) fn explain_start_failure(failure: StartFailure, context: &StartContext) -> NotStarted {
    let errno = Errno::from_raw(failure.errno);
    let error = io::Error::from(errno);
    let (class, detail, advice) = match failure.step {
        StartStep::Bind => {
            let advice =
                "this job may no longer use them (cgroup cpuset): start it again, or leave --bind out";
            let reason = format!("{}: cannot be bound to its CPUs: {error}", context.program);
            return NotStarted { class: Class::CpuBinding, reason, advice: advice.to_owned() };
        }
        StartStep::Fork => fork_failure(errno, context),
        StartStep::Exec => exec_failure(errno, context),
    };
    let detail = if detail.is_empty() { detail } else { format!(": {detail}") };
    NotStarted { class, reason: format!("{}: {error}{detail}", context.program), advice }
}

type Explanation = (Class, String, String);

fn explanation(class: Class, detail: impl Into<String>, advice: impl Into<String>) -> Explanation {
    (class, detail.into(), advice.into())
}

fn fork_failure(errno: Errno, context: &StartContext) -> Explanation {
    let class = if errno == Errno::ENOMEM { Class::OutOfMemory } else { Class::ResourceLimit };
    let (detail, advice) = match (errno, &context.tasks, context.process_limit) {
        (Errno::EAGAIN, Some(tasks), _) if tasks.current + 1 >= tasks.max => {
            let (folder, max, current) = (tasks.folder.display(), tasks.max, tasks.current);
            (
                format!("{folder} allows {max} processes and threads (pids.max), and has {current}"),
                "raise it (docker run --pids-limit, podPidsLimit of the kubelet, TasksMax= of systemd), or start fewer workers",
            )
        }
        (Errno::EAGAIN, _, Some(limit)) => (
            format!("this user may have {limit} processes and threads (ulimit -u), on the whole host"),
            "raise it (ulimit -u, nproc in /etc/security/limits.conf, LimitNPROC= of systemd), or start fewer workers",
        ),
        (Errno::EMFILE, ..) => (
            context
                .descriptor_limit
                .map_or_else(String::new, |limit| format!("{limit} open files are allowed (ulimit -n)")),
            "raise it (ulimit -n, nofile in /etc/security/limits.conf, LimitNOFILE= of systemd, docker run --ulimit nofile=N:N)",
        ),
        (Errno::ENOMEM, ..) => {
            ("no process could be made".to_owned(), "free memory on this host, or start fewer workers")
        }
        _ => (
            "no process could be made".to_owned(),
            "look at kernel.pid_max, kernel.threads-max and fs.file-max of this host, and at ulimit -a",
        ),
    };
    explanation(class, detail, advice)
}

fn exec_failure(errno: Errno, context: &StartContext) -> Explanation {
    let program = &context.program;
    match (errno, &context.file) {
        (Errno::E2BIG, _) => arguments_too_large(context),
        (Errno::ETXTBSY, _) => explanation(
            Class::NotExecutable,
            "it is being written",
            "start again when it is built or copied; copy to another name and rename, then this cannot happen",
        ),
        (Errno::ENOENT | Errno::ENOTDIR, None) if context.in_current_folder => explanation(
            Class::MissingProgram,
            "it is in the current folder, and only looked for in PATH",
            format!("write ./{program}"),
        ),
        (Errno::ENOENT, Some(file)) => missing_interpreter(file),
        (Errno::EACCES, Some(file)) => permission_denied(program, file),
        (Errno::ENOEXEC, Some(file)) => unknown_format(file),
        (Errno::EACCES | Errno::EPERM | Errno::ENOEXEC, _) => {
            explanation(Class::NotExecutable, "", "chmod +x, the #! line, or a file system mounted noexec")
        }
        _ => explanation(Class::MissingProgram, "", "is it installed on this node, and in PATH?"),
    }
}

/// Explains a missing file when the program file exists. If a program's interpreter or loader is missing, the
/// kernel reports the program itself as missing.
fn missing_interpreter(file: &ProgramFile) -> Explanation {
    match &file.kind {
        FileKind::Script(line) if line.has_cr => explanation(
            Class::NotExecutable,
            format!(
                "it has Windows line endings: by its #! line its interpreter is `{}\\r`",
                line.last_argument().display()
            ),
            format!("dos2unix {}", file.path),
        ),
        FileKind::Script(line) => explanation(
            Class::MissingProgram,
            format!("its #! line names {}, which is not there", line.interpreter.display()),
            "install that on this node, or change the line",
        ),
        FileKind::Elf(_) => explanation(
            Class::MissingLibrary,
            "the file is there, and the loader that it asks for is not",
            format!("build it for the C library of this host; readelf -l {} names the loader", file.path),
        ),
        _ => explanation(Class::MissingProgram, "", "is it installed on this node, and in PATH?"),
    }
}

fn permission_denied(program: &str, file: &ProgramFile) -> Explanation {
    let path = &file.path;
    let (detail, advice) = match &file.kind {
        FileKind::Folder { .. } => ("it is a folder", "name the program in it".to_owned()),
        kind if file.is_noexec => {
            let way = match kind {
                FileKind::Script(line) => {
                    format!(", or write --no-python {} {program}", line.interpreter.display())
                }
                _ => String::new(),
            };
            let advice = format!("copy it to another (findmnt -T {path} shows this one){way}");
            ("its file system is mounted noexec", advice)
        }
        _ if !file.is_executable => {
            let python = if program.ends_with(".py") { "leave --no-python out, or " } else { "" };
            ("it has no permission to be executed", format!("{python}chmod +x {path}"))
        }
        FileKind::Script(line) => {
            let interpreter = line.interpreter.display();
            let question = format!("may this user execute {interpreter}, which its #! line names");
            ("", format!("{question}, and enter all folders above?"))
        }
        _ => ("", format!("may this user enter all folders above? namei -l {path} shows it")),
    };
    explanation(Class::NotExecutable, detail, advice)
}

fn unknown_format(file: &ProgramFile) -> Explanation {
    let class = Class::NotExecutable;
    if !matches!(file.kind, FileKind::Elf(_)) {
        return explanation(class, "", "put its interpreter in a #! line, its first");
    }
    match file.kind.foreign_arch() {
        Some(cpu) => explanation(
            class,
            format!("it is a program for {cpu}, and this host is {}", std::env::consts::ARCH),
            "build it for this host, or give nodes of each kind their own SCRIPT",
        ),
        None => explanation(
            class,
            "it is not a complete program: damaged, or a library or object file",
            format!("build or copy it again; file {} says what it is", file.path),
        ),
    }
}

fn arguments_too_large(context: &StartContext) -> Explanation {
    let kib = |bytes: usize| bytes.div_ceil(1024);
    let largest = context.largest.as_ref();
    let detail = format!(
        "its arguments have {} KiB and its environment variables {} KiB{}",
        kib(context.argument_bytes),
        kib(context.variable_bytes),
        largest.map_or(String::new(), |(name, bytes)| format!(", of which {name} has {}", kib(*bytes)))
    );
    let advice = match largest {
        Some((name, bytes)) if *bytes >= ARGUMENT_MAX_BYTES => {
            format!(
                "no variable and no argument may have more than 128 KiB: unset {name}, or pass it in a file"
            )
        }
        Some(_) | None => "unset variables that the workers do not need, put long arguments into a file, or \
                           raise ulimit -s, a quarter of which is for arguments and variables"
            .to_owned(),
    };
    explanation(Class::ResourceLimit, detail, advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(step: StartStep, errno: Errno, context: &StartContext) -> (Class, String) {
        let failure = StartFailure { step, errno: errno as i32 };
        let told = explain_start_failure(failure, context);
        (told.class, told.to_string())
    }

    fn file(kind: FileKind) -> StartContext {
        let file = ProgramFile { path: "./x".to_owned(), kind, is_executable: true, is_noexec: false };
        StartContext { program: "./x".to_owned(), file: Some(file), ..StartContext::default() }
    }

    fn starting(text: &str) -> FileKind {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("x");
        std::fs::write(&path, text).expect("a file");
        FileKind::of(&path)
    }

    #[test]
    fn start_error_explains_the_kernel_refusal_with_a_remedy() {
        let sh = || starting("#!/bin/sh\n");
        let noexec = |kind| {
            let mut context = file(kind);
            context.file.as_mut().expect("a file").is_noexec = true;
            context
        };
        let plain = |program: &str| {
            let mut context = file(FileKind::Other);
            context.program = program.to_owned();
            context.file.as_mut().expect("a file").is_executable = false;
            context
        };
        let absent = StartContext { program: "x".to_owned(), ..StartContext::default() };
        let here = StartContext { in_current_folder: true, ..absent.clone() };
        let foreign = if std::env::consts::ARCH == "x86_64" { '\u{28}' } else { '\u{3}' };
        let foreign = format!("\u{7f}ELF\u{1}\u{1}\u{1}{}{foreign}\0", "\0".repeat(11));
        use Class::{MissingLibrary, MissingProgram, NotExecutable};
        for (errno, context, class, parts) in [
            (Errno::ENOENT, &absent, MissingProgram, ["x: No such file", "in PATH?"]),
            (Errno::ENOENT, &here, MissingProgram, ["in the current folder", "write ./x"]),
            (
                Errno::ENOENT,
                &file(starting("#!/opt/python -u\n")),
                MissingProgram,
                ["names /opt/python", "install"],
            ),
            (
                Errno::ENOENT,
                &file(starting("#!/bin/sh\r\n")),
                NotExecutable,
                ["`/bin/sh\\r`", "dos2unix ./x"],
            ),
            (Errno::ENOENT, &file(starting("\u{7f}ELF")), MissingLibrary, ["the loader", "readelf -l ./x"]),
            (
                Errno::EACCES,
                &file(FileKind::Folder { has_main: true }),
                NotExecutable,
                ["a folder", "name the"],
            ),
            (Errno::EACCES, &noexec(FileKind::Other), NotExecutable, ["mounted noexec", "findmnt -T ./x"]),
            (Errno::EACCES, &noexec(sh()), NotExecutable, ["mounted noexec", "--no-python /bin/sh ./x"]),
            (Errno::EACCES, &plain("./x"), NotExecutable, ["no permission", "chmod +x ./x"]),
            (Errno::EACCES, &plain("./x.py"), NotExecutable, ["no permission", "leave --no-python out"]),
            (Errno::EACCES, &file(sh()), NotExecutable, ["Permission denied", "/bin/sh, which its #! line"]),
            (
                Errno::ENOEXEC,
                &file(starting(&foreign)),
                NotExecutable,
                ["a program for", "build it for this host"],
            ),
            (
                Errno::ENOEXEC,
                &file(starting("\u{7f}ELF")),
                NotExecutable,
                ["not a complete program", "file ./x"],
            ),
            (Errno::ETXTBSY, &file(FileKind::Other), NotExecutable, ["being written", "start again"]),
        ] {
            let (found, text) = of(StartStep::Exec, errno, context);
            assert_eq!(found, class, "{text}");
            for part in parts {
                assert!(text.contains(part), "{part}: {text}");
            }
            assert_eq!(text.lines().count(), 2, "{text}");
        }
    }

    #[test]
    fn start_error_states_exceeded_limits_with_numbers() {
        let tasks = |current| Some(TaskLimit { folder: "/cg/pod".into(), max: 20, current });
        let context = StartContext {
            program: "x".to_owned(),
            tasks: tasks(20),
            process_limit: Some(64),
            descriptor_limit: Some(32),
            argument_bytes: 10,
            variable_bytes: 3 << 20,
            largest: Some(("BIG".to_owned(), 200 << 10)),
            ..StartContext::default()
        };
        let roomy = StartContext { tasks: tasks(3), ..context.clone() };
        let many = StartContext { largest: Some(("PATH".to_owned(), 9 << 10)), ..context.clone() };
        for (step, errno, context, parts) in [
            (StartStep::Fork, Errno::EAGAIN, &context, ["/cg/pod allows 20", "and has 20", "--pids-limit"]),
            (StartStep::Fork, Errno::EAGAIN, &roomy, ["may have 64 processes", "(ulimit -u)", "LimitNPROC="]),
            (StartStep::Fork, Errno::EMFILE, &context, ["32 open files", "(ulimit -n)", "LimitNOFILE="]),
            (
                StartStep::Exec,
                Errno::E2BIG,
                &context,
                ["arguments have 1 KiB", "variables 3072 KiB, of which BIG has 200", "unset BIG"],
            ),
            (
                StartStep::Exec,
                Errno::E2BIG,
                &many,
                ["arguments have 1 KiB", "of which PATH has 9", "ulimit -s"],
            ),
        ] {
            let (class, text) = of(step, errno, context);
            assert_eq!(class, Class::ResourceLimit, "{text}");
            for part in parts {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
        let (class, text) = of(StartStep::Bind, Errno::EINVAL, &context);
        assert!(
            class == Class::CpuBinding && text.contains("x: cannot be bound to its CPUs: Invalid argument"),
            "{text}"
        );
    }
}
