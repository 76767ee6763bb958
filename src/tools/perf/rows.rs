//! The result of one measured size, and its CSV and JSON forms. Pure.

use serde_json::json;

use super::measure::{BenchCase, Timing};
use super::stats;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    pub(crate) case: BenchCase,
    /// The requested algorithm; `None` if the collective has no choice, or if none was requested.
    pub(crate) algorithm: Option<String>,
    /// The root of all calls; `None` if the root rotates.
    pub(crate) root: Option<usize>,
    pub(crate) ranks: usize,
    /// Number of elements.
    pub(crate) count: usize,
    pub(crate) timing: Timing,
}

impl Row {
    pub(crate) fn bytes(&self) -> usize {
        self.count.saturating_mul(self.case.dtype.size_bytes())
    }

    /// Bandwidth in GB/s: buffer size divided by time.
    pub(crate) fn algorithm_bandwidth(&self) -> f64 {
        stats::gigabytes_per_second(self.bytes(), self.timing.micros.p50)
    }

    /// Bandwidth of the links in GB/s, as nccl-tests define it.
    pub(crate) fn bus_bandwidth(&self) -> f64 {
        self.algorithm_bandwidth() * self.case.collective.bus_factor(self.ranks)
    }

    /// Returns the root as text; `None` if the collective has no root.
    pub(crate) fn root_text(&self) -> Option<String> {
        let text = || self.root.map_or("each".to_owned(), |root| root.to_string());
        self.case.collective.has_root().then(text)
    }

    /// Returns the result as a line of CSV; with `with_op`, the first column names the operation.
    pub(crate) fn csv(&self, system: &str, transport: &str, with_op: bool) -> String {
        let op = self.case.op.filter(|_| with_op).map(|op| op.to_string());
        let names: Vec<&str> =
            [Some(system), self.algorithm.as_deref(), op.as_deref()].into_iter().flatten().collect();
        let BenchCase { collective, dtype, .. } = self.case;
        let Timing { iterations, micros } = self.timing;
        format!(
            "{},{transport},{collective},{},{dtype},{},{iterations},{:.4},{:.4},{:.4},{:.4}",
            names.join("-"),
            self.ranks,
            self.bytes(),
            micros.p50,
            micros.p99,
            self.algorithm_bandwidth(),
            self.bus_bandwidth(),
        )
    }

    pub(crate) fn json(&self, transport: &str) -> String {
        let BenchCase { collective, dtype, op } = self.case;
        json!({
            "collective": collective.to_string(),
            "transport": transport,
            "algorithm": self.algorithm,
            "dtype": dtype.to_string(),
            "op": op.map(|op| op.to_string()),
            "root": self.root,
            "ranks": self.ranks,
            "count": self.count,
            "bytes": self.bytes(),
            "iterations": self.timing.iterations,
            "p50_us": self.timing.micros.p50,
            "p99_us": self.timing.micros.p99,
            "algorithm_gb_per_s": self.algorithm_bandwidth(),
            "bus_gb_per_s": self.bus_bandwidth(),
        })
        .to_string()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use convoke_comm::{Dtype, ReduceOp};

    use super::super::collective::Collective;
    use super::super::stats::Percentiles;
    use super::*;

    pub(crate) fn row(collective: Collective, count: usize, p50: f64) -> Row {
        let op = collective.reduces().then_some(ReduceOp::Sum);
        Row {
            case: BenchCase { collective, dtype: Dtype::F32, op },
            algorithm: None,
            root: None,
            ranks: 4,
            count,
            timing: Timing { iterations: 20, micros: Percentiles { p50, p99: 2.0 * p50 } },
        }
    }

    #[test]
    fn csv_columns_match_all_benchmarks() {
        let mut row = row(Collective::AllReduce, 1_000_000, 4000.0);
        assert_eq!(
            row.csv("convoke", "tcp", false),
            "convoke,tcp,all_reduce,4,f32,4000000,20,4000.0000,8000.0000,1.0000,1.5000"
        );
        row.algorithm = Some("ring".to_owned());
        assert!(row.csv("convoke", "tcp", true).starts_with("convoke-ring-sum,tcp,all_reduce,4,"));
    }

    #[test]
    fn json_has_a_name_for_every_value() {
        let row = row(Collective::Broadcast, 1000, 2.0);
        let value: serde_json::Value = serde_json::from_str(&row.json("tcp")).unwrap();
        assert_eq!((value["collective"].as_str(), value["bytes"].as_u64()), (Some("broadcast"), Some(4000)));
        assert_eq!((value["p50_us"].as_f64(), value["bus_gb_per_s"].as_f64()), (Some(2.0), Some(2.0)));
        assert!(value["op"].is_null() && value["root"].is_null() && value["algorithm"].is_null());
    }

    #[test]
    fn root_column_appears_only_for_rooted_collectives() {
        let mut rooted = row(Collective::Gather, 4, 1.0);
        assert_eq!(rooted.root_text().as_deref(), Some("each"));
        rooted.root = Some(2);
        assert_eq!(rooted.root_text().as_deref(), Some("2"));
        assert_eq!(row(Collective::AllReduce, 4, 1.0).root_text(), None);
    }
}
