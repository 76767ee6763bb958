//! Layers inside a crate: its top modules use each other in one direction only.
//!
//! The test reads the paths that begin with `crate::` in the code that users get. A name that `lib.rs`
//! imports or exports counts as its module.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::source::{is_word_part, without_comments_and_strings};
use super::{assert_none, is_test_file, read, with_extension};

/// The folders of the crates to which the rule applies.
const LAYERED_CRATES: [&str; 7] =
    ["src/capi", "src/comm", "src/env", "src/launcher", "src/recorder", "src/store", "src/train"];

/// The uses among the top modules of a crate.
pub(super) struct ModuleGraph {
    /// For each module those that it uses, and the files that do.
    uses: BTreeMap<String, BTreeMap<String, BTreeSet<PathBuf>>>,
    /// Paths from the root of the crate whose first name is not a module: the file and that name.
    through_root: BTreeSet<(PathBuf, String)>,
}

impl ModuleGraph {
    /// Builds the graph of a crate from its files: their paths from the crate's folder, and their text.
    fn new(files: &BTreeMap<PathBuf, String>) -> Self {
        let mut code = BTreeMap::new();
        let mut test_modules = Vec::new();
        let stripped: BTreeMap<_, _> =
            files.iter().map(|(path, text)| (path, without_comments_and_strings(text))).collect();
        for (path, text) in &stripped {
            let (kept, names) = production(&tokens(text));
            test_modules.extend(names.into_iter().map(|name| folder_of_children(path).join(name)));
            code.insert(path.as_path(), kept);
        }
        let in_tests = |path: &Path| {
            is_test_file(path)
                || test_modules.iter().any(|module| path.with_extension("").starts_with(module))
        };
        code.retain(|path, _| !in_tests(path));
        let root = &code[Path::new("lib.rs")];
        let mut uses: BTreeMap<_, BTreeMap<_, BTreeSet<_>>> =
            modules(root).map(|module| (module.to_owned(), BTreeMap::new())).collect();
        let exports = exports(root);
        let mut through_root = BTreeSet::new();
        for (path, code) in &code {
            let module = path.with_extension("");
            let module = module.iter().next().unwrap().to_str().unwrap();
            for name in crate_paths(code) {
                let used = if uses.contains_key(name) {
                    Some(name)
                } else {
                    through_root.insert(((*path).to_owned(), name.to_owned()));
                    exports.get(name).copied()
                };
                let Some(used) = used.filter(|used| *used != module && uses.contains_key(*used)) else {
                    continue;
                };
                if let Some(of_module) = uses.get_mut(module) {
                    of_module.entry(used.to_owned()).or_default().insert((*path).to_owned());
                }
            }
        }
        Self { uses, through_root }
    }

    /// Returns all modules that `module` uses, directly or through others.
    fn reachable<'a>(&'a self, module: &'a str) -> BTreeSet<&'a str> {
        let mut found = BTreeSet::new();
        let mut queue = vec![module];
        while let Some(module) = queue.pop() {
            queue.extend(self.uses[module].keys().map(String::as_str).filter(|used| found.insert(*used)));
        }
        found
    }

    /// Returns a graph of other things than top modules.
    pub(super) fn of(uses: BTreeMap<String, BTreeMap<String, BTreeSet<PathBuf>>>) -> Self {
        Self { uses, through_root: BTreeSet::new() }
    }

    pub(super) fn uses(&self) -> &BTreeMap<String, BTreeMap<String, BTreeSet<PathBuf>>> {
        &self.uses
    }

    /// Returns the circles: for each its modules, and a line for each use that belongs to it.
    pub(super) fn circles(&self) -> BTreeMap<String, Vec<String>> {
        let reachable: BTreeMap<&str, BTreeSet<&str>> =
            self.uses.keys().map(|module| (module.as_str(), self.reachable(module))).collect();
        let mut circles: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (module, uses) in &self.uses {
            let members =
                reachable[module.as_str()].iter().filter(|used| reachable[*used].contains(module.as_str()));
            let name = members.copied().collect::<Vec<_>>().join(", ");
            for (used, files) in
                uses.iter().filter(|(used, _)| reachable[used.as_str()].contains(module.as_str()))
            {
                let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
                let line = format!("{module} -> {used}: {}", files.join(", "));
                circles.entry(name.clone()).or_default().push(line);
            }
        }
        circles
    }
}

/// Returns the folder that contains the child modules of a file.
fn folder_of_children(path: &Path) -> PathBuf {
    let is_folder =
        path.file_name().is_some_and(|name| name == "lib.rs" || name == "mod.rs" || name == "main.rs");
    if is_folder { path.parent().unwrap().to_owned() } else { path.with_extension("") }
}

/// Returns the child modules that a file declares.
pub(super) fn modules<'a>(code: &[&'a str]) -> impl Iterator<Item = &'a str> {
    code.windows(3).filter(|item| item[0] == "mod" && item[2] == ";").map(|item| item[1])
}

/// Returns the names that the imports of `lib.rs` bring to the root, each with the top module of its path.
fn exports<'a>(root: &[&'a str]) -> BTreeMap<&'a str, &'a str> {
    let mut exports = BTreeMap::new();
    for statement in root.split(|token| *token == ";") {
        let Some(start) = statement.iter().rposition(|token| *token == "use") else { continue };
        let mut path = &statement[start + 1..];
        if let ["crate" | "self", "::", rest @ ..] = path {
            path = rest;
        }
        let Some((head, names)) = path.split_first() else { continue };
        for (at, name) in names.iter().enumerate() {
            if matches!(names.get(at + 1), None | Some(&("," | "}"))) && *name != "}" {
                exports.insert(*name, *head);
            }
        }
    }
    exports
}

/// Returns the first names of the paths that begin at the root of the crate.
fn crate_paths<'a, 'b>(code: &'b [&'a str]) -> impl Iterator<Item = &'a str> + 'b {
    let starts = code.windows(2).enumerate().filter(|(_, pair)| *pair == ["crate", "::"]);
    starts.flat_map(|(at, _)| heads_of(&code[at + 2..]))
}

/// Returns the first names of the path or group of paths at the start of the code.
fn heads_of<'a>(code: &[&'a str]) -> Vec<&'a str> {
    match code.first() {
        Some(&"{") => elements(code).iter().filter_map(|path| path.first().copied()).collect(),
        first => first.copied().into_iter().collect(),
    }
}

/// Splits a file into the code that users get, and the names of the child modules that only tests compile.
pub(super) fn production<'a>(mut code: &[&'a str]) -> (Vec<&'a str>, Vec<&'a str>) {
    const ITEMS: [&str; 9] = ["const", "enum", "fn", "impl", "mod", "static", "struct", "trait", "use"];
    let mut kept = Vec::new();
    let mut test_modules = Vec::new();
    while let Some(token) = code.first() {
        if code.starts_with(&["#", "[", "cfg", "("]) && holds_only_in_tests(&code[2..]) {
            code = &code[1 + group_length(&code[1..])..];
            let item = &code[..item_length(code)];
            // Other things, such as fields, stay; their end is harder to find.
            if item.iter().any(|token| ITEMS.contains(token)) {
                test_modules.extend(modules(item));
                code = &code[item.len()..];
            }
        } else {
            kept.push(*token);
            code = &code[1..];
        }
    }
    (kept, test_modules)
}

/// Returns whether the condition of a `cfg` holds in tests only. The code begins with the condition.
fn holds_only_in_tests(code: &[&str]) -> bool {
    match code.first() {
        Some(&"test") => true,
        Some(&("all" | "cfg")) => elements(&code[1..]).iter().any(|part| holds_only_in_tests(part)),
        Some(&"any") => elements(&code[1..]).iter().all(|part| part.is_empty() || holds_only_in_tests(part)),
        _ => false,
    }
}

/// Returns the length of the item at the start of the code.
fn item_length(code: &[&str]) -> usize {
    let mut at = 0;
    while at < code.len() {
        match code[at] {
            ";" => return at + 1,
            "{" => return at + group_length(&code[at..]),
            "(" | "[" => at += group_length(&code[at..]),
            ")" | "]" | "}" => return at,
            _ => at += 1,
        }
    }
    at
}

/// Returns the length of the group in brackets at the start of the code, with its brackets.
fn group_length(code: &[&str]) -> usize {
    let mut depth = 0;
    for (at, token) in code.iter().enumerate() {
        match *token {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    panic!("no closing bracket: {code:?}");
}

/// Returns the parts between the commas of the group in brackets at the start of the code.
pub(super) fn elements<'a, 'b>(code: &'b [&'a str]) -> Vec<&'b [&'a str]> {
    let end = group_length(code) - 1;
    let (mut parts, mut start, mut at) = (Vec::new(), 1, 1);
    while at < end {
        match code[at] {
            "," => {
                parts.push(&code[start..at]);
                at += 1;
                start = at;
            }
            "(" | "[" | "{" => at += group_length(&code[at..]),
            _ => at += 1,
        }
    }
    parts.push(&code[start..end]);
    parts
}

/// Returns names, `::` and single characters of code without comments and strings.
pub(super) fn tokens(code: &str) -> Vec<&str> {
    let mut out = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = if is_word_part(first) {
            rest.find(|c| !is_word_part(c)).unwrap_or(rest.len())
        } else if rest.starts_with("::") {
            2
        } else {
            first.len_utf8()
        };
        out.push(&rest[..length]);
        rest = rest[length..].trim_start();
    }
    out
}

/// Returns the graph of the crate in `folder`.
fn graph_of(folder: &str) -> ModuleGraph {
    let in_crate = |(path, text): (PathBuf, String)| Some((path.strip_prefix(folder).ok()?.to_owned(), text));
    ModuleGraph::new(&with_extension("rs").filter_map(in_crate).collect())
}

#[test]
fn top_modules_form_no_circles() {
    let mut found = Vec::new();
    for folder in LAYERED_CRATES {
        let graph = graph_of(folder);
        let uses: usize = graph.uses.values().map(BTreeMap::len).sum();
        assert!(uses > 5, "{folder}: only {uses} uses among its modules: is the code still read right?");
        for (modules, uses) in graph.circles() {
            found.push(format!("{folder}: {modules}\n    {}", uses.join("\n    ")));
        }
    }
    assert_none(&found, "the top modules of a crate form no circle; move what both need to a lower module");
}

/// The head of `src/comm/lib.rs` lists the layers, one a line.
#[test]
fn modules_of_the_runtime_depend_only_on_earlier_layers() {
    let lib = read(Path::new("src/comm/lib.rs"));
    let mut layers = BTreeMap::new();
    for (layer, line) in lib.lines().filter(|line| line.starts_with("//! - `")).enumerate() {
        layers.extend(line.split('`').skip(1).step_by(2).map(|name| (name, layer)));
    }
    let graph = graph_of("src/comm");
    assert!(
        graph.uses.keys().eq(layers.keys()),
        "the layers in src/comm/lib.rs are {:?}, its modules {:?}",
        layers.keys(),
        graph.uses.keys()
    );
    let mut found = Vec::new();
    for (module, uses) in &graph.uses {
        for (used, files) in uses.iter().filter(|(used, _)| layers[used.as_str()] >= layers[module.as_str()])
        {
            found.push(format!("{module} -> {used}: {files:?}"));
        }
    }
    // The root depends on all layers.
    let through_root =
        graph.through_root.iter().filter(|(path, _)| path.iter().next() != Some("lib.rs".as_ref()));
    found.extend(through_root.map(|(path, name)| format!("{}: crate::{name}", path.display())));
    assert_none(&found, "a module depends only on modules of the layers before its own (src/comm/lib.rs)");
}

#[test]
fn planted_circles_between_modules_are_detected() {
    let root = "mod engine; mod error; pub mod plan; #[cfg(all(test, not(x)))] mod models;
        pub use error::{Failure, Reason as Why}; pub use plan::step::Step;";
    let engine =
        "use crate::plan::{Step, tuning}; use crate::{error::{self, Reason}, plan}; #[cfg(test)] mod checks;";
    let error = "/// crate::engine\nconst TEXT: &str = \"{ crate::plan\"; const QUOTE: char = '\"'; // crate::plan
        #[cfg(test)] pub(crate) mod tests { use crate::engine; } fn longest<'a>(text: &'a str) -> &'a str { text }";
    let plain = [
        ("lib.rs", root),
        ("engine/mod.rs", engine),
        ("engine/checks.rs", "use crate::models;"),
        ("error.rs", error),
        ("models/mod.rs", "use crate::engine;"),
        (
            "plan/mod.rs",
            "#[cfg(test)] use crate::engine; mod step; const RAW: &str = r#\"\"crate::engine\"#;",
        ),
        ("plan/step.rs", "use crate::plan::Order;"),
        ("plan/tests/mod.rs", "use crate::engine;"),
    ];
    let circles = |changes: &[(&str, &str)]| {
        let files = plain.iter().chain(changes).map(|(path, text)| (PathBuf::from(path), (*text).to_owned()));
        let circles = ModuleGraph::new(&files.collect()).circles();
        circles.into_iter().map(|(modules, uses)| (modules, uses.join("; "))).collect::<Vec<_>>()
    };
    let circle = |modules: &str, uses: &str| vec![(modules.to_owned(), uses.to_owned())];
    assert_eq!(circles(&[]), []);
    let paths = tokens("use crate::a::B; crate::c(super::d, crate::{e, f})");
    assert!(crate_paths(&paths).eq(["a", "c", "e", "f"]));
    let files = plain.map(|(path, text)| (PathBuf::from(path), text.to_owned()));
    let through_root = BTreeSet::from([(PathBuf::from("plan/step.rs"), "Why".to_owned())]);
    let why = (PathBuf::from("plan/step.rs"), "use crate::Why;".to_owned());
    assert_eq!(ModuleGraph::new(&files.into_iter().chain([why]).collect()).through_root, through_root);
    assert_eq!(
        circles(&[("plan/step.rs", "fn run(task: &crate::engine::Task) {}")]),
        circle("engine, plan", "engine -> plan: engine/mod.rs; plan -> engine: plan/step.rs")
    );
    let through_root = [("error.rs", "use crate::{\n    Step,\n};"), ("plan/step.rs", "use crate::Why;")];
    assert_eq!(
        circles(&through_root),
        circle("error, plan", "error -> plan: error.rs; plan -> error: plan/step.rs")
    );
    let long =
        [("error.rs", "fn f() -> crate::Step { step }"), ("plan/mod.rs", "#[cfg(x)] use crate::engine;")];
    assert_eq!(
        circles(&long),
        circle(
            "engine, error, plan",
            "engine -> error: engine/mod.rs; engine -> plan: engine/mod.rs; error -> plan: error.rs; \
             plan -> engine: plan/mod.rs"
        )
    );
}
