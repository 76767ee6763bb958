//! Who computes on which example, in which step.
//!
//! Pure: no clock, no I/O.

use crate::random::Random;

/// Streams of random numbers from here on are the epochs'; see [`Random::new`].
const FIRST_EPOCH_STREAM: u64 = 1 << 32;

/// Deals the examples of each epoch out to the ranks, as torch's `DistributedSampler` does.
///
/// An epoch is one order of all examples, the same on every rank, cut into global batches; within a
/// batch the examples go round the ranks. So the batches do not depend on the number of ranks, every
/// rank takes the same number of steps, and no example is dropped or taken twice. (torch pads instead;
/// here a rank may have one example less than another in a step, hence the weights in `train`.)
///
/// ```text
/// batch 4, 2 ranks, 10 examples in the order    d b h a | c j e i | g f
/// rank 0                                        d   h     c   e     g
/// rank 1                                          b   a     j   i     f
/// ```
#[derive(Debug)]
pub(crate) struct Sampler {
    order: Vec<usize>,
    batch: usize,
    seed: u64,
}

impl Sampler {
    /// `batch` is the global one, at least 1. Call [`Sampler::set_epoch`] before each epoch.
    pub(crate) fn new(examples: usize, batch: usize, seed: u64) -> Self {
        assert!(batch > 0, "a batch has at least one example");
        Self { order: (0..examples).collect(), batch, seed }
    }

    /// Shuffles for this epoch; the order depends on seed and epoch alone, not on earlier calls.
    pub(crate) fn set_epoch(&mut self, epoch: u64) {
        self.order.sort_unstable();
        Random::new(self.seed, FIRST_EPOCH_STREAM + epoch).shuffle(&mut self.order);
    }

    /// Steps of an epoch, the same for all ranks.
    pub(crate) fn steps(&self) -> usize {
        self.order.len().div_ceil(self.batch)
    }

    /// Examples of all ranks in this step: the batch, but for the last step perhaps.
    pub(crate) fn examples_in(&self, step: usize) -> usize {
        self.global_batch(step).len()
    }

    /// The examples of one rank in this step.
    pub(crate) fn examples_of(
        &self,
        step: usize,
        rank: usize,
        world: usize,
    ) -> impl Iterator<Item = usize> + '_ {
        self.global_batch(step).iter().copied().skip(rank).step_by(world)
    }

    fn global_batch(&self, step: usize) -> &[usize] {
        let start = step * self.batch;
        &self.order[start..self.order.len().min(start + self.batch)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of all ranks in each step, sorted.
    fn batches(sampler: &Sampler, world: usize) -> Vec<Vec<usize>> {
        (0..sampler.steps())
            .map(|step| {
                let mut all: Vec<usize> =
                    (0..world).flat_map(|rank| sampler.examples_of(step, rank, world)).collect();
                all.sort_unstable();
                assert_eq!(all.len(), sampler.examples_in(step));
                all
            })
            .collect()
    }

    #[test]
    fn every_world_size_sees_the_same_batches_and_each_example_once() {
        for examples in [1, 5, 64, 65, 1438] {
            let mut sampler = Sampler::new(examples, 64, 9);
            sampler.set_epoch(3);
            let alone = batches(&sampler, 1);
            let mut seen: Vec<usize> = alone.concat();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..examples));
            for world in 2..=9 {
                assert_eq!(batches(&sampler, world), alone, "{world} ranks, {examples} examples");
            }
        }
    }

    #[test]
    fn ranks_differ_by_one_example_at_most() {
        let mut sampler = Sampler::new(1438, 64, 9);
        sampler.set_epoch(0);
        for world in 1..=70 {
            for step in 0..sampler.steps() {
                let counts = (0..world).map(|rank| sampler.examples_of(step, rank, world).count());
                let (least, most) = (counts.clone().min().unwrap(), counts.max().unwrap());
                assert!(most - least <= 1, "{world} ranks, step {step}: {least} to {most}");
            }
        }
    }

    #[test]
    fn the_order_depends_on_seed_and_epoch_only() {
        let order = |seed, epochs: &[u64]| {
            let mut sampler = Sampler::new(100, 10, seed);
            epochs.iter().for_each(|&epoch| sampler.set_epoch(epoch));
            sampler.order
        };
        assert_eq!(order(1, &[0, 1, 2]), order(1, &[2]), "a resumed run shuffles as an uninterrupted one");
        assert_ne!(order(1, &[2]), order(1, &[3]));
        assert_ne!(order(1, &[2]), order(2, &[2]));
    }
}
