//! Measurements of one kind of case: checked against bounds, and written as a row of the table in
//! docs/measurements/faults.md.

use std::fs::OpenOptions;
use std::io::Write;
use std::time::Duration;

/// Bounds for the times of one kind of case.
#[derive(Debug, Clone, Copy)]
pub struct TimeBounds {
    pub median: Duration,
    pub longest: Duration,
}

impl TimeBounds {
    /// The death of a process on this host is detected after 100 ms in the median
    /// (docs/measurements/faults.md). The remainder is an allowance for a busy machine.
    pub const LOCAL_DEATH: Self = Self { median: Duration::from_secs(1), longest: Duration::from_secs(5) };

    pub fn within(bound: Duration) -> Self {
        Self { median: bound, longest: bound }
    }
}

/// The measured times of one kind of case.
pub struct Measurements {
    case: &'static str,
    named: &'static str,
    bounds: TimeBounds,
    all: Vec<Duration>,
}

impl Measurements {
    pub fn new(case: &'static str, named: &'static str, bounds: TimeBounds) -> Self {
        Self { case, named, bounds, all: Vec::new() }
    }

    pub fn add(&mut self, time: Duration) {
        let longest = self.bounds.longest;
        assert!(time <= longest, "{}: {time:.3?}, promised are {longest:?}", self.case);
        self.all.push(time);
    }

    /// Checks the median and writes the row.
    pub fn finish(mut self) {
        self.all.sort_unstable();
        let Some(&longest) = self.all.last() else { return };
        let median = self.all[self.all.len() / 2];
        let limit = self.bounds.median;
        assert!(median <= limit, "{}: median {median:.3?}, promised are {limit:?}", self.case);
        let ms = |time: Duration| match time.as_secs_f64() * 1000.0 {
            ms if ms < 10.0 => format!("{ms:.1} ms"),
            ms if ms < 1000.0 => format!("{ms:.0} ms"),
            ms => format!("{:.2} s", ms / 1000.0),
        };
        let (count, median, longest) = (self.all.len(), ms(median), ms(longest));
        let row = format!("| {} | {} | {count} | {median} | {longest} |\n", self.case, self.named);
        eprint!("{row}");
        if let Some(path) = std::env::var_os("CONVOKE_FAULT_TABLE") {
            let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
            file.write_all(row.as_bytes()).unwrap();
        }
    }
}
