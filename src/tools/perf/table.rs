//! The table of results for people. Pure.

use super::collective::Collective;
use super::rows::Row;
use super::sizes;

/// Maximum width of a bar.
const BAR: usize = 40;
/// Minimum width of a bar; a shorter one is unreadable.
const MIN_BAR: usize = 8;

/// The columns shown for one collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Columns {
    op: bool,
    root: bool,
    algorithm: bool,
    /// Number of characters of a full bar; 0 for no bars.
    bar: usize,
}

impl Columns {
    /// The columns of `collective`, with bars up to a line width of `width` characters; `None` for no bars.
    pub(crate) fn new(collective: Collective, algorithm: bool, width: Option<usize>) -> Self {
        let columns = Self { op: collective.reduces(), root: collective.has_root(), algorithm, bar: 0 };
        let room = width.unwrap_or(0).saturating_sub(columns.heading().len() + 3).min(BAR);
        Self { bar: if room < MIN_BAR { 0 } else { room }, ..columns }
    }

    pub(crate) fn has_bars(self) -> bool {
        self.bar > 0
    }

    /// Returns two header lines: names and units.
    pub(crate) fn head(self) -> [String; 2] {
        [self.heading(), self.line(["", "elements", "", "", "", "", "µs", "µs", "GB/s", "GB/s"])]
    }

    fn heading(self) -> String {
        self.line(["size", "count", "type", "op", "root", "algorithm", "p50", "p99", "algbw", "busbw"])
    }

    fn line(self, cells: [&str; 10]) -> String {
        let widths = [9, 11, 12, 11, 5, 10, 10, 10, 9, 9];
        let shown = [true, true, true, self.op, self.root, self.algorithm, true, true, true, true];
        let cells = cells.into_iter().zip(widths).zip(shown).filter(|(_, shown)| *shown);
        cells.map(|((cell, width), _)| format!("{cell:>width$}")).collect()
    }

    /// Returns the line of one size. `most` is the bus bandwidth that a full bar shows; `None` for no bar.
    pub(crate) fn row(self, row: &Row, most: Option<f64>) -> String {
        let (algorithm_bandwidth, bus_bandwidth) = (row.algorithm_bandwidth(), row.bus_bandwidth());
        let is_barrier = row.case.collective == Collective::Barrier;
        let of_data = |text: String| if is_barrier { "-".to_owned() } else { text };
        let cells = [
            of_data(sizes::text(row.bytes())),
            of_data(row.count.to_string()),
            of_data(row.case.dtype.to_string()),
            row.case.op.map_or("-".to_owned(), |op| op.to_string()),
            row.root_text().unwrap_or_else(|| "-".to_owned()),
            row.algorithm.clone().unwrap_or_else(|| "table".to_owned()),
            digits(row.timing.micros.p50),
            digits(row.timing.micros.p99),
            of_data(digits(algorithm_bandwidth)),
            of_data(digits(bus_bandwidth)),
        ];
        let line = self.line(cells.each_ref().map(String::as_str));
        match most.filter(|_| self.has_bars() && !is_barrier) {
            Some(most) => format!("{line}  {}", bar(bus_bandwidth / most, self.bar)).trim_end().to_owned(),
            None => line,
        }
    }
}

/// Formats a number with four significant digits, or with all digits before the decimal point.
pub(crate) fn digits(number: f64) -> String {
    match number.abs() {
        n if n >= 1000.0 || n == 0.0 => format!("{number:.0}"),
        n if n >= 100.0 => format!("{number:.1}"),
        n if n >= 10.0 => format!("{number:.2}"),
        n if n >= 0.001 => format!("{number:.3}"),
        _ => format!("{number:.1e}"),
    }
}

/// Draws `fraction` of `width` characters, with a resolution of an eighth of a character.
fn bar(fraction: f64, width: usize) -> String {
    let eighths = (fraction.clamp(0.0, 1.0) * (8 * width) as f64).round() as usize;
    let rest = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"][eighths % 8];
    format!("{}{rest}", "█".repeat(eighths / 8))
}

/// Formats ranks as a short text: `0-3, 6`.
pub(crate) fn ranks(ranks: &[usize]) -> String {
    let runs = ranks.chunk_by(|a, b| a + 1 == *b).filter_map(|run| Some((run.first()?, run.last()?)));
    let texts =
        runs.map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") });
    texts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::rows::tests::row;
    use super::*;

    #[test]
    fn table_omits_empty_columns() {
        let columns = Columns::new(Collective::AllReduce, false, None);
        let row = row(Collective::AllReduce, 16 << 10, 100.0);
        assert_eq!(
            [columns.head()[0].clone(), columns.head()[1].clone(), columns.row(&row, None)],
            [
                "     size      count        type         op       p50       p99    algbw    busbw",
                "            elements                               µs        µs     GB/s     GB/s",
                "   64 KiB      16384         f32        sum     100.0     200.0    0.655    0.983",
            ]
        );
        let rooted = Columns::new(Collective::Reduce, true, None).heading();
        assert!(rooted.contains("op") && rooted.contains("root") && rooted.contains("algorithm"));
        assert!(!Columns::new(Collective::AllGather, false, None).heading().contains("op"));
    }

    #[test]
    fn bars_fill_exactly_the_line() {
        for width in [0, 60, 90, 100, 120, 400] {
            let columns = Columns::new(Collective::AllReduce, false, Some(width));
            let row = row(Collective::AllReduce, 16 << 10, 100.0);
            let length = columns.row(&row, Some(row.bus_bandwidth())).chars().count();
            assert!(length <= width.max(columns.heading().len()), "{length} of {width}");
            assert_eq!(columns.has_bars(), width >= 100, "{width}");
        }
        assert_eq!((bar(1.0, 3), bar(0.5, 3), bar(0.0, 3)), ("███".into(), "█▌".into(), String::new()));
        assert_eq!(bar(f64::NAN, 3), "");
    }

    #[test]
    fn barrier_results_have_no_bandwidth() {
        let columns = Columns::new(Collective::Barrier, false, Some(200));
        let line = columns.row(&row(Collective::Barrier, 0, 4.0), Some(1.0));
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(cells, ["-", "-", "-", "4.000", "8.000", "-", "-"]);
    }

    #[test]
    fn numbers_and_rank_lists_are_short() {
        let numbers = [0.0, 0.000_05, 0.0123, 1.5, 12.345, 123.45, 12_345.6];
        assert_eq!(numbers.map(digits), ["0", "5.0e-5", "0.012", "1.500", "12.35", "123.5", "12346"]);
        assert_eq!(ranks(&[0, 1, 2, 3, 6, 8, 9]), "0-3, 6, 8-9");
    }
}
