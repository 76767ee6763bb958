//! The help text, the manual page and the shell completions, made by clap from the table of flags.

use clap::{Arg, ArgAction, Command};

use super::flags::{Flag, GROUPS, Takes};

/// Describes the command line to clap. It only makes texts from this; the parser is our own.
pub(crate) fn command(name: &'static str) -> Command {
    let mut command = Command::new(name)
        .about("Starts the processes of a distributed program, watches them and restarts them; torchrun's command line")
        .override_usage(format!(
            "{name} [FLAGS] SCRIPT [ARGUMENTS]...\n       {name} check [FLAGS] [SCRIPT [ARGUMENTS]...]\n       {name} drain DIR"
        ))
        .disable_help_flag(true)
        .disable_version_flag(true)
        .term_width(0)
        .help_template("{about}\n\nUsage: {usage}\n\n{all-args}{after-help}")
        .after_help(
            "Words may be joined by underscores as well (--nproc_per_node), and flags cut to a unique prefix.\n\
             PET_ variables are defaults of the flags; the command line wins. All words after SCRIPT go to it,\n\
             with ${local_rank} replaced.\n\
             convoke check with the flags of a job looks for what would fail it, on all its hosts, and starts nothing.\n\
             convoke drain asks the launchers with this log folder to drain their jobs.",
        )
        .arg(
            Arg::new("script")
                .display_order(0)
                .value_name("SCRIPT")
                .required(true)
                .help("Python script, module (-m) or program")
                .help_heading("Arguments"),
        )
        .arg(
            Arg::new("arguments")
                .display_order(1)
                .value_name("ARGUMENTS")
                .num_args(0..)
                .trailing_var_arg(true)
                .allow_hyphen_values(true)
                .help("Its arguments, passed on untouched")
                .help_heading("Arguments"),
        );
    for group in GROUPS {
        for flag in group.flags {
            command = command.arg(argument(flag).help_heading(group.heading));
        }
    }
    command
}

fn argument(flag: &'static Flag) -> Arg {
    let arg = Arg::new(flag.name).long(flag.name).short(flag.short).aliases(flag.underscored());
    let arg = arg.help(help_line(flag));
    match flag.takes {
        Takes::Nothing => arg.action(ArgAction::SetTrue),
        Takes::Value(form) => arg.value_name(form).action(ArgAction::Set),
        Takes::MaybeValue(form) => {
            arg.value_name(form).action(ArgAction::Set).num_args(0..=1).require_equals(true)
        }
    }
}

fn help_line(flag: &Flag) -> String {
    let default = Some(flag.default).filter(|default| !default.is_empty());
    let default = default.map_or_else(String::new, |default| format!(" [default: {default}]"));
    let variable = flag.variable().map_or_else(String::new, |variable| format!(" [{variable}]"));
    format!("{}{default}{variable}", flag.help)
}

pub(crate) fn text(name: &'static str) -> String {
    command(name).render_help().to_string()
}

/// Returns the completions for a shell; `None` if clap does not know the shell.
pub(crate) fn completion(name: &'static str, shell: &str) -> Option<String> {
    let shell: clap_complete::Shell = shell.parse().ok()?;
    let mut out = Vec::new();
    clap_complete::generate(shell, &mut command(name), name, &mut out);
    Some(String::from_utf8_lossy(&out).into_owned())
}

/// Returns the manual page, in the language of man(7).
pub(crate) fn man(name: &'static str) -> String {
    let mut out = Vec::new();
    // Writing to memory does not fail.
    let _ = clap_mangen::Man::new(command(name).version(VERSION)).render(&mut out);
    String::from_utf8_lossy(&out).into_owned()
}

/// Version, commit, target and, if so built, `without etcd`, as set by build.rs.
pub(crate) const VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("CONVOKE_COMMIT"),
    ", ",
    env!("CONVOKE_TARGET"),
    env!("CONVOKE_WITHOUT"),
    ")"
);

/// Returns the text of `--version`: `convoke 0.1.0 (commit, target)`, or ending in `, without etcd)`.
pub(crate) fn version(name: &str) -> String {
    format!("{name} {VERSION}\n")
}
