//! A job step of Slurm, from the variables that srun sets for its tasks. Pure.

use std::collections::BTreeSet;

use convoke_env::{job_ports, slurm};

use super::{JOB_PORTS, NodeSearch, ScheduledJob};
use crate::formatting::count;

/// Ids from here on, as unsigned 32-bit numbers, are no steps of srun: batch script, interactive shell, ...
const FIRST_SPECIAL_STEP: u32 = 0xffff_fff0;

/// Facts about this process that the variables do not tell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SlurmStartContext {
    /// True if a user types at this process: its stdin is a terminal, and a shell started it.
    pub(crate) is_interactive: bool,
}

/// Reason for which this launcher cannot be a node of the Slurm job in which it runs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SlurmError {
    #[error(
        "{step} starts {tasks} tasks on one node, but one launcher starts all workers of a node\n  try: srun \
         --ntasks-per-node=1, and --nproc-per-node={tasks} of convoke for {tasks} workers on each node; or --scheduler=none \
         for a job of its own in each task"
    )]
    SeveralTasks { step: String, tasks: usize },
    /// Another task of the step reports [`SlurmError::SeveralTasks`].
    #[error("")]
    SeveralTasksReported,
    #[error(
        "slurm job {job} has {nodes} nodes, but {place} starts convoke once\n  try: put srun before it: srun \
         --ntasks-per-node=1 convoke ...; or --nnodes=1 for a job of this node alone"
    )]
    NoStep { job: String, nodes: usize, place: &'static str },
    #[error(
        "{step} has {nodes} nodes, but this shell (srun --pty) runs on one of them\n  try: srun --overlap \
         --ntasks-per-node=1 convoke ... in this shell; or --nnodes=1 for a job of this node alone"
    )]
    ShellOfOneNode { step: String, nodes: usize },
    #[error(
        "{name}={value:?}: {what}, though this is a job of Slurm\n  try: start it by srun, without changing SLURM_ variables; \
         or --scheduler=none"
    )]
    Variable { name: &'static str, value: String, what: &'static str },
}

/// Reads a Slurm job from its variables. Returns `None` outside of Slurm.
pub(crate) fn slurm_job(
    get: &dyn Fn(&str) -> Option<String>,
    start_context: SlurmStartContext,
) -> Result<Option<ScheduledJob>, SlurmError> {
    let Some(job) = get("SLURM_JOB_ID") else { return Ok(None) };
    let job = match (get("SLURM_ARRAY_JOB_ID"), get("SLURM_ARRAY_TASK_ID")) {
        (Some(array), Some(task)) => format!("{array}_{task}"),
        _ => job,
    };
    let variables = Variables { get, job };
    match variables.step()? {
        Some(step) => variables.job_of_step(step, start_context).map(Some),
        None => variables.job_without_step().map(Some),
    }
}

struct Variables<'a> {
    get: &'a dyn Fn(&str) -> Option<String>,
    /// The job's id as Slurm's tools show it.
    job: String,
}

impl Variables<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.get)(name)
    }

    /// Returns the value of a variable that srun always sets. If it is missing, the value is empty, which is
    /// refused as malformed.
    fn text(&self, name: &str) -> String {
        self.get(name).unwrap_or_default()
    }

    fn number(&self, name: &'static str) -> Result<usize, SlurmError> {
        let value = self.text(name);
        let wrong = SlurmError::Variable { name, value: value.clone(), what: "not a whole number" };
        value.parse().map_err(|_| wrong)
    }

    fn optional_number(&self, name: &str) -> Option<usize> {
        self.get(name)?.parse().ok().filter(|number| *number > 0)
    }

    /// Returns the number of the step; `None` in a batch script and in the shell of salloc.
    fn step(&self) -> Result<Option<u32>, SlurmError> {
        const NAME: &str = "SLURM_STEP_ID";
        let Some(text) = self.get(NAME) else { return Ok(None) };
        let what = "neither a step nor a special step";
        let wrong = || SlurmError::Variable { name: NAME, value: text.clone(), what };
        // Slurm prints special numbers as signed ones in some versions.
        let number: i64 = text.parse().map_err(|_| wrong())?;
        let number = u32::try_from(number).or(i32::try_from(number).map(i32::cast_unsigned));
        let number = number.map_err(|_| wrong())?;
        Ok((number < FIRST_SPECIAL_STEP).then_some(number))
    }

    /// Returns how often the job was requeued.
    fn restarts(&self) -> String {
        self.get("SLURM_RESTART_COUNT").unwrap_or_else(|| "0".to_owned())
    }

    fn job_of_step(&self, step: u32, place: SlurmStartContext) -> Result<ScheduledJob, SlurmError> {
        const NODES: &str = "SLURM_STEP_NUM_NODES";
        const NODE: &str = "SLURM_NODEID";
        const LIST: &str = "SLURM_STEP_NODELIST";
        const TASKS: &str = "SLURM_STEP_TASKS_PER_NODE";
        let label = format!("slurm job {}.{step}", self.job);
        let (nodes, node) = (self.number(NODES)?, self.number(NODE)?);
        let wrong = |name, what| Err(SlurmError::Variable { name, value: self.text(name), what });
        if nodes == 0 || nodes > slurm::MAX_HOSTS {
            return wrong(NODES, "not a number of nodes");
        }
        if node >= nodes {
            return wrong(NODE, "not below SLURM_STEP_NUM_NODES");
        }
        let tasks = self.text(TASKS);
        let Some(tasks) = slurm::tasks_of_nodes(&tasks) else { return wrong(TASKS, "not a list of counts") };
        if let Some(&most) = tasks.iter().max().filter(|most| **most > 1) {
            // One of the tasks reports it.
            return Err(match self.get("SLURM_PROCID").as_deref() {
                Some("0") | None => SlurmError::SeveralTasks { step: label, tasks: most },
                Some(_) => SlurmError::SeveralTasksReported,
            });
        }
        if nodes > 1 && place.is_interactive && self.get("SLURM_PTY_PORT").is_some() {
            return Err(SlurmError::ShellOfOneNode { step: label, nodes });
        }
        let list = self.text(LIST);
        let Some(name) = slurm::first_host(&list) else { return wrong(LIST, "not a list of hosts") };
        let id = format!("slurm-{}.{step}.{}", self.job, self.restarts());
        let (ports, port_source) = self.ports(&id)?;
        let addresses = [self.get("MASTER_ADDR"), self.get("SLURM_LAUNCH_NODE_IPADDR")];
        let sources = vec![
            format!("{label}; its id is {id}"),
            format!("nodes: {nodes}, from {NODES}; this is node {node}, from {NODE}"),
            format!("node 0: {name}, the first host of {LIST}={list}"),
            format!("port of node 0: {port_source}"),
        ];
        Ok(ScheduledJob {
            node_0: NodeSearch {
                job: label.clone(),
                name,
                ports,
                addresses: addresses.into_iter().flatten().collect(),
                asks_scontrol: true,
            },
            hosts: slurm::hosts(&list).unwrap_or_else(|_| Vec::new()),
            sources,
            warnings: Vec::new(),
            ..self.job_of_one_node(id, label, nodes, node)
        })
    }

    /// Returns the job of a batch script or of the shell of salloc.
    fn job_without_step(&self) -> Result<ScheduledJob, SlurmError> {
        let nodes = self.optional_number("SLURM_JOB_NUM_NODES").unwrap_or(1);
        let is_batch = self.get("SLURM_STEP_ID").is_none() && self.get("SLURMD_NODENAME").is_some();
        if nodes > 1 {
            let place = if is_batch { "its batch script" } else { "the shell of salloc" };
            return Err(SlurmError::NoStep { job: self.job.clone(), nodes, place });
        }
        let id = format!("slurm-{}.{}", self.job, self.restarts());
        let label = format!("slurm job {}", self.job);
        let mut job = self.job_of_one_node(id, label, 1, 0);
        if self.get("SLURMD_NODENAME").is_none() {
            job.warnings.push(format!(
                "this shell of salloc may be on another host than slurm job {}; put srun before convoke to run on its node",
                self.job
            ));
        }
        Ok(job)
    }

    fn job_of_one_node(&self, id: String, label: String, nodes: usize, node: usize) -> ScheduledJob {
        let sources = vec![format!("{label} has one node, by SLURM_JOB_NUM_NODES; its id is {id}")];
        ScheduledJob {
            node_0: NodeSearch {
                job: label.clone(),
                name: "localhost".to_owned(),
                ports: job_ports(&id, JOB_PORTS),
                addresses: Vec::new(),
                asks_scontrol: false,
            },
            hosts: Vec::new(),
            id,
            label,
            nodes,
            node,
            is_slurm: true,
            cpus: self.optional_number("SLURM_CPUS_PER_TASK"),
            gpus: self.optional_number("SLURM_GPUS_ON_NODE"),
            sources,
            warnings: Vec::new(),
        }
    }

    /// Returns the ports that node 0 may serve at, and where they come from.
    fn ports(&self, id: &str) -> Result<(Vec<u16>, String), SlurmError> {
        if let Some(value) = self.get("MASTER_PORT") {
            let port = value.parse().ok().filter(|port| *port > 0);
            let what = "not a port from 1 to 65535";
            let port = port.ok_or(SlurmError::Variable { name: "MASTER_PORT", value, what })?;
            return Ok((vec![port], format!("{port}, from MASTER_PORT")));
        }
        let reserved = self.get("SLURM_STEP_RESV_PORTS").and_then(|list| slurm::ports(&list));
        if let Some(ports) = reserved {
            // A port that occurs twice would be tried twice.
            let ports: Vec<u16> =
                BTreeSet::from_iter(ports).into_iter().take(usize::from(JOB_PORTS)).collect();
            let text = format!("the first free one of {}, from SLURM_STEP_RESV_PORTS", ports_text(&ports));
            return Ok((ports, text));
        }
        let ports = job_ports(id, JOB_PORTS);
        let text = format!(
            "the first free one of {}, {} derived from the job's id",
            ports_text(&ports),
            count(ports.len(), "port")
        );
        Ok((ports, text))
    }
}

fn ports_text(ports: &[u16]) -> String {
    match ports {
        [first, .., last] => format!("{first} to {last}"),
        _ => ports.iter().map(ToString::to_string).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: &[(&str, &str)] = &[
        ("SLURM_JOB_ID", "42"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NUM_NODES", "4"),
        ("SLURM_JOB_NUM_NODES", "4"),
        ("SLURM_NODEID", "1"),
        ("SLURM_PROCID", "0"),
        ("SLURM_STEP_NODELIST", "gpu[07-10]"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x4)"),
        ("SLURMD_NODENAME", "gpu08"),
    ];

    fn read(changes: &[(&str, Option<&str>)]) -> Result<ScheduledJob, SlurmError> {
        read_at(changes, SlurmStartContext::default())
    }

    fn read_at(
        changes: &[(&str, Option<&str>)],
        start_context: SlurmStartContext,
    ) -> Result<ScheduledJob, SlurmError> {
        let get = |name: &str| match changes.iter().find(|(changed, _)| *changed == name) {
            Some((_, value)) => value.map(str::to_owned),
            None => STEP.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned()),
        };
        slurm_job(&get, start_context).map(|job| job.expect("SLURM_JOB_ID is set"))
    }

    #[test]
    fn step_of_srun_gives_nodes_rank_and_node_0() {
        let job = read(&[]).unwrap();
        assert_eq!((job.nodes, job.node, job.node_0.name.as_str()), (4, 1, "gpu07"));
        assert_eq!((job.id.as_str(), job.label.as_str()), ("slurm-42.0.0", "slurm job 42.0"));
        assert_eq!(job.node_0.ports, job_ports("slurm-42.0.0", 8));
        let array = [("SLURM_ARRAY_JOB_ID", Some("40")), ("SLURM_ARRAY_TASK_ID", Some("2"))];
        assert_eq!(read(&array).unwrap().id, "slurm-40_2.0.0");
        assert_eq!(read(&[("SLURM_RESTART_COUNT", Some("3"))]).unwrap().id, "slurm-42.0.3");
        let given = read(&[("MASTER_PORT", Some("1234"))]).unwrap();
        assert_eq!(given.node_0.ports, [1234]);
        let reserved = read(&[("SLURM_STEP_RESV_PORTS", Some("12000-12001"))]).unwrap();
        assert_eq!(reserved.node_0.ports, [12_000, 12_001]);
        assert_eq!(slurm_job(&|_| None, SlurmStartContext::default()), Ok(None));
    }

    #[test]
    fn layouts_without_one_launcher_per_node_are_refused_with_the_remedy() {
        let two = ("SLURM_STEP_TASKS_PER_NODE", Some("2(x4)"));
        let text = read(&[two]).unwrap_err().to_string();
        assert!(text.starts_with("slurm job 42.0 starts 2 tasks on one node"), "{text}");
        assert!(text.contains("srun --ntasks-per-node=1, and --nproc-per-node=2"), "{text}");
        assert_eq!(read(&[two, ("SLURM_PROCID", Some("1"))]), Err(SlurmError::SeveralTasksReported));
        let uneven = read(&[("SLURM_STEP_TASKS_PER_NODE", Some("1(x3),2"))]).unwrap_err();
        assert!(matches!(uneven, SlurmError::SeveralTasks { tasks: 2, .. }));
        for (step, place) in
            [(None, "its batch script"), (Some("4294967290"), "the shell of"), (Some("-6"), "the shell of")]
        {
            let text = read(&[("SLURM_STEP_ID", step)]).unwrap_err().to_string();
            assert!(text.contains(place) && text.contains("put srun before it"), "{step:?}: {text}");
        }
        let typed = SlurmStartContext { is_interactive: true };
        let pty = read_at(&[("SLURM_PTY_PORT", Some("4000"))], typed).unwrap_err().to_string();
        assert!(pty.contains("this shell (srun --pty) runs on one of them"), "{pty}");
        assert!(read_at(&[], typed).is_ok());
    }

    #[test]
    fn job_of_one_node_needs_no_srun() {
        let one = [("SLURM_STEP_ID", None), ("SLURM_JOB_NUM_NODES", Some("1"))];
        let job = read(&one).unwrap();
        assert_eq!((job.nodes, job.node, job.id.as_str()), (1, 0, "slurm-42.0"));
        assert_eq!(job.warnings, Vec::<String>::new());
        let salloc = read(&[one[0], one[1], ("SLURMD_NODENAME", None)]).unwrap();
        assert!(salloc.warnings[0].contains("put srun before convoke"), "{:?}", salloc.warnings);
    }

    #[test]
    fn malformed_variable_is_named() {
        for (name, value) in [
            ("SLURM_STEP_NUM_NODES", "x"),
            ("SLURM_STEP_NUM_NODES", "0"),
            ("SLURM_NODEID", "4"),
            ("SLURM_NODEID", ""),
            ("SLURM_STEP_TASKS_PER_NODE", "(x"),
            ("SLURM_STEP_NODELIST", "h[1"),
            ("SLURM_STEP_ID", "batch"),
            ("MASTER_PORT", "0"),
        ] {
            let error = read(&[(name, Some(value))]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{name}={value:?}: ")), "{error}");
        }
    }
}
