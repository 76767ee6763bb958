//! Suggests a flag in place of a misspelt one, or of one of another launcher. Pure.

use strsim::osa_distance;

use super::flags;

/// Flags of convoke, each with the flags of other launchers that mean the same.
const FOREIGN_FLAGS: &[(&str, &[&str])] = &[
    ("--nproc-per-node", &["-n", "-np", "--np", "--ntasks", "--ntasks-per-node"]),
    ("--nproc-per-node", &["--num-processes", "--num-procs", "--num-gpus"]),
    ("--nnodes", &["-N", "--nodes", "--num-nodes", "--num-machines"]),
    ("--node-rank", &["--machine-rank"]),
    ("--master-addr", &["--main-process-ip"]),
    ("--master-port", &["--main-process-port"]),
    ("--rdzv-id", &["--job-id", "--run-id"]),
];

/// Returns advice for an unknown flag, such as `did you mean --master-addr?`; `None` if no flag is similar.
pub(crate) fn flag(name: &str) -> Option<String> {
    let plain = name.to_lowercase().replace('_', "-");
    let same = |other: &&str| if other.len() == 2 { *other == name } else { *other == plain };
    if let Some((ours, _)) = FOREIGN_FLAGS.iter().find(|(_, theirs)| theirs.iter().any(same)) {
        return Some(format!("convoke calls it {ours}"));
    }
    let wanted = plain.trim_start_matches('-');
    if wanted.len() < 3 {
        return None;
    }
    if let Some(flag) = flags::named(wanted) {
        let underscored = flag.underscored().map_or(String::new(), |name| format!(" (or --{name})"));
        return Some(format!("write {}{underscored}", flag.dashed()));
    }
    let (distance, flag) = flags::all()
        .map(|flag| (osa_distance(wanted, flag.name), flag))
        .min_by_key(|(distance, _)| *distance)?;
    // The longer the name, the more letters may differ. If one name is a prefix of the other, up to 4 letters
    // may differ.
    let continued = wanted.starts_with(flag.name) || flag.name.starts_with(wanted);
    (distance <= wanted.len() / 3 || continued && distance <= 4)
        .then(|| format!("did you mean {}?", flag.dashed()))
}

/// Dashes and minus signs other than ASCII's `-`.
const DASHES: &str = "\u{2010}\u{2011}\u{2012}\u{2013}\u{2014}\u{2015}\u{2212}\u{fe58}\u{fe63}\u{ff0d}";
/// Characters that look like a blank or are invisible, but that a shell does not treat as a blank.
const INVISIBLE: &str = "\u{a0}\u{ad}\u{200b}\u{200c}\u{200d}\u{200e}\u{200f}\u{202f}\u{2060}\u{feff}";

/// Returns whether a character is a typographic dash or an invisible character, as in a formatted document.
pub(crate) fn is_typographic(c: char) -> bool {
    DASHES.contains(c) || INVISIBLE.contains(c)
}

/// Returns `text` with typographic dashes replaced by `-`, and without invisible characters.
pub(crate) fn without_typography(text: &str) -> String {
    let seen = text.chars().filter(|&c| !INVISIBLE.contains(c));
    seen.map(|c| if DASHES.contains(c) { '-' } else { c }).collect()
}

/// Returns the choice that `text` probably meant; `None` if no choice is similar.
pub(crate) fn choice<'a>(text: &str, choices: &[&'a str]) -> Option<&'a str> {
    let text = text.trim().to_lowercase().replace('_', "-");
    let (distance, choice) = choices
        .iter()
        .map(|choice| (osa_distance(&text, choice), *choice))
        .min_by_key(|(distance, _)| *distance)?;
    (distance <= (choice.len() / 3).max(1)).then_some(choice)
}
