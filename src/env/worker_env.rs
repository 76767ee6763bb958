//! The environment variables that describe one worker: writing and reading them.

use crate::ancestor;
use crate::error::{EnvError, check_below, invalid, parse_value};
use crate::generation::Generation;
use crate::placement::Placement;
use crate::vars;

/// Role of a worker, and its rank among the workers of that role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Role {
    /// Name of the role, the value of `--role`.
    pub name: String,
    /// Rank among the workers of this role on all nodes.
    pub rank: usize,
    /// Number of workers of this role on all nodes.
    pub world_size: usize,
}

/// The contents of torchrun's variables for one worker.
///
/// To join a job by `env://`, `rank`, `world_size`, `master_addr` and `master_port` must be set.
/// Launchers other than torchrun may leave out the other variables; the defaults then describe a job
/// on one node. Under `mpirun` and `srun`, variables of these programs replace torchrun's variables
/// that are not set (`docs/reference/joining.md`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerEnv {
    /// Global rank, below `world_size`.
    pub rank: usize,
    /// Number of workers in the job, at least 1.
    pub world_size: usize,
    /// Index on this node. With `--virtual-local-rank` it is 0 for all workers.
    pub local_rank: usize,
    /// Number of workers on this node.
    pub local_world_size: usize,
    /// Rank of this node.
    pub group_rank: usize,
    /// Number of nodes in this rendezvous round.
    pub group_world_size: usize,
    /// Role, and rank among the workers of that role.
    pub role: Role,
    /// Host of the key-value store for the workers.
    pub master_addr: String,
    /// Port of the key-value store for the workers.
    pub master_port: u16,
    /// Number of restarts that this agent has used up.
    pub restart_count: u32,
    /// Value of `--max-restarts`.
    pub max_restarts: u32,
    /// Job id.
    pub run_id: String,
    /// True if the agent serves the store. Otherwise rank 0 must serve it.
    pub use_agent_store: bool,
    /// Path of the file for the error of this worker; `None` if the launcher writes no log files.
    pub error_file: Option<String>,
    /// Generation of the rendezvous round; `None` under another launcher.
    pub generation: Option<Generation>,
}

impl WorkerEnv {
    /// Returns the variables of this worker, in a fixed order.
    #[must_use]
    pub fn to_vars(&self) -> Vec<(&'static str, String)> {
        let mut out = vec![
            (vars::RANK, self.rank.to_string()),
            (vars::WORLD_SIZE, self.world_size.to_string()),
            (vars::LOCAL_RANK, self.local_rank.to_string()),
            (vars::LOCAL_WORLD_SIZE, self.local_world_size.to_string()),
            (vars::GROUP_RANK, self.group_rank.to_string()),
            (vars::GROUP_WORLD_SIZE, self.group_world_size.to_string()),
            (vars::ROLE_NAME, self.role.name.clone()),
            (vars::ROLE_RANK, self.role.rank.to_string()),
            (vars::ROLE_WORLD_SIZE, self.role.world_size.to_string()),
            (vars::MASTER_ADDR, self.master_addr.clone()),
            (vars::MASTER_PORT, self.master_port.to_string()),
            (vars::RESTART_COUNT, self.restart_count.to_string()),
            (vars::MAX_RESTARTS, self.max_restarts.to_string()),
            (vars::RUN_ID, self.run_id.clone()),
            (vars::USE_AGENT_STORE, if self.use_agent_store { "True" } else { "False" }.to_owned()),
            (vars::ERROR_FILE, self.error_file.clone().unwrap_or_default()),
        ];
        if let Some(generation) = self.generation {
            out.push((vars::GENERATION, generation.to_string()));
        }
        out
    }

    /// Reads the variables of this process; `None` if they do not describe a worker.
    ///
    /// # Errors
    /// Returns the errors of [`WorkerEnv::from_vars`].
    pub fn from_process() -> Result<Option<Self>, EnvError> {
        let get = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        // A Hydra proxy on each host starts the ranks there. The proxy is the nearest ancestor without
        // PMI_RANK, and its pid identifies the job on this host.
        let local_job = || Some(format!("hydra-{}", ancestor::nearest_ancestor_without("PMI_RANK")?));
        Self::read(get, local_job)
    }

    /// Reads the variables through `get`, which returns the value of a variable. Returns `None` if
    /// none of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT is set and neither mpirun nor srun
    /// started this process.
    ///
    /// # Errors
    /// [`EnvError`] if variables are missing or a value is malformed or out of range.
    pub fn from_vars(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, EnvError> {
        Self::read(get, || None)
    }

    /// Reads the variables as [`Self::from_vars`] does. `local_job` returns an identity for the
    /// processes of an MPICH job on this host.
    pub(crate) fn read(
        explicit: impl Fn(&str) -> Option<String>,
        local_job: impl FnOnce() -> Option<String>,
    ) -> Result<Option<Self>, EnvError> {
        const NEEDED: [&str; 4] = [vars::RANK, vars::WORLD_SIZE, vars::MASTER_ADDR, vars::MASTER_PORT];
        // Torchrun's variables have precedence over those of mpirun and srun. If RANK or WORLD_SIZE is
        // set, all needed ones must be.
        let by_hand = explicit(vars::RANK).or_else(|| explicit(vars::WORLD_SIZE)).is_some();
        let placed = if by_hand { None } else { Placement::from_vars(&explicit, local_job)? };
        let get = |name: &str| explicit(name).or_else(|| placed.as_ref()?.torchrun_var(name));
        let (present, missing): (Vec<_>, Vec<_>) = NEEDED.into_iter().partition(|name| get(name).is_some());
        if present.is_empty() {
            return Ok(None);
        }
        match (missing.first(), &placed) {
            (None, _) => {}
            (Some(first), Some(placed)) => return Err(placed.missing_error(first)),
            (Some(_), None) => return Err(EnvError::Missing { present, missing }),
        }
        let needed = |name: &str| get(name).expect("a missing variable has returned an error");
        let needed_number = |name: &'static str| parse_value(name, &needed(name), "a whole number");
        // Reads an index and a count, which is larger.
        let index = |index: &'static str, count: &'static str, default: (usize, usize)| {
            check_below((index, number(get, index, default.0)?), (count, number(get, count, default.1)?))
        };
        let whole = (needed_number(vars::RANK)?, needed_number(vars::WORLD_SIZE)?);
        let (rank, world_size) = check_below((vars::RANK, whole.0), (vars::WORLD_SIZE, whole.1))?;
        let (local_rank, local_world_size) = index(vars::LOCAL_RANK, vars::LOCAL_WORLD_SIZE, whole)?;
        let (group_rank, group_world_size) = index(vars::GROUP_RANK, vars::GROUP_WORLD_SIZE, (0, 1))?;
        let role = index(vars::ROLE_RANK, vars::ROLE_WORLD_SIZE, whole)?;
        let master_addr = needed(vars::MASTER_ADDR);
        if master_addr.is_empty() {
            return Err(invalid(vars::MASTER_ADDR, &master_addr, "a host name or address"));
        }
        let master_port = parse_value(vars::MASTER_PORT, &needed(vars::MASTER_PORT), "a port (0 to 65535)")?;
        let text = |name: &str, default: &str| get(name).unwrap_or_else(|| default.to_owned());
        let use_agent_store = match get(vars::USE_AGENT_STORE).as_deref() {
            None | Some("" | "False") => false,
            Some("True") => true,
            Some(other) => return Err(invalid(vars::USE_AGENT_STORE, other, "True or False")),
        };
        let parse_generation = |value: String| {
            value
                .parse()
                .map_err(|_| invalid(vars::GENERATION, &value, "a generation (32 hexadecimal digits)"))
        };
        let generation = get(vars::GENERATION).map(parse_generation).transpose()?;
        Ok(Some(Self {
            rank,
            world_size,
            local_rank,
            local_world_size,
            group_rank,
            group_world_size,
            role: Role { name: text(vars::ROLE_NAME, "default"), rank: role.0, world_size: role.1 },
            master_addr,
            master_port,
            restart_count: number(get, vars::RESTART_COUNT, 0)?,
            max_restarts: number(get, vars::MAX_RESTARTS, 0)?,
            run_id: text(vars::RUN_ID, "none"),
            use_agent_store,
            error_file: get(vars::ERROR_FILE).filter(|path| !path.is_empty()),
            generation,
        }))
    }
}

/// Parses the number in the variable `name`; returns `default` if it is not set.
fn number<N: std::str::FromStr>(
    get: impl Fn(&str) -> Option<String>,
    name: &'static str,
    default: N,
) -> Result<N, EnvError> {
    get(name).map_or(Ok(default), |value| parse_value(name, &value, "a whole number"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn worker() -> WorkerEnv {
        WorkerEnv {
            rank: 5,
            world_size: 8,
            local_rank: 1,
            local_world_size: 4,
            group_rank: 1,
            group_world_size: 2,
            role: Role { name: "trainer".to_owned(), rank: 3, world_size: 6 },
            master_addr: "node-0".to_owned(),
            master_port: 29500,
            restart_count: 2,
            max_restarts: 3,
            run_id: "job7".to_owned(),
            use_agent_store: true,
            error_file: Some("/tmp/error.json".to_owned()),
            generation: Some(Generation::from_bytes([7; 16])),
        }
    }

    fn read(pairs: &[(&str, &str)]) -> Result<Option<WorkerEnv>, EnvError> {
        let map: HashMap<_, _> = pairs.iter().copied().collect();
        WorkerEnv::from_vars(|name| map.get(name).map(|&value| value.to_owned()))
    }

    const MINIMAL: [(&str, &str); 4] =
        [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")];

    #[test]
    fn variables_round_trip() {
        let sparse = WorkerEnv { error_file: None, generation: None, ..worker() };
        for worker in [worker(), sparse] {
            let map: HashMap<_, _> = worker.to_vars().into_iter().collect();
            assert_eq!(WorkerEnv::from_vars(|name| map.get(name).cloned()), Ok(Some(worker)));
        }
    }

    #[test]
    fn worker_environment_without_variables_is_none() {
        assert_eq!(read(&[("LOCAL_RANK", "3"), ("HOME", "/root")]), Ok(None));
    }

    #[test]
    fn four_variables_suffice_from_another_launcher() {
        let worker = read(&MINIMAL).unwrap().unwrap();
        assert_eq!((worker.rank, worker.local_rank, worker.local_world_size), (1, 1, 2));
        assert_eq!((worker.generation, worker.use_agent_store), (None, false));
    }

    #[test]
    fn missing_variables_are_named() {
        let error = read(&MINIMAL[..2]).unwrap_err().to_string();
        assert!(error.starts_with("RANK, WORLD_SIZE set, but not MASTER_ADDR, MASTER_PORT"), "{error}");
    }

    #[test]
    fn malformed_values_are_named() {
        let cases = [
            ("RANK", "-1", "RANK=\"-1\" is not a whole number"),
            ("RANK", "", "RANK=\"\" is not a whole number"),
            ("RANK", "2", "RANK=2 is out of range: WORLD_SIZE=2 allows 0 to 1"),
            ("RANK", "99999999999999999999999", "is not a whole number"),
            ("WORLD_SIZE", "two", "WORLD_SIZE=\"two\" is not a whole number"),
            ("WORLD_SIZE", "0", "RANK=1 is out of range: WORLD_SIZE=0"),
            ("MASTER_ADDR", "", "MASTER_ADDR=\"\" is not a host name or address"),
            ("MASTER_PORT", "70000", "MASTER_PORT=\"70000\" is not a port"),
            ("MASTER_PORT", "http", "MASTER_PORT=\"http\" is not a port"),
            ("LOCAL_RANK", "4", "LOCAL_RANK=4 is out of range: LOCAL_WORLD_SIZE=2"),
            ("LOCAL_WORLD_SIZE", "1.5", "LOCAL_WORLD_SIZE=\"1.5\" is not a whole number"),
            ("GROUP_RANK", "1", "GROUP_RANK=1 is out of range: GROUP_WORLD_SIZE=1"),
            ("ROLE_RANK", "9", "ROLE_RANK=9 is out of range"),
            ("TORCHELASTIC_RESTART_COUNT", "-1", "TORCHELASTIC_RESTART_COUNT=\"-1\" is not a whole number"),
            ("TORCHELASTIC_USE_AGENT_STORE", "yes", "is not True or False"),
            ("CONVOKE_GENERATION", "xyz", "CONVOKE_GENERATION=\"xyz\" is not a generation"),
        ];
        for (name, value, message) in cases {
            let mut pairs: Vec<_> = MINIMAL.iter().copied().filter(|&(n, _)| n != name).collect();
            pairs.push((name, value));
            let error = read(&pairs).unwrap_err().to_string();
            assert!(error.contains(message), "{name}={value}: {error}");
        }
    }
}
