//! Determines of what kind the file SCRIPT is: an executable of some format, or an input for Python.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::machine::is_executable;

/// Most bytes of a `#!` line that the kernel reads.
const LINE_MAX_BYTES: u64 = 256;

/// What is at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FileKind {
    /// An ELF file, and the field `e_machine` of its header: the kind of CPU for which the file is built;
    /// `None` if the file is too short.
    Elf(Option<u16>),
    /// A file that starts with `#!`.
    Script(Shebang),
    /// A folder, and whether Python can run it: whether it has a `__main__.py`.
    Folder { has_main: bool },
    /// Any other file, or a device or pipe.
    Other,
    /// A symbolic link to this path, at which there is no file.
    Dangling(PathBuf),
    /// A file that this user may not read, or whose folder this user may not search.
    Unreadable(io::ErrorKind),
    /// There is no file of this name.
    Absent,
}

/// The `#!` line of a script, as the kernel parses it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shebang {
    pub(crate) interpreter: OsString,
    /// All text after the interpreter, which the kernel passes as one argument.
    pub(crate) argument: Option<OsString>,
    /// True if the line ends with CR LF. The kernel takes the CR as part of the line's last word.
    pub(crate) has_cr: bool,
    /// True if the script file has an execute permission.
    pub(crate) is_executable: bool,
}

impl FileKind {
    pub(crate) fn of(path: &Path) -> Self {
        let metadata = match fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Self::Unreadable(error.kind());
            }
            Err(_) => return fs::read_link(path).map_or(Self::Absent, Self::Dangling),
        };
        if metadata.is_dir() {
            return Self::Folder { has_main: path.join("__main__.py").is_file() };
        }
        if !metadata.is_file() {
            // The path is a device or pipe. Reading from a pipe would consume data meant for the workers.
            return Self::Other;
        }
        let mut start = Vec::new();
        let read = fs::File::open(path).and_then(|file| file.take(LINE_MAX_BYTES).read_to_end(&mut start));
        match read {
            Ok(_) => Self::of_start(&start, is_executable(path)),
            Err(error) => Self::Unreadable(error.kind()),
        }
    }

    fn of_start(start: &[u8], is_executable: bool) -> Self {
        if start.starts_with(b"\x7fELF") {
            // Byte 5 of the header gives the byte order of its other fields.
            let is_big_endian = start.get(5) == Some(&2);
            let machine = start.get(18..20).map(|two| u16::from_le_bytes([two[0], two[1]]));
            return Self::Elf(
                machine.map(|machine| if is_big_endian { machine.swap_bytes() } else { machine }),
            );
        }
        start.strip_prefix(b"#!").map_or(Self::Other, |line| Self::Script(Shebang::of(line, is_executable)))
    }

    /// Returns the name of the CPU for which an ELF file is built, if this host has another kind of CPU.
    pub(crate) fn foreign_arch(&self) -> Option<String> {
        let Self::Elf(Some(machine)) = *self else { return None };
        let is_own = match std::env::consts::ARCH {
            // An x86_64 kernel may also run i386 programs, and an aarch64 kernel arm programs.
            "x86_64" => matches!(machine, 62 | 3),
            "aarch64" => matches!(machine, 183 | 40),
            _ => true,
        };
        let name = match machine {
            3 => "i386",
            8 => "mips",
            20 => "ppc",
            21 => "ppc64",
            22 => "s390x",
            40 => "arm",
            62 => "x86_64",
            183 => "aarch64",
            243 => "riscv",
            258 => "loongarch",
            other => return (!is_own).then(|| format!("a CPU of another kind (ELF machine {other})")),
        };
        (!is_own).then(|| name.to_owned())
    }
}

impl Shebang {
    /// Parses a `#!` line. `text` is the start of the file after `#!`.
    fn of(text: &[u8], is_executable: bool) -> Self {
        let line = text.split(|&byte| byte == b'\n').next().unwrap_or_default();
        let has_cr = line.ends_with(b"\r");
        let line = line.strip_suffix(b"\r").unwrap_or(line).trim_ascii();
        let end = line.iter().position(|byte| matches!(byte, b' ' | b'\t')).unwrap_or(line.len());
        let word = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        let rest = line[end..].trim_ascii();
        Self {
            interpreter: word(&line[..end]),
            argument: (!rest.is_empty()).then(|| word(rest)),
            has_cr,
            is_executable,
        }
    }

    /// Returns the last word of the line, to which a CR belongs if the line ends with CR LF.
    pub(crate) fn last_argument(&self) -> &OsStr {
        self.argument.as_ref().unwrap_or(&self.interpreter)
    }

    /// Returns whether the interpreter is Python, named directly or through `env`.
    pub(crate) fn is_python(&self) -> bool {
        let name = |word: &OsStr| Path::new(word).file_name().unwrap_or_default().to_owned();
        let of_python =
            |name: &OsStr| name.as_bytes().starts_with(b"python") || name.as_bytes().starts_with(b"pypy");
        let interpreter = name(&self.interpreter);
        if interpreter != "env" {
            return of_python(&interpreter);
        }
        let argument = self.argument.clone().unwrap_or_default();
        let mut words = argument.as_bytes().split(|byte| byte.is_ascii_whitespace());
        // Options of env, and variables that it sets, come before the program.
        let first = words.find(|word| !word.is_empty() && !word.starts_with(b"-") && !word.contains(&b'='));
        first.is_some_and(|word| of_python(&name(OsStr::from_bytes(word))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shebang(text: &str) -> Shebang {
        match FileKind::of_start(text.as_bytes(), true) {
            FileKind::Script(shebang) => shebang,
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[test]
    fn shebang_line_is_parsed_like_in_the_kernel() {
        for (text, interpreter, argument, has_cr) in [
            ("#!/bin/sh\nexit", "/bin/sh", None, false),
            ("#! /bin/sh -e\n", "/bin/sh", Some("-e"), false),
            ("#!/usr/bin/env -S a b  c \n", "/usr/bin/env", Some("-S a b  c"), false),
            ("#!/bin/sh\r\nexit\r\n", "/bin/sh", None, true),
            ("#!/bin/sh", "/bin/sh", None, false),
            ("#!\n", "", None, false),
        ] {
            let wanted = Shebang {
                interpreter: interpreter.into(),
                argument: argument.map(OsString::from),
                has_cr,
                is_executable: true,
            };
            assert_eq!(shebang(text), wanted, "{text:?}");
        }
    }

    #[test]
    fn python_is_recognised_by_name_and_after_env() {
        for (line, is_python) in [
            ("#!/usr/bin/python3\n", true),
            ("#!/usr/bin/env python\r\n", true),
            ("#!/usr/bin/env -S python3.12 -O\n", true),
            ("#!/usr/bin/env -S LANG=C pypy3\n", true),
            ("#!/opt/python/bin/perl\n", false),
            ("#!/usr/bin/env bash\n", false),
            ("#!/usr/bin/env\n", false),
        ] {
            assert_eq!(shebang(line).is_python(), is_python, "{line:?}");
        }
    }

    #[test]
    fn executables_for_another_cpu_are_recognised() {
        let elf = |order: u8, two: [u8; 2]| {
            let mut start = b"\x7fELF\x02\x00\x01".to_vec();
            start[5] = order;
            start.resize(18, 0);
            start.extend(two);
            FileKind::of_start(&start, true)
        };
        let (other, name): ([u8; 2], _) =
            if std::env::consts::ARCH == "x86_64" { ([183, 0], "aarch64") } else { ([62, 0], "x86_64") };
        assert_eq!(elf(1, other).foreign_arch(), Some(name.to_owned()));
        assert_eq!(elf(2, [0, 22]).foreign_arch(), Some("s390x".to_owned()), "the other order of bytes");
        assert!(elf(1, [9, 9]).foreign_arch().is_some_and(|name| name.contains("ELF machine 2313")));
        let own = FileKind::of(&std::env::current_exe().unwrap());
        assert!(matches!(own, FileKind::Elf(Some(_))) && own.foreign_arch().is_none());
        assert_eq!(FileKind::of_start(b"\x7fELF", true), FileKind::Elf(None));
    }

    proptest::proptest! {
        #[test]
        fn any_file_is_parsed_without_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..40), kind in 0usize..3) {
            let start: &[u8] = [&b""[..], b"#!", b"\x7fELF"][kind];
            FileKind::of_start(&[start, &bytes[..]].concat(), false);
        }
    }
}
