//! Reads lists of hosts: `--hosts`, and the host files of MPI, DeepSpeed and batch systems. Pure.

use convoke_env::slurm;

/// Most hosts of a job.
pub(crate) const MAX_HOSTS: usize = 1024;

/// A host on which `--hosts` or `--hostfile` starts a launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// The host as the remote shell takes it: a name or an address, perhaps with `user@`.
    pub(crate) name: String,
    /// Number of workers; `None` if the list does not say it.
    pub(crate) slots: Option<usize>,
}

impl Host {
    /// Returns the host without `user@`.
    pub(crate) fn address(&self) -> &str {
        without_user(&self.name)
    }
}

fn without_user(name: &str) -> &str {
    name.rsplit_once('@').map_or(name, |(_, host)| host)
}

/// Reason why a text is no list of hosts. It names the wrong part.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct ListError(String);

fn error<T>(text: String) -> Result<T, ListError> {
    Err(ListError(text))
}

/// Reads `--hosts`: names separated by commas, such as `h1,h2:4,user@h3,rack[1-2]n[01-16]`.
pub(crate) fn of_flag(text: &str) -> Result<Vec<Host>, ListError> {
    let mut hosts = Vec::new();
    for entry in split(text) {
        let (names, slots) = with_slots(entry)?;
        add(&mut hosts, names, slots)?;
    }
    checked(hosts)
}

/// Reads a host file. A line is `HOST`, `HOST:SLOTS`, `HOST slots=N` or `HOST N`; `#` begins a comment. A host
/// that occurs again adds slots, as in the node files of PBS.
pub(crate) fn of_file(text: &str) -> Result<Vec<Host>, ListError> {
    let mut hosts = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let place = |problem: ListError| ListError(format!("line {number}: {problem}"));
        let line = line.split_once('#').map_or(line, |(line, _)| line);
        let mut words = line.split_whitespace();
        let Some(entry) = words.next() else { continue };
        let (names, mut slots) = with_slots(entry).map_err(place)?;
        for word in words {
            let value =
                word.strip_prefix("slots=").or_else(|| word.strip_prefix("max_slots=")).unwrap_or(word);
            // Open MPI's max_slots limits oversubscription, which does not exist here.
            if word.starts_with("max_slots=") || word.starts_with("max-slots=") {
                continue;
            }
            slots = Some(count(value).map_err(place)?);
        }
        // A host of a node file, without a number, stands for one worker each time that it occurs.
        add(&mut hosts, names, slots).map_err(place)?;
    }
    checked(hosts)
}

/// Splits a list at commas and blanks that are not inside brackets.
fn split(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_usize;
    let is_separator = move |letter: char| {
        match letter {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && (letter == ',' || letter.is_whitespace())
    };
    text.split(is_separator).filter(|entry| !entry.is_empty())
}

/// Splits `HOST:SLOTS`, and expands the ranges of the host. An IPv6 address is not expanded.
fn with_slots(entry: &str) -> Result<(Vec<String>, Option<usize>), ListError> {
    let host = without_user(entry);
    let is_of_address = |letter: char| letter.is_ascii_hexdigit() || ":.%".contains(letter);
    if host.matches(':').count() > 1 && host.chars().all(is_of_address) {
        return Ok((vec![entry.to_owned()], None));
    }
    let (name, slots) = match entry.rsplit_once(':') {
        Some((name, slots)) => (name, Some(count(slots)?)),
        None => (entry, None),
    };
    // ssh would take a host that begins with a dash as an option.
    if name.is_empty() || name.starts_with('-') || name.contains(['/', '\'', '"', '\\', '$', ';', '&', '|']) {
        return error(format!("{entry:?} is no host"));
    }
    let (user, hosts) = match name.rsplit_once('@') {
        Some((user, hosts)) => (format!("{user}@"), hosts),
        None => (String::new(), name),
    };
    let hosts = slurm::hosts(hosts).map_err(|problem| ListError(problem.to_string()))?;
    if hosts.is_empty() {
        return error(format!("{entry:?} is no host"));
    }
    Ok((hosts.into_iter().map(|host| format!("{user}{host}")).collect(), slots))
}

fn count(text: &str) -> Result<usize, ListError> {
    match text.parse() {
        Ok(slots @ 1..=65_536) => Ok(slots),
        _ => error(format!(
            "{text:?} is no number of slots (workers); a port cannot be given here, but in ~/.ssh/config"
        )),
    }
}

fn add(hosts: &mut Vec<Host>, names: Vec<String>, slots: Option<usize>) -> Result<(), ListError> {
    for name in names {
        if let Some(host) = hosts.iter_mut().find(|host| host.name == name) {
            host.slots = Some(host.slots.unwrap_or(1) + slots.unwrap_or(1));
        } else if hosts.len() == MAX_HOSTS {
            return error(format!("more than {MAX_HOSTS} hosts"));
        } else {
            hosts.push(Host { name, slots });
        }
    }
    Ok(())
}

fn checked(hosts: Vec<Host>) -> Result<Vec<Host>, ListError> {
    if hosts.is_empty() { error("there is no host".to_owned()) } else { Ok(hosts) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shown(hosts: Result<Vec<Host>, ListError>) -> Result<String, String> {
        let text = |host: Host| match host.slots {
            Some(slots) => format!("{}*{slots}", host.name),
            None => host.name,
        };
        hosts
            .map(|hosts| hosts.into_iter().map(text).collect::<Vec<_>>().join(" "))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn hosts_flag_takes_names_slots_users_and_ranges() {
        for (text, wanted) in [
            ("h1,h2:4", "h1 h2*4"),
            ("h[1-3],me@h[08-09]:2", "h1 h2 h3 me@h08*2 me@h09*2"),
            ("10.0.0.1:8,fe80::1", "10.0.0.1*8 fe80::1"),
            ("h1,h1", "h1*2"),
            (" h1 , h2 ", "h1 h2"),
        ] {
            assert_eq!(shown(of_flag(text)), Ok(wanted.to_owned()), "{text}");
        }
    }

    #[test]
    fn host_files_of_mpi_deepspeed_and_pbs_are_read() {
        for (text, wanted) in [
            ("h1 slots=4\nh2 slots=4 max_slots=8\n", "h1*4 h2*4"),
            ("# a comment\nh1\n\nh2:2 # two\n", "h1 h2*2"),
            ("h1\nh1\nh2\nh2\nh2\n", "h1*2 h2*3"),
            ("h1 4\nh2 4\n", "h1*4 h2*4"),
        ] {
            assert_eq!(shown(of_file(text)), Ok(wanted.to_owned()), "{text}");
        }
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, what) in
            [("h1\nh2:x", "line 2: \"x\" is no number of slots"), ("-oProxy", "line 1: "), ("#", "no host")]
        {
            let error = shown(of_file(text)).unwrap_err();
            assert!(error.contains(what), "{text}: {error}");
        }
        for (text, what) in [
            ("", "there is no host"),
            ("h1:0", "is no number of slots"),
            ("h1:70000", "but in ~/.ssh/config"),
            ("-h", "\"-h\" is no host"),
            ("h;reboot", "is no host"),
            ("h[1-2000]", "more than 1024 hosts"),
            ("h[2-1]", "runs backwards"),
        ] {
            let error = shown(of_flag(text)).unwrap_err();
            assert!(error.contains(what), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_list_or_refused(text in "\\PC{0,40}") {
            let _ = (of_flag(&text), of_file(&text));
        }
    }
}
