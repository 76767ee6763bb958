//! Why launchers could not be started on hosts, by class, from what ssh prints. Pure.

use std::collections::BTreeMap;
use std::fmt::Write;

/// Most hosts that a class names.
const MAX_NAMED: usize = 16;

/// The class of a failed start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    UnknownName,
    Refused,
    Timeout,
    HostKey,
    Permission,
    NoProgram,
    OtherVersion,
    NoFolder,
    Dropped,
    Other,
}

impl Class {
    /// Describes the class, and says what to do.
    fn text(self) -> (&'static str, &'static str) {
        match self {
            Self::UnknownName => (
                "no address is known for",
                "is the name spelt right? ssh resolves it by ~/.ssh/config, /etc/hosts and DNS",
            ),
            Self::Refused => ("refused the connection", "does sshd run there, at the port of ~/.ssh/config?"),
            Self::Timeout => ("did not answer", "is the host up, and is its ssh port open in the firewall?"),
            Self::HostKey => (
                "has no known host key, or another one",
                "connect once by hand and compare the key: ssh HOST",
            ),
            Self::Permission => (
                "does not let you in without a password",
                "put your public key there (ssh-copy-id HOST), or start ssh-agent; convoke never asks for passwords",
            ),
            Self::NoProgram => (
                "has no convoke",
                "install it there, in PATH or at the same path as here, or give --copy-binary",
            ),
            Self::OtherVersion => {
                ("has another version of convoke", "install one version on all hosts, or give --copy-binary")
            }
            Self::NoFolder => ("lacks the current directory", "change to a directory that all hosts have"),
            Self::Dropped => (
                "closed the connection at once",
                "too many connections at a time (MaxStartups of sshd), or a login script that ends the session?",
            ),
            Self::Other => ("failed", "test by hand: ssh -o BatchMode=yes HOST true"),
        }
    }
}

/// A host on which no launcher could be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FailedHost {
    pub(super) host: String,
    pub(super) class: Class,
    /// The words of ssh or of the agent; may be empty.
    pub(super) detail: String,
}

/// Classifies a start that ended without an agent. `text` is what ssh, and the host's shell, have printed.
pub(super) fn classify(text: &str, exit_code: Option<i32>) -> Class {
    let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
    if has(&["Could not resolve hostname", "Name or service not known"]) {
        Class::UnknownName
    } else if has(&["Host key verification failed", "REMOTE HOST IDENTIFICATION HAS CHANGED"]) {
        Class::HostKey
    } else if has(&["Permission denied", "Too many authentication failures"]) && exit_code == Some(255) {
        Class::Permission
    } else if has(&["Connection refused"]) {
        Class::Refused
    } else if has(&["timed out", "No route to host", "Network is unreachable", "Connection timed out"]) {
        Class::Timeout
    } else if has(&["kex_exchange_identification", "Connection closed by", "Connection reset by"]) {
        Class::Dropped
    } else if exit_code == Some(127)
        || has(&["convoke: not found", "convoke: command not found", "No such file or directory"])
    {
        Class::NoProgram
    } else {
        Class::Other
    }
}

/// Formats one message about all hosts that failed, by class.
pub(super) fn message(failed: &[FailedHost], hosts: usize) -> String {
    let mut classes = BTreeMap::<Class, Vec<&FailedHost>>::new();
    for host in failed {
        classes.entry(host.class).or_default().push(host);
    }
    let mut text = format!("no launcher could be started on {} of {hosts} hosts", failed.len());
    for (class, hosts) in classes {
        let names: Vec<&str> = hosts.iter().take(MAX_NAMED).map(|host| host.host.as_str()).collect();
        let more = if hosts.len() > MAX_NAMED {
            format!(" and {} more", hosts.len() - MAX_NAMED)
        } else {
            String::new()
        };
        let (what, remedy) = class.text();
        let _ = match class {
            Class::UnknownName => write!(text, "\n  {what} {}{more}", names.join(", ")),
            _ => write!(text, "\n  {}{more} {what}", names.join(", ")),
        };
        if let Some(detail) = hosts.iter().map(|host| host.detail.trim()).find(|detail| !detail.is_empty()) {
            let line = detail.lines().last().unwrap_or(detail);
            let _ = write!(text, " ({line})");
        }
        let _ = write!(text, "\n    try: {remedy}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_ssh_give_the_class() {
        for (text, code, class) in [
            (
                "ssh: Could not resolve hostname h9: Temporary failure in name resolution",
                255,
                Class::UnknownName,
            ),
            ("ssh: connect to host h1 port 22: Connection refused", 255, Class::Refused),
            ("ssh: connect to host h1 port 22: Connection timed out", 255, Class::Timeout),
            ("Host key verification failed.", 255, Class::HostKey),
            ("me@h1: Permission denied (publickey,password).", 255, Class::Permission),
            ("kex_exchange_identification: Connection closed by remote host", 255, Class::Dropped),
            ("sh: 1: exec: convoke: not found", 127, Class::NoProgram),
            ("bash: line 1: /opt/convoke: No such file or directory", 127, Class::NoProgram),
            ("what is that", 1, Class::Other),
        ] {
            assert_eq!(classify(text, Some(code)), class, "{text}");
        }
    }

    #[test]
    fn one_message_names_all_hosts_by_class() {
        let failed = |host: &str, class, detail: &str| FailedHost {
            host: host.to_owned(),
            class,
            detail: detail.to_owned(),
        };
        let all = [
            failed("h3", Class::Refused, "ssh: connect to host h3 port 22: Connection refused\r\n"),
            failed("h9", Class::UnknownName, ""),
            failed("h4", Class::Refused, ""),
        ];
        let text = message(&all, 8);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "no launcher could be started on 3 of 8 hosts");
        assert_eq!(lines[1], "  no address is known for h9");
        assert_eq!(
            lines[3],
            "  h3, h4 refused the connection (ssh: connect to host h3 port 22: Connection refused)"
        );
        assert!(lines[4].starts_with("    try: does sshd run there"), "{text}");
    }
}
