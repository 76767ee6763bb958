//! Names and addresses as real hosts have them: nodes must find each other and the store of their workers.

use std::time::Duration;

use convoke_testkit::skip;

use super::world::{Backend, World};

/// Asserts that two nodes find each other, and begin a new round when a worker is killed.
fn meets(mut world: World) {
    world.start_all(2);
    let round = world.round(2);
    let victim = round[&2].worker;
    let (seen, _) = world.again(&round, |world| world.on(2, &format!("kill -9 {victim}")), &[1], 2);
    assert!(seen.again.is_some_and(|time| time < Duration::from_secs(10)), "{seen:?}");
    world.finish();
}

fn world(backend: Backend, what: &str) -> Option<World> {
    let world = World::new(backend, 2, "2").inspect_err(|why| skip(format!("{what}: {why}"))).ok()?;
    Some(world.with("--max-restarts=1"))
}

/// Debian's /etc/hosts maps the host's own name to 127.0.1.1.
#[test]
fn host_whose_own_name_is_loopback_can_join() {
    for backend in [Backend::C10d, Backend::Etcd(1)] {
        let Some(world) = world(backend, "hosts with 127.0.1.1 in /etc/hosts") else { return };
        for host in [1, 2] {
            let file = world.job.path(&format!("hosts.{host}")).display().to_string();
            let rename = format!("sed 's/^10.77.0.{host} .*/127.0.1.1 h{host}/' /etc/hosts > {file}");
            world.on(
                host,
                &format!("{rename} && mount --bind {file} /etc/hosts && grep -q 127.0.1.1 /etc/hosts"),
            );
        }
        meets(world);
    }
}

#[test]
fn hosts_with_ipv6_only_or_both_can_join() {
    for both in [true, false] {
        let Some(mut world) = world(Backend::C10d, "hosts with IPv6") else { return };
        for host in [1, 2] {
            if !world.tries(host, &format!("ip -6 addr add fd77::{host}/64 dev eth0 nodad")) {
                return skip("hosts with IPv6: the kernel has none");
            }
            if !both {
                world.on(host, "ip -4 addr flush dev eth0");
            }
        }
        world.endpoint = "[fd77::1]:29400".to_owned();
        meets(world);
    }
}

/// No server listens at the endpoint. The error says which node tried which address, and what came back.
#[test]
fn wrong_endpoint_is_reported_with_its_answer() {
    for (endpoint, words) in [
        ("10.77.0.2:29400", &["10.77.0.2:29400", "Connection refused", "the same --rdzv-endpoint"][..]),
        ("nowhere:29400", &["look up nowhere", "nowhere:29400"]),
    ] {
        let Some(world) = world(Backend::C10d, "hosts") else { return };
        let mut world = world.with_conf("join_timeout=2");
        world.endpoint = endpoint.to_owned();
        world.start(1);
        let said = world.nodes.remove(&1).unwrap().wait().expect(1).stderr;
        for word in words {
            assert!(said.contains(word), "no \"{word}\" in\n{said}");
        }
    }
}
