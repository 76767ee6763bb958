//! `convoke check` names hosts whose software or GPUs are not those of the other hosts, or whose address is taken.

use std::fs;

use convoke_launcher_tests::harness::Job;
use convoke_launcher_tests::path_argument;
use convoke_launcher_tests::slurm::Slurm;
use convoke_testkit::gpu;
use convoke_testkit::programs::user_program;

use crate::checked_hosts::{Checked, LIMIT, mistake};
use crate::ssh_hosts::convoke_of_another_version;

#[test]
fn host_with_another_convoke_is_named() {
    let Some(checked) = Checked::up_or_skip(3, "checks of versions of convoke") else { return };
    let [usual, other] = convoke_of_another_version(&checked.job.path("other"));
    let before = format!("mount --bind $JOB/other {}", path_argument(user_program("convoke")));
    let text = format!("convoke is {other}, {usual} on h1, h3");
    checked.assert_named(&mistake(2, &before), "FAIL", "h2", &[&text]);
}

/// The packages are folders as pip makes them, and the real Python finds them.
#[test]
fn host_with_another_torch_nccl_or_script_is_named() {
    let Some(checked) = Checked::up_or_skip(3, "checks of versions of packages") else { return };
    let packages = |site: &str, torch: &str, nccl: &str| {
        for (package, version) in [("torch", torch), ("nvidia_nccl_cu12", nccl)] {
            let folder = checked.job.path(site).join(format!("{package}-{version}.dist-info"));
            fs::create_dir_all(&folder).unwrap();
            let name = package.replace('_', "-");
            let metadata = format!("Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n");
            fs::write(folder.join("METADATA"), metadata).unwrap();
        }
    };
    packages("site", "2.7.1", "2.26.2");
    packages("other-torch", "2.6.0", "2.26.2");
    packages("other-nccl", "2.7.1", "2.21.5");
    let check = |odd: &str| {
        checked.check_each(|host| {
            let before = if host == 2 { odd } else { "" };
            (format!("export PYTHONPATH=$JOB/site; {before}"), "train.py".to_owned())
        })
    };
    let healthy = check("");
    assert!(healthy.nodes[0].stdout.contains("ready for the job\n"), "{}", healthy.text());
    let torch = check("mount --bind $JOB/other-torch $JOB/site");
    torch.assert_names("FAIL", "h2", &["torch is 2.6.0, 2.7.1 on h1, h3"]);
    let nccl = check("mount --bind $JOB/other-nccl $JOB/site");
    nccl.assert_names("FAIL", "h2", &["NCCL is 2.21.5, 2.26.2 on h1, h3"]);
    fs::write(checked.job.path("old.py"), "print('training as before')\n").unwrap();
    let script = check("mount --bind $JOB/old.py $JOB/train.py");
    script.assert_names("FAIL", "h2", &["hash of train.py is ", " on h1, h3"]);
    for result in [torch, nccl, script] {
        assert!(result.nodes[0].stdout.contains(": 1 failure\n"), "nothing else is named: {}", result.text());
    }
}

#[test]
fn host_with_other_variables_of_nccl_is_named_and_secrets_stay_on_it() {
    let Some(checked) = Checked::up_or_skip(3, "checks of variables") else { return };
    let check = |usual: &str, odd: &str| {
        checked.check_each(|host| (if host == 3 { odd } else { usual }.to_owned(), String::new()))
    };
    let usual = "export NCCL_ALGO=Ring NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=eth0 NCCL_API_KEY=one";
    let odd = "export NCCL_ALGO=Tree NCCL_BUFFSIZE= NCCL_SOCKET_IFNAME=eth NCCL_API_KEY=two";
    let result = check(usual, odd);
    for text in [
        "$NCCL_ALGO is Tree, Ring on h1, h2",
        "$NCCL_IB_DISABLE is missing, 1 on h1, h2",
        "$NCCL_BUFFSIZE is empty, missing on h1, h2",
    ] {
        result.assert_names("WARN", "h3", &[text]);
    }
    let text = &result.nodes[0].stdout;
    assert!(text.contains("ready for the job, 3 warnings\n") && !text.contains("NCCL_API_KEY"), "{text}");
}

#[test]
fn host_whose_gpus_are_hidden_or_missing_is_named() {
    let Some(checked) = Checked::up_or_skip(3, "checks of visible GPUs") else { return };
    let library = format!("export LD_LIBRARY_PATH={} CONVOKE_KMSG=/dev/null", gpu::libraries().display());
    let check = |flags: &str, odd: &str| {
        checked.check_each(|host| {
            let own = if host == 2 { odd } else { "" };
            (format!("{library} SIMULATED_GPUS=2 {own}"), flags.to_owned())
        })
    };
    let hidden = check("", "CUDA_VISIBLE_DEVICES=");
    hidden.assert_names("WARN", "h2", &["GPUs is 0, 2 on h1, h3"]);
    let why = "CUDA_VISIBLE_DEVICES= shows no GPU; without it there are 2 GPUs";
    hidden.assert_names("WARN", "h2", &[why]);
    // The job would not start there. The report of node 0 says so, and has all else about the host.
    let per_gpu = check("--nproc-per-node=gpu", "CUDA_VISIBLE_DEVICES=");
    per_gpu.assert_names("FAIL", "h2", &["--nproc-per-node=gpu: ", why]);
    let none = check("--nproc-per-node=gpu", "SIMULATED_GPUS=0");
    none.assert_names("FAIL", "h2", &["--nproc-per-node=gpu: no GPU was found ("]);
    let few = check("--nproc-per-node=2 --gpus-per-worker=1", "SIMULATED_GPUS=1");
    few.assert_names("FAIL", "h2", &["--gpus-per-worker: "]);
    for result in [per_gpu, none, few] {
        let text = &result.nodes[0].stdout;
        assert!(text.contains("convoke check: 3 nodes checked in "), "{}", result.text());
        assert!(result.nodes.iter().all(|node| node.status.code() == Some(1)), "{}", result.text());
    }
}

#[test]
fn gpus_that_slurm_gives_and_no_host_sees_are_named() {
    let Some(slurm) = Slurm::up_or_skip(2, "checks of GPUs in Slurm") else { return };
    let job = Job::new();
    let convoke = path_argument(user_program("convoke"));
    let words = ["srun", "-N2", "--ntasks-per-node=1", "--gres=gpu:2", &convoke, "check", "true"];
    let checked = slurm.run(&job, &words, &[]).expect_exit_code(1);
    let line = |begin: &str| checked.stdout.lines().any(|line| line.starts_with(begin));
    for host in ["h1", "h2"] {
        let found = line(&format!("FAIL {host}"));
        assert!(found || line("FAIL h1, h2: ") || line("FAIL h2, h1: "), "{host}: {}", checked.stdout);
    }
    let (what, remedy) = ("has 2 GPUs on this node, but none is visible", "try: is the driver loaded there");
    assert!(checked.stdout.contains(what) && checked.stdout.contains(remedy), "{}", checked.stdout);
}

#[test]
fn hosts_with_one_address_are_named() {
    let Some(checked) = Checked::up_or_skip(3, "checks of doubled addresses") else { return };
    // As behind NAT: both hosts reach node 0, and publish one address.
    checked.on(3, "echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore; ip addr add 10.77.0.2/32 dev lo");
    let published = checked.check_each(|host| {
        (String::new(), if host == 3 { "--local-addr=10.77.0.2".to_owned() } else { String::new() })
    });
    let text = "have one address, 10.77.0.2, so others reach only one of them by it";
    published.assert_names("FAIL", "h2, h3", &[text]);

    // On one network, h3 took the address of h2, and h1 answers to h3.
    checked.on(3, "ip addr del 10.77.0.2/32 dev lo; ip addr del 10.77.0.3/24 dev eth0; ip addr add 10.77.0.2/24 dev eth0");
    checked.on(1, "ip neigh replace 10.77.0.2 lladdr 02:77:00:00:00:03 dev eth0 nud permanent");
    let taken = checked.check("", None);
    taken.assert_names("WARN", "h3", &["its own name h3 means 10.77.0.3, which is no address of it"]);
    taken.assert_names("FAIL", "node 1", &["did not come to the check within 3 s"]);
    let own = &taken.nodes[1].stdout;
    assert!(own.contains("FAIL h2: node 0 cannot be reached at h1:29500 within 3 s"), "{}", taken.text());
    assert!(taken.took < LIMIT, "{:?}", taken.took);
}
