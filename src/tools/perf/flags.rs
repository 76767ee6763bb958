//! The command line of `convoke-perf`.

use std::path::PathBuf;

use clap::{ArgAction, Parser, ValueEnum};
use convoke_comm::{Dtype, ReduceOp};

use super::collective::Collective;
use super::flag_values::{DeviceKind, List, Selection, at_least, dtypes, ops, positive, zero_or_one};
use super::measure::{BenchCase, Settings};
use super::sizes::{self, SizeStep};
use super::stats::RunLength;

/// Measures how fast the ranks of a job work together; rank 0 prints.
///
/// Run it as a worker, one process for each rank:
///
///   convoke --nproc-per-node=4 convoke-perf all_reduce -b 4 -e 64M -f 4
///
/// For each size it checks the result, and then times calls back to back, in place, with another root for
/// each call. A call's time is the mean over the ranks. Bus bandwidth is that of nccl-tests: what the links
/// carry, whatever the number of ranks. Between several hosts it measures each pair as well, and names the
/// slowest.
///
/// Ends with exit code 0, 1 if a result is wrong or a rank is lost, or 2 for a wrong command line.
#[derive(Debug, Parser)]
#[command(name = "convoke-perf", version)]
pub(crate) struct Flags {
    /// Selects what is measured: a collective, `all` collectives, or `pairs` for only each pair of hosts
    #[arg(value_name = "COLLECTIVE", value_delimiter = ',', default_value = "all")]
    selections: Vec<Selection>,

    /// Smallest size: 4, 64K, 1M, 2G (powers of 1024)
    #[arg(short = 'b', long, value_name = "SIZE", default_value = "4", value_parser = sizes::parse, help_heading = "Sizes")]
    min_bytes: usize,

    /// Largest size; of blocks it is that of all ranks' blocks together
    #[arg(short = 'e', long, value_name = "SIZE", default_value = "64M", value_parser = sizes::parse, help_heading = "Sizes")]
    max_bytes: usize,

    /// Each size is so many times the one before
    #[arg(short, long, value_name = "TIMES", default_value_t = 4, value_parser = at_least::<2>, help_heading = "Sizes")]
    factor: usize,

    /// Each size is so many bytes more than the one before, instead of --factor
    #[arg(short = 'i', long, value_name = "SIZE", value_parser = sizes::parse, conflicts_with = "factor", help_heading = "Sizes")]
    step_bytes: Option<usize>,

    /// Types of the elements, with commas, or `all`: f32, f64, f16, bf16, i8 to i64, u8 to u64, bool,
    /// complex_f32, complex_f64
    #[arg(short, long, value_name = "TYPE", default_value = "f32", value_parser = dtypes, help_heading = "Elements")]
    dtype: List<Dtype>,

    /// Selects the reduction operations, with commas, or `all` that the type supports: sum, prod, min, max,
    /// avg, band, bor, bxor, premul_sum
    #[arg(short, long, value_name = "OP", default_value = "sum", value_parser = ops, help_heading = "Elements")]
    op: List<ReduceOp>,

    /// Root of all calls; by default each call has another
    #[arg(short, long, value_name = "RANK", help_heading = "Calls")]
    root: Option<usize>,

    /// Algorithms to compare, with commas, or `all` that a collective has, for instance ring,direct. `table`
    /// is the default choice, and an unknown name lists all. Collectives with none of them are measured as
    /// they are
    #[arg(long, value_name = "NAMES", value_delimiter = ',', help_heading = "Calls")]
    pub(crate) algorithms: Vec<String>,

    /// Start each call as a nonblocking call, then wait for it
    #[arg(long, help_heading = "Calls")]
    nonblocking: bool,

    /// Keep so many nonblocking calls in flight, each with its own buffers; the time is that of one call
    #[arg(short = 'a', long, value_name = "CALLS", value_parser = at_least::<1>, help_heading = "Calls")]
    in_flight: Option<usize>,

    /// Selects where the buffers are. On GPUs several calls are enqueued before the host waits for them
    #[arg(long, value_enum, value_name = "WHERE", default_value = "cpu", help_heading = "Calls")]
    pub(crate) device: DeviceKind,

    /// Use memory that the ranks of a host share (`Group::alloc`)
    #[arg(long, help_heading = "Calls")]
    alloc: bool,

    /// Write the memory that is sent anew before each call, as a program does: it is in no other core's cache
    /// then. The time of that is not counted
    #[arg(long, help_heading = "Calls")]
    rewrite: bool,

    /// Check the results of each size before it is timed: 1 or 0
    #[arg(short, long, value_name = "0|1", default_value = "1", value_parser = zero_or_one, action = ArgAction::Set, help_heading = "Calls")]
    check: bool,

    /// Time so many calls of each size, instead of about --time-ms
    #[arg(short = 'n', long, value_name = "CALLS", value_parser = at_least::<1>, help_heading = "Time")]
    iters: Option<usize>,

    /// Make so many calls before the timed ones; by default as many as needed to estimate the time of one
    #[arg(short, long, value_name = "CALLS", help_heading = "Time")]
    warmup: Option<usize>,

    /// Time each size for about so long
    #[arg(long, value_name = "MS", default_value_t = 30.0, value_parser = positive, help_heading = "Time")]
    time_ms: f64,

    /// Time at least so many calls of each size
    #[arg(long, value_name = "CALLS", default_value_t = 5, value_parser = at_least::<1>, help_heading = "Time")]
    min_iters: usize,

    /// Time at most so many calls of each size
    #[arg(long, value_name = "CALLS", default_value_t = 2000, value_parser = at_least::<1>, help_heading = "Time")]
    max_iters: usize,

    /// Do not measure the pairs of hosts
    #[arg(long, help_heading = "Hosts")]
    no_pairs: bool,

    /// Size of a message between two hosts
    #[arg(long, value_name = "SIZE", default_value = "4M", value_parser = sizes::parse, help_heading = "Hosts")]
    pub(crate) pair_bytes: usize,

    /// Print the CSV of launcher-tests/peers, with `# done` as its last line
    #[arg(long, conflicts_with = "json", help_heading = "Output")]
    csv: bool,

    /// Print one JSON object for each line of the table
    #[arg(long, help_heading = "Output")]
    json: bool,

    /// Draw bandwidth and latency over size into this file
    #[arg(long, value_name = "FILE.svg", help_heading = "Output")]
    pub(crate) plot: Option<PathBuf>,

    /// First column of the CSV; of several algorithms or operations the name of each follows
    #[arg(long, value_name = "NAME", default_value = "convoke", help_heading = "Output")]
    pub(crate) system: String,

    /// Second column of the CSV; what the group uses by default, shm or tcp
    #[arg(long, value_name = "NAME", help_heading = "Output")]
    pub(crate) transport: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutputFormat {
    Table,
    Csv,
    Json,
}

impl Flags {
    /// Checks combinations of flags, which the parser of a single flag cannot check.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.min_bytes > self.max_bytes {
            let [least, most] = [self.min_bytes, self.max_bytes].map(sizes::text);
            return Err(format!("--min-bytes {least} is more than --max-bytes {most}"));
        }
        if self.step_bytes == Some(0) {
            return Err("--step-bytes 0 never reaches --max-bytes: give at least 1".to_owned());
        }
        if self.min_bytes == 0 && self.step_bytes.is_none() {
            return Err("--min-bytes 0 times --factor stays 0: begin with 4, or give --step-bytes".to_owned());
        }
        if self.min_iters > self.max_iters {
            let (least, most) = (self.min_iters, self.max_iters);
            return Err(format!("--min-iters {least} is more than --max-iters {most}"));
        }
        let of_host = [
            ("--algorithms", !self.algorithms.is_empty()),
            ("--nonblocking", self.nonblocking),
            ("--alloc", self.alloc),
            ("--rewrite", self.rewrite),
        ];
        if let Some((flag, _)) = of_host.iter().find(|(_, given)| *given && self.device != DeviceKind::Cpu) {
            return Err(format!(
                "{flag} concerns memory of the host, and cannot be used with --device on a GPU"
            ));
        }
        if self.pair_bytes == 0 {
            return Err("--pair-bytes 0 measures no bandwidth: give at least 1".to_owned());
        }
        self.cases_for(usize::MAX).map(drop)
    }

    /// Returns the cases to measure on `ranks` ranks, in the order of the table.
    pub(crate) fn cases(&self, ranks: usize) -> Result<Vec<BenchCase>, String> {
        if let Some(root) = self.root.filter(|&root| root >= ranks) {
            return Err(format!("--root {root}: ranks are 0 to {}", ranks - 1));
        }
        self.cases_for(ranks)
    }

    fn cases_for(&self, ranks: usize) -> Result<Vec<BenchCase>, String> {
        let mut cases = Vec::new();
        for &what in &self.selections {
            let (collectives, named) = match what {
                Selection::All => (Collective::value_variants().to_vec(), false),
                Selection::Pairs => (Vec::new(), false),
                Selection::One(collective) => (vec![collective], true),
            };
            for collective in collectives {
                let is_scan = matches!(collective, Collective::Scan | Collective::ExclusiveScan);
                let lack = if is_scan && self.device != DeviceKind::Cpu {
                    "is not available on devices".to_owned()
                } else if collective.min_ranks() > ranks {
                    format!("needs {} ranks", collective.min_ranks())
                } else {
                    self.add(collective, named, &mut cases)?;
                    continue;
                };
                if named {
                    return Err(format!("{collective} {lack}"));
                }
            }
        }
        Ok(cases)
    }

    fn add(&self, collective: Collective, named: bool, cases: &mut Vec<BenchCase>) -> Result<(), String> {
        if collective == Collective::Barrier {
            // A barrier has no elements.
            cases.push(BenchCase { collective, dtype: self.dtype.items()[0], op: None });
            return Ok(());
        }
        for &dtype in self.dtype.items() {
            if !collective.reduces() {
                cases.push(BenchCase { collective, dtype, op: None });
                continue;
            }
            for &op in self.op.items() {
                let there = self.device != DeviceKind::Cuda || convoke_comm::device::accepts(op, dtype);
                if collective.accepts(op, dtype) && there {
                    cases.push(BenchCase { collective, dtype, op: Some(op) });
                } else if let (true, List::Named(_), List::Named(_)) = (named, &self.op, &self.dtype) {
                    return Err(match there {
                        true => {
                            format!("{collective} of {dtype} by {op} has no meaning; --op all takes what has")
                        }
                        false => format!("NCCL has no {op} of {dtype}; --op all takes what it has"),
                    });
                }
            }
        }
        Ok(())
    }

    /// Element counts of the sizes of one case, without consecutive duplicates.
    pub(crate) fn counts(&self, case: &BenchCase, ranks: usize) -> Vec<usize> {
        let step = self.step_bytes.map_or(SizeStep::Times(self.factor), SizeStep::Plus);
        let sizes = sizes::series(self.min_bytes, self.max_bytes, step);
        let count = |bytes| case.collective.count(bytes, case.dtype.size_bytes(), ranks);
        let mut counts: Vec<_> = sizes.map(count).collect();
        counts.dedup();
        counts
    }

    pub(crate) fn settings(&self) -> Settings {
        let (least, most) = (self.min_iters, self.max_iters);
        let about = RunLength::ForTime { micros: self.time_ms * 1e3, least, most };
        Settings {
            length: self.iters.map_or(about, RunLength::Iterations),
            warmup: self.warmup,
            root: self.root,
            checked: self.check,
            rewrite: self.rewrite,
            alloc: self.alloc,
            nonblocking: self.nonblocking || self.in_flight.is_some(),
            in_flight: self.in_flight.unwrap_or(1),
        }
    }

    pub(crate) fn output_format(&self) -> OutputFormat {
        match (self.csv, self.json) {
            (true, _) => OutputFormat::Csv,
            (_, true) => OutputFormat::Json,
            _ => OutputFormat::Table,
        }
    }

    /// Returns whether to measure pairs of hosts, if there are several hosts.
    pub(crate) fn pairs(&self) -> bool {
        let named = self.selections.contains(&Selection::Pairs);
        named || (!self.no_pairs && self.output_format() != OutputFormat::Csv)
    }

    /// Returns whether several operations are measured, so that each line must name its operation.
    pub(crate) fn has_several_ops(&self) -> bool {
        self.op.items().len() > 1
    }

    /// Describes how times are measured, for the header of the output.
    pub(crate) fn describe_method(&self) -> String {
        let settings = self.settings();
        let length = match settings.length {
            RunLength::Iterations(calls) => format!("{calls} calls of each size"),
            RunLength::ForTime { least, most, .. } => {
                format!("about {} ms of each size, {least} to {most} calls", self.time_ms)
            }
        };
        let root = settings.root.map_or("another root for each".to_owned(), |root| format!("root {root}"));
        let form = match settings.in_flight {
            _ if !settings.nonblocking => "back to back".to_owned(),
            1 => "nonblocking".to_owned(),
            calls => format!("nonblocking, {calls} under way at a time"),
        };
        let checked = if settings.checked { "results checked before" } else { "results not checked" };
        let rewritten = if settings.rewrite { ", each with memory written anew" } else { "" };
        let shared = if settings.alloc { ", in memory that ranks of a host share" } else { "" };
        format!(
            "{length}, {form}{rewritten}{shared}, {root}; a call's time is the mean over the ranks; {checked}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cases(arguments: &[&str], ranks: usize) -> Result<Vec<String>, String> {
        let flags = Flags::try_parse_from(["convoke-perf"].iter().chain(arguments)).unwrap();
        flags.check()?;
        let text = |case: &BenchCase| {
            let op = case.op.map(|op| format!(" {op}")).unwrap_or_default();
            format!("{} {}{op}", case.collective, case.dtype)
        };
        flags.cases(ranks).map(|cases| cases.iter().map(text).collect())
    }

    #[test]
    fn undefined_combinations_are_skipped_in_all_and_refused_by_name() {
        assert_eq!(cases(&["all_reduce,barrier"], 2).unwrap(), ["all_reduce f32 sum", "barrier f32"]);
        let all = cases(&["--op=avg", "--dtype=f32,f64"], 1).unwrap();
        assert!(all.contains(&"reduce f64 avg".to_owned()) && all.contains(&"gather f64".to_owned()));
        assert!(!all.iter().any(|case| case.contains("scan") || case.contains("send_recv")), "{all:?}");
        assert_eq!(cases(&["scan", "--op=all", "--dtype=bool"], 2).unwrap().len(), 7);
        assert!(cases(&["scan", "--op=avg"], 2).unwrap_err().contains("no meaning"));
        assert!(cases(&["send_recv"], 1).unwrap_err().contains("needs 2 ranks"));
        assert!(cases(&["--root=2"], 2).unwrap_err().contains("ranks are 0 to 1"));
        assert_eq!(cases(&["pairs"], 2).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn sizes_are_rounded_to_blocks_without_duplicates() {
        let flags = Flags::try_parse_from(["convoke-perf", "all_gather", "-b4", "-e100", "-f2"]).unwrap();
        let case = flags.cases(3).unwrap()[0];
        assert_eq!(flags.counts(&case, 3), [3, 6, 15]);
    }

    #[test]
    fn host_pairs_are_not_measured_for_csv_only_output() {
        let pairs = |arguments: &[&str]| {
            Flags::try_parse_from(["convoke-perf"].iter().chain(arguments)).unwrap().pairs()
        };
        assert_eq!((pairs(&[]), pairs(&["--no-pairs"]), pairs(&["--csv"])), (true, false, false));
        assert!(pairs(&["--csv", "pairs"]));
    }
}
