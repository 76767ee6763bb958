//! Random schedules of drains: ranks that learn of a drain at any moment all stop at one step.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use convoke_store::{MemoryStore, Store};
use convoke_testkit::{Random, is_full_test_run};

use super::world::World;
use crate::{CommError, Group, GroupOptions, ReduceOp};

/// Longest time of an operation: a rank that stops alone leaves the others in a call, which then fails.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Steps after which every file exists, so that each schedule ends.
const LAST_STEP: usize = 40;

/// One schedule: number of ranks, and what each rank does at its steps.
struct Schedule {
    seed: u64,
    ranks: usize,
    folder: tempfile::TempDir,
    /// Calls of `drain` that all ranks have begun.
    begun: AtomicUsize,
    /// The first step in which a rank has created a file before its own call, and its rank.
    asked: Mutex<Option<usize>>,
}

impl Schedule {
    fn file(&self, rank: usize) -> std::path::PathBuf {
        self.folder.path().join(rank.to_string())
    }

    /// Returns a number below `bound` that the seed, rank and step determine.
    fn draw(&self, rank: usize, step: usize, salt: u64, bound: usize) -> usize {
        let mut random =
            Random::from_seed(self.seed ^ (rank as u64) << 40 ^ (step as u64) << 20 ^ salt << 52);
        random.below(bound)
    }

    /// Runs one rank until it stops. Returns the step.
    fn run_rank(&self, store: Arc<dyn Store>, rank: usize) -> Result<usize, CommError> {
        let options = GroupOptions::default().timeout(TIMEOUT).init_timeout(TIMEOUT);
        let options = options.shared_memory(self.seed.is_multiple_of(2));
        let group = Group::new(store, rank, self.ranks, options)?;
        let world = World::with_drain_file(group, self.file(rank));
        for step in 0.. {
            // The time of a step differs between ranks.
            (0..self.draw(rank, step, 1, 4)).for_each(|_| thread::yield_now());
            if self.draw(rank, step, 2, 3) == 0 {
                thread::sleep(Duration::from_micros(self.draw(rank, step, 3, 300) as u64));
            }
            // A launcher creates the files of its workers, one after the other, at any moment.
            if self.draw(rank, step, 4, 25 * self.ranks) == 0 || step == LAST_STEP {
                let one = self.draw(rank, step, 5, self.ranks);
                create(&self.file(one));
                if one == rank {
                    let mut asked = self.asked.lock().expect("no rank panics with the lock");
                    *asked = Some(asked.map_or(step, |earlier| earlier.min(step)));
                }
            }
            // Steps have other operations as well.
            if step % 3 == 0 {
                let mut sum = [step as u64];
                world.all_reduce(&mut sum, ReduceOp::Sum)?;
                assert_eq!(sum, [(step * self.ranks) as u64]);
            }
            self.begun.fetch_add(1, Ordering::Relaxed);
            if world.drain()? {
                return Ok(step);
            }
        }
        unreachable!("the loop has no other end")
    }
}

fn create(file: &Path) {
    fs::write(file, b"").expect("the folder of the test exists");
}

#[test]
fn ranks_stop_at_one_step_in_every_schedule() {
    let schedules = if is_full_test_run() { 3000 } else { 100 };
    let mut random = Random::new("ranks_stop_at_one_step_in_every_schedule");
    for _ in 0..schedules {
        let schedule = Schedule {
            seed: random.next(),
            ranks: 2 + random.below(4),
            folder: tempfile::tempdir().unwrap(),
            begun: AtomicUsize::new(0),
            asked: Mutex::new(None),
        };
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let steps: Vec<usize> = thread::scope(|scope| {
            let ranks: Vec<_> = (0..schedule.ranks)
                .map(|rank| {
                    let (store, schedule) = (Arc::clone(&store), &schedule);
                    scope.spawn(move || schedule.run_rank(store, rank))
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
        });
        let seed = schedule.seed;
        assert!(steps.windows(2).all(|pair| pair[0] == pair[1]), "seed {seed}: {steps:?}");
        assert_eq!(schedule.begun.load(Ordering::Relaxed), (steps[0] + 1) * schedule.ranks, "seed {seed}");
        // A rank that knows of the drain before its call stops in this call, and with it all others.
        let asked = *schedule.asked.lock().unwrap();
        assert!(
            asked.is_none_or(|asked| steps[0] <= asked),
            "seed {seed}: asked {asked:?}, stopped {steps:?}"
        );
    }
}
