//! The lists in Slurm's variables: hosts, tasks of each node, ports. Pure.

use std::fmt;

/// Most hosts of a list, and most numbers of one range, as in Slurm.
pub const MAX_HOSTS: usize = 65_536;

/// Reason why a text is no host list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostListError {
    what: &'static str,
    /// The part of the list with the mistake.
    part: String,
}

impl fmt::Display for HostListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.part, self.what)
    }
}

impl std::error::Error for HostListError {}

fn mistake<T>(part: &str, what: &'static str) -> Result<T, HostListError> {
    Err(HostListError { what, part: part.to_owned() })
}

/// A part of a host's name: text, or numbers of which each host has one.
#[derive(Debug)]
enum Part<'a> {
    Text(&'a str),
    Numbers(Vec<Range>),
}

/// The numbers `first` to `last`, with at least `width` digits.
#[derive(Debug, Clone, Copy)]
struct Range {
    first: u64,
    last: u64,
    width: usize,
}

impl Range {
    fn parse(text: &str) -> Result<Self, HostListError> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let number = |digits: &str| {
            let plain = !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
            plain.then(|| digits.parse::<u64>().ok()).flatten()
        };
        let (Some(low), Some(high)) = (number(first), number(last)) else {
            return mistake(text, "neither a number nor a range such as 1-8");
        };
        if low > high {
            return mistake(text, "the range runs backwards");
        }
        if high - low >= MAX_HOSTS as u64 {
            return mistake(text, "more than 65536 hosts");
        }
        Ok(Self { first: low, last: high, width: first.len() })
    }

    fn count(self) -> usize {
        usize::try_from(self.last - self.first).unwrap_or(MAX_HOSTS) + 1
    }

    fn digits(self) -> impl Iterator<Item = String> {
        (self.first..=self.last).map(move |number| format!("{number:0width$}", width = self.width))
    }
}

/// Splits a list at its commas and blanks, but not inside brackets.
fn entries(list: &str) -> impl Iterator<Item = &str> {
    let mut is_inside = false;
    let is_separator = move |letter: char| {
        match letter {
            '[' => is_inside = true,
            ']' => is_inside = false,
            _ => {}
        }
        !is_inside && (letter == ',' || letter.is_ascii_whitespace())
    };
    list.split(is_separator).filter(|entry| !entry.is_empty())
}

/// Splits one entry of a list, such as `rack[1-2]node[07,09-12]`.
fn parts(entry: &str) -> Result<Vec<Part<'_>>, HostListError> {
    let mut parts = Vec::new();
    let mut rest = entry;
    while let Some(open) = rest.find('[') {
        if open > 0 {
            parts.push(Part::Text(&rest[..open]));
        }
        let Some((inside, after)) = rest[open + 1..].split_once(']') else {
            return mistake(entry, "the bracket is not closed");
        };
        parts.push(Part::Numbers(inside.split(',').map(Range::parse).collect::<Result<_, _>>()?));
        rest = after;
    }
    if !rest.is_empty() {
        parts.push(Part::Text(rest));
    }
    Ok(parts)
}

/// Returns all hosts of a list such as `rack[1-2]node[07,09-12],login`, in order. A host may occur
/// several times.
///
/// # Errors
/// [`HostListError`] with the malformed part, or if there are more than [`MAX_HOSTS`].
pub fn hosts(list: &str) -> Result<Vec<String>, HostListError> {
    let mut hosts = Vec::new();
    for entry in entries(list) {
        let mut names = vec![String::new()];
        for part in parts(entry)? {
            match part {
                Part::Text(text) => names.iter_mut().for_each(|name| name.push_str(text)),
                Part::Numbers(ranges) => {
                    let each: usize = ranges.iter().map(|range| range.count()).sum();
                    if names.len().saturating_mul(each) > MAX_HOSTS {
                        return mistake(entry, "more than 65536 hosts");
                    }
                    let all = |name: &String| {
                        let numbers = ranges.iter().flat_map(|range| range.digits());
                        numbers.map(|number| format!("{name}{number}")).collect::<Vec<_>>()
                    };
                    names = names.iter().flat_map(all).collect();
                }
            }
        }
        hosts.append(&mut names);
        if hosts.len() > MAX_HOSTS {
            return mistake(entry, "more than 65536 hosts");
        }
    }
    Ok(hosts)
}

/// Returns the first host of a list; `None` if the list is empty or malformed.
#[must_use]
pub fn first_host(list: &str) -> Option<String> {
    let mut name = String::new();
    for part in parts(entries(list).next()?).ok()? {
        match part {
            Part::Text(text) => name.push_str(text),
            Part::Numbers(ranges) => name.push_str(&ranges.first()?.digits().next()?),
        }
    }
    Some(name)
}

/// Returns the number of tasks on each node, from a list such as `2(x3),1`: 2 tasks on each of 3 nodes,
/// and 1 on the fourth. `None` if the list is malformed or has more than [`MAX_HOSTS`] nodes.
#[must_use]
pub fn tasks_of_nodes(list: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for entry in list.split(',') {
        let (tasks, times) = match entry.split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse::<usize>().ok()?),
            None => (entry, 1),
        };
        if times > MAX_HOSTS - all.len() {
            return None;
        }
        all.resize(all.len() + times, tasks.parse().ok()?);
    }
    Some(all)
}

/// Returns the ports of a list such as `12000-12003,13000`, without 0; `None` if the list is malformed.
#[must_use]
pub fn ports(list: &str) -> Option<Vec<u16>> {
    let mut all = Vec::new();
    for entry in list.split(',') {
        let (first, last) = entry.split_once('-').unwrap_or((entry, entry));
        all.extend((first.parse::<u16>().ok()?..=last.parse::<u16>().ok()?).filter(|port| *port > 0));
    }
    (!all.is_empty()).then_some(all)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn host_list_is_expanded_as_scontrol_does() {
        let cases: [(&str, &[&str]); 11] = [
            ("login", &["login"]),
            ("h[1-3]", &["h1", "h2", "h3"]),
            ("a[08-11]", &["a08", "a09", "a10", "a11"]),
            ("a[001-002,10],a[9-10]", &["a001", "a002", "a10", "a9", "a10"]),
            ("rack[0-1]n[00-01]", &["rack0n00", "rack0n01", "rack1n00", "rack1n01"]),
            ("a[1-2][3-4]", &["a13", "a14", "a23", "a24"]),
            ("h[1-2],,h3", &["h1", "h2", "h3"]),
            (" h1 , h2\nh3", &["h1", "h2", "h3"]),
            ("[1-3]", &["1", "2", "3"]),
            ("h2,h1,h2", &["h2", "h1", "h2"]),
            // Slurm refuses a text behind the brackets.
            ("h[1-2].cluster,h-1,h.2", &["h1.cluster", "h2.cluster", "h-1", "h.2"]),
        ];
        for (list, wanted) in cases {
            assert_eq!(hosts(list).unwrap(), wanted, "{list}");
            assert_eq!(first_host(list).as_deref(), Some(wanted[0]), "{list}");
        }
        assert_eq!(hosts("").unwrap(), Vec::<String>::new());
        assert_eq!(first_host(""), None);
    }

    #[test]
    fn malformed_host_list_is_refused_with_its_part() {
        for (list, part) in [
            ("a[1-2", "\"a[1-2\": the bracket is not closed"),
            ("b,a[]", "\"\": neither a number nor a range such as 1-8"),
            ("a[x-2]", "\"x-2\": neither a number nor a range such as 1-8"),
            ("a[5-3]", "\"5-3\": the range runs backwards"),
            ("a[1-100000]", "\"1-100000\": more than 65536 hosts"),
            ("a[1-1000][1-1000]", "\"a[1-1000][1-1000]\": more than 65536 hosts"),
            ("a[99999999999999999999]", "\"99999999999999999999\": neither a number nor a range such as 1-8"),
        ] {
            assert_eq!(hosts(list).unwrap_err().to_string(), part);
        }
    }

    #[test]
    fn tasks_and_ports_are_read() {
        assert_eq!(tasks_of_nodes("2(x3),1"), Some(vec![2, 2, 2, 1]));
        assert_eq!(tasks_of_nodes("3,1"), Some(vec![3, 1]));
        for list in ["", "x", "2(x3", "2(x99999999)", "2(x-1)"] {
            assert_eq!(tasks_of_nodes(list), None, "{list}");
        }
        assert_eq!(ports("12000-12002,13000"), Some(vec![12_000, 12_001, 12_002, 13_000]));
        for list in ["", "0", "x", "1-x", "70000", "3-1"] {
            assert_eq!(ports(list), None, "{list}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_host_list_or_refused(list in "[hn0-9,\\[\\]\\- ]{0,24}") {
            if let Ok(hosts) = hosts(&list) {
                prop_assert!(hosts.iter().all(|host| !host.is_empty()), "{:?}", hosts);
                prop_assert_eq!(first_host(&list), hosts.first().cloned());
            }
            let _ = tasks_of_nodes(&list);
            let _ = ports(&list);
        }
    }
}
