//! Circles of files: inside the modules of a list, files use each other in one direction only.
//!
//! The test reads the paths that begin with `crate::`, `super::`, `self::` or a child module. A name that a
//! file imports or exports counts as the file that defines it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::layers::{ModuleGraph, elements, modules, production, tokens};
use super::{assert_none, is_test_file, with_extension};

/// The modules to which the rule applies: folder of the crate, and path of the module in it.
const MODULES: [(&str, &str); 5] = [
    ("src/comm", "engine"),
    ("src/comm", "api/device"),
    ("src/launcher", "agent"),
    ("src/launcher", "cli"),
    ("src/launcher", "config"),
];

/// The path of a module in its crate.
type ModulePath = Vec<String>;

/// Returns the graph of the files of `module`. `files` are all files of the crate.
fn graph_of_files(module: &str, files: &BTreeMap<PathBuf, String>) -> ModuleGraph {
    let mut tests = Vec::new();
    let mut code: BTreeMap<ModulePath, (Vec<&str>, PathBuf)> = BTreeMap::new();
    for (path, text) in files.iter().filter(|(path, _)| path.with_extension("").starts_with(module)) {
        let (kept, names) = production(&tokens(text));
        let name = path.with_extension("");
        let name = if name.ends_with("mod") { name.parent().unwrap().to_owned() } else { name };
        tests.extend(names.into_iter().map(|child| name.join(child)));
        // A module called `build` is no build script.
        if !is_test_file(path) || path.ends_with("build.rs") {
            let name = name.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
            code.insert(name, (kept, path.clone()));
        }
    }
    code.retain(|name, _| !tests.iter().any(|test| name.iter().collect::<PathBuf>().starts_with(test)));
    let used: BTreeMap<&ModulePath, Vec<(ModulePath, Option<&str>)>> =
        code.iter().map(|(name, (code, _))| (name, used_paths(name, code))).collect();
    let mut uses: BTreeMap<String, BTreeMap<String, BTreeSet<PathBuf>>> =
        code.keys().map(|name| (name.join("/"), BTreeMap::new())).collect();
    for (name, paths) in &used {
        for (path, _) in paths {
            if let Some(target) = defining_file(path, &used, 0).filter(|target| target != *name) {
                let of_file = uses.get_mut(&name.join("/")).unwrap();
                of_file.entry(target.join("/")).or_default().insert(code[*name].1.clone());
            }
        }
    }
    ModuleGraph::of(uses)
}

/// Returns the file that defines the last name of a path.
fn defining_file(
    path: &[String],
    used: &BTreeMap<&ModulePath, Vec<(ModulePath, Option<&str>)>>,
    depth: usize,
) -> Option<ModulePath> {
    let length = (1..=path.len()).rev().find(|&length| used.contains_key(&path[..length].to_vec()))?;
    let (file, rest) = path.split_at(length);
    let imported = rest.first().filter(|_| depth < 8).and_then(|name| {
        let mut imports = used[&file.to_vec()].iter().filter(|(path, _)| path != &[file, rest].concat());
        let (path, _) = imports.find(|(_, import)| import.as_ref() == Some(&name.as_str()))?;
        defining_file(path, used, depth + 1)
    });
    Some(imported.unwrap_or_else(|| file.to_vec()))
}

/// Returns the paths in the code of the file `name`, and the name that each brings to the file if it is
/// imported.
fn used_paths<'a>(name: &[String], code: &[&'a str]) -> Vec<(ModulePath, Option<&'a str>)> {
    let children: BTreeSet<&str> = modules(code).collect();
    let mut found = Vec::new();
    let mut import_ends = 0;
    for at in 0..code.len() {
        if code[at] == "use" {
            import_ends = at + code[at..].iter().position(|token| *token == ";").unwrap_or(0);
        }
        let starts = code.get(at + 1) == Some(&"::") && at.checked_sub(1).is_none_or(|at| code[at] != "::");
        let base = match code[at] {
            "crate" if starts => Vec::new(),
            "self" if starts => name.to_vec(),
            "super" if starts => name[..name.len() - 1].to_vec(),
            child if starts && children.contains(child) => [name, &[child.to_owned()]].concat(),
            _ => continue,
        };
        let mut paths = Vec::new();
        expand(&code[at + 2..], base, &mut paths);
        let is_import = at < import_ends;
        found.extend(paths.into_iter().map(|(path, import)| (path, import.filter(|_| is_import))));
    }
    found
}

/// Adds the paths at the start of the code, below `base`, each with the name by which it is imported.
fn expand<'a>(code: &[&'a str], mut base: ModulePath, out: &mut Vec<(ModulePath, Option<&'a str>)>) {
    match code {
        ["{", ..] => elements(code).into_iter().for_each(|part| expand(part, base.clone(), out)),
        ["super", "::", rest @ ..] => {
            base.pop();
            expand(rest, base, out);
        }
        [first, rest @ ..] if first.starts_with(|c: char| c.is_alphabetic() || c == '_') => {
            if *first != "self" {
                base.push((*first).to_owned());
            }
            match rest {
                ["::", rest @ ..] if !matches!(rest.first(), Some(&"<")) => expand(rest, base, out),
                ["as", alias, ..] => out.push((base, Some(alias))),
                _ => out.push((base, Some(first))),
            }
        }
        // A list that is imported as a whole, or the end of an element.
        _ => out.push((base, None)),
    }
}

#[test]
fn files_of_a_module_form_no_circles() {
    let mut found = Vec::new();
    for (folder, module) in MODULES {
        let in_crate =
            |(path, text): (PathBuf, String)| Some((path.strip_prefix(folder).ok()?.to_owned(), text));
        let stripped =
            |(path, text): (PathBuf, String)| (path, super::source::without_comments_and_strings(&text));
        let files = with_extension("rs").filter_map(in_crate).map(stripped).collect();
        let graph = graph_of_files(module, &files);
        let uses: usize = graph.uses().values().map(BTreeMap::len).sum();
        assert!(uses > 5, "{module}: only {uses} uses among its files: is the code still read right?");
        found.extend(graph.circles().into_values().flatten().map(|line| format!("{folder}: {line}")));
    }
    assert_none(&found, "files of a module form no circle; move what both need to a third file below both");
}

#[test]
fn planted_circles_between_files_are_detected() {
    let plain = [
        (
            "engine/mod.rs",
            "mod queue; mod wait; #[cfg(test)] mod checks; pub use wait::{Wait, spin as turn};",
        ),
        ("engine/queue.rs", "use super::{Wait, wait::Policy as How}; fn f() -> super::turn::Of { x }"),
        (
            "engine/wait.rs",
            "use crate::error::Error; #[cfg(test)] mod tests { use super::super::queue::Queue; }",
        ),
        ("engine/checks.rs", "use super::queue;"),
        ("other.rs", "use crate::engine::queue;"),
    ];
    let circles = |changes: &[(&str, &str)]| {
        let files = plain.iter().chain(changes).map(|(path, text)| (PathBuf::from(path), (*text).to_owned()));
        let circles = graph_of_files("engine", &files.collect()).circles();
        circles.into_iter().map(|(modules, uses)| (modules, uses.join("; "))).collect::<Vec<_>>()
    };
    assert_eq!(circles(&[]), []);
    let circle = [(
        "engine/queue, engine/wait".to_owned(),
        "engine/queue -> engine/wait: engine/queue.rs; engine/wait -> engine/queue: engine/wait.rs"
            .to_owned(),
    )];
    for text in
        ["use super::queue::Queue;", "fn f(x: &crate::engine::queue::Queue) {}", "use super::{self, queue};"]
    {
        assert!(circles(&[("engine/wait.rs", text)])[0].1.contains("engine/wait -> engine/queue"), "{text}");
    }
    assert_eq!(circles(&[("engine/wait.rs", "use super::queue;")]), circle);
    // A name of the parent itself.
    assert!(!circles(&[("engine/wait.rs", "use super::Engine;")]).is_empty());
}
