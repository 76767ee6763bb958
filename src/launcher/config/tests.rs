//! Tests of the meaning of values, and of the defaults that this machine adds.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use proptest::prelude::*;

use super::file::FileKind;
use super::machine::{Vendor, in_path};
use super::output::{streams, substrings};
use super::testing::config_of;
use super::*;
use crate::cli::{float, integer};

fn none(_: &str) -> Option<OsString> {
    None
}

/// A configuration on this machine, with an interpreter that need not exist.
fn config_with(words: &[&str], variables: &[(&str, &str)]) -> Config {
    let env = |name: &str| {
        let given =
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value));
        given.or_else(|| (name == "PYTHON_EXEC").then(|| "py".into()))
    };
    let line = std::iter::once("convoke").chain(words.iter().copied()).map(OsString::from);
    config_of(line, &env, &Machine::detect()).unwrap_or_else(|error| panic!("{words:?}: {error}"))
}

fn config(words: &[&str]) -> Config {
    config_with(words, &[])
}

fn argv(config: &Config) -> Vec<String> {
    config.program.argv.iter().map(|word| word.to_string_lossy().into_owned()).collect()
}

#[test]
fn integers_follow_python_syntax() {
    for (text, number) in [
        ("7", 7),
        (" 7 ", 7),
        ("+7", 7),
        ("-7", -7),
        ("007", 7),
        ("1_000", 1000),
        ("9".repeat(99).as_str(), 10i128.pow(36)),
    ] {
        assert_eq!(integer(text), Some(number), "{text}");
    }
    for text in ["", " ", "x", "1.0", "1e3", "_1", "1_", "1__0", "- 1", "--1", "0x10", "+"] {
        assert_eq!(integer(text), None, "{text}");
    }
}

#[test]
fn floats_follow_python_syntax() {
    for (text, number) in
        [("0.1", 0.1), (" 2 ", 2.0), ("1e-1", 0.1), ("1_0.5", 10.5), (".5", 0.5), ("-1", -1.0)]
    {
        assert_eq!(float(text), Some(number), "{text}");
    }
    assert!(float("nan").is_some_and(f64::is_nan) && float("-inf") == Some(f64::NEG_INFINITY));
    for text in ["", "x", "1,5", "_1", "1_", "1._5", "0x1"] {
        assert_eq!(float(text), None, "{text}");
    }
}

#[test]
fn redirects_accept_a_digit_or_a_rank_list() {
    let both = Streams { stdout: true, stderr: true };
    assert_eq!(streams("0"), Some(StreamChoice::All(Streams::default())));
    assert_eq!(streams("3"), Some(StreamChoice::All(both)));
    let Some(StreamChoice::Some(of_rank)) = streams("0:1,9:2,0:3") else { panic!() };
    assert_eq!(
        of_rank.into_iter().collect::<Vec<_>>(),
        [(0, both), (9, Streams { stdout: false, stderr: true })]
    );
    for text in ["", "4", "-1", "00", "0:", ":1", "0:4", "10:1", "0:1,", "0:1;1:2", "0:1, 1:2", " 1", "all"] {
        assert_eq!(streams(text), None, "{text}");
    }
}

#[test]
fn doubled_comma_is_a_literal_comma() {
    assert_eq!(substrings("apple,a,,b"), ["apple", "a,b"]);
    assert_eq!(substrings(""), [""; 0]);
    assert_eq!(substrings(",,"), [","]);
    assert_eq!(substrings("a,,,b"), ["a,", "b"]);
    assert_eq!(substrings(",a,"), ["a"]);
}

#[test]
fn macros_follow_python_string_templates() {
    for (text, wanted) in [
        ("--x=${local_rank}", "--x=3"),
        ("$local_rank", "3"),
        ("$$local_rank", "$local_rank"),
        ("$$$local_rank", "$3"),
        ("${other} $5", "${other} $5"),
        ("$local_rank_x ${local_rank}x", "$local_rank_x 3x"),
        ("${local_rank", "${local_rank"),
        ("${ local_rank }", "${ local_rank }"),
        ("$LOCAL_RANK", "$LOCAL_RANK"),
        ("$", "$"),
        ("cost: 5$", "cost: 5$"),
        ("", ""),
    ] {
        assert_eq!(substitute(OsStr::new(text), 3), wanted, "{text}");
    }
    let odd = OsString::from_vec(b"\xff$local_rank\xff".to_vec());
    assert_eq!(substitute(&odd, 3).as_bytes(), b"\xff3\xff");
}

proptest! {
    #[test]
    fn arguments_without_dollar_are_never_changed(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
        let bytes: Vec<u8> = bytes.into_iter().filter(|byte| *byte != b'$').collect();
        let word = OsString::from_vec(bytes);
        prop_assert_eq!(substitute(&word, 7), word);
    }
}

#[test]
fn each_worker_sees_one_device() {
    let env = |list: &'static [(&str, &str)]| {
        move |name: &str| list.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    };
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let cuda = |value| vec![pair("CUDA_VISIBLE_DEVICES", value)];
    assert_eq!(visible_devices(&env(&[]), 1), Ok(cuda("1")));
    assert_eq!(visible_devices(&env(&[("CUDA_VISIBLE_DEVICES", "5, 7")]), 1), Ok(cuda("7")));
    assert_eq!(visible_devices(&env(&[("CUDA_VISIBLE_DEVICES", "GPU-a,MIG-b")]), 0), Ok(cuda("GPU-a")));
    assert_eq!(
        visible_devices(&env(&[("CUDA_VISIBLE_DEVICES", "")]), 0),
        Ok(cuda("")),
        "hidden stays hidden"
    );
    let hip = [("HIP_VISIBLE_DEVICES", "4,6"), ("CUDA_VISIBLE_DEVICES", "0,1")].as_slice();
    let both = vec![pair("CUDA_VISIBLE_DEVICES", "6"), pair("HIP_VISIBLE_DEVICES", "6")];
    assert_eq!(visible_devices(&env(Box::leak(hip.to_vec().into_boxed_slice())), 1), Ok(both));
    assert_eq!(
        visible_devices(&env(&[("HIP_VISIBLE_DEVICES", ""), ("CUDA_VISIBLE_DEVICES", "3")]), 0),
        Ok(cuda("3"))
    );
    let error = visible_devices(&env(&[("CUDA_VISIBLE_DEVICES", "5")]), 1).expect_err("too short");
    assert_eq!(error.to_string(), "CUDA_VISIBLE_DEVICES=5 has no device for local rank 1 (entries: 1)");
}

#[test]
fn omp_num_threads_divides_the_cpus_of_the_scheduler() {
    assert_eq!(devices::omp_num_threads(false, 4, Some(32), 64), Some(8));
    assert_eq!(devices::omp_num_threads(false, 1, Some(6), 64), Some(6));
    assert_eq!(devices::omp_num_threads(false, 2, Some(32), 4), Some(2), "this process may use 4 of them");
    assert_eq!(devices::omp_num_threads(false, 8, Some(4), 64), Some(1));
}

#[test]
fn omp_num_threads_is_one_with_several_workers() {
    assert_eq!(devices::omp_num_threads(false, 2, None, 8), Some(1));
    assert_eq!(devices::omp_num_threads(false, 1, None, 8), None);
    assert_eq!(devices::omp_num_threads(true, 8, Some(16), 16), None);
    let noted = |words: &[&str], variables| {
        let config = config_with(words, variables);
        assert!(config.warnings.is_empty(), "a job that goes well is quiet: {:?}", config.warnings);
        config.notes.concat().contains("sets OMP_NUM_THREADS=1")
    };
    assert!(noted(&["--nproc-per-node=2", "x"], &[]));
    assert!(!noted(&["--nproc-per-node=2", "x"], &[("OMP_NUM_THREADS", "4")]) && !noted(&["x"], &[]));
}

/// A machine with these device nodes; names that end in a vendor get a sysfs entry.
fn machine(nodes: &[&str], vendors: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
    let root = tempfile::tempdir().expect("a directory");
    for node in nodes {
        let path = root.path().join("dev").join(node);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(path, "").expect("a file");
    }
    for (node, vendor) in vendors {
        let dir = root.path().join("sys/class/drm").join(node).join("device");
        fs::create_dir_all(&dir).expect("a directory");
        fs::write(dir.join("vendor"), format!("{vendor}\n")).expect("a file");
    }
    let machine = Machine {
        root: root.path().to_owned(),
        cpus: vec![0, 1, 2],
        driver_timeout: Duration::ZERO,
        gpus: OnceLock::new(),
        launcher: Vec::new(),
    };
    (root, machine)
}

#[test]
fn devices_are_counted_by_their_device_nodes() {
    let (_root, nvidia) =
        machine(&["nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia"], &[]);
    assert_eq!(nvidia.devices(Vendor::Nvidia, &none), 3);
    assert_eq!((nvidia.devices(Vendor::Amd, &none), nvidia.devices(Vendor::Intel, &none)), (0, 0));
    let nodes = ["kfd", "dri/renderD128", "dri/renderD129", "dri/card0"];
    let (_root, mixed) = machine(&nodes, &[("renderD128", "0x1002"), ("renderD129", "0x8086")]);
    assert_eq!((mixed.devices(Vendor::Amd, &none), mixed.devices(Vendor::Intel, &none)), (1, 1));
    let (_root, intel) = machine(&["dri/renderD128"], &[("renderD128", "0x8086")]);
    assert_eq!((intel.devices(Vendor::Amd, &none), intel.devices(Vendor::Intel, &none)), (0, 1));
}

#[test]
fn workers_share_a_session_only_if_autogroup_requires_it() {
    let (root, machine) = machine(&[], &[]);
    let own = |workers: &str| {
        let words = ["convoke", workers, "--no-python", "x"].map(OsString::from);
        config_of(words.into_iter(), &none, &machine).expect("a configuration").own_sessions
    };
    let sysctl = root.path().join("proc/sys/kernel");
    fs::create_dir_all(&sysctl).expect("a directory");
    for (autogroup, crowded) in [(None, true), (Some("0\n"), true), (Some("1\n"), false)] {
        if let Some(text) = autogroup {
            fs::write(sysctl.join("sched_autogroup_enabled"), text).expect("a file");
        }
        assert_eq!((own("--nproc-per-node=3"), own("--nproc-per-node=4")), (true, crowded), "{autogroup:?}");
    }
}

#[test]
fn hidden_devices_do_not_count() {
    let (_root, machine) = machine(&["nvidia0", "nvidia1", "nvidia2", "nvidia3"], &[]);
    for (list, count) in [
        ("", 0),
        ("0", 1),
        ("3, 1", 2),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,9,1", 1), // the driver stops at the first that is none
        ("GPU-6ff3,GPU-77aa", 2),
        ("NoDevFiles", 0),
        ("none", 0),
        ("void", 0),
        ("0,all", 1),
        ("GPU-6ff3,void", 1),
        ("0,1,2,3,0,1", 4),
    ] {
        let env = |name: &str| (name == "CUDA_VISIBLE_DEVICES").then(|| OsString::from(list));
        assert_eq!(machine.devices(Vendor::Nvidia, &env), count, "{list:?}");
    }
}

#[test]
fn amd_and_intel_gpus_are_hidden_by_nonnumeric_values() {
    let nodes = ["kfd", "dri/renderD128", "dri/renderD129", "dri/renderD130"];
    let vendors = [("renderD128", "0x1002"), ("renderD129", "0x1002"), ("renderD130", "0x8086")];
    let (_root, machine) = machine(&nodes, &vendors);
    for (vendor, variable, list, count) in [
        (Vendor::Amd, "ROCR_VISIBLE_DEVICES", "void", 0),
        (Vendor::Amd, "HIP_VISIBLE_DEVICES", "none", 0),
        (Vendor::Amd, "HIP_VISIBLE_DEVICES", "1,x,0", 1),
        (Vendor::Amd, "ROCR_VISIBLE_DEVICES", "GPU-12ab", 1),
        (Vendor::Intel, "ZE_AFFINITY_MASK", "none", 0),
        (Vendor::Intel, "ZE_AFFINITY_MASK", "0.1", 1),
        (Vendor::Intel, "ZE_AFFINITY_MASK", "3.1", 0),
    ] {
        let env = |name: &str| (name == variable).then(|| OsString::from(list));
        assert_eq!(machine.devices(vendor, &env), count, "{variable}={list}");
    }
}

#[test]
fn variable_hiding_all_gpus_is_named() {
    let (_root, machine) = machine(&["nvidia0", "nvidia1"], &[]);
    let env = |name: &str| (name == "CUDA_VISIBLE_DEVICES").then(|| OsString::from("NoDevFiles"));
    let words = ["convoke", "--nproc-per-node=gpu", "--no-python", "x"].map(OsString::from);
    let error = config_of(words.into_iter(), &env, &machine).expect_err("no GPU");
    let what = "CUDA_VISIBLE_DEVICES=NoDevFiles shows no GPU; without it there are 2 GPUs";
    assert!(error.text.contains(what), "{}", error.text);
}

#[test]
fn nproc_cpu_and_auto_respect_the_cgroup_quota() {
    let (root, machine) = machine(&[], &[]);
    let workers = |kind: &str| {
        let words = ["convoke", kind, "--no-python", "x"].map(OsString::from);
        config_of(words.into_iter(), &none, &machine).expect("a configuration").nproc_per_node
    };
    assert_eq!((workers("--nproc-per-node=cpu"), workers("--nproc-per-node=auto")), (3, 3));
    let group = root.path().join("sys/fs/cgroup/pod/container");
    fs::create_dir_all(&group).expect("a directory");
    fs::create_dir_all(root.path().join("proc/self")).expect("a directory");
    let mount = "40 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
    fs::write(root.path().join("proc/self/mountinfo"), mount).expect("a file");
    fs::write(root.path().join("proc/self/cgroup"), "0::/pod/container\n").expect("a file");
    fs::write(group.join("cpu.max"), "max 100000\n").expect("a file");
    fs::write(group.with_file_name("cpu.max"), "250000 100000\n").expect("a file");
    assert_eq!((workers("--nproc-per-node=cpu"), workers("--nproc-per-node=auto")), (2, 2));
    fs::write(group.join("cpu.max"), "800000 100000\n").expect("a file");
    assert_eq!(workers("--nproc-per-node=cpu"), 2, "never more than the group above allows");
}

#[test]
fn programs_and_scripts_are_distinguished() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = |name: &str, bytes: &[u8], mode: u32| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
        path.to_string_lossy().into_owned()
    };
    let elf = file("worker", b"\x7fELF\x02\x01\x01", 0o755);
    let shell = file("run.sh", b"#!/bin/sh\n", 0o755);
    let plain = file("plain.sh", b"#!/bin/sh\n", 0o644);
    let script = file("train.py", b"#!/usr/bin/env python\n", 0o755);
    let text = file("train", b"import torch\n", 0o644);
    let empty = file("empty", b"", 0o755);
    for direct in [&elf, &shell] {
        assert_eq!(argv(&config(&[direct, "a"])), [direct, "a"]);
    }
    let other = file("tool", b"#!/usr/bin/env python3\n", 0o644);
    let windows = file("windows", b"#!/usr/bin/env python3\r\n", 0o755);
    let line = file("windows.py", b"#!/bin/sh\r\n", 0o755);
    for python in [&script, &text, &empty, &other, &windows, &line, &"/no/such/file.py".to_owned()] {
        assert_eq!(argv(&config(&[python, "a"])), ["py", "-u", python, "a"]);
    }
    // Only the permission is missing.
    assert_eq!(argv(&config(&[&plain, "a"])), ["/bin/sh", &plain, "a"]);
    let perl = file("plain.pl", b"#!/usr/bin/env -S perl -w\n", 0o600);
    assert_eq!(argv(&config(&[&perl])), ["/usr/bin/env", "-S perl -w", &perl]);
    assert_eq!(argv(&config(&["-m", &elf])), ["py", "-u", "-m", &elf], "-m means Python");
    let assumed_python = |words: &[&str]| config(words).program.assumed_python;
    assert!(assumed_python(&["no-such-worker"]) && assumed_python(&["./no-such-worker"]));
    assert!(
        !assumed_python(&["no-such.py"])
            && !assumed_python(&["-m", "no.such"])
            && !assumed_python(&[&text])
            && !assumed_python(&[&elf])
    );
    assert_eq!(FileKind::of(dir.path()), FileKind::Folder { has_main: false });
    assert_eq!(FileKind::of(Path::new("/no/such")), FileKind::Absent);
    file("__main__.py", b"", 0o644);
    let folder = dir.path().to_string_lossy().into_owned();
    assert_eq!(argv(&config(&[&folder])), ["py", "-u", &folder], "Python runs its __main__.py");
    let env = |name: &str| (name == "PATH").then(|| dir.path().into());
    assert_eq!(in_path(OsStr::new("run.sh"), &env), Some(dir.path().join("run.sh")));
    assert_eq!(in_path(OsStr::new("plain.sh"), &env), None, "not executable");
    assert_eq!(in_path(OsStr::new("./run.sh"), &env), None, "has a slash");
    assert_eq!(in_path(OsStr::new(""), &env), None);
    let path = dir.path().to_string_lossy().into_owned();
    let found = config_with(&["run.sh", "a"], &[("PATH", &path)]);
    assert_eq!((argv(&found), found.program.title.as_str()), (vec!["run.sh".into(), "a".into()], "run.sh"));
}

#[test]
fn non_executable_program_is_refused_with_a_remedy() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    let file = |name: &str, bytes: &[u8]| fs::write(dir.path().join(name), bytes).expect("a file");
    file("windows.sh", b"#!/bin/bash\r\necho\r\n");
    file("line", b"#!/usr/bin/env ruby\r\n");
    file("bare.sh", b"exec true\n");
    file("model.jl", b"using Flux\n");
    file("study.ipynb", b"{}");
    fs::create_dir(dir.path().join("package")).expect("a directory");
    std::os::unix::fs::symlink("/no/such/target", dir.path().join("link")).expect("a link");
    for (name, what) in [
        ("windows.sh", "its interpreter is `/bin/bash\\r`; dos2unix "),
        ("line", "its interpreter is `ruby\\r`; dos2unix "),
        ("bare.sh", "--no-python sh "),
        ("model.jl", "--no-python julia "),
        ("study.ipynb", "jupyter nbconvert --to script "),
        ("package", "is a folder without a __main__.py"),
        ("link", "is a link to /no/such/target, which is not there"),
        ("none.py\r", "ends with a carriage return"),
    ] {
        let words = ["convoke".into(), path(name)].map(OsString::from);
        let env = |name: &str| (name == "PYTHON_EXEC").then(|| OsString::from("py"));
        let error = config_of(words.into_iter(), &env, &Machine::detect()).expect_err(name);
        assert!(error.code == 1 && error.text.contains(what), "{}", error.text);
        assert_eq!(error.text.matches('\n').count(), 1, "one line: {}", error.text);
    }
}

#[test]
fn active_virtual_environment_python_is_preferred() {
    let dir = tempfile::tempdir().expect("a directory");
    let bin = |environment: &str, marker: &str, name: &str| {
        let bin = dir.path().join(environment).join("bin");
        fs::create_dir_all(&bin).expect("a directory");
        fs::write(bin.join(name), "").expect("a file");
        fs::set_permissions(bin.join(name), fs::Permissions::from_mode(0o755)).expect("a mode");
        if !marker.is_empty() {
            let marker = dir.path().join(environment).join(marker);
            fs::create_dir_all(marker.parent().expect("a parent")).expect("a directory");
            fs::write(marker, "").expect("a file");
        }
        bin
    };
    let (plain, own) = (bin("usr", "", "python"), bin("own", "pyvenv.cfg", "python3"));
    let (active, path) = (bin("active", "", "python"), bin("path", "", "python"));
    let python = |launcher: &Path, variables: &[(&str, PathBuf)]| {
        let env = |name: &str| {
            let given = variables.iter().find(|(known, _)| *known == name);
            given.map(|(_, value)| value.clone().into_os_string())
        };
        let (_root, machine) = machine(&[], &[]);
        let machine = Machine { launcher: vec![launcher.to_owned()], ..machine };
        let words = ["convoke", "x.py"].map(OsString::from).into_iter();
        PathBuf::from(&config_of(words, &env, &machine).expect("a configuration").program.argv[0])
    };
    let path_only = [("PATH", path.clone())];
    let both = [("PATH", path.clone()), ("VIRTUAL_ENV", dir.path().join("active"))];
    let gone = [("PATH", path.clone()), ("VIRTUAL_ENV", dir.path().join("gone"))];
    let all =
        [("PATH", path.clone()), ("VIRTUAL_ENV", dir.path().join("active")), ("PYTHON_EXEC", "py".into())];
    assert_eq!(python(&own, &both), own.join("python3"));
    let conda = bin("conda", "conda-meta/history", "python");
    assert_eq!(python(&conda, &both), conda.join("python"));
    assert_eq!(python(&plain, &both), active.join("python"), "no environment is there");
    assert_eq!(python(&plain, &path_only), path.join("python"));
    assert_eq!(python(&plain, &gone), path.join("python"));
    assert_eq!(python(&own, &all), PathBuf::from("py"));
}

#[test]
fn commands_match_torchrun() {
    assert_eq!(argv(&config(&["x.py", "a"])), ["py", "-u", "x.py", "a"]);
    assert_eq!(argv(&config(&["-m", "pkg.mod", "a"])), ["py", "-u", "-m", "pkg.mod", "a"]);
    assert_eq!(argv(&config(&["--no-python", "x.py", "a"])), ["x.py", "a"]);
    let run_path = argv(&config(&["--run-path", "--no-python", "x.py", "a"]));
    assert_eq!(
        (&run_path[..3], &run_path[4..]),
        (&["py", "-u", "-c"].map(String::from)[..], &["x.py".into(), "a".into()][..])
    );
    assert!(run_path[3].contains("runpy.run_path"), "--run-path wins over --no-python");
    let title = |words: &[&str]| config(words).program.title;
    assert_eq!(title(&["x.py"]), "py", "PYTHON_EXEC is set");
    assert_eq!(
        (title(&["--no-python", "tool"]).as_str(), title(&["--run-path", "x.py"]).as_str()),
        ("tool", "x.py")
    );
}

#[test]
fn missing_python_error_states_what_to_do() {
    let env = |name: &str| (name == "PATH").then(|| OsString::from("/no/such/bin"));
    let here = Machine::detect();
    let words = ["convoke", "x.py"].map(OsString::from).into_iter();
    let error = config_of(words, &env, &here).expect_err("no python");
    assert_eq!(error.code, 1);
    assert!(error.text.contains("PYTHON_EXEC") && error.text.contains("--no-python"), "{}", error.text);
    let words = ["convoke", "--no-python", "x"].map(OsString::from).into_iter();
    assert!(config_of(words, &env, &here).is_ok());
}

#[test]
fn backends_are_selected_like_torchrun() {
    let standalone = |words: &[&str]| config(words).rendezvous == Rendezvous::Standalone;
    assert!(standalone(&["--standalone", "--rdzv-backend=static", "--rdzv-endpoint=127.0.0.1:1", "x"]));
    assert!(standalone(&["--rdzv-id=mine", "x"]) && standalone(&["--master-addr=10.0.0.1", "x"]));
    assert!(standalone(&["--standalone", "--nnodes=1:4", "x"]));
    let fixed = |words: &[&str]| match config(words).rendezvous {
        Rendezvous::Static { host, port, node_rank, timeout, .. } => {
            (host, port, node_rank, timeout.as_secs())
        }
        other => panic!("{words:?}: {other:?}"),
    };
    let local = "127.0.0.1".to_owned();
    assert_eq!(fixed(&["--master-port=7", "x"]), (local.clone(), 7, 0, 900));
    assert_eq!(fixed(&["--nnodes=2", "x"]), (local.clone(), 29500, 0, 900));
    assert_eq!(fixed(&["--nnodes=2", "--node-rank=1", "--rdzv-conf=timeout=3", "x"]), (local, 29500, 1, 3));
    let addr = fixed(&["--nnodes=2", "--rdzv-endpoint=[fe80::1]:9", "--master-port=8", "x"]);
    assert_eq!(addr, ("fe80::1".to_owned(), 9, 0, 900));
    assert_eq!(fixed(&["--nnodes=2", "--master-addr=[::1]", "x"]).0, "::1");
    assert_eq!(fixed(&["--nnodes=2", "--master-addr=::1", "x"]).0, "::1");
    let c10d = |endpoint: &str| match config(&["--rdzv-backend=c10d", "--rdzv-endpoint", endpoint, "x"])
        .rendezvous
    {
        Rendezvous::Elastic { endpoint: Endpoint::Host { host, port, .. }, .. } => (host, port),
        other => panic!("{endpoint}: {other:?}"),
    };
    assert_eq!(c10d(""), ("localhost".to_owned(), 29400));
    assert_eq!(c10d("host"), ("host".to_owned(), 29400));
    assert_eq!(c10d("localhost:0"), ("localhost".to_owned(), 0));
    assert_eq!(c10d("[::1]"), ("::1".to_owned(), 29400));
    assert_eq!(c10d("::1:29500"), ("::1".to_owned(), 29500), "the last colon separates");
}

#[test]
fn run_id_is_kept_except_by_standalone_backends() {
    let id = |words: &[&str]| config(words).run_id;
    assert_eq!(id(&["--master-port=1", "x"]), "none");
    assert_eq!(id(&["--master-port=1", "--rdzv-id=job", "x"]), "job");
    let random = id(&["--master-port=1", "--rdzv-id=", "x"]);
    assert!(random.len() > 30 && random.bytes().all(|byte| byte.is_ascii_digit()), "{random}");
    let uuid = id(&["--standalone", "--rdzv-id=job", "x"]);
    assert_eq!(uuid.split('-').map(str::len).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
    assert_eq!((&uuid[14..15], id(&["x"]) == uuid), ("4", false));
}

#[test]
fn ignored_flags_are_reported() {
    let warnings = |words: &[&str]| config(words).warnings;
    assert_eq!(
        warnings(&["--rdzv-id=mine", "--node-rank=1", "x"]),
        [
            "--rdzv-id=mine is ignored: one node without --rdzv-endpoint or --master-port",
            "--node-rank=1 is ignored: one node without --rdzv-endpoint or --master-port",
        ]
    );
    assert_eq!(warnings(&["--node-rank=0", "--nnodes=1", "x"]), [""; 0], "the tutorials' line");
    assert_eq!(
        warnings(&["--standalone", "--master-port=1", "x"]),
        ["--master-port=1 is ignored: --standalone"]
    );
    assert_eq!(
        warnings(&["--rdzv-backend=c10d", "--node-rank=0", "x"]),
        ["--node-rank=0 is ignored: only the static backend reads it"]
    );
    assert_eq!(
        warnings(&["-r", "5:1", "x"]),
        ["--redirects=5:1 names local rank 5, but this node has 1 worker"]
    );
    assert_eq!(config_with(&["--rdzv-id=mine", "x"], &[("LOGLEVEL", "ERROR")]).warnings, [""; 0]);
    assert_eq!(
        config_with(&["x"], &[("PET_NODE_RANK", "1")]).warnings,
        [""; 0],
        "set for all jobs by some schedulers"
    );
}

#[test]
fn unused_rendezvous_settings_are_named() {
    let warnings = |words: &[&str]| config(words).warnings;
    assert_eq!(
        warnings(&["--rdzv-backend=c10d", "--rdzv-conf=join_timout=60,timeout=900", "x"]),
        [
            "--rdzv-conf: join_timout, timeout are ignored: c10d knows no such setting; did you mean join_timeout?"
        ]
    );
    assert_eq!(
        warnings(&["--nnodes=2", "--rdzv-conf=join_timeout=60", "x"]),
        ["--rdzv-conf: join_timeout is ignored: static knows no such setting"]
    );
    assert_eq!(
        warnings(&["--rdzv-conf=frobnicate=1", "x"]),
        ["--rdzv-conf: frobnicate is ignored: convoke knows no such setting"]
    );
    assert_eq!(warnings(&["--rdzv-backend=c10d", "--rdzv-conf=read_timeout=60,use_libuv=0", "x"]), [""; 0]);
    assert_eq!(warnings(&["--rdzv-conf=timeout=900", "x"]), [""; 0], "one node: nothing to wait for");
}

#[test]
fn loopback_endpoint_with_several_nodes_causes_a_warning() {
    let doubt = |words: &[&str]| config(words).rendezvous_hint.unwrap_or_default();
    let told = "by which every host reaches itself: nodes on other hosts do not find";
    for (words, start) in [
        (&["--nnodes=2", "x"][..], "--master-addr is 127.0.0.1"),
        (&["--nnodes=2", "--master-addr=localhost", "x"], "--master-addr is localhost"),
        (&["--nnodes=2", "--rdzv-endpoint=[::1]:7", "x"], "--rdzv-endpoint is ::1"),
        (&["--nnodes=1:2", "--rdzv-backend=c10d", "x"], "--rdzv-endpoint is localhost"),
        (
            &["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.1.1", "x"],
            "--rdzv-endpoint is 127.0.1.1",
        ),
    ] {
        let found = doubt(words);
        assert!(found.starts_with(start) && found.contains(told), "{words:?}: {found}");
    }
    for words in [
        &["x"][..],
        &["--rdzv-backend=c10d", "x"],
        &["--nnodes=2", "--master-addr=10.0.0.1", "x"],
        &["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node0", "x"],
    ] {
        assert_eq!(doubt(words), "", "{words:?}");
    }
}

#[test]
fn signal_list_replaces_the_default_and_unknown_ones_are_reported() {
    use nix::sys::signal::Signal;
    let config = config(&["--signals-to-handle=SIGUSR1, SIGTERM,SIGUSR1,TERM,SIGFOO,SIGKILL", "x"]);
    assert_eq!(config.signals, [Signal::SIGUSR1, Signal::SIGTERM]);
    assert_eq!(config.signals_text, "SIGUSR1, SIGTERM,SIGUSR1,TERM,SIGFOO,SIGKILL");
    assert_eq!(
        config.warnings,
        [
            "--signals-to-handle: no signal is called TERM; it is left out; did you mean SIGTERM?",
            "--signals-to-handle: no signal is called SIGFOO; it is left out",
            "--signals-to-handle: SIGKILL cannot be handled; it is left out",
        ]
    );
    assert_eq!(self::config(&["--signals-to-handle=", "x"]).signals, []);
}

#[test]
fn prefix_template_uses_flag_then_variable_then_default() {
    const NAME: &str = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE";
    let template =
        |words: &[&str], variables: &[(&str, &str)]| config_with(words, variables).logs.prefix_template;
    assert_eq!(template(&["--log-line-prefix-template=F", "x"], &[(NAME, "E")]), "F");
    assert_eq!(template(&["--log-line-prefix-template=", "x"], &[(NAME, "E")]), "E");
    assert_eq!(template(&["x"], &[(NAME, "")]), "[${role_name}${local_rank}]:");
}

#[test]
fn other_environment_variables_are_read() {
    let variables = [
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "2"),
        ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),
        ("LOGLEVEL", "warning"),
    ];
    let config = config_with(&["--event-log-handler=console", "x"], &variables);
    assert_eq!((config.shutdown_timeout.as_secs(), config.share_store), (2, false));
    assert_eq!(config.events, EventHandler::Null, "LOGLEVEL is above INFO");
    assert_eq!(self::config(&["--event-log-handler=console", "x"]).events, EventHandler::Console);
    assert_eq!(config_with(&["--shutdown-timeout=0", "x"], &variables).shutdown_timeout.as_secs(), 0);
}

#[test]
fn rdzv_conf_is_split_at_commas_and_trimmed() {
    let conf = config(&["--rdzv-conf= join_timeout = 60 ,x=a=b,join_timeout=61", "x"]).rendezvous_conf;
    assert_eq!(conf, [("join_timeout".to_owned(), "61".to_owned()), ("x".to_owned(), "a=b".to_owned())]);
    assert_eq!(config(&["--rdzv-conf= ", "x"]).rendezvous_conf, []);
    config(&["--nnodes=2", "--rdzv-conf=join_timeout=soon", "x"]); // static does not know that key
}

#[test]
fn log_flags_select_files_and_console() {
    let logs = config(&[
        "--log-dir=/dev/null",
        "--local-ranks-filter= 0,00",
        "--duplicate-stdout-filters=a,,b",
        "x",
    ])
    .logs;
    assert_eq!((logs.dir, logs.local_ranks_filter), (LogDir::Disabled, Some([0].into())));
    assert_eq!(logs.duplicate_stdout, ["a,b"]);
    assert_eq!(config(&["--log-dir=", "--local-ranks-filter=", "x"]).logs.local_ranks_filter, None);
}
