//! Converts the flags to [`Config`], and checks all their values.

use std::path::PathBuf;
use std::time::Duration;

use super::machine::{Machine, Vendor};
use super::numeric_flags::{choice, non_negative, seconds, whole_number};
use super::settings::{Config, NodeRange, Orphans, ReportFormat};
use super::{
    binding, devices, drain_flags, numeric_flags, output, program, rendezvous_flags, scheduler_flags,
    signal_list,
};
use crate::cli::{CliError, Env, ParsedArgs, integer, suggest_choice};
use crate::formatting::count;
use crate::scheduler::ScheduledJob;

const SHUTDOWN_TIMEOUT_SECONDS: u32 = 30;
/// Most lines of stderr that a report keeps per worker, by default.
const STDERR_LINES: usize = 64;
/// Flags that ask for devices of a host, or divide them among its workers.
pub(crate) const OF_DEVICES: &[&str] =
    &["nproc-per-node", "gpus-per-worker", "gpu-bind", "virtual-local-rank", "bind", "numa-binding"];
const SIGNALS: &str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";
const FORWARDED: &str = "SIGUSR1,SIGUSR2";

/// Checks the values of all flags and chooses defaults for the others.
pub(crate) fn config(args: &ParsedArgs, env: Env<'_>, machine: &Machine) -> Result<Config, CliError> {
    numeric_flags::check(args)?;
    let mut warnings = Vec::new();

    let nodes = nodes(args)?;
    let max_restarts = non_negative(args, "max-restarts", "3")?.unwrap_or(0);
    let monitor_interval = seconds(args, "monitor-interval")?;
    let shutdown_timeout = shutdown_timeout(args, env)?;
    let gpus_per_worker = gpus_per_worker(args)?;
    let scheduled = scheduler_flags::scheduled_job(args, nodes, env)?;
    warnings.extend(scheduled.iter().flat_map(|job| job.warnings.clone()));
    let each = gpus_per_worker.unwrap_or(1);
    let nproc_per_node = match &scheduled {
        Some(job) if !args.is_on("nproc-per-node") => scheduled_nproc(job, env, machine, each, &mut warnings),
        Some(_) | None => nproc_per_node(args, env, machine, each)?,
    };
    let mut logs = output::logs(args, env, nproc_per_node, &mut warnings)?;
    let stderr_lines = stderr_lines(args)?;
    let orphans = if args.text("orphans")? == "keep" { Orphans::Keep } else { Orphans::Stop };
    logs.keep_stderr_tail = stderr_lines > 0 && orphans == Orphans::Stop;
    let events = output::events(args, env)?;
    let program = program::program(args, env, machine)?;
    let (rendezvous, run_id, nodes, rendezvous_conf) =
        rendezvous_flags::rendezvous_config(args, nodes, scheduled.as_ref(), &mut warnings)?;
    let signals_text = args.text_or("signals-to-handle", SIGNALS)?;
    let signals = signal_list::signals("signals-to-handle", signals_text, &mut warnings);
    let forwarded = args.text_or("forward-signals", FORWARDED)?;
    let mut forward_signals = signal_list::signals("forward-signals", forwarded, &mut warnings);
    let drain = drain_flags::drain(args, env, scheduled.as_ref(), &mut warnings)?;
    forward_signals.retain(|signal| !signals.contains(signal) && !drain.signals.contains(signal));
    let virtual_local_rank = args.is_on("virtual-local-rank");
    if virtual_local_rank {
        let parent = |name: &str| env(name).map(|value| value.to_string_lossy().into_owned());
        let advice = "lower --nproc-per-node or extend the list";
        devices::visible_devices(&parent, nproc_per_node - 1)
            .map_err(|error| CliError::value(format!("--virtual-local-rank: {error}; {advice}")).of_host())?;
    }
    let gpus = if gpus_per_worker.is_some() || args.is_on("gpu-bind") {
        let name = if gpus_per_worker.is_some() { "gpus-per-worker" } else { "gpu-bind" };
        if virtual_local_rank {
            return Err(CliError::value(format!(
                "--{name} and --virtual-local-rank exclude each other; the second also sets LOCAL_RANK to 0"
            )));
        }
        machine.gpus_of_workers(env, nproc_per_node, each).map_err(|error| {
            let advice = format!("lower --nproc-per-node or leave --{name} out");
            CliError::value(format!("--{name}: {error}; {advice}")).of_host()
        })?
    } else {
        ("CUDA_VISIBLE_DEVICES", Vec::new())
    };
    let cpus = binding::worker_cpus(args, env, machine, nproc_per_node)?;
    if let Some(value) = args.get("logs-specs") {
        let name = value.as_str()?;
        return Err(CliError::value(format!(
            "--logs-specs={name}: there are no Python plug-ins here; leave it out, and see --redirects, --tee and --log-dir"
        )));
    }
    let omp_num_threads = devices::omp_num_threads(
        env("OMP_NUM_THREADS").is_some(),
        nproc_per_node,
        scheduled.as_ref().and_then(|job| job.cpus),
        machine.cpu_share(),
    );
    let note = |threads| {
        format!(
            "convoke sets OMP_NUM_THREADS={threads} for each worker, so that they do not overload the machine; \
             set it yourself to tune it"
        )
    };
    warnings.extend(machine.gpu_warning().map(str::to_owned));
    if output::is_quiet(env) {
        warnings.clear();
    }
    Ok(Config {
        nodes,
        nproc_per_node,
        rendezvous_hint: rendezvous_flags::rendezvous_hint(args, nodes, &rendezvous),
        rendezvous,
        run_id,
        scheduled,
        rendezvous_conf,
        local_addr: args
            .get_nonempty("local-addr")
            .map(|value| rendezvous_flags::host_without_port(value, None))
            .transpose()?,
        max_restarts,
        restart_delay: seconds(args, "restart-delay")?.unwrap_or_default(),
        restart_stop_after_same: stop_after_same(args)?,
        monitor_interval,
        role: output::role(args)?,
        program,
        logs,
        flight: output::flight(env),
        events,
        signals,
        signals_given: args.is_on("signals-to-handle"),
        forward_signals,
        drain,
        signals_text: signals_text.to_owned(),
        shutdown_timeout,
        virtual_local_rank,
        omp_num_threads,
        as_gloo: args.is_on("as-gloo"),
        gpus,
        cpus,
        own_sessions: nproc_per_node <= machine.cpu_count()
            || !convoke_env::host::autogroup_enabled(&machine.root),
        orphans,
        report: match choice(args, "report", &["short", "full"])? {
            Some("full") => ReportFormat::Full,
            Some(_) | None => ReportFormat::Short,
        },
        notes: omp_num_threads.map(note).into_iter().collect(),
        report_file: args.get_nonempty("report-file").map(|value| PathBuf::from(&value.text)),
        termination_log: output::termination_log(args, env),
        exit_codes: output::exit_codes(args)?,
        stderr_lines,
        share_store: env("TORCH_DISABLE_SHARE_RDZV_TCP_STORE").is_none_or(|value| value != "1"),
        warnings,
    })
}

fn nodes(args: &ParsedArgs) -> Result<NodeRange, CliError> {
    let Some(value) = args.get("nnodes") else { return Ok(NodeRange { min: 1, max: 1 }) };
    let text = value.as_str()?;
    let wrong = |what: &str, example: &str| Err(value.error(what, example));
    let count = |text: &str| integer(text).map(|number| usize::try_from(number.max(0)).unwrap_or(usize::MAX));
    let parts: Option<Vec<usize>> = text.split(':').map(count).collect();
    let (min, max) = match parts.as_deref() {
        Some(&[both]) => (both, both),
        Some(&[min, max]) => (min, max),
        Some(_) => return wrong("one number or two, not more", "1:4"),
        None => return wrong("neither a number of nodes nor a range", "2, or MIN:MAX such as 1:4"),
    };
    if min == 0 {
        return wrong("there must be at least one node", "1");
    }
    if min > max {
        return wrong("the minimum is above the maximum", &format!("{max}:{min}"));
    }
    if max > 1_000_000 {
        return wrong("too many nodes", "1000000 or fewer");
    }
    Ok(NodeRange { min, max })
}

fn gpus_per_worker(args: &ParsedArgs) -> Result<Option<usize>, CliError> {
    let Some((value, number)) = whole_number(args, "gpus-per-worker", "1")? else { return Ok(None) };
    match usize::try_from(number) {
        Ok(number @ 1..=1024) => Ok(Some(number)),
        Ok(0) | Err(_) => Err(value.error("there must be at least one", "1")),
        Ok(_) => Err(value.error("more than any node has", "8")),
    }
}

fn nproc_per_node(
    args: &ParsedArgs,
    env: Env<'_>,
    machine: &Machine,
    gpus_per_worker: usize,
) -> Result<usize, CliError> {
    let Some(value) = args.get("nproc-per-node") else { return Ok(1) };
    let wrong = |what: &str, example: &str| Err(value.error(what, example));
    let text = value.as_str()?;
    if let Some(number) = integer(text) {
        return match usize::try_from(number) {
            Ok(0) | Err(_) => wrong("there must be at least one worker", "1"),
            Ok(number) if number > 65_536 => wrong("too many workers", "65536 or fewer"),
            Ok(number) => Ok(number),
        };
    }
    let gpus = || visible_gpus(env, machine);
    let lacking = |what: &str| Err(value.error(what, "cpu, or a number").of_host());
    match text {
        "cpu" => Ok(machine.cpu_share()),
        "auto" => Ok(match gpus() {
            0 => machine.cpu_share(),
            count => (count / gpus_per_worker).max(1),
        }),
        "gpu" => match gpus() {
            0 => {
                let none = "no GPU was found (no /dev/nvidia0, no /dev/kfd, or the variables hide all)";
                lacking(hidden_gpus_message(env, machine).as_deref().unwrap_or(none))
            }
            count if count < gpus_per_worker => {
                lacking(&format!("there are {count} GPUs, fewer than --gpus-per-worker={gpus_per_worker}"))
            }
            count => Ok(count / gpus_per_worker),
        },
        "xpu" => match machine.devices(Vendor::Intel, env) {
            0 => lacking("no Intel GPU was found (no /dev/dri/renderD128 of Intel)"),
            count => Ok(count),
        },
        _ => wrong(
            "neither a number nor cpu, gpu, xpu or auto",
            suggest_choice(text, &["cpu", "gpu", "xpu", "auto"]).unwrap_or("2"),
        ),
    }
}

/// Returns the number of workers on this node of a scheduler's job without `--nproc-per-node`: one for each
/// `gpus_per_worker` visible GPUs, or one if none is visible.
fn scheduled_nproc(
    job: &ScheduledJob,
    env: Env<'_>,
    machine: &Machine,
    gpus_per_worker: usize,
    warnings: &mut Vec<String>,
) -> usize {
    let gpus = visible_gpus(env, machine);
    if let (0, Some(given)) = (gpus, job.gpus) {
        warnings.push(format!(
            "{} has {} on this node, but none is visible here, so one worker starts; is the driver missing? \
             --nproc-per-node sets the number",
            job.label,
            count(given, "GPU")
        ));
    }
    (gpus / gpus_per_worker).max(1)
}

/// Returns the number of visible GPUs of NVIDIA, or of AMD if there are none.
pub(crate) fn visible_gpus(env: Env<'_>, machine: &Machine) -> usize {
    match machine.devices(Vendor::Nvidia, env) {
        0 => machine.devices(Vendor::Amd, env),
        count => count,
    }
}

/// Returns a message that names the environment variable which hides all GPUs. `None` if there are no GPUs or
/// no such variable.
pub(crate) fn hidden_gpus_message(env: Env<'_>, machine: &Machine) -> Option<String> {
    let names = ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"];
    let vendors = [(Vendor::Nvidia, &names[2..]), (Vendor::Amd, &names[..])];
    let mut there = vendors.map(|(vendor, names)| (machine.devices(vendor, &|_| None), names)).into_iter();
    let (gpus, names) = there.find(|(gpus, _)| *gpus > 0)?;
    let (name, list) = names.iter().find_map(|name| Some((name, env(name)?)))?;
    Some(format!("{name}={} shows no GPU; without it there are {}", list.display(), count(gpus, "GPU")))
}

fn stop_after_same(args: &ParsedArgs) -> Result<Option<u32>, CliError> {
    let times = non_negative(args, "restart-stop-after-same", "3")?;
    if times == Some(0) {
        let what = "must be 1 or more; leave it out to restart whatever happens";
        return Err(args.error("restart-stop-after-same", what, "3"));
    }
    Ok(times)
}

fn shutdown_timeout(args: &ParsedArgs, env: Env<'_>) -> Result<Duration, CliError> {
    const VARIABLE: &str = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT";
    let seconds = match (non_negative(args, "shutdown-timeout", "30")?, env(VARIABLE)) {
        (Some(seconds), _) => seconds,
        (None, None) => SHUTDOWN_TIMEOUT_SECONDS,
        (None, Some(text)) => {
            let seconds = text.to_str().and_then(integer).and_then(|number| u32::try_from(number).ok());
            seconds.ok_or_else(|| {
                CliError::value(format!(
                    "{VARIABLE}={}: must be a whole number of seconds, 0 or more; write {VARIABLE}=30",
                    text.display()
                ))
            })?
        }
    };
    Ok(Duration::from_secs(seconds.into()))
}

fn stderr_lines(args: &ParsedArgs) -> Result<usize, CliError> {
    const MAX: usize = 1000;
    let lines = non_negative(args, "stderr-tail", "64")?.unwrap_or(STDERR_LINES);
    if lines > MAX {
        return Err(CliError::value(format!("--stderr-tail={lines}: too large; write --stderr-tail={MAX}")));
    }
    Ok(lines)
}
