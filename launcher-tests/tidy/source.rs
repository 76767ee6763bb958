//! The code of a Rust file without its comments and literals.

pub(super) fn is_word_part(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns the source without comments and without the content of strings and characters. Lines keep their
/// numbers.
pub(super) fn without_comments_and_strings(source: &str) -> String {
    let mut kept = String::new();
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if first == '"' {
            quoted_len(rest, '"')
        } else if first == 'r' && !kept.ends_with(|c: char| is_word_part(c) && c != 'b') {
            raw_string_len(rest)
        } else if first == '\'' && is_char_literal(rest) {
            quoted_len(rest, '\'')
        } else {
            0
        };
        let step = if skipped == 0 { first.len_utf8() } else { skipped };
        if skipped == 0 {
            kept.push(first);
        } else {
            kept.push(' ');
            kept.extend(rest[..step].chars().filter(|&c| c == '\n'));
        }
        rest = &rest[step..];
    }
    kept
}

/// Returns the length of a literal that begins and ends with `quote`.
fn quoted_len(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Returns the length of a raw string, or 0 if the text begins with none.
fn raw_string_len(text: &str) -> usize {
    let hashes = text[1..].bytes().take_while(|&b| b == b'#').count();
    if !text[1 + hashes..].starts_with('"') {
        return 0;
    }
    let end = format!("\"{}", "#".repeat(hashes));
    let begin = 2 + hashes;
    text[begin..].find(&end).map_or(text.len(), |at| begin + at + end.len())
}

/// Distinguishes a character from a lifetime.
fn is_char_literal(text: &str) -> bool {
    let mut next = text.chars().skip(1);
    matches!((next.next(), next.next()), (Some('\\'), _) | (Some(_), Some('\'')))
}
