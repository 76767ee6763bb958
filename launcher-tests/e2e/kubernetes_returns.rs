//! A pod is lost and comes back with another address: the pods of a job start again and end well.

use std::collections::BTreeSet;
use std::fs;

use super::kubernetes_cluster::{Cluster, MAX_MESSAGE_BYTES, Pod, address, kill_pod, pods_of};
use convoke_launcher_tests::group_line;
use convoke_launcher_tests::harness::{Launcher, ProcessOutput};
use convoke_testkit::{TEST_TIMEOUT, skip, try_wait_until_within};

/// Exit code that the manifests' podFailurePolicy ignores.
const FROM_OUTSIDE: i32 = 75;
/// Begin of a line that says why a pod waits.
const WAITS: &str = "waiting for node 0 at digits-0.digits.default.svc.cluster.local:29500: ";

/// The worker says that it is up, waits until the test lets it end, and sums the ranks with all others.
const WORKER: &str = "\
echo $RANK > \"$JOB/up.$GROUP_WORLD_SIZE.$(hostname).$LOCAL_RANK\"
while [ ! -e \"$JOB/go\" ]; do sleep 0.02; done
exec TEST_WORKER group
";

/// The way in which a pod is lost.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    /// All its processes are killed. Its host lives.
    Processes,
    /// Its host loses its power.
    Host,
}

/// A job and its pods. Pod `i` runs on host `i + 1` at first.
struct Running {
    cluster: Cluster,
    pods: Vec<Pod>,
}

impl Running {
    /// Returns `None`, and reports why, where no simulated hosts are possible.
    fn up(file: &str, worker: &str) -> Option<Self> {
        let pods = pods_of(file);
        match Cluster::up(2 * pods.len(), worker) {
            Ok(cluster) => Some(Self { cluster, pods }),
            Err(why) => {
                skip(format!("pods of {file} that return: {why}"));
                None
            }
        }
    }

    /// Starts all pods, on the hosts from `first_host` on, with their names.
    fn start_all(&self, first_host: usize) -> Vec<Launcher> {
        let start = |(pod, host): (&Pod, usize)| {
            self.cluster.set_name(pod, Some(address(host)));
            self.cluster.start(pod, host)
        };
        self.pods.iter().zip(first_host..).map(start).collect()
    }

    /// Waits until workers of all pods but `missing` are up, in a world of as many nodes.
    fn wait_for_workers(&self, missing: Option<usize>) {
        let pods: Vec<_> = (0..self.pods.len()).filter(|node| Some(*node) != missing).collect();
        for node in &pods {
            let file = format!("up.{}.{}.0", pods.len(), self.pods[*node].name);
            self.cluster.job.wait_for_file(&file);
            fs::remove_file(self.cluster.job.path(&file)).unwrap();
        }
    }

    /// Takes pod `victim` away. The name server, which has it in its cache, still gives its address.
    fn lose(&self, running: &[Launcher], victim: usize, loss: Loss) {
        match loss {
            Loss::Processes => kill_pod(&running[victim]),
            Loss::Host => {
                let host = (victim + 1).to_string();
                let _ = self.cluster.hosts.run_script(["kill-host", &host]).unwrap();
            }
        }
    }

    fn release_workers(&self) {
        fs::write(self.cluster.job.path("go"), "").unwrap();
    }

    /// Waits for the pods other than `victim`, which end from outside because `lost` is lost. All of
    /// them show one message.
    fn expect_loss(&self, running: Vec<Launcher>, victim: usize, lost: &str) {
        let mut messages = BTreeSet::new();
        for (node, (pod, launcher)) in self.pods.iter().zip(running).enumerate() {
            if node != victim {
                let ended = launcher.wait().expect_exit_code(FROM_OUTSIDE);
                assert!(ended.stderr.contains(lost), "{}", ended.stderr);
                messages.insert(self.cluster.termination_message(pod));
            }
        }
        assert_eq!(messages.len(), 1, "{messages:#?}");
        let message = messages.pop_first().unwrap();
        assert!(message.contains(lost) && message.contains("is lost"), "{message}");
        assert!(message.len() <= MAX_MESSAGE_BYTES, "{message}");
    }
}

/// Waits until a pod that runs says `what`.
fn wait_for_line(pod: &mut Launcher, what: &str) {
    let says = || {
        let ended = pod.child.try_wait().unwrap();
        (pod.stderr().contains(what) || ended.is_some()).then_some(())
    };
    let _ = try_wait_until_within(TEST_TIMEOUT, says);
    let said = pod.stderr();
    assert!(said.contains(what), "no {what:?}:\n{said}");
}

/// Asserts that all pods of a job have met and succeeded, and that each has the ranks of one node.
fn expect_success(ended: &[ProcessOutput]) {
    let workers = ended[0].stdout.matches(" here, sum ").count();
    let size = workers * ended.len();
    let is_of_node = |text: &str, node: usize| {
        let line = |local| group_line(node * workers + local, size, local, workers);
        (0..workers).all(|local| text.contains(&format!("{}\n", line(local))))
    };
    let all: Vec<_> = ended.iter().map(|ended| ended.stdout.as_str()).collect();
    for node in 0..ended.len() {
        assert_eq!(all.iter().filter(|text| is_of_node(text, node)).count(), 1, "node {node}: {all:#?}");
    }
}

/// A pod is lost, all pods start again, on other hosts and so with other addresses, and the job ends well. The name
/// of node 0 still leads to the old address for a while, then nowhere.
fn all_pods_start_again(victim: usize, loss: Loss) {
    let Some(job) = Running::up("k8s-job.yaml", WORKER) else { return };
    let running = job.start_all(1);
    job.wait_for_workers(None);
    job.lose(&running, victim, loss);
    job.expect_loss(
        running,
        victim,
        &format!("node {victim} (digits-{victim}.digits.default.svc.cluster.local)"),
    );

    let first_host = job.pods.len() + 1;
    let mut again: Vec<_> =
        job.pods.iter().zip(first_host..).map(|(pod, host)| job.cluster.start(pod, host)).collect();
    again[1..].iter_mut().for_each(|pod| wait_for_line(pod, WAITS));
    job.cluster.set_name(&job.pods[0], None);
    let unknown = format!("{WAITS}cannot look up");
    again[1..].iter_mut().for_each(|pod| wait_for_line(pod, &unknown));
    for (pod, host) in job.pods.iter().zip(first_host..) {
        job.cluster.set_name(pod, Some(address(host)));
    }
    job.release_workers();
    expect_success(&again.into_iter().map(|pod| pod.wait().expect_exit_code(0)).collect::<Vec<_>>());
    job.cluster.job.wait_until_no_processes(TEST_TIMEOUT);
}

#[test]
fn job_goes_on_when_a_killed_pod_returns_with_another_address() {
    all_pods_start_again(2, Loss::Processes);
}

#[test]
fn job_goes_on_when_the_killed_pod_of_node_0_returns_with_another_address() {
    all_pods_start_again(0, Loss::Processes);
}

#[test]
fn job_goes_on_when_a_pod_returns_from_a_lost_host() {
    all_pods_start_again(2, Loss::Host);
}

#[test]
fn job_goes_on_when_the_pod_of_node_0_returns_from_a_lost_host() {
    all_pods_start_again(0, Loss::Host);
}

/// The returned pod is early: the pods of the ended attempt still stop their workers, and node 0 still serves.
#[test]
fn returned_pod_waits_until_the_ended_attempt_is_gone() {
    let saves = "trap 'while [ ! -e \"$JOB/saved\" ]; do sleep 0.02; done; exit 0' TERM\n";
    let Some(job) = Running::up("k8s-job.yaml", &format!("{saves}{WORKER}")) else { return };
    let (victim, hosts) = (2, job.pods.len());
    let running = job.start_all(1);
    job.wait_for_workers(None);
    job.lose(&running, victim, Loss::Processes);
    let mut returned = job.cluster.start(&job.pods[victim], hosts + victim + 1);
    job.cluster.set_name(&job.pods[victim], Some(address(hosts + victim + 1)));
    wait_for_line(&mut returned, WAITS);
    fs::write(job.cluster.job.path("saved"), "").unwrap();
    job.expect_loss(running, victim, "node 2 (");

    let mut again: Vec<_> = (0..hosts)
        .filter(|node| *node != victim)
        .map(|node| {
            job.cluster.set_name(&job.pods[node], Some(address(hosts + node + 1)));
            job.cluster.start(&job.pods[node], hosts + node + 1)
        })
        .collect();
    again.insert(victim, returned);
    job.release_workers();
    expect_success(&again.into_iter().map(|pod| pod.wait().expect_exit_code(0)).collect::<Vec<_>>());
}

#[test]
fn elastic_job_goes_on_without_a_lost_pod_and_takes_it_in_when_it_is_back() {
    for loss in [Loss::Processes, Loss::Host] {
        let Some(job) = Running::up("k8s-elastic.yaml", WORKER) else { return };
        let mut running = job.start_all(1);
        job.wait_for_workers(None);
        let victim = 2;
        job.lose(&running, victim, loss);
        job.wait_for_workers(Some(victim));
        // The pod has its name again on another host.
        let host = job.pods.len() + 1;
        job.cluster.set_name(&job.pods[victim], None);
        running[victim] = job.cluster.start(&job.pods[victim], host);
        job.cluster.set_name(&job.pods[victim], Some(address(host)));
        job.wait_for_workers(None);
        job.release_workers();
        let ended: Vec<_> = running.into_iter().map(|pod| pod.wait().expect_exit_code(0)).collect();
        expect_success(&ended);
        let lost = format!("node {victim} (");
        assert!(
            ended[0].stderr.contains(&lost) && ended[0].stderr.contains("is lost"),
            "{}",
            ended[0].stderr
        );
    }
}

/// Pod 0 serves the rendezvous. Without it the job ends, and all pods start again.
#[test]
fn elastic_job_starts_again_when_the_pod_of_its_rendezvous_was_lost() {
    for loss in [Loss::Processes, Loss::Host] {
        let Some(job) = Running::up("k8s-elastic.yaml", WORKER) else { return };
        let running = job.start_all(1);
        job.wait_for_workers(None);
        job.lose(&running, 0, loss);
        job.expect_loss(running, 0, "the rendezvous at digits-0.digits:29400");
        let again = job.start_all(job.pods.len() + 1);
        job.wait_for_workers(None);
        job.release_workers();
        expect_success(&again.into_iter().map(|pod| pod.wait().expect_exit_code(0)).collect::<Vec<_>>());
    }
}
