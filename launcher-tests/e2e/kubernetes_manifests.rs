//! The manifests for Kubernetes run as they stand: their commands, in the pods that their controllers make.

use std::fs;

use sha2::{Digest, Sha256};

use super::kubernetes_cluster::{Cluster, address, manifests, pods_of};
use convoke_launcher_tests::group_line;
use convoke_launcher_tests::harness::Launcher;
use convoke_testkit::programs::repository_root;
use convoke_testkit::{skip, wait_until};

/// Stands in for the training program: it says where it runs, and sums the ranks with all others.
const WORKER: &str = "\
echo \"pod $(hostname), process 1 is $(cat /proc/1/comm): rank $RANK of $WORLD_SIZE on node $GROUP_RANK: $*\"
exec TEST_WORKER group
";

#[test]
fn pods_json_belongs_to_the_manifests() {
    let jobs = repository_root().join("src/examples/jobs");
    let is_manifest = |name: &String| name.starts_with("k8s-") && name.ends_with(".yaml");
    let files = fs::read_dir(&jobs).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut files: Vec<_> = files.filter(is_manifest).collect();
    files.sort();
    let known: Vec<_> = manifests().into_iter().map(|manifest| (manifest.file, manifest.sha256)).collect();
    let hash = |file: String| {
        let digest = Sha256::digest(fs::read(jobs.join(&file)).unwrap());
        (file, digest.iter().map(|byte| format!("{byte:02x}")).collect())
    };
    let found: Vec<(String, String)> = files.into_iter().map(hash).collect();
    assert_eq!(found, known, "run launcher-tests/manifests.py with --write");
}

/// Begin of the line that a pod of a static job prints while it waits.
const STATIC: &str = "waiting for node 0 at ";

/// Runs a manifest whose pods start last to first, and have names only after pod 1 has said that it waits.
fn run(file: &str, waits: &str) {
    let pods = pods_of(file);
    let cluster = match Cluster::up(pods.len(), WORKER) {
        Ok(cluster) => cluster,
        Err(why) => return skip(format!("pods of {file}: {why}")),
    };
    let mut running: Vec<Launcher> =
        (1..=pods.len()).rev().map(|host| cluster.start(&pods[host - 1], host)).collect();
    running.reverse();
    wait_until("a pod to miss the name of node 0", || running[1].stderr().contains(waits).then_some(()));
    for (pod, host) in pods.iter().zip(1..) {
        cluster.set_name(pod, Some(address(host)));
    }
    let ended: Vec<_> = running.into_iter().map(|pod| pod.wait().expect_exit_code(0)).collect();

    let texts: Vec<_> = ended.iter().map(|ended| ended.stdout.as_str()).collect();
    let all = texts.concat();
    let workers = texts[0].matches(", process 1 is ").count();
    assert!(workers > 0, "{all}{}", ended[0].stderr);
    let size = workers * pods.len();
    for (node, (pod, text)) in pods.iter().zip(&texts).enumerate() {
        let has_check = pod.containers.len() == 2;
        let checked = text.split(", process 1 is ").next().unwrap_or_default();
        assert_eq!(checked.contains("convoke check: 4 nodes checked"), has_check, "{all}");
        for local_rank in 0..workers {
            let rank = node * workers + local_rank;
            let place = format!("rank {rank} of {size} on node {node}");
            let said = format!("pod {}, process 1 is convoke: {place}: --epochs 2\n", pod.name);
            assert_eq!(text.matches(&said).count(), 1, "{said}{all}");
            let met = format!("{}\n", group_line(rank, size, local_rank, workers));
            assert_eq!(text.matches(&met).count(), 1, "{met}{all}");
        }
        assert_eq!(text.matches(", process 1 is ").count(), workers, "{all}");
        assert_eq!(cluster.termination_message(pod), "", "of a pod that succeeded");
    }
    assert_eq!(cluster.job.processes(), [0; 0]);
}

#[test]
fn pods_of_the_job_run_its_command() {
    run("k8s-job.yaml", STATIC);
}

#[test]
fn pods_of_the_job_with_a_check_run_it_before_the_command() {
    assert_eq!(pods_of("k8s-check.yaml")[0].containers.len(), 2);
    run("k8s-check.yaml", STATIC);
}

#[test]
fn pods_of_the_job_set_run_its_command() {
    run("k8s-jobset.yaml", STATIC);
}

#[test]
fn pods_of_the_pytorch_job_run_its_command() {
    run("k8s-pytorchjob.yaml", STATIC);
}

#[test]
fn pods_of_the_train_job_run_its_command() {
    run("k8s-trainjob.yaml", STATIC);
}

#[test]
fn pods_of_the_volcano_job_run_its_command() {
    run("k8s-volcano.yaml", STATIC);
}

#[test]
fn pods_of_the_elastic_job_run_its_command() {
    run("k8s-elastic.yaml", "digits-0.digits:29400");
}
