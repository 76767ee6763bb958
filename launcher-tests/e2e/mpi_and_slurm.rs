//! Workers that other launchers start: mpirun of Open MPI and of MPICH, and srun.

use convoke_launcher_tests::harness::{Job, ProcessOutput};
use convoke_launcher_tests::hosts::missing_requirement;
use convoke_launcher_tests::slurm::Slurm;
use convoke_launcher_tests::{group_line, path_argument, worker_command};
use convoke_testkit::programs::user_program;
use convoke_testkit::skip;

/// Executes its arguments in a network namespace with loopback only, because mpirun listens on all
/// addresses.
const LOOPBACK_UP: &str = "ip link set lo up && exec \"$@\"";
const OPEN_MPI: &[&str] = &["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"];

/// Runs `launcher rest...` in its own network namespace. Reports a skipped test and returns `None` if that is
/// impossible here.
fn run(launcher: &[&str], rest: &[&str]) -> Option<ProcessOutput> {
    if let Some(why) = missing_requirement(&["unshare", "ip", launcher[0]]) {
        skip(format!("workers under {}: {why}", launcher[0]));
        return None;
    }
    let job = Job::new();
    let mut command = job.command_for_program("unshare", ["--net", "sh", "-c", LOOPBACK_UP, "sh"]);
    command.args(launcher).args(rest);
    Some(job.start(command).wait().expect_exit_code(0))
}

/// Returns the expected output of all workers in rank order; `here` has local rank and local size of each
/// rank.
fn expected(here: &[(usize, usize)]) -> Vec<String> {
    let size = here.len();
    let line =
        |(rank, &(local, local_size)): (usize, &(usize, usize))| group_line(rank, size, local, local_size);
    here.iter().enumerate().map(line).collect()
}

fn rank_lines(ended: &ProcessOutput) -> Vec<String> {
    let mut lines: Vec<_> =
        ended.stdout.lines().filter(|line| line.starts_with("rank ")).map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn workers_start_under_open_mpi_mpirun() {
    let [program, role] = worker_command("group");
    let Some(ended) = run(OPEN_MPI, &["-np", "3", &program, &role]) else { return };
    assert_eq!(rank_lines(&ended), expected(&[(0, 3), (1, 3), (2, 3)]), "{}", ended.stderr);
}

#[test]
fn workers_start_under_mpich_mpirun() {
    let [program, role] = worker_command("group");
    let Some(ended) = run(&["mpirun.mpich"], &["-n", "3", &program, &role]) else { return };
    assert_eq!(rank_lines(&ended), expected(&[(0, 3), (1, 3), (2, 3)]), "{}", ended.stderr);
    // A shell between mpirun and the worker must make no difference.
    let script = format!("{program} {role}; exit $?");
    let Some(ended) = run(&["mpirun.mpich"], &["-n", "2", "sh", "-c", &script]) else { return };
    assert_eq!(rank_lines(&ended), expected(&[(0, 2), (1, 2)]), "{}", ended.stderr);
}

#[test]
fn launcher_under_mpirun_sets_the_ranks_of_its_workers() {
    let [program, role] = worker_command("group");
    let launcher = path_argument(user_program("convoke"));
    let rest = ["-np", "1", &launcher, "--nproc-per-node=2", &program, &role];
    let Some(ended) = run(OPEN_MPI, &rest) else { return };
    assert_eq!(rank_lines(&ended), expected(&[(0, 2), (1, 2)]), "{}", ended.stderr);
}

#[test]
fn workers_start_on_two_hosts_under_srun_and_mpirun() {
    if let Some(why) = missing_requirement(&["mpirun.openmpi", "mpirun.mpich"]) {
        skip(format!("workers under srun, and under mpirun inside of Slurm: {why}"));
        return;
    }
    let Some(slurm) = Slurm::up_or_skip(2, "workers under srun, and under mpirun inside of Slurm") else {
        return;
    };
    let [program, role] = worker_command("group");
    let job = Job::new();
    let check = |arguments: &[&str], variables: &[(&str, &str)], here: &[(usize, usize)]| {
        let ended = slurm.run(&job, arguments, variables).expect_exit_code(0);
        assert_eq!(rank_lines(&ended), expected(here), "{arguments:?}: {}", ended.stderr);
    };
    check(&["srun", "-N2", "-n3", &program, &role], &[], &[(0, 2), (1, 2), (0, 1)]);
    check(&["srun", "--mpi=pmi2", "-N1", "-n2", &program, &role], &[], &[(0, 2), (1, 2)]);
    let both = [(0, 2), (1, 2), (0, 2), (1, 2)];
    let job_of_4 = ["salloc", "-Q", "-N2", "--ntasks-per-node=2"];
    check(&[&job_of_4[..], &["mpirun.openmpi", "--allow-run-as-root", &program, &role]].concat(), &[], &both);
    check(&[&job_of_4[..], &["mpirun.mpich", "-n", "4", "-ppn", "2", &program, &role]].concat(), &[], &both);

    // If rank 0 is not on the first node, it must report that it cannot serve the store. MASTER_ADDR then
    // corrects the address.
    let list = job.path("hosts");
    std::fs::write(&list, "h2\nh1\n").unwrap();
    let list = ("SLURM_HOSTFILE", list.to_str().unwrap());
    let turned = ["srun", "-K", "-N2", "-n2", "-m", "arbitrary"];
    // Each task writes its own error file. When the step is killed, output on its way to srun is lost.
    let errors = format!("exec {program} {role} 2> '{}'.$SLURM_PROCID", job.path("errors").display());
    let ended = slurm.run(&job, &[&turned[..], &["sh", "-c", &errors]].concat(), &[list]);
    assert_ne!(ended.status.code(), Some(0));
    let said_by_0 = std::fs::read_to_string(job.path("errors.0")).unwrap();
    assert!(said_by_0.contains("cannot serve the store at h1:"), "{said_by_0}{}", ended.stderr);
    assert!(said_by_0.contains("MASTER_ADDR and MASTER_PORT win"), "{said_by_0}");
    check(&[&turned[..], &[&program, &role]].concat(), &[list, ("MASTER_ADDR", "h2")], &[(0, 1), (0, 1)]);
}
