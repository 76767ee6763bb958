//! Rejects replaced words in names: the code uses the terms of NCCL, MPI, torchrun, Raft and Linux.

use std::iter;
use std::path::Path;

use super::source::{is_word_part, without_comments_and_strings};
use super::{assert_none, with_extension};

/// Words that no name below a folder may contain, each with the term to use instead. A plural with `s` counts
/// as the word. Strings, comments and local variables are not checked.
const REPLACED_WORDS: &[(&str, &[(&str, &str)])] = &[
    ("src", &[("scene", "subprocess test")]),
    (
        "src/comm/engine",
        &[
            ("seat", "progress lock"),
            ("letter", "submission"),
            ("chore", "callback"),
            ("mailbox", "submission queue"),
            ("door", "handshake, acceptor"),
            ("dial", "connector"),
            ("gong", "doorbell"),
            ("crowd", "oversubscription"),
            ("patience", "wait policy"),
            ("haste", "deadline bounds"),
            ("nudge", "poll, wake-up"),
            ("beside", "what happens in parallel, such as on_memory"),
            ("told", "entry, event"),
            ("parting", "closing"),
            ("siege", "scripted peer"),
            ("lent", "borrowed buffer"),
            ("lane", "connection"),
        ],
    ),
    (
        "src/comm/shm",
        &[
            ("bell", "doorbell"),
            ("gong", "doorbell"),
            ("handout", "descriptor passing"),
            ("obstacle", "unavailable reason"),
            ("giver", "sender"),
            ("taker", "receiver"),
            ("give", "publish, send"),
            ("told", "entry, event"),
            ("party", "local group"),
            ("joining", "follower"),
            ("leading", "leader"),
            ("stranger", "unauthenticated peer"),
            ("pace", "store policy"),
            ("arrive", "store fence"),
            ("whom", "peers"),
            ("spot", "location"),
            ("lane", "connection"),
            ("lent", "borrowed buffer"),
        ],
    ),
    (
        "src/comm/collectives/kernels",
        &[("fold", "ordered reduction"), ("wide", "f32 accumulator"), ("shares", "parts")],
    ),
    (
        "src/comm/programs",
        &[
            ("shelf", "handle list"),
            ("keeper", "handle sink"),
            ("junk", "arbitrary"),
            ("badly", "fault case"),
            ("doing", "current steps"),
            ("works", "handles"),
            ("lane", "connection"),
            ("lent", "borrowed buffer"),
            ("settle", "wait"),
            ("guilty", "culprit"),
        ],
    ),
    (
        "src/comm/api/device",
        &[
            ("told", "capabilities"),
            ("begun", "pending operation"),
            ("patience", "timeout"),
            ("ending", "teardown"),
            ("chore", "callback"),
            ("alone", "exclusive, single"),
            ("look", "poll"),
        ],
    ),
    ("src/comm/nccl", &[("enter", "set device"), ("place", "location, rank")]),
    (
        "src/comm/collectives/plan",
        &[("gate", "dependency"), ("lane", "rail"), ("star", "linear"), ("beside", "in parallel")],
    ),
    (
        "src/comm/api/group",
        &[
            ("nudge", "poll, wake-up"),
            ("past", "history, previous"),
            ("told", "entry, event"),
            ("lent", "borrowed buffer"),
            ("ticket", "completion"),
        ],
    ),
    (
        "src/comm/bootstrap",
        &[
            ("invitation", "socket info"),
            ("whereabouts", "store location"),
            ("standing", "current state"),
            ("claim", "rank lock"),
            ("ours", "own"),
            ("look", "check"),
        ],
    ),
    (
        "src/comm/transport/links",
        &[
            ("rough", "faulty link"),
            ("chance", "fault source"),
            ("lane", "connection"),
            ("broken", "connection error"),
            ("unheard", "time since acknowledgement"),
        ],
    ),
    ("src/comm/api/session", &[("meeting", "bootstrap"), ("living", "live")]),
    (
        "src/comm/api/spawn",
        &[
            ("ticket", "call id"),
            ("course", "supervisor"),
            ("past", "history, previous"),
            ("told", "report"),
            ("patience", "timeout"),
        ],
    ),
    ("src/comm/flight", &[("told", "recorded"), ("track", "group recorder")]),
    ("src/train", &[("anew", "again, reset"), ("noted", "recorded")]),
    ("src/store", &[("hub", "shared store"), ("bury", "run last will")]),
    (
        "src/launcher",
        &[
            ("findings", "log evidence"),
            ("verdict", "job outcome"),
            ("trial", "job outcome"),
            ("court", "termination"),
            ("told", "event, report"),
            ("surroundings", "start context"),
            ("blame", "failure origin"),
            ("elect", "select root cause"),
            ("patience", "timeout"),
            ("glance", "read pending"),
            ("doubt", "hint"),
            ("culprit", "root cause"),
            ("leftover", "orphan"),
            ("guest", "other job"),
        ],
    ),
    ("src/launcher/rendezvous", ELASTIC),
    ("src/launcher/membership", ELASTIC),
    ("src/tools", REPORTING),
    ("launcher-tests", REPORTING),
    (
        "launcher-tests",
        &[
            ("moment", "fault point"),
            ("orders", "fault test configuration"),
            ("leash", "orphan guard"),
            ("patience", "timeout"),
            ("intruder", "unauthenticated peer"),
            ("scene", "subprocess test"),
            ("anew", "again, new round"),
        ],
    ),
];

/// Words of elastic jobs.
const ELASTIC: &[(&str, &str)] = &[
    ("hall", "rendezvous server"),
    ("desk", "coordinator session"),
    ("finder", "discovery"),
    ("archive", "record writer"),
    ("mandate", "leader lease"),
    ("muster", "join status"),
    ("seat", "rank assignment"),
    ("crowd", "nodes on host"),
    ("stranger", "unauthenticated peer"),
    ("desert", "shutdown notice"),
    ("planted", "injected bug"),
    ("nowhere", "discovery error"),
    ("trouble", "registry error"),
    ("office", "coordinator process"),
];

/// Words of what is printed.
const REPORTING: &[(&str, &str)] = &[
    ("told", "report, event"),
    ("tell", "report"),
    ("said", "report, message"),
    ("speaks", "is printing"),
    ("settle", "wait"),
    ("seat", "place, slot"),
];

/// Keywords before a declared name.
const DECLARATIONS: &[&str] =
    &["fn", "struct", "enum", "union", "trait", "type", "mod", "const", "static", "macro_rules"];

/// Returns the declared names with their line numbers: items, and fields and variants with a line of their
/// own.
fn declared_names(source: &str) -> Vec<(usize, String)> {
    let code = without_comments_and_strings(source);
    let mut found = Vec::new();
    for (number, line) in code.lines().enumerate() {
        let words: Vec<(usize, &str)> = words(line).collect();
        for pair in words.windows(2) {
            let (keyword, name) = (pair[0], pair[1]);
            let between = line[keyword.0 + keyword.1.len()..name.0].trim();
            // `*const T` and `&'static T` declare nothing.
            let declares = !line[..keyword.0].ends_with(['*', '\'']) && matches!(between, "" | "!");
            if declares && DECLARATIONS.contains(&keyword.1) {
                found.push((number + 1, name.1.to_owned()));
            }
        }
        found.extend(field_or_variant(line).map(|name| (number + 1, name.to_owned())));
    }
    found
}

/// Returns the words of a line with their positions.
fn words(line: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut at = 0;
    iter::from_fn(move || {
        let start = at + line[at..].find(is_word_part)?;
        at = line[start..].find(|c| !is_word_part(c)).map_or(line.len(), |len| start + len);
        Some((start, &line[start..at]))
    })
}

/// Returns the name at the beginning of a line if it reads as a field or as a variant.
fn field_or_variant(line: &str) -> Option<&str> {
    let mut line = line.trim_start();
    if let Some(rest) = line.strip_prefix("pub").filter(|rest| !rest.starts_with(is_word_part)) {
        let scope = rest.strip_prefix('(').and_then(|scope| scope.split_once(')'));
        line = scope.map_or(rest, |(_, rest)| rest).trim_start();
    }
    let (name, rest) = line.split_at(line.find(|c| !is_word_part(c)).unwrap_or(line.len()));
    let rest = rest.trim();
    let field = rest.starts_with(':') && !rest.starts_with("::");
    let variant =
        name.starts_with(char::is_uppercase) && (rest.is_empty() || rest.starts_with([',', '(', '{', '=']));
    (!name.is_empty() && (field || variant)).then_some(name)
}

/// Returns the parts of a name or path in small letters: `RankLock`, `rank_lock` and `rank/lock` have the
/// same.
fn parts(name: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut before = '_';
    for c in name.chars() {
        if !c.is_alphanumeric() || (c.is_uppercase() && !before.is_uppercase()) {
            parts.push(String::new());
        }
        if c.is_alphanumeric() {
            parts.last_mut().unwrap().extend(c.to_lowercase());
        }
        before = c;
    }
    parts.retain(|part| !part.is_empty());
    parts
}

/// Returns the replaced words in a name below `path`, each with the term to use instead.
fn replaced_words(path: &Path, name: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let parts = parts(name);
    REPLACED_WORDS
        .iter()
        .filter(move |(folder, _)| path.starts_with(folder))
        .flat_map(|(_, words)| words.iter().copied())
        .filter(move |(word, _)| {
            parts.iter().any(|part| part == word || part.strip_suffix('s') == Some(*word))
        })
}

/// Returns a line for each replaced word in the names of a file, its own name included.
fn violations(path: &Path, source: &str) -> Vec<String> {
    let shown = path.display().to_string();
    let names = declared_names(source).into_iter().chain([(0, shown.clone())]);
    let mut found = Vec::new();
    for (line, name) in names {
        for (word, term) in replaced_words(path, &name) {
            let place = if line == 0 { shown.clone() } else { format!("{shown}:{line}: {name}") };
            found.push(format!("{place}: for \"{word}\" use: {term}"));
        }
    }
    found
}

#[test]
fn names_use_standard_terms() {
    let mut found = Vec::new();
    let mut count = 0;
    for (path, source) in with_extension("rs") {
        found.extend(violations(&path, &source));
        count += declared_names(&source).len();
    }
    assert_none(&found, "replaced words in names (REPLACED_WORDS in names.rs)");
    assert!(count > 10_000, "only {count} names: are declarations still recognised?");
}

#[test]
fn planted_names_are_rejected() {
    let source = r##"
pub(crate) struct SeatGuard<'a>(&'a u8);
// fn seat() {}  /* seat: u8 */
const TEXT: &str = "fn seat() {}";
    let seat = (r#"
        seats: u8"#, '"', b'\'');
    pub(crate) seats: usize,
    TakeSeat(u8),
    pub async fn take_seat(self) -> *const seat {
macro_rules! seat {
    seat::find(self.seat);
    seated: bool,
"##;
    let lines = |path: &str| -> Vec<String> {
        violations(Path::new(path), source)
            .iter()
            .map(|line| line.strip_prefix(path).unwrap().split(": for ").next().unwrap().to_owned())
            .collect()
    };
    let names = [":2: SeatGuard", ":7: seats", ":8: TakeSeat", ":9: take_seat", ":10: seat"];
    assert_eq!(lines("src/comm/engine/file.rs"), names);
    assert_eq!(lines("src/comm/engine/seat.rs").last().unwrap(), "");
    assert!(lines("src/comm/collectives/plan/seat.rs").is_empty());
    let message = &violations(Path::new("src/comm/engine/file.rs"), source)[0];
    assert_eq!(message, "src/comm/engine/file.rs:2: SeatGuard: for \"seat\" use: progress lock");
    assert_eq!(parts("HTTPServer_of4Ranks"), ["httpserver", "of4", "ranks"]);
}
