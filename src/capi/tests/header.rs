//! The header is the one that cbindgen makes from the sources.

#![allow(clippy::unwrap_used, clippy::panic)] // a broken expectation ends the test

use convoke_testkit::programs::repository_root;

/// Rewrites the header with `CONVOKE_WRITE_HEADER=1 cargo test -p convoke-capi --test header`.
#[test]
fn header_matches_the_sources() {
    let folder = repository_root().join("src/capi");
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let mut made = Vec::new();
    cbindgen::Builder::new()
        .with_src(folder.join("lib.rs"))
        .with_config(config)
        .generate()
        .unwrap()
        .write(&mut made);
    // Rust's word for what a caller must promise means nothing to programmers in C.
    let made = String::from_utf8(made).unwrap().replace("// # Safety\n", "// Requirements:\n");
    let path = folder.join("include/convoke.h");
    if std::env::var_os("CONVOKE_WRITE_HEADER").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap();
    assert!(committed == made, "{} differs from the sources; see the comment of this test", path.display());
}
