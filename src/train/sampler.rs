//! Assigns examples to ranks.
//!
//! Pure: no clock, no I/O.

use crate::random::Random;

/// Number of the random stream that shuffles epoch 0; later epochs use the numbers after it. See
/// [`Random::new`].
const FIRST_EPOCH_STREAM: u64 = 1 << 32;

/// Distributes the examples of each epoch over the ranks.
///
/// An epoch is one order of all examples, identical on every rank. Ranks take examples from it round-robin.
///
/// ```text
/// 10 examples in the order    d b h a c j e i g f        taken one by one, Tail::Pad
/// rank 0 of 3                 d     a     e     f
/// rank 1 of 3                   b     c     i     (d)    once more, from the beginning
/// rank 2 of 3                     h     j     g     (b)
/// ```
///
/// `Sampler` corresponds to torch's `DistributedSampler`. Torch's class shuffles by default; here shuffling
/// must be [requested](Self::shuffled).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sampler {
    examples: usize,
    rank: usize,
    world: usize,
    seed: Option<u64>,
    tail: Tail,
}

/// Treatment of the last examples of an epoch, if there are too few for all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Tail {
    /// Repeats the first examples of the epoch: all ranks have equally many, and no example is left out.
    #[default]
    Pad,
    /// Leaves the last examples out: all ranks have equally many, and no example is repeated.
    Drop,
    /// Gives some ranks one example less: each example is used once. Requires weighted averages, or
    /// [`Ddp::join`](crate::Ddp::join).
    Uneven,
}

impl Sampler {
    /// Distributes a data set of `examples` examples over `world` ranks; this sampler returns the examples of
    /// `rank`.
    ///
    /// # Panics
    /// If `rank` is not below `world`.
    #[must_use]
    pub fn new(examples: usize, rank: usize, world: usize) -> Self {
        assert!(rank < world, "rank {rank} of {world}");
        Self { examples, rank, world, seed: None, tail: Tail::default() }
    }

    /// Shuffles each epoch. The order depends only on `seed` and the epoch, so a run resumed from a
    /// checkpoint sees the same order.
    #[must_use]
    pub fn shuffled(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Sets the treatment of the last examples of an epoch, if there are too few for all ranks.
    #[must_use]
    pub fn tail(mut self, tail: Tail) -> Self {
        self.tail = tail;
        self
    }

    /// Returns the examples of the epoch with this number.
    ///
    /// # Cost
    /// 8 bytes for each example.
    #[must_use]
    pub fn epoch(&self, epoch: u64) -> Epoch {
        let mut order: Vec<usize> = (0..self.examples).collect();
        if let Some(seed) = self.seed {
            Random::new(seed, FIRST_EPOCH_STREAM.wrapping_add(epoch)).shuffle(&mut order);
        }
        Epoch { order, at: 0, end: 0, rank: self.rank, world: self.world, tail: self.tail }.resumed_at(0)
    }
}

/// The examples of one epoch. As an iterator it returns this rank's examples one by one, or it returns
/// [batches](Self::next_batch).
#[derive(Debug, Clone)]
pub struct Epoch {
    order: Vec<usize>,
    /// Number of examples that all ranks together have taken, and that number at the end of the epoch.
    /// Positions beyond the last example mean examples from the beginning.
    at: usize,
    end: usize,
    rank: usize,
    world: usize,
    tail: Tail,
}

impl Epoch {
    /// Number of examples that all ranks together have taken. Store this number in checkpoints, to resume the
    /// epoch.
    #[must_use]
    pub fn position(&self) -> usize {
        self.at
    }

    /// Resumes an epoch with the same seed at `position`, also with a different number of ranks.
    #[must_use]
    pub fn resumed_at(mut self, position: usize) -> Self {
        self.at = position.min(self.order.len());
        let left = self.order.len() - self.at;
        self.end = self.at
            + match self.tail {
                Tail::Pad => left.next_multiple_of(self.world),
                Tail::Drop => left - left % self.world,
                Tail::Uneven => left,
            };
        self
    }

    /// Takes the next `examples` examples of all ranks together, fewer at the end; `None` if none are left.
    ///
    /// If `examples` is a multiple of the number of ranks, all ranks get equally many, except at the end with
    /// [`Tail::Uneven`]. The batches do not depend on the number of ranks, but their split among ranks does.
    /// The last batch also depends on the number of ranks with [`Tail::Pad`] and [`Tail::Drop`].
    ///
    /// # Panics
    /// If `examples` is 0.
    pub fn next_batch(&mut self, examples: usize) -> Option<Batch> {
        assert!(examples > 0, "a batch has at least one example");
        let (start, end) = (self.at, self.end.min(self.at.saturating_add(examples)));
        if start == end {
            return None;
        }
        self.at = end;
        let own = (start..end).skip(self.rank).step_by(self.world).map(|place| self.example(place)).collect();
        Some(Batch { own, examples: end - start })
    }

    fn example(&self, place: usize) -> usize {
        self.order[place % self.order.len()]
    }
}

impl Iterator for Epoch {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let place = self.at + self.rank;
        self.at = self.end.min(self.at + self.world);
        (place < self.end).then(|| self.example(place))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = (self.end - self.at).saturating_sub(self.rank).div_ceil(self.world);
        (left, Some(left))
    }
}

impl ExactSizeIterator for Epoch {}

/// A batch of examples that is split among the ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    own: Vec<usize>,
    examples: usize,
}

impl Batch {
    /// The examples of this rank; there may be none.
    #[must_use]
    pub fn own(&self) -> &[usize] {
        &self.own
    }

    /// Number of examples of all ranks together.
    #[must_use]
    pub fn examples(&self) -> usize {
        self.examples
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const TAILS: [Tail; 3] = [Tail::Pad, Tail::Drop, Tail::Uneven];

    fn sampler(examples: usize, rank: usize, world: usize) -> Sampler {
        Sampler::new(examples, rank, world).shuffled(9)
    }

    /// The examples that each rank takes one by one, indexed by rank.
    fn assigned(examples: usize, world: usize, tail: Tail) -> Vec<Vec<usize>> {
        (0..world).map(|rank| sampler(examples, rank, world).tail(tail).epoch(3).collect()).collect()
    }

    /// The examples of all ranks in each batch, sorted.
    fn batches(examples: usize, batch: usize, world: usize) -> Vec<Vec<usize>> {
        let mut epochs: Vec<Epoch> =
            (0..world).map(|rank| sampler(examples, rank, world).tail(Tail::Uneven).epoch(3)).collect();
        std::iter::from_fn(|| {
            let assigned: Option<Vec<Batch>> =
                epochs.iter_mut().map(|epoch| epoch.next_batch(batch)).collect();
            let assigned = assigned?;
            let mut all: Vec<usize> = assigned.iter().flat_map(|batch| batch.own().to_vec()).collect();
            all.sort_unstable();
            assert!(assigned.iter().all(|batch| batch.examples() == all.len()));
            let (least, most) = (assigned.iter().map(|batch| batch.own.len()).min(), assigned[0].own.len());
            assert!(least.is_some_and(|least| most - least <= 1), "the first has most");
            Some(all)
        })
        .collect()
    }

    #[test]
    fn tail_policy_decides_about_remaining_examples() {
        for (examples, world) in [(10, 3), (9, 3), (1, 4), (0, 2), (100, 7), (5, 1)] {
            for tail in TAILS {
                let assigned = assigned(examples, world, tail);
                let counts: BTreeSet<usize> = assigned.iter().map(Vec::len).collect();
                let all: Vec<usize> = assigned.concat();
                let distinct: BTreeSet<usize> = all.iter().copied().collect();
                let context = format!("{examples} examples, {world} ranks, {tail:?}: {assigned:?}");
                let (taken, most) = match tail {
                    Tail::Pad => (examples.next_multiple_of(world), examples),
                    Tail::Drop => (examples / world * world, examples / world * world),
                    Tail::Uneven => (examples, examples),
                };
                assert_eq!((all.len(), distinct.len()), (taken, most), "{context}");
                assert!(tail == Tail::Uneven || counts.len() == 1, "{context}");
                assert!(counts.last().unwrap() - counts.first().unwrap() <= 1, "{context}");
            }
        }
    }

    #[test]
    fn batches_are_equal_for_every_world_size_without_duplicates() {
        for examples in [1, 5, 64, 65, 1438] {
            let alone = batches(examples, 64, 1);
            let mut seen: Vec<usize> = alone.concat();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..examples));
            for world in 2..=9 {
                assert_eq!(batches(examples, 64, world), alone, "{world} ranks, {examples} examples");
            }
        }
    }

    #[test]
    fn epoch_resumes_with_any_number_of_ranks() {
        for tail in TAILS {
            let mut before: Vec<Epoch> =
                (0..3).map(|rank| sampler(101, rank, 3).tail(tail).epoch(5)).collect();
            let mut taken: Vec<usize> =
                before.iter_mut().flat_map(|epoch| epoch.next_batch(30).unwrap().own).collect();
            assert_eq!(before[0].position(), 30);
            let after = (0..4).map(|rank| sampler(101, rank, 4).tail(tail).epoch(5).resumed_at(30));
            taken.extend(after.flatten());
            let distinct: BTreeSet<usize> = taken.iter().copied().collect();
            // 71 examples are left for four ranks.
            let (all, once) = match tail {
                Tail::Pad => (102, 101),
                Tail::Drop => (98, 98),
                Tail::Uneven => (101, 101),
            };
            assert_eq!((taken.len(), distinct.len()), (all, once), "{tail:?}");
        }
        assert_eq!(sampler(10, 0, 2).epoch(1).resumed_at(1000).next(), None);
    }

    #[test]
    fn remaining_example_count_is_exact() {
        for tail in TAILS {
            for rank in 0..3 {
                let mut epoch = sampler(10, rank, 3).tail(tail).epoch(0);
                while let left @ 1.. = epoch.len() {
                    assert!(epoch.next().is_some());
                    assert_eq!(epoch.len(), left - 1, "{tail:?}");
                }
                assert_eq!(epoch.next(), None);
            }
        }
    }

    #[test]
    fn example_order_depends_only_on_seed_and_epoch() {
        let order = |seed, epoch| Sampler::new(100, 0, 1).shuffled(seed).epoch(epoch).collect::<Vec<_>>();
        assert_eq!(order(1, 2), order(1, 2), "a resumed run shuffles as an uninterrupted one");
        assert_ne!(order(1, 2), order(1, 3));
        assert_ne!(order(1, 2), order(2, 2));
        assert!(Sampler::new(5, 0, 1).epoch(7).eq(0..5));
    }
}
