//! Names and addresses as real hosts have them: nodes must find each other and the store of their workers.

use std::time::Duration;

use convoke_testkit::skip;

use super::cluster::{Backend, Cluster};

/// Asserts that two nodes find each other, and begin a new round when a worker is killed.
fn expect_working_job(mut cluster: Cluster) {
    cluster.start_all(2);
    let round = cluster.wait_for_round(2);
    let victim = round[&2].worker;
    let (times, _) =
        cluster.expect_new_round(&round, |cluster| cluster.exec(2, &format!("kill -9 {victim}")), &[1], 2);
    assert!(times.restarted.is_some_and(|time| time < Duration::from_secs(10)), "{times:?}");
    cluster.finish();
}

fn start_cluster(backend: Backend, what: &str) -> Option<Cluster> {
    let cluster = Cluster::new(backend, 2, "2").inspect_err(|why| skip(format!("{what}: {why}"))).ok()?;
    Some(cluster.with_argument("--max-restarts=1"))
}

/// Debian's /etc/hosts maps the host's own name to 127.0.1.1.
#[test]
fn host_whose_own_name_is_loopback_can_join() {
    for backend in [Backend::C10d, Backend::Etcd(1)] {
        let Some(cluster) = start_cluster(backend, "hosts with 127.0.1.1 in /etc/hosts") else { return };
        for host in [1, 2] {
            let file = cluster.job.path(&format!("hosts.{host}")).display().to_string();
            let rename = format!("sed 's/^10.77.0.{host} .*/127.0.1.1 h{host}/' /etc/hosts > {file}");
            cluster.exec(
                host,
                &format!("{rename} && mount --bind {file} /etc/hosts && grep -q 127.0.1.1 /etc/hosts"),
            );
        }
        expect_working_job(cluster);
    }
}

#[test]
fn hosts_with_ipv6_only_or_both_can_join() {
    for both in [true, false] {
        let Some(mut cluster) = start_cluster(Backend::C10d, "hosts with IPv6") else { return };
        for host in [1, 2] {
            if !cluster.succeeds(host, &format!("ip -6 addr add fd77::{host}/64 dev eth0 nodad")) {
                return skip("hosts with IPv6: the kernel has none");
            }
            if !both {
                cluster.exec(host, "ip -4 addr flush dev eth0");
            }
        }
        cluster.endpoint = "[fd77::1]:29400".to_owned();
        expect_working_job(cluster);
    }
}

/// No server listens at the endpoint. The error says which node tried which address, and what came back.
#[test]
fn wrong_endpoint_is_reported_with_its_answer() {
    for (endpoint, words) in [
        ("10.77.0.2:29400", &["10.77.0.2:29400", "Connection refused", "the same --rdzv-endpoint"][..]),
        ("nowhere:29400", &["look up nowhere", "nowhere:29400"]),
    ] {
        let Some(cluster) = start_cluster(Backend::C10d, "hosts") else { return };
        let mut cluster = cluster.with_conf("join_timeout=2");
        cluster.endpoint = endpoint.to_owned();
        cluster.start(1);
        let message = cluster.nodes.remove(&1).unwrap().wait().expect_exit_code(1).stderr;
        for word in words {
            assert!(message.contains(word), "no \"{word}\" in\n{message}");
        }
    }
}
