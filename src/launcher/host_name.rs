//! Finds the names of this host, from the host name and /etc/hosts alone. A query to an unreachable name
//! server would cost 10 s.

use std::fs;

pub(crate) fn host_name() -> String {
    convoke_env::host::name().unwrap_or_else(|| "localhost".to_owned())
}

/// Returns the host name with its domain if /etc/hosts contains it.
pub(crate) fn full_host_name() -> String {
    let name = host_name();
    let hosts = fs::read_to_string("/etc/hosts").unwrap_or_default();
    full_name(&name, &hosts).unwrap_or(name)
}

/// Finds the full name of the host `name` in the text of /etc/hosts, like Python's `socket.getfqdn`. In the
/// line that has this name, returns the first name with a dot, else the first name. `None` if no line has it.
fn full_name(name: &str, hosts: &str) -> Option<String> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_host_name_is_read_from_etc_hosts() {
        let hosts = "127.0.0.1 localhost # loop\n::1 localhost\n10.0.0.7\tnode7.cluster.example node7 # me\n127.0.1.1 lone\n";
        assert_eq!(full_name("node7", hosts), Some("node7.cluster.example".to_owned()));
        assert_eq!(full_name("NODE7", hosts), Some("node7.cluster.example".to_owned()));
        assert_eq!(full_name("lone", hosts), Some("lone".to_owned()));
        assert_eq!(full_name("other", hosts), None);
        assert_eq!(full_name("box", "127.0.0.1 localhost box\n"), Some("localhost".to_owned()), "as Python");
        assert!(!full_host_name().is_empty() && !host_name().is_empty());
    }
}
