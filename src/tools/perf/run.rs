//! Runs `convoke-perf`, from the parsed command line to the last line of output.

use std::sync::Arc;

use convoke_comm::algorithms::Algorithms;
use convoke_comm::device::cudarc::driver::CudaStream;
use convoke_comm::{CommError, Group, World};

use super::buffers::{BenchBuffers, HostBuffers};
use super::collective::{Collective, Shape};
use super::device_buffers::{self, DeviceBuffers};
use super::error::PerfError;
use super::flag_values::DeviceKind;
use super::flags::Flags;
use super::measure::{Bench, BenchCase, Settings};
use super::report::{HostRanks, Report};
use super::rows::Row;
use super::values::{Value, with_type};
use super::{memory, pairs, plot, sizes};

pub(crate) fn run(flags: &Flags) -> Result<(), PerfError> {
    flags.check().map_err(PerfError::Usage)?;
    check_algorithms(flags)?;
    let world = convoke_comm::init()?;
    let cases = flags.cases(world.size()).map_err(PerfError::Usage)?;
    if cases.is_empty() && world.hosts().len() < 2 {
        let what = "all ranks are on one host, and `pairs` needs at least two hosts";
        return Err(PerfError::Usage(what.to_owned()));
    }
    let transport = match flags.device {
        DeviceKind::Cpu => world.backend().name(),
        DeviceKind::Cuda => "nccl",
        DeviceKind::Staged => "staged",
    };
    let mut report = Report::new(flags, world.rank() == 0, transport);
    let outcome = measure(flags, &world, &cases, &mut report);
    if let Err(error) = &outcome {
        abort_group(&world, error);
    }
    outcome
}

/// Aborts a group because of an error of this rank.
fn abort_group(group: &Group, error: &PerfError) {
    if !matches!(error, PerfError::Comm(_)) {
        group.abort(&error.to_string());
    }
}

fn measure(
    flags: &Flags,
    world: &World,
    cases: &[BenchCase],
    report: &mut Report<'_>,
) -> Result<(), PerfError> {
    let settings = flags.settings();
    let device = match flags.device {
        DeviceKind::Cpu => None,
        kind => Some(device_buffers::join(world, kind == DeviceKind::Staged)?),
    };
    for case in cases.iter().filter(|_| device.is_none()) {
        let (a, b) = max_buffer_lens(flags, case, world);
        let bytes = a.saturating_add(b).saturating_mul(case.dtype.size_bytes());
        let what = format!("{} of {}", case.collective, sizes::text(largest_bytes(flags, case, world)));
        let (bytes, (_, ranks)) = (bytes.saturating_mul(settings.in_flight), world.local_rank_and_size());
        memory::check_available(&what, bytes, ranks)?;
    }
    let hosts = host_ranks(world)?;
    report.print_header(&hosts, world.size(), cases.is_empty())?;
    for cases in cases.chunk_by(|a, b| a.collective == b.collective) {
        let algorithm_groups = match &device {
            Some((group, _)) => vec![(None, group.clone())],
            None => algorithm_groups(flags, world, cases[0].collective)?,
        };
        let stream = device.as_ref().map(|(_, stream)| stream);
        for case in cases {
            let sizes =
                SizeSweep { flags, settings: &settings, case, algorithm_groups: &algorithm_groups, stream };
            let unknown = || CommError::Unsupported(format!("elements of type {}", case.dtype));
            let measured = with_type!(case.dtype, T => sizes.measure::<T>(world, report),
                else Err(unknown().into()));
            if let Err(error) = measured {
                algorithm_groups.iter().for_each(|(_, group)| abort_group(group, &error));
                return Err(error);
            }
        }
        report.end_collective()?;
    }
    if flags.pairs() && world.hosts().len() > 1 {
        let pairs = pairs::measure(world, flags.pair_bytes, |what| report.show_progress(what))?;
        report.print_pairs(&pairs, &hosts)?;
    }
    if let (0, Some(path)) = (world.rank(), &flags.plot) {
        plot::draw(&report.rows, path)?;
    }
    world.barrier()?;
    Ok(report.print_footer()?)
}

/// All sizes of one case, each measured with every algorithm.
struct SizeSweep<'a> {
    flags: &'a Flags,
    settings: &'a Settings,
    case: &'a BenchCase,
    algorithm_groups: &'a [(Option<String>, Group)],
    /// The CUDA stream for calls; `None` for buffers in host memory.
    stream: Option<&'a Arc<CudaStream>>,
}

impl SizeSweep<'_> {
    fn measure<T: Value>(&self, world: &World, report: &mut Report<'_>) -> Result<(), PerfError> {
        let Self { flags, settings, case, .. } = *self;
        let lens = max_buffer_lens(flags, case, world);
        match self.stream {
            Some(stream) => self.measure_at(world, report, DeviceBuffers::<T>::new(settings, stream, lens)?),
            None => {
                let host = HostBuffers::<T>::new(settings, &case.collective.to_string(), world, lens)?;
                self.measure_at(world, report, host)
            }
        }
    }

    fn measure_at(
        &self,
        world: &World,
        report: &mut Report<'_>,
        buffers: impl BenchBuffers,
    ) -> Result<(), PerfError> {
        let Self { flags, settings, case, algorithm_groups, .. } = *self;
        let mut bench = Bench::new(settings, *case, buffers);
        let counts = flags.counts(case, world.size());
        for (number, &count) in counts.iter().enumerate() {
            for (algorithm, group) in algorithm_groups {
                let size = sizes::text(count.saturating_mul(case.dtype.size_bytes()));
                let (collective, dtype) = (case.collective, case.dtype);
                let by = algorithm.as_deref().map(|algorithm| format!(" by {algorithm}")).unwrap_or_default();
                let (number, of) = (number + 1, counts.len());
                report
                    .show_progress(&format!("{collective} of {size} of {dtype}{by}: {number} of {of} sizes"));
                let timing = bench.measure(group, count)?;
                let (algorithm, root, ranks) = (algorithm.clone(), settings.root, world.size());
                report.print_row(Row { case: *case, algorithm, root, ranks, count, timing })?;
            }
        }
        Ok(())
    }
}

/// Lengths of the largest buffers `a` and `b` on this rank.
fn max_buffer_lens(flags: &Flags, case: &BenchCase, world: &World) -> (usize, usize) {
    let counts = flags.counts(case, world.size()).into_iter();
    let lens =
        counts.map(|count| Shape::new(case.collective, count, world.rank(), world.size()).buffer_lens());
    lens.fold((0, 0), |most, lens| (most.0.max(lens.0), most.1.max(lens.1)))
}

fn largest_bytes(flags: &Flags, case: &BenchCase, world: &World) -> usize {
    let most = flags.counts(case, world.size()).into_iter().max().unwrap_or_default();
    most.saturating_mul(case.dtype.size_bytes())
}

/// Returns the names of all algorithms. The group decides which of them a collective has.
fn algorithms() -> Vec<&'static str> {
    let mut names = vec!["table"];
    for (_, name) in Algorithms::choices() {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

fn check_algorithms(flags: &Flags) -> Result<(), PerfError> {
    let algorithms = algorithms();
    let known = |name: &&String| *name == "all" || algorithms.contains(&name.as_str());
    let Some(name) = flags.algorithms.iter().find(|name| !known(name)) else { return Ok(()) };
    let there = algorithms.join(", ");
    Err(PerfError::Usage(format!("--algorithms: {name:?} is unknown: choose {there}, or all")))
}

/// Returns the groups that measure `collective`. Each group uses one requested algorithm that the collective
/// has. If there is no such algorithm, or only `table`, it returns the world group, which uses its tuning
/// table.
fn algorithm_groups(
    flags: &Flags,
    world: &World,
    collective: Collective,
) -> Result<Vec<(Option<String>, Group)>, PerfError> {
    let all = flags.algorithms.iter().any(|name| name == "all");
    let asked = |name: &&str| all || flags.algorithms.iter().any(|asked| asked == name);
    let everybody: Vec<usize> = (0..world.size()).collect();
    let mut algorithm_groups = Vec::new();
    for name in algorithms().into_iter().filter(asked) {
        let overrides = match name {
            "table" => String::new(),
            _ => format!("{}:{name}", collective.tuned_as()),
        };
        // An error means that the collective has no such algorithm.
        let Ok(algorithms) = overrides.parse() else { continue };
        if let Some(group) = world.with_algorithms(algorithms).subgroup(&everybody)? {
            algorithm_groups.push((Some(name.to_owned()), group));
        }
    }
    // Without an algorithm, or with the default table alone, there is nothing to compare.
    if algorithm_groups.iter().all(|(name, _)| name.as_deref() == Some("table")) {
        return Ok(vec![(None, world.group())]);
    }
    Ok(algorithm_groups)
}

/// Returns the hosts by name. Hosts with equal names get numbers.
fn host_ranks(world: &World) -> Result<HostRanks, PerfError> {
    let own = convoke_env::host::name().unwrap_or_else(|| "?".to_owned());
    let names = world.all_gather_object(&own)?;
    let ranks = world.hosts().to_vec();
    let of_host = |host: &Vec<usize>| names[*host.first().expect("each host has a rank")].clone();
    let hosts: Vec<String> = ranks.iter().map(of_host).collect();
    let twice = |name: &String| hosts.iter().filter(|other| *other == name).count() > 1;
    let numbered = |(number, name): (usize, &String)| {
        if twice(name) { format!("{name}#{number}") } else { name.clone() }
    };
    Ok(HostRanks { names: hosts.iter().enumerate().map(numbered).collect(), ranks })
}
