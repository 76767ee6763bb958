//! Libraries that are not NCCL, old or broken: stubs that these tests compile with a C compiler.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::candidates::Candidate;
use super::{Library, NcclError, Version};

/// A folder with stubs, removed when this value is dropped.
struct Stubs(PathBuf);

impl Stubs {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("convoke-nccl-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    /// A library that `stub.c` makes with these options.
    fn stub(&self, name: &str, options: &[&str]) -> Candidate {
        let path = self.0.join(name);
        let source = convoke_testkit::programs::repository_root().join("src/comm/nccl/tests/stub.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-o"]).arg(&path).arg(source).args(options);
        assert!(compiler.status().unwrap().success());
        chosen(path)
    }
}

impl Drop for Stubs {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn chosen(path: PathBuf) -> Candidate {
    Candidate { path, guessed: false }
}

#[test]
fn first_recent_enough_nccl_is_used() {
    let stubs = Stubs::new("first");
    let old = stubs.stub("old.so", &["-DVERSION=21703"]);
    let good = stubs.stub("good.so", &["-DVERSION=23007"]);
    let absent = Candidate { path: stubs.0.join("absent.so"), guessed: true };
    let library = Library::open(&[absent, old, good.clone()]).unwrap();
    assert_eq!((library.version().to_string().as_str(), library.path()), ("2.30.7", &*good.path));
}

#[test]
fn missing_nccl_error_lists_all_paths_tried() {
    let nowhere = Path::new("/nowhere/libnccl.so.2").to_owned();
    let guessed = Candidate { path: nowhere.clone(), guessed: true };
    let name = chosen("libnccl-absent.so.2".into());
    let error = Library::open(&[name, chosen(nowhere.clone()), guessed]).unwrap_err();
    let NcclError::NotFound { tried } = &error else { panic!("{error}") };
    assert_eq!(
        tried.iter().map(|(path, _)| path.clone()).collect::<Vec<_>>(),
        ["libnccl-absent.so.2".into(), nowhere]
    );
    let expected = "NCCL was not found: tried libnccl-absent.so.2: cannot open shared object file: No such file or \
                    directory, /nowhere/libnccl.so.2: cannot open shared object file: No such file or directory; install it";
    assert!(error.to_string().starts_with(expected), "{error}");
    assert!(error.to_string().ends_with("or say where it is in CONVOKE_NCCL_SO"), "{error}");
}

#[test]
fn too_old_nccl_is_named_with_its_version() {
    let stubs = Stubs::new("old");
    let old = stubs.stub("libnccl.so.2", &["-DVERSION=2708"]);
    let error = Library::open(std::slice::from_ref(&old)).unwrap_err();
    let version = Version { major: 2, minor: 7, patch: 8 };
    assert_eq!(error, NcclError::TooOld { path: old.path.clone(), version });
    assert!(error.to_string().ends_with("is NCCL 2.7.8; 2.18.0 or newer is needed"), "{error}");
}

#[test]
fn broken_nccl_library_error_states_the_defect() {
    let stubs = Stubs::new("broken");
    let what = |place: Candidate| match Library::open(&[place]).unwrap_err() {
        NcclError::Unusable { what, .. } => what,
        other => panic!("{other}"),
    };
    assert_eq!(
        what(stubs.stub("lacks.so", &["-DVERSION=23007", "-DLACKS_ABORT"])),
        "it has no ncclCommAbort"
    );
    assert_eq!(
        what(stubs.stub("mute.so", &["-DVERSION=23007", "-DMUTE"])),
        "it reports the invalid version 23007"
    );
    assert_eq!(what(stubs.stub("zero.so", &["-DVERSION=0"])), "it reports the invalid version 0");
    assert_eq!(
        what(stubs.stub("later.so", &["-DVERSION=30000"])),
        "it is NCCL 3.0.0, and only NCCL 2 is known here"
    );
    assert_eq!(what(chosen("libm.so.6".into())), "it has no ncclGetVersion");
    let text = stubs.0.join("text.so");
    std::fs::write(&text, "no library").unwrap();
    let error = Library::open(&[chosen(text)]).unwrap_err();
    assert!(error.to_string().contains("text.so: file too short"), "{error}");
}

#[test]
fn nccl_version_codes_are_decoded() {
    let read = |code| Version::from_code(code).map(|version| version.to_string());
    assert_eq!(read(2708).as_deref(), Some("2.7.8"));
    assert_eq!(read(2212).as_deref(), Some("2.2.12"));
    assert_eq!(read(21803).as_deref(), Some("2.18.3"));
    assert_eq!(read(23007).as_deref(), Some("2.30.7"));
    assert_eq!((read(0), read(-1)), (None, None));
}
