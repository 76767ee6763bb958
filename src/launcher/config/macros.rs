//! Replaces `${name}` in arguments and line prefixes, by the rules of Python's `string.Template`. Pure.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Replaces `${local_rank}` and `$local_rank` by the local rank; `$$` becomes `$`. Other text stays.
pub(crate) fn substitute(text: &OsStr, local_rank: usize) -> OsString {
    let rank = local_rank.to_string();
    OsString::from_vec(expand(text.as_bytes(), |name| (name == "local_rank").then_some(rank.as_str())))
}

/// Replaces every `${name}` and `$name` for which `value` returns a text; `$$` becomes `$`. Other text stays.
pub(crate) fn expand<'a>(text: &[u8], value: impl Fn(&str) -> Option<&'a str>) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some(dollar) = rest.iter().position(|&byte| byte == b'$') {
        out.extend_from_slice(&rest[..dollar]);
        rest = &rest[dollar..];
        let (whole, name) = macro_at(rest);
        match name.and_then(&value) {
            Some(value) => out.extend_from_slice(value.as_bytes()),
            None if rest.starts_with(b"$$") => out.push(b'$'),
            None => out.extend_from_slice(&rest[..whole]),
        }
        rest = &rest[whole..];
    }
    out.extend_from_slice(rest);
    out
}

/// Returns the length of the macro at the start of `text`, which starts with `$`, and the macro's name.
fn macro_at(text: &[u8]) -> (usize, Option<&str>) {
    let name_length = |text: &[u8]| match text.first() {
        Some(first) if first.is_ascii_alphabetic() || *first == b'_' => {
            text.iter().take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'_').count()
        }
        _ => 0,
    };
    let name = |from: usize, length: usize| std::str::from_utf8(&text[from..from + length]).ok();
    match text.get(1) {
        Some(b'$') => (2, None),
        Some(b'{') => match name_length(&text[2..]) {
            length if length > 0 && text.get(2 + length) == Some(&b'}') => (length + 3, name(2, length)),
            _ => (1, None),
        },
        _ => match name_length(&text[1..]) {
            0 => (1, None),
            length => (length + 1, name(1, length)),
        },
    }
}
