//! Names of this host, from the host name and /etc/hosts alone. An unreachable name server would cost 10 s.

use std::fs;

/// The host name.
pub(crate) fn host_name() -> String {
    nix::unistd::gethostname()
        .map_or_else(|_| "localhost".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// The host name with its domain if /etc/hosts knows one.
pub(crate) fn full_host_name() -> String {
    let name = host_name();
    let hosts = fs::read_to_string("/etc/hosts").unwrap_or_default();
    full_name(&name, &hosts).unwrap_or(name)
}

/// Works like Python's `socket.getfqdn`. Returns the first name with a dot in the line that names this host,
/// else the line's first name. `None` if no line names it.
pub(super) fn full_name(name: &str, hosts: &str) -> Option<String> {
    hosts.lines().find_map(|line| {
        let mut words = line.split('#').next().unwrap_or("").split_whitespace();
        let _address = words.next()?;
        let names: Vec<&str> = words.collect();
        if !names.iter().any(|other| other.eq_ignore_ascii_case(name)) {
            return None;
        }
        names.iter().find(|other| other.contains('.')).or(names.first()).map(|&name| name.to_owned())
    })
}
