//! Extracts the reason for a worker's failure from the last lines of its stderr. Pure.

use std::ops::Range;

/// Most lines of a traceback that the report shows: its start and its end.
const SHOWN_MAX_LINES: usize = 60;
/// Most lines of an exception's message after its first line.
const MESSAGE_MAX_LINES: usize = 12;

/// Text with which convoke's runtime reports that a rank panicked.
const PANICKED: &str = " panicked; group ";

/// Python's message if it cannot run a folder or zip file as a program.
pub(crate) const NO_MAIN: &str = "can't find '__main__' module in";

/// What the last lines of stderr, or an error file, say about a failure. Each text is a line of the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LogEvidence {
    /// The line with type and message of the last uncaught Python exception.
    pub(crate) exception: Option<String>,
    /// Place and message of a Rust or Go panic, in one line.
    pub(crate) panic: Option<String>,
    /// Final message of a C or C++ program: glibc, assert, terminate, stack overflow.
    pub(crate) abort_message: Option<String>,
    /// Line of the dynamic linker or of a Python import that names a missing library.
    pub(crate) library: Option<String>,
    /// Line of a program that rejects an argument.
    pub(crate) argument: Option<String>,
    /// True if a line begins with "usage:".
    pub(crate) usage: bool,
    /// Lines that say what the kernel or a device refused to the worker.
    pub(crate) no_space: Option<String>,
    pub(crate) address_in_use: Option<String>,
    pub(crate) device_memory: Option<String>,
    pub(crate) not_found: Option<String>,
    pub(crate) not_permitted: Option<String>,
    /// Line about a lost peer or connection, and the peer's rank if the line names it.
    pub(crate) peer_lost: Option<(String, Option<usize>)>,
    /// Line about a collective call that timed out, and the missing rank if the line names it.
    pub(crate) timeout: Option<(String, Option<usize>)>,
    /// Line about a child process of the worker that was killed.
    pub(crate) killed_child: Option<String>,
    /// Range of the lines that the report shows as traceback.
    pub(crate) traceback_range: Option<Range<usize>>,
}

type Field = fn(&mut LogEvidence) -> &mut Option<String>;

/// Texts that a line has which is such evidence. Of several lines, the last counts.
const LINES: [(Field, &[&str]); 8] = [
    (|found| &mut found.library, &["error while loading shared libraries", "cannot open shared object file"]),
    (
        |found| &mut found.argument,
        &[
            "unrecognized arguments:",
            "unrecognized option",
            "unknown option",
            "no such option",
            "unexpected argument",
            "invalid option",
        ],
    ),
    (|found| &mut found.no_space, &["No space left on device", "Disk quota exceeded"]),
    (|found| &mut found.address_in_use, &["Address already in use", "EADDRINUSE"]),
    (
        |found| &mut found.device_memory,
        &[
            "CUDA out of memory",
            "HIP out of memory",
            "XPU out of memory",
            "CUDA_ERROR_OUT_OF_MEMORY",
            "CUDA error: out of memory",
            "CUBLAS_STATUS_ALLOC_FAILED",
        ],
    ),
    (
        |found| &mut found.not_found,
        &["can't open file", NO_MAIN, ": not found", "command not found", "No module named"],
    ),
    (|found| &mut found.not_permitted, &["Permission denied"]),
    (
        |found| &mut found.killed_child,
        &["killed by signal: Killed", "A process in the process pool was terminated abruptly"],
    ),
];

impl LogEvidence {
    /// Extracts the evidence from `lines`, oldest first.
    pub(crate) fn from_lines(lines: &[String]) -> Self {
        let lines: Vec<&str> = lines.iter().map(|line| strip_rank_prefix(line)).collect();
        let mut found = Self::default();
        for line in &lines {
            found.scan_line(line);
        }
        if let Some((range, exception)) = python_traceback(&lines) {
            found.exception = Some(exception);
            found.traceback_range = Some(range);
        } else if let Some((range, message)) = parse_panic(&lines) {
            found.traceback_range = Some(range);
            found.panic = Some(message);
        } else if let Some(start) = lines.iter().position(|line| line.starts_with("Fatal Python error: ")) {
            found.traceback_range = Some(start..block_end(&lines, start));
            found.abort_message = Some(lines[start].to_owned());
        }
        found
    }

    /// Merges evidence from the log (`self`) and from the worker's error file (`own`). `own` has priority;
    /// `self` supplies only what `own` lacks.
    pub(crate) fn overridden_by(self, own: Self) -> Self {
        Self {
            exception: own.exception.or(self.exception),
            panic: own.panic.or(self.panic),
            abort_message: own.abort_message.or(self.abort_message),
            library: own.library.or(self.library),
            argument: own.argument.or(self.argument),
            usage: own.usage || self.usage,
            no_space: own.no_space.or(self.no_space),
            address_in_use: own.address_in_use.or(self.address_in_use),
            device_memory: own.device_memory.or(self.device_memory),
            not_found: own.not_found.or(self.not_found),
            not_permitted: own.not_permitted.or(self.not_permitted),
            peer_lost: own.peer_lost.or(self.peer_lost),
            timeout: own.timeout.or(self.timeout),
            killed_child: own.killed_child.or(self.killed_child),
            traceback_range: self.traceback_range,
        }
    }

    /// Removes a lost peer that is this worker itself: the runtime's message about its own panic.
    pub(crate) fn ignore_own_panic(&mut self, rank: usize) {
        self.peer_lost.take_if(|(line, lost)| *lost == Some(rank) && line.contains(PANICKED));
    }

    fn scan_line(&mut self, line: &str) {
        let has = |needle: &str| line.contains(needle);
        let trimmed = || Some(line.trim().to_owned());
        for (field, needles) in LINES {
            if needles.iter().any(|needle| has(needle)) {
                *field(self) = trimmed();
            }
        }
        if line.trim() == "Killed" {
            self.killed_child = trimmed();
        }
        self.usage |= line.trim_start().to_ascii_lowercase().starts_with("usage:");
        if is_abort_message(line) && self.abort_message.is_none() {
            self.abort_message = trimmed();
        } else if let Some(what) = line.trim_start().strip_prefix("what():") {
            let what = what.trim();
            self.abort_message = self.abort_message.take().map(|words| format!("{words}: {what}"));
        }
        if let Some(rank) = parse_timeout(line) {
            self.timeout.get_or_insert((line.trim().to_owned(), rank));
        } else if let Some(rank) = parse_peer_loss(line) {
            self.peer_lost.get_or_insert((line.trim().to_owned(), rank));
        }
    }
}

/// Removes torch's `[rank3]: ` prefix from a line of a traceback.
fn strip_rank_prefix(line: &str) -> &str {
    let rest = line.strip_prefix("[rank").map(|rest| rest.trim_start_matches(|c: char| c.is_ascii_digit()));
    match rest.and_then(|rest| rest.strip_prefix("]:")) {
        Some(rest) => rest.strip_prefix(' ').unwrap_or(rest),
        None => line,
    }
}

fn is_abort_message(line: &str) -> bool {
    const GLIBC: [&str; 12] = [
        "*** stack smashing detected ***",
        "*** buffer overflow detected ***",
        "double free or corruption",
        "free(): ",
        "malloc(): ",
        "malloc_consolidate(): ",
        "realloc(): ",
        "corrupted size vs. prev_size",
        "corrupted double-linked list",
        "munmap_chunk(): ",
        "terminate called ",
        "Fatal glibc error",
    ];
    GLIBC.iter().any(|start| line.starts_with(start))
        || (line.contains("Assertion ") && line.trim_end().ends_with("failed."))
        || line.contains("has overflowed its stack")
        || line.contains("ERROR: AddressSanitizer")
        || line.starts_with("Fatal Python error: ")
}

/// Parses a line about the timeout of a collective call; `None` if it is no such line. Returns the missing
/// rank, if the line names it.
fn parse_timeout(line: &str) -> Option<Option<usize>> {
    if let Some(rest) =
        line.split("waiting for rank(s) ").nth(1).filter(|_| line.contains("timed out after "))
    {
        return Some(number(rest));
    }
    if let Some(rest) = line.split("Timeout { missing: [").nth(1) {
        return Some(number(rest));
    }
    let torch = line.contains("Watchdog caught collective operation timeout")
        || line.contains("Timed out waiting") && line.contains("recv operation");
    torch.then_some(None)
}

/// Parses a line about the loss of a peer or of its connection; `None` if it is no such line. Returns the
/// peer's rank, if the line names it.
fn parse_peer_loss(line: &str) -> Option<Option<usize>> {
    // Message of convoke-comm's errors, by Display: rank 3 at 10.0.0.1:4000 was ended by SIGSEGV; group ...
    let how = [
        " was ended by ",
        " exited with code ",
        " closed its connections without leaving the group",
        " cannot be reached: ",
        " has left the group",
        PANICKED,
    ];
    // `fn main() -> Result` and `unwrap` print such a message after words of their own, so it is searched
    // anywhere in the line.
    for (at, _) in line.match_indices(" at ") {
        let (before, rest) = line.split_at(at);
        let rank = before.rsplit_once("rank ").and_then(|(_, digits)| digits.parse().ok());
        if let (Some(rank), true) =
            (rank, how.iter().any(|how| rest.contains(how)) && rest.contains("; group "))
        {
            return Some(Some(rank));
        }
    }
    // Earlier versions of convoke-comm printed this Debug form.
    if let Some(rest) = line.split("PeerLost { rank: ").nth(1) {
        return Some(number(rest));
    }
    // Messages of NCCL and gloo through torch, and of sockets through Python. They name no rank.
    const LOST: [&str; 11] = [
        "Connection closed by peer",
        "Connection reset by peer",
        "Connection closed by remote peer",
        "connection was closed by peer",
        "remote process exited or there was a network error",
        "ncclRemoteError",
        "ncclSystemError",
        "ConnectionResetError",
        "Broken pipe",
        "recvValue failed",
        "failed to recv, got 0 bytes",
    ];
    LOST.iter().any(|text| line.contains(text)).then_some(None)
}

/// Parses the number at the start of `text`.
fn number(text: &str) -> Option<usize> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).map_or(text, |end| &text[..end]);
    digits.parse().ok()
}

const HEADER: &str = "Traceback (most recent call last):";

/// Finds the last uncaught Python exception. Returns the range of its traceback, including chained
/// exceptions, and the line with its type and message.
fn python_traceback(lines: &[&str]) -> Option<(Range<usize>, String)> {
    let headers = (0..lines.len()).filter(|&at| lines[at].trim_start().ends_with(HEADER));
    let mut best = None;
    for at in headers {
        let before = at.checked_sub(1).map_or("", |before| lines[before]);
        // Such an exception does not end the program, but its traceback may follow that of the exception that
        // did.
        let harmless = before.starts_with("Exception in thread") && best.is_some();
        if !harmless && !before.starts_with("Exception ignored in") {
            best = parse_traceback(lines, at).or(best);
        }
    }
    let (mut range, text) = best.or_else(|| syntax_error(lines))?;
    // Extends the range to the first traceback of the exceptions chained to this one.
    while let Some(link) = (0..range.start).rev().find(|&at| !lines[at].trim().is_empty()) {
        let linked = lines[link].starts_with("During handling of the above exception")
            || lines[link].starts_with("The above exception was the direct cause");
        let first = (0..link).rev().find(|&at| lines[at].trim_start().ends_with(HEADER));
        match first.filter(|_| linked) {
            Some(first) => range.start = first,
            None => break,
        }
    }
    Some((range, text))
}

/// Parses the traceback whose header is line `at`. Returns its range and the line with the exception.
fn parse_traceback(lines: &[&str], at: usize) -> Option<(Range<usize>, String)> {
    // In an exception group, Python prints a bar before each line of a traceback.
    let group = lines[at].trim_start().starts_with('+');
    let inner = |line: usize| {
        let bare = lines[line].trim_start().trim_start_matches(['|', '+']);
        if group { bare.strip_prefix(' ').unwrap_or(bare) } else { lines[line] }
    };
    let is_frame = |line: &str| line.is_empty() || line.starts_with([' ', '\t']);
    let last = (at + 1..lines.len()).find(|&line| !is_frame(inner(line)))?;
    let exception = inner(last);
    let kind = exception.split(':').next().unwrap_or("");
    if kind.is_empty() || !kind.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '.') {
        return None;
    }
    // The message of an exception may have several lines, and nothing marks its end.
    let stop = (last + 1 + MESSAGE_MAX_LINES).min(lines.len());
    let over = |&line: &usize| lines[line].trim().is_empty() || starts_new_entry(lines[line]);
    let end = (last + 1..stop).find(over).unwrap_or(stop);
    Some((at..end, exception.to_owned()))
}

/// Returns whether the line begins another message, and so does not continue that of an exception.
fn starts_new_entry(line: &str) -> bool {
    line.ends_with(HEADER)
        || line.starts_with("Exception ignored in")
        || line.starts_with('[')
        || line.starts_with("thread '")
}

/// Finds a syntax error. Python prints no traceback header for a script that it cannot parse.
fn syntax_error(lines: &[&str]) -> Option<(Range<usize>, String)> {
    let kinds = ["SyntaxError: ", "IndentationError: ", "TabError: "];
    let last = lines.iter().rposition(|line| kinds.iter().any(|kind| line.starts_with(kind)))?;
    let start = (0..last).rev().take_while(|&at| lines[at].starts_with(' ')).last()?;
    Some((start..last + 1, lines[last].to_owned()))
}

/// Finds the first panic of Rust or Go. Returns the range of its lines, and its place and message in one
/// line.
fn parse_panic(lines: &[&str]) -> Option<(Range<usize>, String)> {
    if let Some(at) =
        lines.iter().position(|line| line.starts_with("thread '") && line.contains(" panicked at "))
    {
        let place = lines[at].split_once(" panicked at ")?.1;
        let message = match (place.strip_suffix(':'), lines.get(at + 1)) {
            (Some(place), Some(message)) => format!("panicked at {place}: {message}"),
            _ => format!("panicked at {place}"),
        };
        return Some((at..block_end(lines, at), message));
    }
    let at =
        lines.iter().position(|line| line.starts_with("panic: ") || line.starts_with("fatal error: "))?;
    let go = lines[at..].iter().any(|line| line.starts_with("goroutine "));
    go.then(|| (at..block_end(lines, at), lines[at].to_owned()))
}

/// Returns the end of a panic's or fatal error's lines that start at `at`. There are as many as the report
/// can show, without the advice to set RUST_BACKTRACE.
fn block_end(lines: &[&str], at: usize) -> usize {
    let end = (at + SHOWN_MAX_LINES).min(lines.len());
    (at..end).find(|&line| lines[line].starts_with("note: run with `RUST_BACKTRACE")).unwrap_or(end)
}

/// Formats the lines `range` of `lines` as a traceback for the report. If there are too many, omits the
/// middle.
pub(crate) fn format_traceback(lines: &[String], range: &Range<usize>) -> String {
    let part: Vec<&str> = lines[range.clone()].iter().map(|line| strip_rank_prefix(line)).collect();
    if part.len() <= SHOWN_MAX_LINES {
        return part.join("\n");
    }
    let half = SHOWN_MAX_LINES / 2;
    let left_out = part.len() - 2 * half;
    let (start, end) = (part[..half].join("\n"), part[part.len() - half..].join("\n"));
    format!("{start}\n  [... {left_out} lines ...]\n{end}")
}
