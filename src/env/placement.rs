//! Translates the variables that mpirun and srun set for a process to those of torchrun. Pure.
//!
//! mpirun and srun tell a process its rank, but not the address of rank 0. That address is derived
//! from other variables that they set.

use crate::error::{EnvError, check_below, invalid, parse_value};
use crate::slurm::{first_host, tasks_of_nodes};
use crate::vars;

/// The range from which a job without MASTER_PORT gets its port. It lies below the ephemeral ports of
/// Linux.
const PORTS: std::ops::Range<u16> = 20_000..30_000;

/// The program that started this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JobLauncher {
    OpenMpi,
    /// The mpirun of MPICH and of MPIs derived from it.
    Hydra,
    Srun,
}

/// Rank and node of this process, as the job launcher's variables tell them.
#[derive(Debug)]
pub(crate) struct Placement {
    launcher: JobLauncher,
    /// Rank, and number of ranks.
    rank: (usize, usize),
    /// Rank on the node, and number of ranks there.
    local_rank: (usize, usize),
    /// Rank of the node, and number of nodes; only srun sets variables with them.
    node: Option<(usize, usize)>,
    /// Identity of this job: equal on all ranks of the job, and different from that of other jobs on
    /// this host.
    job: Option<String>,
    /// Name or address of the host that should run rank 0.
    master: Option<String>,
    restart_count: Option<String>,
}

impl Placement {
    /// Reads the variables of mpirun or srun; `None` if neither started this process.
    ///
    /// The variables of mpirun have precedence: inside a Slurm job, its processes also have Slurm's
    /// variables, which describe other processes. `local_job` returns an identity for the processes of
    /// a Hydra job on this host, because Hydra sets no variable with one.
    ///
    /// # Errors
    /// [`EnvError`] if a variable is missing, malformed or out of range.
    pub(crate) fn from_vars(
        get: impl Fn(&str) -> Option<String>,
        local_job: impl FnOnce() -> Option<String>,
    ) -> Result<Option<Self>, EnvError> {
        let has = |name: &str| get(name).is_some();
        let needed = |name: &'static str| {
            get(name).ok_or_else(|| invalid(name, "", "set, though other variables of this launcher are"))
        };
        let number = |name: &'static str| parse_value::<usize>(name, &needed(name)?, "a whole number");
        // Returns an index and a count, which is larger.
        let index = |index: &'static str, count: &'static str| {
            check_below((index, number(index)?), (count, number(count)?))
        };
        let slurm_job = || Some(format!("slurm-{}.{}", get("SLURM_JOB_ID")?, get("SLURM_STEP_ID")?));
        let first_node = |list: &str| get(list).and_then(|nodes| first_host(&nodes));
        let placement = if has("OMPI_COMM_WORLD_RANK") {
            let job = get("PMIX_NAMESPACE").or_else(|| get("OMPI_MCA_ess_base_jobid"));
            let mpirun = || get("OMPI_MCA_orte_hnp_uri").and_then(|uri| first_address(&uri));
            Self {
                launcher: JobLauncher::OpenMpi,
                rank: index("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")?,
                local_rank: index("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")?,
                node: None,
                job: job.map(|job| format!("mpirun-{job}")),
                // The node list comes first: in a Slurm job, mpirun may run on a login node outside
                // the job's nodes.
                master: first_node("SLURM_JOB_NODELIST").or_else(mpirun),
                restart_count: get("SLURM_RESTART_COUNT"),
            }
        } else if has("PMI_RANK") && has("MPI_LOCALRANKID") {
            let rank = index("PMI_RANK", "PMI_SIZE")?;
            let local_rank = index("MPI_LOCALRANKID", "MPI_LOCALNRANKS")?;
            Self {
                launcher: JobLauncher::Hydra,
                rank,
                local_rank,
                node: None,
                // Hydra starts its proxies on all hosts in one Slurm step, so the step identifies the
                // job on several hosts.
                job: if rank.1 == local_rank.1 { local_job() } else { slurm_job() },
                master: first_node("SLURM_JOB_NODELIST"),
                restart_count: get("SLURM_RESTART_COUNT"),
            }
        } else if has("SLURM_PROCID") && has("SLURM_STEP_ID") {
            // SLURM_STEP_ID excludes batch scripts, which have no step: their SLURM_PROCID is not the
            // rank of a worker.
            let total = if has("SLURM_STEP_NUM_TASKS") { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
            let node = index("SLURM_NODEID", "SLURM_STEP_NUM_NODES")?;
            let tasks = needed("SLURM_STEP_TASKS_PER_NODE")?;
            let tasks = tasks_of_nodes(&tasks).and_then(|all| all.get(node.0).copied()).ok_or_else(|| {
                invalid("SLURM_STEP_TASKS_PER_NODE", &tasks, "a list of counts with one for SLURM_NODEID")
            })?;
            let local_rank = ("SLURM_LOCALID", number("SLURM_LOCALID")?);
            let local_rank = check_below(local_rank, ("SLURM_STEP_TASKS_PER_NODE", tasks))?;
            Self {
                launcher: JobLauncher::Srun,
                rank: index("SLURM_PROCID", total)?,
                local_rank,
                node: Some(node),
                job: slurm_job(),
                master: first_node("SLURM_STEP_NODELIST"),
                restart_count: get("SLURM_RESTART_COUNT"),
            }
        } else {
            return Ok(None);
        };
        Ok(Some(placement))
    }

    /// Returns the value for torchrun's variable `name`; `None` if the launcher does not tell it.
    pub(crate) fn torchrun_var(&self, name: &str) -> Option<String> {
        let number = |number: usize| Some(number.to_string());
        match name {
            vars::RANK => number(self.rank.0),
            vars::WORLD_SIZE => number(self.rank.1),
            vars::LOCAL_RANK => number(self.local_rank.0),
            vars::LOCAL_WORLD_SIZE => number(self.local_rank.1),
            vars::GROUP_RANK => number(self.node?.0),
            vars::GROUP_WORLD_SIZE => number(self.node?.1),
            vars::RESTART_COUNT => self.restart_count.clone(),
            vars::RUN_ID => self.job.clone(),
            vars::MASTER_ADDR if self.rank.1 == self.local_rank.1 => Some("127.0.0.1".to_owned()),
            vars::MASTER_ADDR => self.master.clone(),
            vars::MASTER_PORT => Some(port(self.job.as_ref()?).to_string()),
            _ => None,
        }
    }

    /// Returns the error for a needed variable whose value the launcher does not tell.
    pub(crate) fn missing_error(&self, variable: &'static str) -> EnvError {
        let (rank, world_size) = self.rank;
        let (launcher, how) = match self.launcher {
            JobLauncher::OpenMpi => ("Open MPI's mpirun", format!("mpirun -x {variable}=...")),
            JobLauncher::Hydra => ("MPICH's mpirun", format!("mpirun -genv {variable} ...")),
            JobLauncher::Srun => ("srun", format!("export {variable}=... before srun")),
        };
        EnvError::NoMaster { launcher: launcher.to_owned(), rank, world_size, variable, how }
    }
}

/// Returns the port of a job without MASTER_PORT.
fn port(job: &str) -> u16 {
    job_ports(job, 1)[0]
}

/// Returns `count` ports in a row that are derived from the identity of a job (FNV-1a), so that all nodes
/// of a job try the same ports and two jobs most likely try different ones.
///
/// # Panics
/// If `count` is 0 or above 10,000.
#[must_use]
pub fn job_ports(job: &str, count: u16) -> Vec<u16> {
    let hash = job.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let all = PORTS.end - PORTS.start;
    assert!((1..=all).contains(&count), "{count} ports of {all}");
    let first = u16::try_from(hash % u64::from(all)).expect("the remainder is below 10,000");
    (first..first + count).map(|port| PORTS.start + port % all).collect()
}

/// Returns the first address of mpirun's contact URI, as in
/// `7.0;tcp://10.0.0.1,10.1.0.1:4000;tcp6://[::1]:4001`.
fn first_address(uri: &str) -> Option<String> {
    let (_, addresses) = uri.split_once("://")?;
    let end = addresses.find([',', ';']).unwrap_or(addresses.len());
    match addresses[..end].strip_prefix('[') {
        Some(v6) => Some(v6.split_once(']')?.0.to_owned()),
        None => addresses[..end].split(':').next().filter(|host| !host.is_empty()).map(str::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::worker_env::WorkerEnv;

    type Vars = [(&'static str, &'static str)];

    const OPEN_MPI: &Vars = &[
        ("OMPI_COMM_WORLD_RANK", "3"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("OMPI_COMM_WORLD_NODE_RANK", "1"),
        ("OMPI_MCA_orte_hnp_uri", "802095104.0;tcp://192.0.2.2,10.0.0.1:55807;tcp6://[fd00::2]:38355"),
        ("PMIX_NAMESPACE", "802095105"),
        ("PMIX_RANK", "3"),
    ];
    const HYDRA: &Vars = &[
        ("PMI_RANK", "1"),
        ("PMI_SIZE", "2"),
        ("PMI_FD", "8"),
        ("MPI_LOCALRANKID", "1"),
        ("MPI_LOCALNRANKS", "2"),
    ];
    const SRUN: &Vars = &[
        ("SLURM_JOB_ID", "7"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "2"),
        ("SLURM_NTASKS", "3"),
        ("SLURM_STEP_NUM_TASKS", "3"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_NODEID", "1"),
        ("SLURM_STEP_NUM_NODES", "2"),
        ("SLURM_STEP_NODELIST", "h[1-2]"),
        ("SLURM_JOB_NODELIST", "h[1-2]"),
        ("SLURM_STEP_TASKS_PER_NODE", "2,1"),
    ];
    /// Slurm's variables in a process of mpirun. They describe other processes.
    const WRONG_SLURM: &Vars = &[
        ("SLURM_JOB_ID", "7"),
        ("SLURM_STEP_ID", "1"),
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "1"),
        ("SLURM_NODEID", "0"),
        ("SLURM_JOB_NODELIST", "node[07-08]"),
    ];

    fn read(sets: &[&[(&str, &str)]]) -> Result<Option<WorkerEnv>, EnvError> {
        // The last set has precedence; an empty value stands for a variable that is not set.
        let get = |name: &str| {
            let pairs = sets.iter().rev().flat_map(|set| set.iter());
            let value = pairs.into_iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            value.filter(|value| !value.is_empty())
        };
        WorkerEnv::read(get, || Some("hydra-17".to_owned()))
    }

    fn worker(sets: &[&[(&str, &str)]]) -> WorkerEnv {
        read(sets).unwrap().unwrap()
    }

    fn place(worker: &WorkerEnv) -> (usize, usize, usize, usize) {
        (worker.rank, worker.world_size, worker.local_rank, worker.local_world_size)
    }

    /// The variables that torchrun sets.
    const TORCHRUN: &Vars = &[
        ("RANK", "1"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("GROUP_RANK", "0"),
        ("GROUP_WORLD_SIZE", "2"),
        ("ROLE_RANK", "1"),
        ("ROLE_WORLD_SIZE", "4"),
        ("MASTER_ADDR", "node-1"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_RESTART_COUNT", "1"),
        ("TORCHELASTIC_MAX_RESTARTS", "3"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("CONVOKE_GENERATION", "00000000000000000000000000000001"),
    ];

    proptest! {
        /// With random changes, the variables give an error or a worker that round-trips.
        #[test]
        fn random_variables_never_cause_a_panic(
            launcher in prop::sample::select(vec![TORCHRUN, OPEN_MPI, HYDRA, SRUN]),
            changes in prop::collection::vec(
                (
                    any::<prop::sample::Index>(),
                    "[0-3]|[0-9]{1,21}|[0-9](\\(x[0-9]{1,20}\\)(,[0-9])?)?|n\\[[0-9,-]{0,5}\\]?,?|.{0,12}",
                ),
                0..4,
            ),
        ) {
            let changes: Vec<_> =
                changes.iter().map(|(place, value)| (place.get(launcher).0, value.as_str())).collect();
            let (all, whole) = ([&[("MASTER_ADDR", "h"), ("MASTER_PORT", "1")], launcher, &changes], changes.is_empty());
            match read(&all) {
                Ok(Some(worker)) => {
                    let again = worker.to_vars();
                    let again: Vec<_> =
                        again.iter().map(|(name, value)| (*name, value.as_str())).collect();
                    prop_assert_eq!(read(&[&again]), Ok(Some(worker)));
                }
                Ok(None) => prop_assert!(!whole),
                Err(error) => prop_assert!(!whole && error.to_string().len() < 1000, "{}", error),
            }
        }
    }

    #[test]
    fn each_starter_provides_rank_and_local_rank() {
        let open_mpi = worker(&[OPEN_MPI]);
        assert_eq!(place(&open_mpi), (3, 4, 1, 2));
        assert_eq!(
            (open_mpi.master_addr.as_str(), open_mpi.run_id.as_str()),
            ("192.0.2.2", "mpirun-802095105")
        );
        let hydra = worker(&[HYDRA]);
        assert_eq!(place(&hydra), (1, 2, 1, 2));
        assert_eq!((hydra.master_addr.as_str(), hydra.run_id.as_str()), ("127.0.0.1", "hydra-17"));
        let srun = worker(&[SRUN]);
        assert_eq!(place(&srun), (2, 3, 0, 1));
        assert_eq!((srun.group_rank, srun.group_world_size), (1, 2));
        assert_eq!((srun.master_addr.as_str(), srun.run_id.as_str()), ("h1", "slurm-7.0"));
        assert!(PORTS.contains(&srun.master_port));
        assert!(!srun.use_agent_store);
    }

    #[test]
    fn mpirun_variables_outrank_slurm_and_rank_0_hosts_the_master() {
        let open_mpi = worker(&[OPEN_MPI, WRONG_SLURM]);
        assert_eq!((place(&open_mpi), open_mpi.master_addr.as_str()), ((3, 4, 1, 2), "node07"));
        let hydra = worker(&[HYDRA, WRONG_SLURM, &[("PMI_SIZE", "4")]]);
        assert_eq!((place(&hydra), hydra.master_addr.as_str()), ((1, 4, 1, 2), "node07"));
        assert_eq!(hydra.run_id, "slurm-7.1");
    }

    #[test]
    fn explicit_variables_win() {
        let master =
            [("MASTER_ADDR", "head"), ("MASTER_PORT", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "9")];
        for launcher in [OPEN_MPI, HYDRA, SRUN] {
            let worker = worker(&[launcher, &master]);
            assert_eq!((worker.master_addr.as_str(), worker.master_port), ("head", 1));
            assert_eq!((worker.local_rank, worker.local_world_size), (0, 9));
        }
        let torchrun = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")];
        assert_eq!(place(&worker(&[OPEN_MPI, HYDRA, SRUN, &torchrun])), (0, 1, 0, 1));
        let error = read(&[SRUN, &torchrun[..2]]).unwrap_err().to_string();
        assert!(error.starts_with("RANK, WORLD_SIZE set, but not MASTER_ADDR, MASTER_PORT"), "{error}");
    }

    #[test]
    fn processes_of_slurm_without_srun_get_no_rank() {
        assert_eq!(read(&[SRUN, &[("SLURM_STEP_ID", "")]]), Ok(None), "a batch script");
        assert_eq!(read(&[&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]]), Ok(None), "srun --mpi=pmi2 tells more");
    }

    #[test]
    fn missing_starter_variables_are_requested_with_advice() {
        let cases: [(&[&Vars], &str); 3] = [
            (
                &[OPEN_MPI, &[("OMPI_MCA_orte_hnp_uri", "")]],
                "Open MPI's mpirun started this process as rank 3 of 4, but MASTER_ADDR is not set: set it \
                 (mpirun -x MASTER_ADDR=...)",
            ),
            (&[HYDRA, &[("PMI_SIZE", "4")]], "MASTER_ADDR is not set: set it (mpirun -genv MASTER_ADDR ...)"),
            (
                &[SRUN, &[("SLURM_JOB_ID", "")]],
                "MASTER_PORT is not set: set it (export MASTER_PORT=... before",
            ),
        ];
        for (sets, message) in cases {
            let error = read(sets).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn malformed_values_are_named() {
        let cases = [
            (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "x", "OMPI_COMM_WORLD_RANK=\"x\" is not a whole number"),
            (
                OPEN_MPI,
                "OMPI_COMM_WORLD_RANK",
                "4",
                "OMPI_COMM_WORLD_RANK=4 is out of range: OMPI_COMM_WORLD_SIZE=4",
            ),
            (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "", "OMPI_COMM_WORLD_SIZE=\"\" is not set"),
            (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK", "2", "OMPI_COMM_WORLD_LOCAL_RANK=2 is out of range"),
            (OPEN_MPI, "MASTER_PORT", "http", "MASTER_PORT=\"http\" is not a port"),
            (HYDRA, "PMI_RANK", "2", "PMI_RANK=2 is out of range: PMI_SIZE=2"),
            (HYDRA, "PMI_SIZE", "-2", "PMI_SIZE=\"-2\" is not a whole number"),
            (HYDRA, "MPI_LOCALNRANKS", "", "MPI_LOCALNRANKS=\"\" is not set"),
            (SRUN, "SLURM_PROCID", "3", "SLURM_PROCID=3 is out of range: SLURM_STEP_NUM_TASKS=3"),
            (SRUN, "SLURM_NODEID", "2", "SLURM_NODEID=2 is out of range: SLURM_STEP_NUM_NODES=2"),
            (
                SRUN,
                "SLURM_STEP_TASKS_PER_NODE",
                "2",
                "=\"2\" is not a list of counts with one for SLURM_NODEID",
            ),
            (SRUN, "SLURM_STEP_TASKS_PER_NODE", "2(x", "is not a list of counts"),
            (SRUN, "SLURM_STEP_TASKS_PER_NODE", "2(x99999999999999999999)", "is not a list of counts"),
            (SRUN, "SLURM_STEP_NUM_NODES", "1", "SLURM_NODEID=1 is out of range: SLURM_STEP_NUM_NODES=1"),
            (SRUN, "SLURM_LOCALID", "1", "SLURM_LOCALID=1 is out of range"),
        ];
        for (launcher, name, value, message) in cases {
            let error = read(&[launcher, &[(name, value)]]).unwrap_err().to_string();
            assert!(error.contains(message), "{name}={value}: {error}");
        }
    }

    #[test]
    fn first_address_of_mpirun_is_decoded() {
        let addresses = [
            ("1.0;tcp6://[fd00::2]:38355", Some("fd00::2")),
            ("1.0;tcp://10.0.0.1:4", Some("10.0.0.1")),
            ("1.0;tcp://", None),
            ("1.0", None),
        ];
        for (uri, first) in addresses {
            assert_eq!(first_address(uri).as_deref(), first, "{uri}");
        }
    }
}
