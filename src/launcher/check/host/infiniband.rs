//! Reads the state of InfiniBand and RoCE ports.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::super::peer::NodeResult;
use super::super::problem::Problem;

/// Reads `sys/class/infiniband` below `root`.
pub(super) fn check(root: &Path, host: &str) -> NodeResult {
    let mut result = NodeResult::default();
    let Ok(devices) = fs::read_dir(root.join("sys/class/infiniband")) else {
        result.not_checked.push("InfiniBand (none)".to_owned());
        return result;
    };
    let read = |path: &Path| {
        fs::read_to_string(path).map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
    };
    let mut ports: BTreeMap<String, String> = BTreeMap::new();
    for device in devices.flatten() {
        let name = device.file_name().to_string_lossy().into_owned();
        result.facts.insert(format!("InfiniBand firmware {name}"), read(&device.path().join("fw_ver")));
        let Ok(numbers) = fs::read_dir(device.path().join("ports")) else { continue };
        for port in numbers.flatten() {
            let (state, rate) = (read(&port.path().join("state")), read(&port.path().join("rate")));
            let state = state.split_once(": ").map_or(state.as_str(), |(_, state)| state).to_owned();
            let value = if state == "ACTIVE" { format!("ACTIVE, {rate}") } else { state };
            ports.insert(format!("InfiniBand port {name}/{}", port.file_name().to_string_lossy()), value);
        }
    }
    if ports.is_empty() {
        result.not_checked.push("InfiniBand (none)".to_owned());
    } else if !ports.values().any(|state| state.starts_with("ACTIVE")) {
        let list: Vec<_> = ports.iter().map(|(name, state)| format!("{name} is {state}")).collect();
        let text = format!("no InfiniBand port is active: {}", list.join(", "));
        let remedy =
            "look at the cable, the switch port and the subnet manager: ibstat, dmesg; NCCL would use TCP";
        result.problems.push(Problem::fail("InfiniBand", host, text, remedy));
    }
    result.facts.extend(ports);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_states_are_facts_and_a_host_without_an_active_port_fails() {
        let root = tempfile::tempdir().unwrap();
        let device = root.path().join("sys/class/infiniband/mlx5_0");
        let port = device.join("ports/1");
        fs::create_dir_all(&port).unwrap();
        fs::write(device.join("fw_ver"), "28.39.1002\n").unwrap();
        fs::write(port.join("rate"), "400 Gb/sec (4X NDR)\n").unwrap();
        fs::write(port.join("state"), "4: ACTIVE\n").unwrap();
        let good = check(root.path(), "h1");
        assert_eq!(good.problems, []);
        assert_eq!(good.facts["InfiniBand port mlx5_0/1"], "ACTIVE, 400 Gb/sec (4X NDR)");
        assert_eq!(good.facts["InfiniBand firmware mlx5_0"], "28.39.1002");
        fs::write(port.join("state"), "1: DOWN\n").unwrap();
        let bad = check(root.path(), "h1");
        assert_eq!(bad.problems[0].text, "no InfiniBand port is active: InfiniBand port mlx5_0/1 is DOWN");
    }
}
