//! Runs the tool, from the parsed command line to the last line of output.

use std::sync::Arc;

use convoke_comm::device::cudarc::driver::CudaStream;
use convoke_comm::{CommError, Group, World};

use super::collective::{Collective, Shape};
use super::device::{self, Device};
use super::error::PerfError;
use super::flags::Flags;
use super::measure::{Bench, Rules, Subject};
use super::place::{Host, Place};
use super::report::{Places, Report};
use super::rows::Row;
use super::values::{Value, with_type};
use super::words::Where;
use super::{memory, pairs, plot, sizes};

/// Names of all algorithms. The group decides which of them a collective has.
const ALGORITHMS: [&str; 7] = ["table", "ring", "direct", "doubling", "hierarchy", "binomial", "chain"];

/// Runs the measurements that `flags` request, with all ranks of the job.
///
/// # Errors
/// Returns the first error. The other ranks then end as well, and get this error as the reason.
pub(crate) fn run(flags: &Flags) -> Result<(), PerfError> {
    flags.check().map_err(PerfError::Usage)?;
    check_algorithms(flags)?;
    let world = convoke_comm::init()?;
    let subjects = flags.subjects(world.size()).map_err(PerfError::Usage)?;
    if subjects.is_empty() && world.hosts().len() < 2 {
        return Err(PerfError::Usage("all ranks are on one host: there are no pairs of hosts".to_owned()));
    }
    let transport = match flags.device {
        Where::Cpu => world.backend().name(),
        Where::Cuda => "nccl",
        Where::Staged => "staged",
    };
    let mut report = Report::new(flags, world.rank() == 0, transport);
    let outcome = measure(flags, &world, &subjects, &mut report);
    if let Err(error) = &outcome {
        end(&world, error);
    }
    outcome
}

/// Aborts a group because of an error of this rank.
fn end(group: &Group, error: &PerfError) {
    if !matches!(error, PerfError::Comm(_)) {
        group.abort(&error.to_string());
    }
}

fn measure(
    flags: &Flags,
    world: &World,
    subjects: &[Subject],
    report: &mut Report<'_>,
) -> Result<(), PerfError> {
    let rules = flags.rules();
    let device = match flags.device {
        Where::Cpu => None,
        place => Some(device::join(world, place == Where::Staged)?),
    };
    for subject in subjects.iter().filter(|_| device.is_none()) {
        let (a, b) = most(flags, subject, world);
        let bytes = a.saturating_add(b).saturating_mul(subject.dtype.size_bytes());
        let what = format!("{} of {}", subject.collective, sizes::text(largest(flags, subject, world)));
        memory::check(&what, bytes.saturating_mul(rules.in_flight), world.place_on_host().1)?;
    }
    let places = places(world)?;
    report.head(&places, world.size(), subjects.is_empty())?;
    for subjects in subjects.chunk_by(|a, b| a.collective == b.collective) {
        let contenders = match &device {
            Some((group, _)) => vec![(None, group.clone())],
            None => contenders(flags, world, subjects[0].collective)?,
        };
        let stream = device.as_ref().map(|(_, stream)| stream);
        for subject in subjects {
            let sizes = Sizes { flags, rules: &rules, subject, contenders: &contenders, stream };
            let unknown = || CommError::Unsupported(format!("elements of type {}", subject.dtype));
            let measured = with_type!(subject.dtype, T => sizes.measure::<T>(world, report),
                else Err(unknown().into()));
            if let Err(error) = measured {
                contenders.iter().for_each(|(_, group)| end(group, &error));
                return Err(error);
            }
        }
        report.end()?;
    }
    if flags.pairs() && world.hosts().len() > 1 {
        let pairs = pairs::measure(world, flags.pair_bytes, |what| report.progress(what))?;
        report.pairs(&pairs, &places)?;
    }
    if let (0, Some(path)) = (world.rank(), &flags.plot) {
        plot::draw(report.rows(), path)?;
    }
    world.barrier()?;
    Ok(report.tail()?)
}

/// All sizes of one subject, each measured with every contender.
struct Sizes<'a> {
    flags: &'a Flags,
    rules: &'a Rules,
    subject: &'a Subject,
    contenders: &'a [(Option<String>, Group)],
    /// The stream of a device; `None` on the host.
    stream: Option<&'a Arc<CudaStream>>,
}

impl Sizes<'_> {
    fn measure<T: Value>(&self, world: &World, report: &mut Report<'_>) -> Result<(), PerfError> {
        let Self { flags, rules, subject, .. } = *self;
        let lens = most(flags, subject, world);
        match self.stream {
            Some(stream) => self.measure_at::<T>(world, report, Device::new(rules, stream, lens)?),
            None => {
                let host = Host::new(rules, subject.collective.name(), world, lens)?;
                self.measure_at::<T>(world, report, host)
            }
        }
    }

    fn measure_at<T: Value>(
        &self,
        world: &World,
        report: &mut Report<'_>,
        place: impl Place<T>,
    ) -> Result<(), PerfError> {
        let Self { flags, rules, subject, contenders, .. } = *self;
        let mut bench = Bench::new(rules, *subject, place);
        let counts = flags.counts(subject, world.size());
        for (number, &count) in counts.iter().enumerate() {
            for (algorithm, group) in contenders {
                let size = sizes::text(count.saturating_mul(subject.dtype.size_bytes()));
                let (collective, dtype) = (subject.collective, subject.dtype);
                let by = algorithm.as_deref().map(|algorithm| format!(" by {algorithm}")).unwrap_or_default();
                let of = counts.len();
                report.progress(&format!(
                    "{collective} of {size} of {dtype}{by}: {} of {of} sizes",
                    number + 1
                ));
                let timing = bench.measure(group, count)?;
                report.row(Row {
                    subject: *subject,
                    algorithm: algorithm.clone(),
                    root: rules.root,
                    ranks: world.size(),
                    count,
                    timing,
                })?;
            }
        }
        Ok(())
    }
}

/// Lengths of the largest buffers `a` and `b` on this rank.
fn most(flags: &Flags, subject: &Subject, world: &World) -> (usize, usize) {
    let counts = flags.counts(subject, world.size()).into_iter();
    let lens =
        counts.map(|count| Shape::new(subject.collective, count, world.rank(), world.size()).buffer_lens());
    lens.fold((0, 0), |most, lens| (most.0.max(lens.0), most.1.max(lens.1)))
}

/// Number of bytes of the largest size.
fn largest(flags: &Flags, subject: &Subject, world: &World) -> usize {
    let most = flags.counts(subject, world.size()).into_iter().max().unwrap_or_default();
    most.saturating_mul(subject.dtype.size_bytes())
}

/// Checks names of algorithms before anything is measured.
fn check_algorithms(flags: &Flags) -> Result<(), PerfError> {
    let known = |name: &&String| *name == "all" || ALGORITHMS.contains(&name.as_str());
    match flags.algorithms.iter().find(|name| !known(name)) {
        Some(name) => {
            let there = ALGORITHMS.join(", ");
            Err(PerfError::Usage(format!("--algorithms: there is no {name:?}: {there}, or all")))
        }
        None => Ok(()),
    }
}

/// Returns the groups that measure `collective`. Each uses one requested algorithm that the collective has.
/// Otherwise it returns the world group, which uses its tuning table.
fn contenders(
    flags: &Flags,
    world: &World,
    collective: Collective,
) -> Result<Vec<(Option<String>, Group)>, PerfError> {
    let all = flags.algorithms.iter().any(|name| name == "all");
    let asked = |name: &&str| all || flags.algorithms.iter().any(|asked| asked == name);
    let everybody: Vec<usize> = (0..world.size()).collect();
    let mut contenders = Vec::new();
    for name in ALGORITHMS.iter().filter(|name| asked(name)) {
        let overrides = match *name {
            "table" => String::new(),
            _ => format!("{}:{name}", collective.tuned_as()),
        };
        // An error means that the collective has no such algorithm.
        let Ok(handle) = world.with_algorithms(&overrides) else { continue };
        if let Some(group) = handle.subgroup(&everybody)? {
            contenders.push((Some((*name).to_owned()), group));
        }
    }
    match contenders.as_slice() {
        // With fewer than two algorithms there is nothing to compare.
        [] => Ok(vec![(None, world.group())]),
        [(Some(only), _)] if only == "table" => Ok(vec![(None, world.group())]),
        _ => Ok(contenders),
    }
}

/// Returns the hosts by name. Hosts with equal names get numbers.
fn places(world: &World) -> Result<Places, PerfError> {
    let own = nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned());
    let names = world.all_gather_object(&own.unwrap_or_else(|_| "?".to_owned()))?;
    let ranks = world.hosts().to_vec();
    let of_host =
        |host: &Vec<usize>| host.first().and_then(|&rank| names.get(rank)).cloned().unwrap_or_default();
    let hosts: Vec<String> = ranks.iter().map(of_host).collect();
    let twice = |name: &String| hosts.iter().filter(|other| *other == name).count() > 1;
    let numbered = |(number, name): (usize, &String)| {
        if twice(name) { format!("{name}#{number}") } else { name.clone() }
    };
    Ok(Places { names: hosts.iter().enumerate().map(numbered).collect(), ranks })
}
