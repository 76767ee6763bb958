//! Layout of gradients in buckets: which bucket and element range holds the gradient of each parameter. One
//! collective reduces a whole bucket.
//!
//! Pure: no clock, no I/O.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The assignment of a network's parameters to buckets, identical on all ranks.
///
/// The backward pass usually ends with the first parameter of the forward pass, so buckets are filled from
/// the last parameter to the first. A bucket is full when it has reached its size. The first bucket is
/// smaller, so that communication starts early (Li et al. 2020, doi:10.14778/3415478.3415530).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    /// Type of the elements.
    dtype: String,
    /// Options that all ranks must set alike, as text.
    pub(crate) settings: String,
    /// Names of the parameters, and their numbers of elements.
    parameters: Vec<(String, usize)>,
    pub(crate) locations: Vec<Location>,
    /// Indexes of the parameters in each bucket, in the order of their gradients in memory.
    pub(crate) buckets: Vec<Vec<usize>>,
}

/// The position of a parameter's gradient in the buckets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Location {
    pub(crate) bucket: usize,
    /// Element range inside the bucket.
    pub(crate) range: Range<usize>,
}

/// Sizes of buckets, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) first: usize,
    pub(crate) others: usize,
}

impl Layout {
    pub(crate) fn new(
        parameters: Vec<(String, usize)>,
        dtype: &str,
        element_bytes: usize,
        sizes: Sizes,
    ) -> Self {
        let mut locations = vec![Location { bucket: 0, range: 0..0 }; parameters.len()];
        let (mut buckets, mut len) = (Vec::<Vec<usize>>::new(), 0);
        let mut is_full = true;
        for (index, (_, count)) in parameters.iter().enumerate().rev() {
            if is_full {
                buckets.push(Vec::new());
                len = 0;
            }
            let bucket = buckets.len() - 1;
            locations[index] = Location { bucket, range: len..len + count };
            buckets[bucket].push(index);
            len += count;
            let size = if bucket == 0 { sizes.first } else { sizes.others };
            is_full = len.saturating_mul(element_bytes) >= size;
        }
        Self { dtype: dtype.to_owned(), settings: String::new(), parameters, locations, buckets }
    }

    /// Number of parameters.
    pub(crate) fn len(&self) -> usize {
        self.parameters.len()
    }

    pub(crate) fn name(&self, parameter: usize) -> &str {
        &self.parameters[parameter].0
    }

    /// Number of elements in a bucket.
    pub(crate) fn bucket_len(&self, bucket: usize) -> usize {
        self.buckets[bucket].iter().map(|&parameter| self.parameters[parameter].1).sum()
    }

    /// A hash of the whole layout: ranks with equal fingerprints have equal layouts.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut hash = Sha256::new();
        let mut word = |word: usize| hash.update((word as u64).to_le_bytes());
        for bucket in &self.buckets {
            word(bucket.len());
            bucket.iter().for_each(|&parameter| word(parameter));
        }
        let texts = self.parameters.iter().map(|(name, count)| (name.as_str(), *count));
        for (text, count) in texts.chain([(self.dtype.as_str(), 0), (self.settings.as_str(), 0)]) {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
            hash.update((count as u64).to_le_bytes());
        }
        let digest: [u8; 32] = hash.finalize().into();
        u64::from_le_bytes(*digest.first_chunk().expect("SHA-256 has 32 bytes"))
    }

    /// Describes the first difference from `other`; `None` if the layouts are equal.
    pub(crate) fn difference(&self, other: &Self) -> Option<String> {
        if self == other {
            return None;
        }
        let both = self.parameters.iter().zip(&other.parameters).enumerate();
        let parameter = both.into_iter().find_map(|(index, (ours, theirs))| {
            let of = |(name, count): &(String, usize)| format!("{name} with {count} elements");
            (ours != theirs).then(|| format!("parameter {index} is {}, not {}", of(ours), of(theirs)))
        });
        let counts = (self.len() != other.len())
            .then(|| format!("it has {} parameters, not {}", self.len(), other.len()));
        let types =
            (self.dtype != other.dtype).then(|| format!("they are {}, not {}", self.dtype, other.dtype));
        let settings = (self.settings != other.settings)
            .then(|| format!("its options are {}, not {}", self.settings, other.settings));
        parameter.or(counts).or(types).or(settings).or_else(|| {
            let (ours, theirs) = (self.buckets.len(), other.buckets.len());
            Some(format!("its buckets have other sizes ({ours} buckets and {theirs})"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn layout(counts: &[usize], first: usize, others: usize) -> Layout {
        let named = counts.iter().enumerate().map(|(index, &count)| (format!("p{index}"), count)).collect();
        Layout::new(named, "f32", 4, Sizes { first, others })
    }

    #[test]
    fn buckets_start_with_the_last_parameter_and_close_when_full() {
        let layout = layout(&[10, 2, 3, 4, 1], 16, 40);
        assert_eq!(layout.buckets, [vec![4, 3], vec![2, 1, 0]]);
        assert_eq!(layout.locations[4], Location { bucket: 0, range: 0..1 });
        assert_eq!(layout.locations[3], Location { bucket: 0, range: 1..5 });
        assert_eq!(layout.locations[0], Location { bucket: 1, range: 5..15 });
        assert_eq!((layout.bucket_len(0), layout.bucket_len(1)), (5, 15));
    }

    #[test]
    fn bucket_of_exactly_its_size_is_full() {
        // Elements have 4 bytes: the first bucket is full at 16 bytes, the others at 40.
        assert_eq!(layout(&[10, 4, 6, 4], 16, 40).buckets, [vec![3], vec![2, 1], vec![0]]);
    }

    #[test]
    fn every_parameter_has_its_own_range() {
        let mut random = Random::new(4, 4);
        for _ in 0..500 {
            let counts: Vec<usize> = (0..1 + random.below(30)).map(|_| random.below(50)).collect();
            let layout = layout(&counts, random.below(300), random.below(900));
            let mut used: Vec<Vec<bool>> =
                (0..layout.buckets.len()).map(|bucket| vec![false; layout.bucket_len(bucket)]).collect();
            for (parameter, &count) in counts.iter().enumerate() {
                let Location { bucket, range } = layout.locations[parameter].clone();
                assert_eq!(range.len(), count);
                assert!(used[bucket][range.clone()].iter().all(|used| !used), "{counts:?}");
                used[bucket][range].fill(true);
            }
            assert!(used.iter().flatten().all(|&used| used), "{counts:?}");
            assert!(layout.buckets.iter().all(|bucket| !bucket.is_empty()), "{counts:?}");
        }
    }

    #[test]
    fn layout_difference_is_described_and_changes_the_fingerprint() {
        let ours = layout(&[10, 2], 1, 1);
        let other_name =
            Layout { parameters: vec![("p0".to_owned(), 10), ("q".to_owned(), 2)], ..ours.clone() };
        let cases = [
            (layout(&[10, 3], 1, 1), "parameter 1 is p1 with 2 elements, not p1 with 3 elements"),
            (layout(&[10], 1, 1), "it has 2 parameters, not 1"),
            (layout(&[10, 2], 100, 100), "buckets"),
            (Layout { dtype: "f64".to_owned(), ..ours.clone() }, "they are f32, not f64"),
            (other_name, "p1 with 2 elements, not q"),
            (Layout { settings: "x".to_owned(), ..ours.clone() }, "its options are , not x"),
        ];
        assert_eq!(ours.difference(&ours), None);
        for (other, part) in cases {
            let difference = ours.difference(&other).unwrap();
            assert!(difference.contains(part), "{difference}");
            assert_ne!(ours.fingerprint(), other.fingerprint(), "{part}");
        }
    }

    #[test]
    fn fingerprint_is_equal_in_all_builds() {
        assert_eq!(layout(&[10, 2], 1, 1).fingerprint(), 8_499_401_631_276_651_658);
    }
}
