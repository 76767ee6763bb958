//! Checks how this host looks up names: its own and that of node 0.

use std::net::{IpAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use convoke_env::host::interfaces;

use super::super::peer::NodeResult;
use super::super::problem::Problem;
use crate::config::{Config, Endpoint, Rendezvous, is_loopback};
use crate::host_name::host_name;
use crate::rendezvous::own_addresses;

/// Time of a look-up that is reported.
const SLOW: Duration = Duration::from_secs(1);

pub(super) fn check(config: &Config, host: &str) -> NodeResult {
    let node_0 = name_of_node_0(config);
    // Nodes of one host reach each other whatever its name means.
    if config.rendezvous == Rendezvous::Standalone || node_0.as_deref().is_some_and(is_loopback) {
        return NodeResult::default();
    }
    let own_name = host_name();
    let (own, took) = look_up(&own_name);
    let mut problems: Vec<Problem> = slow(&own_name, took, host).into_iter().collect();
    problems.extend(own_name_problem(&own_name, own, host));
    problems.extend(interface_problems(host));
    if let Some(name) = node_0.filter(|name| *name != own_name) {
        problems.extend(slow(&name, look_up(&name).1, host));
    }
    NodeResult { problems, ..NodeResult::default() }
}

fn name_of_node_0(config: &Config) -> Option<String> {
    match &config.rendezvous {
        Rendezvous::Static { search: Some(search), .. } => Some(search.name.clone()),
        Rendezvous::Static { host, .. }
        | Rendezvous::Elastic { endpoint: Endpoint::Host { host, .. }, .. } => Some(host.clone()),
        Rendezvous::Elastic { .. } | Rendezvous::Standalone => None,
    }
}

fn look_up(name: &str) -> (Result<Vec<IpAddr>, String>, Duration) {
    let start = Instant::now();
    let found = (name.trim_matches(['[', ']']), 0).to_socket_addrs();
    let found = found.map(|all| all.map(|address| address.ip()).collect()).map_err(|error| error.to_string());
    (found, start.elapsed())
}

fn slow(name: &str, took: Duration, host: &str) -> Option<Problem> {
    let text = format!("looking up {name} took {:.1} s", took.as_secs_f64());
    let remedy = "correct the name servers in /etc/resolv.conf, or add the names of the hosts to /etc/hosts; workers look up names often";
    (took >= SLOW).then(|| Problem::warning("names", host, text, remedy))
}

/// Returns a problem if this host's own name does not lead to an address by which others reach it. Libraries that
/// publish the address of their name then publish a useless one.
fn own_name_problem(name: &str, found: Result<Vec<IpAddr>, String>, host: &str) -> Option<Problem> {
    if std::env::var_os("GLOO_SOCKET_IFNAME").is_some() {
        return None;
    }
    let own = own_addresses();
    let remedy = "correct /etc/hosts or DNS, or export GLOO_SOCKET_IFNAME with the interface; gloo (PyTorch) and MPI publish \
                  the address of the name";
    let text = match found {
        Err(why) => format!("its own name {name} has no address ({why})"),
        Ok(found) if found.iter().all(IpAddr::is_loopback) => {
            let list: Vec<_> = found.iter().map(ToString::to_string).collect();
            format!("its own name {name} means {}, which no other host reaches", list.join(", "))
        }
        Ok(found) if !found.iter().any(|ip| own.contains(ip)) => {
            let list: Vec<_> = found.iter().map(ToString::to_string).collect();
            format!("its own name {name} means {}, which is no address of it", list.join(", "))
        }
        Ok(_) => return None,
    };
    Some(Problem::warning("addresses", host, text, remedy))
}

/// Returns a problem for each variable that names a network interface which this host does not have.
fn interface_problems(host: &str) -> Vec<Problem> {
    let Ok(all) = interfaces() else { return Vec::new() };
    let up: Vec<&str> = all.iter().filter(|one| one.is_up).map(|one| one.name.as_str()).collect();
    ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"]
        .into_iter()
        .filter_map(|variable| {
            let value = std::env::var(variable).ok()?;
            if names_an_interface(variable, &value, &up) {
                return None;
            }
            let text = format!("{variable}={value} names no interface that is up here ({})", up.join(", "));
            Some(Problem::fail("addresses", host, text, "name one of these, or unset the variable"))
        })
        .collect()
}

/// Returns true if the value of a variable selects one of the interfaces. NCCL takes begins of names, exact names
/// after `=`, and a list of exclusions after `^`; gloo takes names.
fn names_an_interface(variable: &str, value: &str, interfaces: &[&str]) -> bool {
    let is_nccl = variable.starts_with("NCCL");
    let (is_excluded, list) = match value.strip_prefix('^') {
        Some(list) if is_nccl => (true, list),
        _ => (false, value),
    };
    let (is_exact, list) = match list.strip_prefix('=') {
        Some(list) if is_nccl => (true, list),
        _ => (!is_nccl, list),
    };
    let matches = |interface: &&&str| {
        list.split(',').any(|name| if is_exact { **interface == name } else { interface.starts_with(name) })
    };
    if is_excluded {
        interfaces.iter().any(|interface| !matches(&interface))
    } else {
        interfaces.iter().any(|interface| matches(&interface))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_nccl_and_gloo_select_interfaces_as_those_libraries_do() {
        let all = ["lo", "eth0", "ib0"];
        for (variable, value, expected) in [
            ("NCCL_SOCKET_IFNAME", "eth", true),
            ("NCCL_SOCKET_IFNAME", "=eth", false),
            ("NCCL_SOCKET_IFNAME", "=eth0", true),
            ("NCCL_SOCKET_IFNAME", "eth7,ib", true),
            ("NCCL_SOCKET_IFNAME", "^lo,docker", true),
            ("NCCL_SOCKET_IFNAME", "^lo,eth,ib", false),
            ("NCCL_SOCKET_IFNAME", "bond0", false),
            ("GLOO_SOCKET_IFNAME", "eth0", true),
            ("GLOO_SOCKET_IFNAME", "eth", false),
        ] {
            assert_eq!(names_an_interface(variable, value, &all), expected, "{variable}={value}");
        }
    }

    fn problem(found: Result<Vec<IpAddr>, String>) -> Option<String> {
        own_name_problem("h1", found, "h1").map(|problem| problem.text)
    }

    #[test]
    fn name_that_means_loopback_or_another_host_is_reported() {
        let loopback = problem(Ok(vec![IpAddr::from([127, 0, 1, 1])])).unwrap();
        assert_eq!(loopback, "its own name h1 means 127.0.1.1, which no other host reaches");
        let other = problem(Ok(vec![IpAddr::from([192, 0, 2, 1])])).unwrap();
        assert_eq!(other, "its own name h1 means 192.0.2.1, which is no address of it");
        assert!(problem(Err("unknown".to_owned())).unwrap().contains("has no address (unknown)"));
        assert!(slow("h1", Duration::from_millis(1500), "h1").unwrap().text.contains("took 1.5 s"));
        assert_eq!(slow("h1", Duration::from_millis(500), "h1"), None);
    }
}
