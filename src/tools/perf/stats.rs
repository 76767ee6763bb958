//! Statistics of measured times. Pure.

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Percentiles {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
}

/// Returns the percentiles of `times`, or 0 if there are none. Sorts `times`.
pub(crate) fn percentiles(times: &mut [f64]) -> Percentiles {
    times.sort_by(f64::total_cmp);
    let at = |index: usize| times.get(index).copied().unwrap_or_default();
    let last = times.len().saturating_sub(1);
    Percentiles { p50: at(times.len() / 2), p99: at((last as f64 * 0.99) as usize) }
}

/// Bandwidth in GB/s (10^9 bytes per second), if `bytes` take `micros` microseconds.
pub(crate) fn gigabytes_per_second(bytes: usize, micros: f64) -> f64 {
    if micros > 0.0 { bytes as f64 / micros / 1e3 } else { 0.0 }
}

/// The median of `values`. With an even number of values, it is the mean of the middle two; 0 if there are
/// none.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        len if len % 2 == 1 => sorted[len / 2],
        len => f64::midpoint(sorted[len / 2 - 1], sorted[len / 2]),
    }
}

/// The mean of `values`; 0 if there are none.
pub(crate) fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// Criterion for the number of iterations of a measurement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum RunLength {
    /// A fixed number of iterations.
    Iterations(usize),
    /// As many iterations as fit into about `micros` microseconds, within bounds.
    ForTime { micros: f64, least: usize, most: usize },
}

impl RunLength {
    /// Returns the number of iterations, if one iteration takes about `estimate` microseconds. A number
    /// derived from time is a multiple of `roots`, so that each root is used equally often.
    pub(crate) fn iterations(self, estimate: f64, roots: usize) -> usize {
        match self {
            Self::Iterations(iterations) => iterations,
            Self::ForTime { micros, least, most } => {
                ((micros / estimate.max(0.01)) as usize).max(least).min(most).next_multiple_of(roots)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_selected_from_sorted_times() {
        let mut times: Vec<f64> = (0..200).rev().map(f64::from).collect();
        assert_eq!(percentiles(&mut times), Percentiles { p50: 100.0, p99: 197.0 });
        assert_eq!(percentiles(&mut [3.0]), Percentiles { p50: 3.0, p99: 3.0 });
        assert_eq!(percentiles(&mut []), Percentiles { p50: 0.0, p99: 0.0 });
    }

    #[test]
    fn bandwidth_uses_powers_of_ten() {
        assert_eq!(gigabytes_per_second(2_000_000, 1000.0), 2.0);
        assert_eq!(gigabytes_per_second(5, 0.0), 0.0);
    }

    #[test]
    fn median_and_mean_are_correct() {
        assert_eq!((median(&[5.0, 1.0, 3.0]), median(&[4.0, 1.0]), median(&[])), (3.0, 2.5, 0.0));
        assert_eq!((mean(&[1.0, 2.0]), mean(&[])), (1.5, 0.0));
    }

    #[test]
    fn iteration_count_is_bounded_and_equal_for_all_roots() {
        let about = RunLength::ForTime { micros: 30_000.0, least: 5, most: 2000 };
        assert_eq!(about.iterations(100.0, 4), 300);
        assert_eq!(about.iterations(1.0, 4), 2000);
        assert_eq!(about.iterations(1e6, 4), 8);
        assert_eq!(about.iterations(0.0, 1), 2000);
        assert_eq!(RunLength::Iterations(7).iterations(1.0, 4), 7);
    }
}
