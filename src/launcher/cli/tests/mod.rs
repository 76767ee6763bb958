//! Tests of the grammar: the settings that the words of a command line give.

mod malformed;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use nix::sys::signal::Signal;
use proptest::prelude::*;

use super::*;
use crate::config::testing::config_of;
use crate::config::{
    Config, EventHandler, LogDir, Machine, NodeRange, Orphans, Rendezvous, StreamChoice, Streams, build,
};

/// A PATH with one `python` and one `tool`, and nothing else.
fn bin() -> PathBuf {
    convoke_testkit::programs::repository_root().join("src/launcher/cli/tests/bin")
}

/// A machine with three CPUs and no devices.
fn here() -> Machine {
    Machine {
        root: PathBuf::from("/no/such/machine"),
        cpus: vec![0, 1, 2],
        driver_timeout: Duration::ZERO,
        gpus: OnceLock::new(),
        launcher: Vec::new(),
    }
}

/// The environment that has these variables, and [`bin`] as PATH.
fn environment(variables: &[(&str, &str)]) -> impl Fn(&str) -> Option<OsString> {
    |name| {
        let given =
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value));
        given.or_else(|| (name == "PATH").then(|| bin().into()))
    }
}

fn with_program<'a>(words: impl IntoIterator<Item = &'a OsStr>) -> impl Iterator<Item = OsString> {
    std::iter::once(OsStr::new("/usr/bin/convoke")).chain(words).map(OsString::from)
}

fn parse_line(line: &str, variables: &[(&str, &str)]) -> Result<Invocation, CliError> {
    parse(with_program(line.split_whitespace().map(OsStr::new)), Command::Job, &environment(variables))
}

fn config_of_words(
    words: &[&OsStr],
    variables: &[(&str, &str)],
    machine: &Machine,
) -> Result<Config, CliError> {
    config_of(with_program(words.iter().copied()), &environment(variables), machine)
}

fn config_of_line(line: &str, variables: &[(&str, &str)], machine: &Machine) -> Result<Config, CliError> {
    let words: Vec<&OsStr> = line.split_whitespace().map(OsStr::new).collect();
    config_of_words(&words, variables, machine)
}

fn config_with(line: &str, variables: &[(&str, &str)]) -> Config {
    config_of_line(line, variables, &here()).unwrap_or_else(|error| panic!("{line}: {error}"))
}

fn config(line: &str) -> Config {
    config_with(line, &[])
}

/// The command without the interpreter's directory.
fn argv(config: &Config) -> Vec<String> {
    let bin = format!("{}/", bin().display());
    config.program.argv.iter().map(|word| word.to_string_lossy().replace(&bin, "")).collect()
}

#[test]
fn defaults_start_one_worker_without_rendezvous() {
    let config = config("train.py --lr 1");
    assert_eq!(config.nodes, NodeRange { min: 1, max: 1 });
    assert_eq!((config.nproc_per_node, config.max_restarts), (1, 0));
    assert_eq!(config.rendezvous, Rendezvous::Standalone);
    assert_eq!(config.run_id.len(), 36);
    assert_eq!((config.role.as_str(), config.local_addr), ("default", None));
    assert_eq!((config.monitor_interval, config.shutdown_timeout), (None, Duration::from_secs(30)));
    assert_eq!(
        (config.events, config.orphans, config.share_store),
        (EventHandler::Null, Orphans::Stop, true)
    );
    assert_eq!(config.signals, [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT]);
    assert_eq!(config.signals_text, "SIGTERM,SIGINT,SIGHUP,SIGQUIT");
    assert_eq!(config.logs.dir, LogDir::Temporary);
    assert_eq!(config.logs.tee, StreamChoice::All(Streams::default()));
    assert_eq!(config.logs.prefix_template, "[${role_name}${local_rank}]:");
    assert_eq!(config.warnings, [""; 0]);
    assert_eq!(config.program.title, "train.py");
}

#[test]
fn all_spellings_of_a_flag_are_equal() {
    for line in [
        "--max-restarts=3 x.py",
        "--max_restarts=3 x.py",
        "--max-restarts 3 x.py",
        "--max_restarts 3 x.py",
        "--max-r=3 x.py",
        "--max_r 3 x.py",
        "--max-restarts=9 --max_restarts=3 x.py",
        "--max-restarts=+3 x.py",
        "--max-restarts=0_3 x.py",
    ] {
        assert_eq!(config(line).max_restarts, 3, "{line}");
    }
    for line in ["-t3 x.py", "-t 3 x.py", "-t=3 x.py", "--tee=3 x.py", "--te 3 x.py", "-t1 -t3 x.py"] {
        assert_eq!(
            config(line).logs.tee,
            StreamChoice::All(Streams { stdout: true, stderr: true }),
            "{line}"
        );
    }
    for line in ["-m x", "--module x", "--modu x", "-mt0 x", "-mm x"] {
        assert_eq!(argv(&config(line)), ["python", "-u", "-m", "x"], "{line}");
    }
}

#[test]
fn flag_prefixes_prefer_torchrun_flags() {
    // --orphans, --version, --use-env and --pass-local-rank are ours; they make nothing ambiguous.
    assert!(parse_line("--print-c=zsh", &[]).is_ok());
    assert_eq!(config("--or=keep x.py").orphans, Orphans::Keep);
    assert!(config("--pass x.py").program.local_rank_argument.is_some());
    let names: Vec<&str> = flags::all().filter(|flag| flag.torchrun).map(|flag| flag.name).collect();
    for (at, flag) in names.iter().enumerate() {
        // Unique among torchrun's: must be unique here.
        for end in 1..flag.len() {
            let prefix = &flag[..end];
            let spellings = |name: &str| if name.contains('-') { 2 } else { 1 };
            let hits: usize = names
                .iter()
                .map(|name| match (name.starts_with(prefix), prefix.contains('-')) {
                    (false, _) => 0,
                    (true, true) => 1,
                    (true, false) => spellings(name),
                })
                .sum();
            let read = grammar::read([OsString::from(format!("--{prefix}"))].into_iter(), Command::Job);
            let ambiguous = matches!(&read, Err(message) if message.contains("is ambiguous"));
            assert_eq!(ambiguous, hits > 1, "--{prefix} of {}", names[at]);
        }
    }
}

#[test]
fn all_arguments_after_the_script_belong_to_it() {
    let words = ["x.py", "--", "-t", "3", "--help", "", "a b", "--nnodes=x", "é"].map(OsStr::new);
    let Ok(config) = config_of_words(&words, &[], &here()) else { panic!() };
    assert_eq!(
        argv(&config),
        ["python", "-u", "x.py", "--", "-t", "3", "--help", "", "a b", "--nnodes=x", "é"]
    );
    assert_eq!(argv(&self::config("-- --odd.py --version")), ["python", "-u", "--odd.py", "--version"]);
    assert_eq!(argv(&self::config("-5 x")), ["python", "-u", "-5", "x"], "no flag looks like a number");
    assert_eq!(argv(&self::config("- x")), ["python", "-u", "-", "x"]);
}

#[test]
fn non_utf8_arguments_are_passed_to_the_script() {
    let odd = OsString::from_vec(b"caf\xe9".to_vec());
    let words = [OsStr::new("x.py"), &odd];
    let Ok(config) = config_of_words(&words, &[], &here()) else { panic!() };
    assert_eq!(config.program.argv.last(), Some(&odd));
    let flag = OsString::from_vec(b"--log-dir=caf\xe9".to_vec());
    let Ok(config) = config_of_words(&[&flag, OsStr::new("x.py")], &[], &here()) else { panic!() };
    assert_eq!(config.logs.dir, LogDir::Path(PathBuf::from(&odd)));
    let flag = OsString::from_vec(b"--role=caf\xe9".to_vec());
    let error = config_of_words(&[&flag, OsStr::new("x.py")], &[], &here()).expect_err("role");
    assert_eq!(
        (error.text.as_str(), error.code),
        ("convoke: error: --role=caf\u{fffd}: not valid UTF-8\n", 1)
    );
}

#[test]
fn unusual_values_are_accepted_unless_they_resemble_flags() {
    assert_eq!(config("--nnodes=2 --rdzv-id - x.py").run_id, "-");
    let words = ["--rdzv-id", "-a b", "--master-port=1", "x.py"].map(OsStr::new);
    let Ok(config) = config_of_words(&words, &[], &here()) else { panic!() };
    assert_eq!(config.run_id, "-a b", "argparse takes words with a blank as values");
    let error = config_of_line("--max-restarts -1 x.py", &[], &here()).expect_err("negative");
    assert_eq!(error.code, 1, "-1 is a value, but a bad one");
}

#[test]
fn environment_variables_are_defaults_of_flags() {
    let variables =
        [("PET_NPROC_PER_NODE", "2"), ("PET_MAX_RESTARTS", "4"), ("PET_ROLE", "pet"), ("PET_TEE", "1")];
    let config = config_with("--max-restarts=1 x.py", &variables);
    assert_eq!((config.nproc_per_node, config.max_restarts, config.role.as_str()), (2, 1, "pet"));
    assert_eq!(config.logs.tee, StreamChoice::All(Streams { stdout: true, stderr: false }));
    assert_eq!(config.logs.role, "pet");
}

#[test]
fn boolean_environment_variables_are_integers() {
    for (value, on) in [("1", true), ("-7", true), (" 1 ", true), ("0", false), ("00", false)] {
        let config = config_with("tool x", &[("PET_NO_PYTHON", value)]);
        assert_eq!(argv(&config), ["tool", "x"], "a program in PATH either way");
        let module = config_with("thing", &[("PET_MODULE", value)]);
        assert_eq!(argv(&module).contains(&"-m".to_owned()), on, "{value}");
    }
    let config = config_with("--module thing", &[("PET_MODULE", "0")]);
    assert!(argv(&config).contains(&"-m".to_owned()), "the command line cannot be turned off");
}

#[test]
fn some_flags_have_no_environment_variable() {
    for name in ["PET_NUMA_BINDING", "PET_LOGS_SPECS", "PET_USE_ENV", "PET_HELP", "PET_PRINT_COMPLETION"] {
        config_with("x.py", &[(name, "x")]);
    }
}

#[test]
fn help_outranks_later_errors() {
    for line in
        ["--help", "-h", "--h", "--nnodes=7 -h --bogus", "-mh", "--unknown --help", "--max-restarts=x --help"]
    {
        let parsed = parse_line(line, &[("PET_NO_PYTHON", "yes")]);
        assert!(matches!(parsed, Ok(Invocation::Help(_))), "{line}: {parsed:?}");
    }
    assert!(matches!(parse_line("--version", &[]), Ok(Invocation::Version(_))));
    assert!(matches!(parse_line("x.py --help", &[]), Ok(Invocation::Run(_))));
}

#[test]
fn version_output_states_whether_etcd_is_missing() {
    let Ok(Invocation::Version(text)) = parse_line("--version", &[]) else { panic!() };
    assert_eq!(text.ends_with(", without etcd)\n"), !cfg!(feature = "etcd"), "{text}");
}

#[test]
fn help_names_every_flag_default_and_variable() {
    let Ok(Invocation::Help(text)) = parse_line("--help", &[]) else { panic!() };
    for flag in flags::all() {
        let line = text.lines().find(|line| {
            line.contains(&format!("{} ", flag.dashed())) || line.contains(&format!("{}[", flag.dashed()))
        });
        let line = line.unwrap_or_else(|| panic!("--{}", flag.name));
        assert!(line.contains(flag.help), "{line}");
        assert!(flag.default.is_empty() || line.contains(&format!("[default: {}]", flag.default)), "{line}");
        assert_eq!(line.contains("[PET_"), flag.pet, "{line}");
        assert!(flag.variable().is_none_or(|name| line.contains(&format!("[{name}]"))), "{line}");
    }
    for heading in GROUP_HEADINGS {
        assert!(text.contains(&format!("\n{heading}:\n")), "{heading}");
    }
    assert!(text.contains("Usage: convoke [FLAGS] SCRIPT [ARGUMENTS]...\n"), "{text}");
}

const GROUP_HEADINGS: [&str; 6] =
    ["Nodes and workers", "Rendezvous", "Program", "Output", "Watching and stopping", "Help"];

/// Flags of torchrun. Written down here, so that the table is not compared with itself;
/// `launcher-tests/torch/flags.py` compares with the installed torchrun.
const FLAGS_OF_TORCHRUN: [&str; 33] = [
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--standalone",
    "--max-restarts",
    "--monitor-interval",
    "--start-method",
    "--event-log-handler",
    "--role",
    "--module",
    "--no-python",
    "--run-path",
    "--log-dir",
    "--redirects",
    "--tee",
    "--log-line-prefix-template",
    "--local-ranks-filter",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--logs-specs",
    "--numa-binding",
    "--signals-to-handle",
    "--virtual-local-rank",
    "--shutdown-timeout",
    "--help",
    "--print-completion",
];

#[test]
fn help_has_every_flag_of_torchrun_and_no_flag_twice() {
    let Ok(Invocation::Help(text)) = parse_line("--help", &[]) else { panic!() };
    let is_flag = |word: &&str| word.starts_with("--");
    let flags = text
        .lines()
        .filter(|line| line.starts_with("  "))
        .filter_map(|line| line.split([' ', ',', '[', '=']).find(is_flag).map(str::to_owned));
    let flags: Vec<String> = flags.collect();
    for flag in FLAGS_OF_TORCHRUN {
        assert_eq!(flags.iter().filter(|known| *known == flag).count(), 1, "{flag}: {flags:?}");
    }
}

#[test]
fn defaults_match_the_help_text() {
    let Ok(Invocation::Help(text)) = parse_line("--help", &[]) else { panic!() };
    let (mut checked, mut different) = (0, Vec::new());
    for flag in flags::all().filter(|flag| matches!(flag.takes, flags::Takes::Value(_))) {
        let line = text.lines().find(|line| line.contains(&format!("{} ", flag.dashed()))).unwrap();
        let Some((_, rest)) = line.split_once("[default: ") else { continue };
        // Prefixes of lines have brackets of their own.
        let (default, _) = rest.split_once("] [PET_").or_else(|| rest.rsplit_once(']')).unwrap();
        let given = format!("{}={default}", flag.dashed());
        // With several nodes: on one, a port that is given is one to meet at.
        let others = if given.starts_with("--nnodes") { "" } else { "--nnodes=2" };
        let with = |given: &str| match config_of_line(&format!("{others} {given} x.py"), &[], &here()) {
            Ok(config) => Ok(Config { run_id: String::new(), ..config }),
            Err(error) => Err(error.text),
        };
        if with(&given) != with("") {
            different.push(given);
        }
        checked += 1;
    }
    assert!(checked > 10, "only {checked} flags with a default");
    // Five are words for a value; one needs a GPU; two only count if they are given (docs/reference/cli.md).
    let known = [
        "--local-addr=full host name",
        "--gpus-per-worker=1",
        "--log-dir=a new one in TMPDIR",
        "--local-ranks-filter=all",
        "--termination-log=/dev/termination-log in a pod",
        "--monitor-interval=0.1",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "--drain-signal=SIGUSR1 in Slurm",
        "--wait=60, 3 in Slurm and with --hosts, 300 in a pod",
    ];
    assert_eq!(different, known);
}

#[test]
fn launcher_called_torchrun_prints_torchrun_help() {
    let words = ["/opt/bin/torchrun", "--help"].map(OsString::from);
    let Ok(Invocation::Help(text)) = parse(words.into_iter(), Command::Job, &|_| None) else { panic!() };
    assert!(text.contains("Usage: torchrun [FLAGS] SCRIPT"), "{text}");
}

#[test]
fn every_shell_has_completions() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let Ok(Invocation::Printed(text)) = parse_line(&format!("--print-completion={shell}"), &[]) else {
            panic!("{shell}")
        };
        assert!(text.contains("nproc-per-node"), "{shell}");
    }
}

#[test]
fn tutorial_flags_are_accepted_unchanged() {
    let one = config("--nproc_per_node 2 --nnodes=1 --node_rank=0 train.py");
    assert_eq!((one.nproc_per_node, one.rendezvous), (2, Rendezvous::Standalone));
    let two = config(
        "--nproc_per_node=8 --nnodes=2 --node_rank=1 --master_addr 10.0.0.1 --master_port 1234 train.py",
    );
    let timeout = Duration::from_secs(900);
    let wanted =
        Rendezvous::Static { host: "10.0.0.1".to_owned(), port: 1234, node_rank: 1, search: None, timeout };
    assert_eq!((two.rendezvous, two.run_id.as_str()), (wanted, "none"));
    let legacy = config("--pass-local-rank=both --nproc-per-node 2 train.py --lr 1");
    assert_eq!(argv(&legacy), ["python", "-u", "train.py", "--lr", "1"]);
    let argument = legacy.program.local_rank_argument.expect("an argument");
    assert_eq!((argument.index, argument.dash, argument.underscore), (3, true, true));
    for line in
        ["--use-env --pass-local-rank x.py", "--use_env=True --pass_local_rank=dash x.py", "--use-env x.py"]
    {
        assert_eq!(config(line).program.local_rank_argument, None, "{line}");
    }
    assert!(config("--pass-local-rank --use-env=False x.py").program.local_rank_argument.is_some());
}

proptest! {
    /// No words cause a panic, and every refusal is one line with a fixed beginning and end.
    #[test]
    fn any_command_line_is_accepted_or_refused(words in proptest::collection::vec(any_word(), 0..6)) {
        let words: Vec<&OsStr> = words.iter().map(OsString::as_os_str).collect();
        let env = environment(&[]);
        let refusal = match parse(with_program(words.iter().copied()), Command::Job, &env) {
            Ok(Invocation::Run(args)) => build::config(&args, &env, &here()).err(),
            Ok(_) => None,
            Err(error) => Some(error),
        };
        if let Some(error) = refusal {
            prop_assert!(error.text.starts_with("convoke: error: ") && error.text.ends_with('\n'));
            prop_assert!(error.code == 1 || error.code == 2);
        }
    }

    /// The words after SCRIPT stay unchanged, for any words before it.
    #[test]
    fn script_arguments_are_never_changed(arguments in proptest::collection::vec(any_word(), 0..6)) {
        let words: Vec<&OsStr> = ["--max-restarts=1", "-t", "3", "x.py"].map(OsStr::new).into_iter()
            .chain(arguments.iter().map(OsString::as_os_str)).collect();
        let Ok(config) = config_of_words(&words, &[], &here()) else { panic!() };
        prop_assert_eq!(&config.program.argv[3..], &arguments[..]);
    }
}

/// Words as they come up, and some that do not.
fn any_word() -> impl Strategy<Value = OsString> {
    let known = flags::all().map(|flag| flag.dashed()).collect::<Vec<_>>();
    let with_value = known.clone();
    prop_oneof![
        proptest::sample::select(known).prop_map(OsString::from),
        (proptest::sample::select(with_value), "[a-z0-9:,=._-]{0,6}")
            .prop_map(|(flag, value)| format!("{flag}={value}").into()),
        "-{0,2}[a-z0-9_=-]{0,8}".prop_map(OsString::from),
        proptest::collection::vec(1u8..=255, 0..8).prop_map(OsString::from_vec),
    ]
}

#[test]
fn check_needs_no_script_and_jobs_have_none_of_its_flags() {
    let words = |words: &[&str]| with_program(words.iter().map(OsStr::new)).collect::<Vec<_>>();
    let parsed = |line: &[&str], command| parse(words(line).into_iter(), command, &|_| None);
    let Ok(Invocation::Run(args)) = parsed(&["--nnodes=2", "--json"], Command::Check) else { panic!() };
    assert!(args.script.is_empty() && args.is_on("json"));
    assert_eq!(args.words_without(&["json"]), ["--nnodes=2"]);
    let Ok(Invocation::Run(args)) = parsed(&["--net", "train.py", "--json"], Command::Check) else {
        panic!()
    };
    assert_eq!((args.script.to_str(), args.is_on("json")), (Some("train.py"), false));
    let error = parsed(&["--net", "train.py"], Command::Job).unwrap_err();
    assert!(
        error.text.contains("--net is a flag of convoke check; write convoke check --net ..."),
        "{}",
        error.text
    );
    let error = parsed(&["--wait", "train.py"], Command::Check).unwrap_err();
    assert!(error.text.contains("`train.py` was taken as the value of --wait"), "{}", error.text);
}

#[test]
fn manual_lists_every_flag_with_its_default() {
    let manual = include_str!("../../../../docs/reference/cli.md");
    for flag in flags::all() {
        let short = flag.short.map_or(String::new(), |letter| format!("`-{letter}`, "));
        let start = format!("| {short}`{}` |", flag.dashed());
        let line = manual.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("{start}"));
        let (plain, code) = (format!(" {} |", flag.default), format!(" `{}` |", flag.default));
        let shown = flag.default.is_empty() || line.contains(&plain) || line.contains(&code);
        assert!(shown, "{line}");
        assert_eq!(line.contains("ours |"), !flag.torchrun, "{line}");
    }
}
