//! The number of files that an addition to the runtime touches, shown by the samples that tests have of each.
//! `docs/internals/extending.md` describes the additions.

use std::path::{Path, PathBuf};

use super::{has_word, with_extension};

/// The files of the sample algorithm: its plans, the list of modules, the list of algorithms.
const ALGORITHM: (&[&str], &[&str]) = (
    &["two_tree", "TwoTree"],
    &[
        "src/comm/collectives/plan/algorithms.rs",
        "src/comm/collectives/plan/mod.rs",
        "src/comm/collectives/plan/two_tree.rs",
    ],
);

/// The files of the sample of a wrapping transport. The second one registers it.
const TRANSPORT: (&[&str], &[&str]) =
    (&["byte_counts"], &["src/comm/transport/links/byte_counts.rs", "src/comm/transport/links/mod.rs"]);

/// The files of the transport that injects faults, and of those that switch it on: the random programs, and a
/// test of the engine. The poller reports readiness late and in another order, which is no property of a
/// link, so it asks for faults of its own.
const FAULTS: (&[&str], &[&str]) = (
    &["fault_injection", "FaultyLink"],
    &[
        "src/comm/engine/poller.rs",
        "src/comm/engine/tests/faulty_link.rs",
        "src/comm/programs/rank.rs",
        "src/comm/transport/links/fault_injection.rs",
        "src/comm/transport/links/mod.rs",
    ],
);

/// Returns the Rust files, these rules apart, whose name is one of `words` or whose code or comments have
/// one.
fn files_with(words: &[&str]) -> Vec<String> {
    let has_one = |(path, text): &(PathBuf, String)| {
        let is_named = words.iter().any(|word| path.file_stem().is_some_and(|stem| stem == *word));
        is_named || text.lines().any(|line| words.iter().any(|word| has_word(line, word)))
    };
    let files = with_extension("rs").filter(|(path, _)| !path.ends_with(file!()));
    files.filter(has_one).map(|(path, _)| path.to_string_lossy().into_owned()).collect()
}

#[test]
fn sample_algorithm_is_in_three_files() {
    assert_eq!(files_with(ALGORITHM.0), ALGORITHM.1);
}

#[test]
fn wrapping_transports_are_in_their_file_and_registered_once() {
    for (words, files) in [TRANSPORT, FAULTS] {
        assert_eq!(files_with(words), files, "{words:?}");
        let links = Path::new("src/comm/transport/links/mod.rs");
        let (_, text) = with_extension("rs").find(|(path, _)| path == links).expect("the file exists");
        let uses = text.lines().filter(|line| has_word(line, words[0])).count();
        assert_eq!(uses, 2, "{words:?}: one declaration of the module, one registration");
    }
}
