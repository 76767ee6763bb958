//! Measures the time that the flight recorder adds to a call.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

fn main() {
    let folder = std::env::temp_dir().join(format!("convoke-flight-bench-{}", std::process::id()));
    let costs = convoke_comm::flight_costs(folder.clone());
    std::fs::remove_dir_all(&folder).unwrap();
    for (what, nanos) in costs {
        println!("{what}: {nanos:.1} ns");
    }
}
