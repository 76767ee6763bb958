//! A pod of an indexed job of Kubernetes, from its variables and its host name. Pure.

use super::{NodeSearch, ScheduledJob};

/// Port of node 0 without MASTER_PORT. Each pod has an address of its own, so no other pod has the port.
const PORT: u16 = 29500;

/// Reason for which this launcher cannot be a node of the indexed job in whose pod it runs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum KubernetesError {
    #[error(
        "JOB_COMPLETION_INDEX={index:?}: not a whole number below --nnodes={nodes}\n  try: --nnodes with the job's number of \
         completions, or --scheduler=none"
    )]
    Index { index: String, nodes: usize },
    #[error(
        "this pod is called {host}, from which the name of the pod with index 0 cannot be derived: {why}\n  try: give the pods a \
         subdomain with a headless service, or name node 0 by --master-addr, with --node-rank=$(JOB_COMPLETION_INDEX)"
    )]
    Name { host: String, why: &'static str },
    #[error("MASTER_PORT={0:?}: not a port from 1 to 65535")]
    Port(String),
}

/// Reads an indexed job with `nodes` pods. `host` is the full name of this pod's host. Returns `None` outside
/// of such a job.
pub(crate) fn kubernetes_job(
    get: &dyn Fn(&str) -> Option<String>,
    host: &dyn Fn() -> String,
    nodes: usize,
) -> Result<Option<ScheduledJob>, KubernetesError> {
    let (Some(_), Some(index)) = (get("KUBERNETES_SERVICE_HOST"), get("JOB_COMPLETION_INDEX")) else {
        return Ok(None);
    };
    let Some(node) = index.parse().ok().filter(|node| *node < nodes) else {
        return Err(KubernetesError::Index { index, nodes });
    };
    let host = host();
    let name = name_of_pod_0(&host, node).map_err(|why| KubernetesError::Name { host: host.clone(), why })?;
    let port = match get("MASTER_PORT") {
        None => PORT,
        Some(text) => match text.parse().ok().filter(|port| *port > 0) {
            Some(port) => port,
            None => return Err(KubernetesError::Port(text)),
        },
    };
    let short = name.split('.').next().unwrap_or(&name);
    let label = format!("kubernetes job {}", short.strip_suffix("-0").unwrap_or(short));
    let sources = vec![
        format!("{label}: this is node {node}, from JOB_COMPLETION_INDEX"),
        format!("node 0: {name}, from the name of this pod, {host}"),
        format!("port of node 0: {port}"),
    ];
    Ok(Some(ScheduledJob {
        id: format!("kubernetes-{name}"),
        node_0: NodeSearch {
            job: label.clone(),
            name,
            ports: vec![port],
            addresses: get("MASTER_ADDR").into_iter().collect(),
            asks_scontrol: false,
        },
        hosts: Vec::new(),
        label,
        nodes,
        node,
        is_slurm: false,
        cpus: None,
        gpus: None,
        sources,
        warnings: Vec::new(),
    }))
}

/// Replaces the index at the end of the pod's own name by 0.
fn name_of_pod_0(host: &str, index: usize) -> Result<String, &'static str> {
    let (own, domain) = host.split_once('.').ok_or("it has no domain, so other pods do not find it")?;
    let stem = own.strip_suffix(&index.to_string()).and_then(|stem| stem.strip_suffix('-'));
    let stem = stem.ok_or("it does not end with the pod's index")?;
    Ok(format!("{stem}-0.{domain}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &[(&str, &str)] = &[("KUBERNETES_SERVICE_HOST", "10.96.0.1"), ("JOB_COMPLETION_INDEX", "11")];

    fn read(more: &[(&str, &str)], host: &str) -> Result<Option<ScheduledJob>, KubernetesError> {
        let get = |name: &str| {
            let set = more.iter().chain(POD).find(|(known, _)| *known == name);
            set.map(|(_, value)| (*value).to_owned())
        };
        kubernetes_job(&get, &|| host.to_owned(), 16)
    }

    #[test]
    fn pod_of_an_indexed_job_gives_rank_and_node_0() {
        for (host, node_0, label) in [
            ("train-11.train.ml.svc.cluster.local", "train-0.train.ml.svc.cluster.local", "train"),
            ("js-node-0-11.js", "js-node-0-0.js", "js-node-0"),
        ] {
            let job = read(&[], host).unwrap().unwrap();
            assert_eq!((job.node, job.nodes, job.node_0.name.as_str()), (11, 16, node_0));
            assert_eq!((job.label, job.node_0.ports), (format!("kubernetes job {label}"), vec![29500]));
        }
        assert_eq!(read(&[("MASTER_PORT", "5")], "a-11.b").unwrap().unwrap().node_0.ports, [5]);
        assert_eq!(kubernetes_job(&|_| None, &|| unreachable!("not asked"), 2), Ok(None));
    }

    #[test]
    fn pod_that_cannot_find_node_0_is_refused_with_the_remedy() {
        let text = |more: &[(&str, &str)], host: &str| read(more, host).unwrap_err().to_string();
        assert!(text(&[], "train-11").contains("it has no domain"));
        assert!(text(&[], "train-11").contains("a subdomain with a headless service"));
        assert!(text(&[], "train-1.x").contains("it does not end with the pod's index"));
        assert!(text(&[("JOB_COMPLETION_INDEX", "16")], "t-16.x").contains("below --nnodes=16"));
        assert!(text(&[("MASTER_PORT", "x")], "t-11.x").contains("not a port"));
    }
}
