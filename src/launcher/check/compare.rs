//! Compares facts of all nodes: finds the hosts that differ from the majority. Pure.

use std::collections::BTreeMap;

use super::problem::{Level, Problem, host_list};

/// Longest value that a problem quotes.
const MAX_VALUE: usize = 80;

/// Returns a problem for each fact that differs between hosts. `nodes` has host and facts of each node.
pub(super) fn compare(nodes: &[(&str, &BTreeMap<String, String>)]) -> Vec<Problem> {
    let mut names: Vec<&String> = nodes.iter().flat_map(|(_, facts)| facts.keys()).collect();
    names.sort();
    names.dedup();
    names.into_iter().flat_map(|name| compare_fact(name, nodes)).collect()
}

fn compare_fact(name: &str, nodes: &[(&str, &BTreeMap<String, String>)]) -> Vec<Problem> {
    let mut groups: BTreeMap<Option<&str>, Vec<String>> = BTreeMap::new();
    for (host, facts) in nodes {
        groups.entry(facts.get(name).map(String::as_str)).or_default().push((*host).to_owned());
    }
    if groups.len() < 2 {
        return Vec::new();
    }
    let (level, remedy) = judgement(name);
    let most = groups.values().map(Vec::len).max().unwrap_or(0);
    let mut largest = groups.iter().filter(|(_, hosts)| hosts.len() == most);
    let (majority, is_tie) = (largest.next(), largest.next().is_some());
    let problem = |hosts: Vec<String>, text: String| Problem {
        level,
        check: name.to_owned(),
        hosts,
        text,
        remedy: remedy.to_owned(),
    };
    match majority {
        Some((usual, others)) if !is_tie => groups
            .iter()
            .filter(|(value, _)| value != &usual)
            .map(|(value, hosts)| {
                let text = format!("{name} is {}, {} on {}", shown(*value), shown(*usual), host_list(others));
                problem(hosts.clone(), text)
            })
            .collect(),
        _ => {
            let each =
                groups.iter().map(|(value, hosts)| format!("{} on {}", shown(*value), host_list(hosts)));
            let text = format!("{name} differs: {}", each.collect::<Vec<_>>().join(", "));
            vec![problem(groups.into_values().flatten().collect(), text)]
        }
    }
}

fn shown(value: Option<&str>) -> String {
    match value {
        None => "missing".to_owned(),
        Some("") => "empty".to_owned(),
        Some(value) => crate::formatting::cut_text(value, MAX_VALUE),
    }
}

/// Returns the severity of a difference, and the remedy.
fn judgement(name: &str) -> (Level, &'static str) {
    match name {
        "--nnodes" => (Level::Fail, "give all nodes the same --nnodes"),
        "convoke" => {
            (Level::Fail, "install one version of convoke on all hosts, or give --copy-binary with --hosts")
        }
        "torch" | "NCCL" => {
            (Level::Fail, "install the same packages on all hosts, or use one environment that all share")
        }
        _ if name.starts_with("hash of ") => {
            (Level::Fail, "copy the same file to all hosts, or put it on a file system that all share")
        }
        _ if name.starts_with("InfiniBand port ") => {
            (Level::Fail, "look at the cable, the switch port and the subnet manager: ibstat, dmesg")
        }
        "workers per node" => {
            (Level::Warning, "ranks are uneven; is that meant? --nproc-per-node sets the number")
        }
        "GPUs" => {
            (Level::Warning, "nvidia-smi shows whether a GPU is lost; CUDA_VISIBLE_DEVICES may hide some")
        }
        "CPUs" => (
            Level::Warning,
            "ranks there have fewer or more CPUs: look at --cpus-per-task in Slurm, the quota of the container, taskset",
        ),
        "Python" => (Level::Warning, "use one environment on all hosts, or name its Python with PYTHON_EXEC"),
        "GPU driver" => (Level::Warning, "install one driver on all hosts"),
        _ if name.starts_with("InfiniBand firmware ") => {
            (Level::Warning, "update the firmware of the network cards")
        }
        _ if name.starts_with('$') => {
            (Level::Warning, "export the variable in the job script, so that all nodes have it")
        }
        _ => (Level::Warning, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(name: &str, values: &[Option<&str>]) -> Vec<String> {
        let hosts: Vec<String> = (1..=values.len()).map(|host| format!("h{host}")).collect();
        let facts: Vec<BTreeMap<String, String>> = values
            .iter()
            .map(|value| value.iter().map(|value| (name.to_owned(), (*value).to_owned())).collect())
            .collect();
        let nodes: Vec<_> = hosts.iter().map(String::as_str).zip(&facts).collect();
        compare(&nodes)
            .iter()
            .map(|problem| format!("{}: {}", host_list(&problem.hosts), problem.text))
            .collect()
    }

    #[test]
    fn hosts_that_differ_from_the_majority_are_named() {
        assert_eq!(compared("torch", &[Some("2.7"); 3]), [""; 0]);
        assert_eq!(
            compared("torch", &[Some("2.7"), Some("2.6"), Some("2.7")]),
            ["h2: torch is 2.6, 2.7 on h1, h3"]
        );
        assert_eq!(
            compared("torch", &[Some("2.7"), None, Some("2.7")]),
            ["h2: torch is missing, 2.7 on h1, h3"]
        );
    }

    #[test]
    fn tie_names_all_hosts() {
        assert_eq!(
            compared("torch", &[Some("2.7"), Some("2.6")]),
            ["h2, h1: torch differs: 2.6 on h2, 2.7 on h1"]
        );
    }
}
