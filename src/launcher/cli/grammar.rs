//! Splits the command line into flags, as Python's argparse does for torchrun. Does not interpret values.
//! Pure.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use super::flags::{self, Flag, Takes};
use super::suggest;

/// The command line, split into flags, SCRIPT and arguments.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RawArgs {
    /// Last value of each flag, by name. `None` for a switch, or if an optional value was left out.
    pub(crate) flags: BTreeMap<&'static str, Option<OsString>>,
    /// The word SCRIPT: what to run. Empty if `convoke check` is called without one.
    pub(crate) script: OsString,
    /// The arguments after SCRIPT, unchanged.
    pub(crate) arguments: Vec<OsString>,
}

/// What the command line asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// `--help`, before any error in the command line.
    Help,
    Version,
    Completion(OsString),
    Man,
    Run(RawArgs),
}

/// The kind of one word before or at SCRIPT.
enum ArgKind {
    Plain,
    /// A flag, and the value or letters attached to it in the same word.
    Flag(&'static Flag, AttachedValue),
    /// A word that starts like a flag, but is none.
    Unknown,
    /// A word that starts with a typographic dash, such as word processors and web pages insert.
    Typographic,
    /// A prefix of several flags, whose names follow.
    Ambiguous(Vec<String>),
}

enum AttachedValue {
    Nothing,
    /// The value after `=`, or after a short flag's letter.
    Value(OsString),
    /// More short flags after a short switch, as in `-mr3`.
    Letters(OsString),
}

/// The kind of run that a command line asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    Job,
    /// `convoke check`, which needs no SCRIPT and has flags of its own.
    Check,
}

/// Parses the command line after the program's name, and after `check`. The error is a text without
/// `error: `.
pub(crate) fn read(words: impl Iterator<Item = OsString>, command: Command) -> Result<Request, String> {
    let mut words = words.peekable();
    let mut out = RawArgs::default();
    let mut unknown: Vec<OsString> = Vec::new();
    let mut taken: Option<(&'static Flag, OsString)> = None;
    let script = loop {
        let Some(word) = words.next() else { break None };
        if word == "--" {
            break words.next(); // SCRIPT, even if it looks like a flag
        }
        let (mut flag, mut attached) = match classify(&word) {
            ArgKind::Plain => break Some(word),
            ArgKind::Unknown => {
                unknown.push(word);
                continue;
            }
            ArgKind::Typographic => return Err(typographic(&word)),
            ArgKind::Ambiguous(candidates) => return Err(ambiguous(&word, &candidates)),
            ArgKind::Flag(flag, attached) => (flag, attached),
        };
        // Splits short switches in one word, such as `-mh`, letter by letter.
        while let AttachedValue::Letters(letters) = attached {
            out.flags.insert(flag.name, None);
            if let Some(request) = immediate(flag, None) {
                return Ok(request);
            }
            let mut next = OsString::from("-");
            next.push(&letters);
            match classify_short(&next) {
                Some((next, rest)) => (flag, attached) = (next, rest),
                None => return Err(format!("{}: `{}` is no short flag", word.display(), letters.display())),
            }
        }
        let attached = if let AttachedValue::Value(value) = attached { Some(value) } else { None };
        let value = match (flag.takes, attached) {
            (Takes::Nothing, Some(value)) => {
                let (name, value) = (flag.dashed(), value.display());
                return Err(format!("{name} takes no value, but got `{value}`; write {name}"));
            }
            (Takes::Nothing | Takes::MaybeValue(_), None) => None,
            (Takes::Value(_) | Takes::MaybeValue(_), Some(value)) => Some(value),
            (Takes::Value(form), None) => match words.next_if(|next| is_value(next)) {
                Some(value) => {
                    taken = Some((flag, value.clone()));
                    Some(value)
                }
                None => return Err(no_value(flag, form, words.peek())),
            },
        };
        if let Some(request) = immediate(flag, value.as_deref()) {
            return Ok(request);
        }
        out.flags.insert(flag.name, value);
    };
    if let Some(first) = unknown.first() {
        return Err(unrecognized(first));
    }
    if let Some(flag) =
        flags::of_check().find(|flag| command == Command::Job && out.flags.contains_key(flag.name))
    {
        let name = flag.dashed();
        return Err(format!("{name} is a flag of convoke check; write convoke check {name} ..."));
    }
    let script = match (script, command) {
        (Some(script), _) => script,
        (None, Command::Check) if taken.as_ref().is_none_or(|(_, value)| !looks_like_program(value)) => {
            return Ok(Request::Run(out));
        }
        (None, _) => return Err(no_script(taken)),
    };
    if script.as_bytes().trim_ascii().is_empty() {
        let what = "SCRIPT is an empty word; is a variable of the shell not set, as in convoke \"$SCRIPT\"?";
        return Err(what.to_owned());
    }
    Ok(Request::Run(RawArgs { script, arguments: words.collect(), ..out }))
}

/// Returns the request of a flag that, as in argparse, ends the parsing at once; `None` for other flags.
fn immediate(flag: &Flag, value: Option<&OsStr>) -> Option<Request> {
    match flag.name {
        "help" => Some(Request::Help),
        "version" => Some(Request::Version),
        "print-man" => Some(Request::Man),
        "print-completion" => value.map(|shell| Request::Completion(shell.to_owned())),
        _ => None,
    }
}

/// Returns whether a word can be the value of the flag before it. Like argparse, it rejects words that look
/// like a flag.
fn is_value(word: &OsStr) -> bool {
    word != "--" && matches!(classify(word), ArgKind::Plain)
}

fn classify(word: &OsStr) -> ArgKind {
    let bytes = word.as_bytes();
    if word.to_str().and_then(|word| word.chars().next()).is_some_and(suggest::is_typographic) {
        return ArgKind::Typographic;
    }
    if bytes.len() < 2 || bytes[0] != b'-' {
        return ArgKind::Plain;
    }
    if bytes[1] == b'-' {
        let (name, value) = split_at_equals(&bytes[2..]);
        let attached = value.map_or(AttachedValue::Nothing, |value| AttachedValue::Value(owned(value)));
        return match lookup(name) {
            Ok(Some(flag)) => ArgKind::Flag(flag, attached),
            Ok(None) if bytes.contains(&b' ') => ArgKind::Plain,
            Ok(None) => ArgKind::Unknown,
            Err(names) => ArgKind::Ambiguous(names),
        };
    }
    match classify_short(word) {
        Some((flag, attached)) => ArgKind::Flag(flag, attached),
        None if is_negative_number(bytes) || bytes.contains(&b' ') => ArgKind::Plain,
        None => ArgKind::Unknown,
    }
}

/// Parses a word with a short flag: `-x`, `-x=V`, `-xV` and, for a switch, `-xyz`. `None` if there is no such
/// flag.
fn classify_short(word: &OsStr) -> Option<(&'static Flag, AttachedValue)> {
    let bytes = word.as_bytes();
    let letter = char::from(*bytes.get(1)?);
    let flag = flags::all().find(|flag| flag.short == Some(letter))?;
    let attached = match (&bytes[2..], flag.takes) {
        ([], _) => AttachedValue::Nothing,
        ([b'=', value @ ..], _) => AttachedValue::Value(owned(value)),
        (letters, Takes::Nothing) => AttachedValue::Letters(owned(letters)),
        (value, Takes::Value(_) | Takes::MaybeValue(_)) => AttachedValue::Value(owned(value)),
    };
    Some((flag, attached))
}

fn owned(bytes: &[u8]) -> OsString {
    OsStr::from_bytes(bytes).to_owned()
}

/// Finds the flag with this name, or with this unique prefix of its name; `None` if there is none. The error
/// has the names of several flags with this prefix.
///
/// As in argparse, both spellings of a flag are separate candidates: `--nproc` is ambiguous between
/// `--nproc-per-node` and `--nproc_per_node`. A prefix of a torchrun flag never means one of convoke's own
/// flags. The two spellings of convoke's own flags do not make a prefix ambiguous.
fn lookup(name: &[u8]) -> Result<Option<&'static Flag>, Vec<String>> {
    let Ok(name) = std::str::from_utf8(name) else { return Ok(None) };
    for torchrun in [true, false] {
        let mut found: Vec<(String, &'static Flag)> = Vec::new();
        for flag in flags::all() {
            for spelling in [Some(flag.name.to_owned()), flag.underscored()].into_iter().flatten() {
                if spelling == name {
                    return Ok(Some(flag));
                }
                let found_before = !torchrun && found.last().is_some_and(|(_, last)| *last == flag);
                let matches = spelling.starts_with(name) && !name.is_empty() && !found_before;
                if matches && flag.torchrun == torchrun {
                    found.push((format!("--{spelling}"), flag));
                }
            }
        }
        match found.as_slice() {
            [] => {}
            [(_, flag)] => return Ok(Some(flag)),
            _ => return Err(found.into_iter().map(|(name, _)| name).collect()),
        }
    }
    Ok(None)
}

fn split_at_equals(bytes: &[u8]) -> (&[u8], Option<&[u8]>) {
    match bytes.iter().position(|&byte| byte == b'=') {
        Some(at) => (&bytes[..at], Some(&bytes[at + 1..])),
        None => (bytes, None),
    }
}

/// Returns whether a word is a negative number, as argparse's `^-\d+$|^-\d*\.\d+$`. Such words are values,
/// since no flag looks like a number.
fn is_negative_number(bytes: &[u8]) -> bool {
    let digits = |bytes: &[u8]| bytes.iter().all(u8::is_ascii_digit);
    let bytes = &bytes[1..];
    match bytes.iter().position(|&byte| byte == b'.') {
        None => !bytes.is_empty() && digits(bytes),
        Some(dot) => digits(&bytes[..dot]) && digits(&bytes[dot + 1..]) && dot + 1 < bytes.len(),
    }
}

fn ambiguous(word: &OsStr, candidates: &[String]) -> String {
    let word = word.to_string_lossy();
    let name = word.split('=').next().unwrap_or(&word);
    let dashed: Vec<&str> =
        candidates.iter().map(String::as_str).filter(|name| !name.contains('_')).collect();
    match dashed.as_slice() {
        [only] => format!("{name} is ambiguous between {}; write {only}", candidates.join(" and ")),
        several => format!("{name} is ambiguous; write one of {}", several.join(", ")),
    }
}

fn no_value(flag: &Flag, form: &str, next: Option<&OsString>) -> String {
    let name = flag.dashed();
    match next {
        Some(next) if next != "--" => {
            let next = next.display();
            format!(
                "{name} needs a value, but `{next}` looks like a flag; write {name}={next} if it is meant as the value"
            )
        }
        _ => format!("{name} needs a value; write {name}={form}"),
    }
}

/// Returns the error for a word whose name has a typographic dash or an invisible character.
fn typographic(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let (name, value) = word.split_once('=').map_or((&*word, None), |(name, value)| (name, Some(value)));
    let odd = name.chars().find(|&c| suggest::is_typographic(c)).unwrap_or_default();
    let plain = suggest::without_typography(name);
    let plain = plain.trim_start_matches('-');
    let is_short = matches!(classify(OsStr::new(&format!("-{plain}"))), ArgKind::Flag(..))
        && !matches!(classify(OsStr::new(&format!("--{plain}"))), ArgKind::Flag(..));
    let dashes = if is_short { "-" } else { "--" };
    let value = value.map_or(String::new(), |value| format!("={value}"));
    let code = u32::from(odd);
    format!(
        "`{word}` has a character that a word processor or a web page has put for a plain one (U+{code:04X}); write \
         {dashes}{plain}{value}, or ./{word} if it is a file"
    )
}

fn unrecognized(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let name = word.split('=').next().unwrap_or(&word);
    if name.contains(suggest::is_typographic) {
        return typographic(OsStr::new(&*word));
    }
    match suggest::flag(name) {
        Some(advice) => format!("unknown flag {name}; {advice}"),
        None => format!("unknown flag {name}; see --help (flags of the script go behind SCRIPT)"),
    }
}

fn no_script(taken: Option<(&Flag, OsString)>) -> String {
    match taken {
        Some((flag, value)) if looks_like_program(&value) => {
            let (name, value) = (flag.dashed(), value.display());
            format!("no SCRIPT: `{value}` was taken as the value of {name}; write {name}=VALUE {value}")
        }
        _ => "no SCRIPT; write convoke [FLAGS] SCRIPT [ARGUMENTS]".to_owned(),
    }
}

fn looks_like_program(word: &OsStr) -> bool {
    let bytes = word.as_bytes();
    bytes.ends_with(b".py") || bytes.starts_with(b"./") || bytes.starts_with(b"/")
}
