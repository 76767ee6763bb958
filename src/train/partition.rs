//! Splits a data set into parts.
//!
//! Pure: no clock, no I/O.

use crate::error::TrainError;
use crate::random::Random;

/// Number of the random stream that shuffles partitions; see [`Random::new`].
const STREAM: u64 = 1 << 33;
/// Amount by which the sum of fractions may exceed 1, because of rounding.
const TOLERANCE: f64 = 1e-9;

/// Splits the examples `0 .. examples` in random order into parts of the given fractions. Use it to separate
/// training from validation data, or to give each rank a permanent share. All ranks get equal parts for equal
/// `seed`.
///
/// Examples beyond the sum of the fractions are in no part. The size of each part is exact to within one
/// example. If the fractions add up to 1, the parts contain all examples.
///
/// ```
/// let parts = convoke_train::partition(1000, &[0.7, 0.2, 0.1], 42)?;
/// assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), [700, 200, 100]);
/// # Ok::<(), convoke_train::TrainError>(())
/// ```
///
/// # Errors
/// [`TrainError::InvalidArgument`] if a fraction is not between 0 and 1, or if the sum exceeds 1.
pub fn partition(examples: usize, fractions: &[f64], seed: u64) -> Result<Vec<Vec<usize>>, TrainError> {
    let invalid = |what: String| Err(TrainError::InvalidArgument(what));
    if let Some(fraction) = fractions.iter().find(|fraction| !(0.0..=1.0).contains(*fraction)) {
        return invalid(format!("a part of {fraction} of all examples is not between 0 and 1"));
    }
    let sum: f64 = fractions.iter().sum();
    if sum > 1.0 + TOLERANCE {
        return invalid(format!("the parts together are {sum} of all examples, more than 1"));
    }
    let mut order: Vec<usize> = (0..examples).collect();
    Random::new(seed, STREAM).shuffle(&mut order);
    let (mut sum, mut start) = (0.0, 0);
    let parts = fractions.iter().map(|fraction| {
        sum += fraction;
        let end = ((sum * examples as f64).round() as usize).clamp(start, examples);
        order[std::mem::replace(&mut start, end)..end].to_vec()
    });
    Ok(parts.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_their_share_without_duplicates() {
        let mut random = Random::new(5, 5);
        for _ in 0..300 {
            let examples = random.below(1000);
            let weights: Vec<f64> =
                (0..1 + random.below(9)).map(|_| random.below(100) as f64 + 1.0).collect();
            let sum: f64 = weights.iter().sum();
            let fractions: Vec<f64> = weights.iter().map(|weight| weight / sum).collect();
            let parts = partition(examples, &fractions, 1).unwrap();
            for (part, fraction) in parts.iter().zip(&fractions) {
                assert!(
                    (part.len() as f64 - fraction * examples as f64).abs() <= 1.0,
                    "{examples} {fractions:?}"
                );
            }
            let mut all = parts.concat();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..examples), "{examples} {fractions:?}");
        }
    }

    #[test]
    fn unassigned_fraction_is_left_out() {
        let parts = partition(10, &[0.5, 0.0, 0.2], 1).unwrap();
        assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), [5, 0, 2]);
        assert_ne!(parts, partition(10, &[0.5, 0.0, 0.2], 2).unwrap());
    }

    #[test]
    fn meaningless_fractions_are_refused() {
        for fractions in [&[0.6, 0.5][..], &[-0.1], &[f64::NAN], &[1.5]] {
            assert!(
                matches!(partition(10, fractions, 1), Err(TrainError::InvalidArgument(_))),
                "{fractions:?}"
            );
        }
    }
}
