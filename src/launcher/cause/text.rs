//! Converts the last bytes of a worker's stderr to lines that can be shown and searched. Pure.

/// Most characters of a line. A longer line keeps its start and its end.
const LINE_MAX_CHARS: usize = 1000;

/// Returns the lines of `bytes`, oldest first. `cut` says that earlier bytes are missing. The first line is
/// then incomplete and left out, if there are other lines.
///
/// If `\r` overwrote a line, only the text after the last `\r` is kept, as a terminal shows it. Escape
/// sequences are removed. Other control characters and invalid UTF-8 become `\u{fffd}`, because shown text
/// must not control a terminal.
pub(crate) fn lines(bytes: &[u8], cut: bool) -> Vec<String> {
    let text = String::from_utf8_lossy(bytes);
    let mut lines: Vec<String> = text.split('\n').map(clean).collect();
    if lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    if cut && lines.len() > 1 {
        lines.remove(0);
    }
    lines
}

fn clean(line: &str) -> String {
    let line = line.trim_end_matches('\r');
    let line = line.rsplit('\r').next().unwrap_or(line);
    let mut out = String::with_capacity(line.len());
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\u{1b}' => skip_escape(&mut chars),
            c if c.is_control() && c != '\t' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    shorten(out)
}

/// Skips the rest of an escape sequence: `ESC [ parameters final`, `ESC ] text BEL` or `ESC c`.
fn skip_escape(chars: &mut std::iter::Peekable<std::str::Chars<'_>>) {
    match chars.next() {
        Some('[') => {
            let _final = chars.find(|c| ('@'..='~').contains(c));
        }
        Some(']') => {
            while let Some(c) = chars.next() {
                if c == '\u{7}' || (c == '\u{1b}' && chars.next_if_eq(&'\\').is_some()) {
                    break;
                }
            }
        }
        Some(_) | None => {}
    }
}

fn shorten(line: String) -> String {
    let count = line.chars().count();
    if count <= LINE_MAX_CHARS {
        return line;
    }
    let half = LINE_MAX_CHARS / 2;
    let (start, end): (String, String) =
        (line.chars().take(half).collect(), line.chars().skip(count - half).collect());
    format!("{start} [... {} characters ...] {end}", count - 2 * half)
}
