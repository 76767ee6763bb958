//! Device operations that are not known to be done. Pure: the caller tells whether an operation is done.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The watchdog's interval between checks while operations are in progress.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The watchdog's interval while a thread waits for the watchdog to report that an operation is done.
const FAST_INTERVAL: Duration = Duration::from_micros(100);
/// At multiples of this number of operations, the thread that adds one also removes those that are done.
const REAP_EVERY: usize = 32;
/// The most commands that may be in a CUDA queue. The queue holds about 1,000 commands. A caller that finds
/// it full blocks inside the driver, where nobody can end the call.
const MAX_COMMANDS: usize = 512;
/// The commands of each operation include convoke's event. The commands of each buffer are waits and events
/// of cudarc. Each launch of an NCCL kernel has commands too, and covers several calls of an NCCL group.
const COMMANDS_PER_OPERATION: usize = 2;
const COMMANDS_PER_BUFFER: usize = 3;
const COMMANDS_PER_LAUNCH: usize = 3;
const CALLS_PER_LAUNCH: usize = 8;

/// The number of CUDA commands of an operation of `calls` NCCL calls on `buffers` buffers.
pub(super) fn commands(calls: usize, buffers: usize) -> usize {
    COMMANDS_PER_OPERATION
        + buffers * COMMANDS_PER_BUFFER
        + calls.div_ceil(CALLS_PER_LAUNCH) * COMMANDS_PER_LAUNCH
}

/// An operation `what`, as the caller represents it, with its stream and deadline.
#[derive(Debug)]
struct Entry<P> {
    what: P,
    /// The stream; operations of one stream end in the order in which they began.
    stream: usize,
    deadline: Instant,
    commands: usize,
}

/// Operations that are not known to be done, in the order in which they began.
#[derive(Debug)]
pub(super) struct PendingOperations<P> {
    entries: VecDeque<Entry<P>>,
    /// The number of CUDA commands of all operations together.
    commands: usize,
    /// Set while a thread waits for the watchdog to report that an operation is done.
    fast_poll: bool,
}

impl<P> Default for PendingOperations<P> {
    fn default() -> Self {
        Self { entries: VecDeque::new(), commands: 0, fast_poll: false }
    }
}

impl<P> PendingOperations<P> {
    /// Adds an operation of `commands` CUDA commands. Returns whether the caller should call [`Self::reap`].
    pub(super) fn add(&mut self, what: P, stream: usize, deadline: Instant, commands: usize) -> bool {
        self.entries.push_back(Entry { what, stream, deadline, commands });
        self.commands += commands;
        self.entries.len().is_multiple_of(REAP_EVERY)
    }

    /// Records that a thread waits for the watchdog to report that an operation is done.
    pub(super) fn request_fast_poll(&mut self) {
        self.fast_poll = true;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns whether no operation should begin until some operations are done.
    pub(super) fn is_full(&self) -> bool {
        self.commands >= MAX_COMMANDS
    }

    pub(super) fn any(&self, is_such: impl Fn(&P) -> bool) -> bool {
        self.entries.iter().any(|entry| is_such(&entry.what))
    }

    /// Removes and returns the operations that are done. In each stream, it asks `is_done` about each
    /// operation until one is not done. At the first error of `is_done` it stops, and returns that error too.
    pub(super) fn reap<E>(&mut self, mut is_done: impl FnMut(&P) -> Result<bool, E>) -> (Vec<P>, Option<E>) {
        let (mut done, mut left, mut failed) = (Vec::new(), VecDeque::new(), None);
        let mut blocked: Vec<usize> = Vec::new();
        for entry in std::mem::take(&mut self.entries) {
            let answer = failed.is_none() && !blocked.contains(&entry.stream);
            match if answer { is_done(&entry.what) } else { Ok(false) } {
                Ok(true) => done.push(entry.what),
                Ok(false) => {
                    blocked.push(entry.stream);
                    blocked.dedup();
                    left.push_back(entry);
                }
                Err(error) => {
                    failed = Some(error);
                    left.push_back(entry);
                }
            }
        }
        self.commands = left.iter().map(|entry: &Entry<P>| entry.commands).sum();
        self.entries = left;
        if self.entries.is_empty() {
            self.fast_poll = false;
        }
        (done, failed)
    }

    /// The first operation that has timed out.
    pub(super) fn first_timed_out(&self, now: Instant) -> Option<&P> {
        self.entries.iter().find(|entry| now >= entry.deadline).map(|entry| &entry.what)
    }

    /// The time until the watchdog's next check; `None` if no operation is in progress.
    pub(super) fn next_check_in(&self, now: Instant) -> Option<Duration> {
        let due = self.entries.iter().map(|entry| entry.deadline).min()?;
        let usual = if self.fast_poll { FAST_INTERVAL } else { CHECK_INTERVAL };
        Some(usual.min(due.saturating_duration_since(now)))
    }

    /// Removes all operations.
    pub(super) fn drain(&mut self) -> Vec<P> {
        (self.fast_poll, self.commands) = (false, 0);
        std::mem::take(&mut self.entries).into_iter().map(|entry| entry.what).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending(entries: &[(u32, usize, u64)]) -> (PendingOperations<u32>, Instant) {
        let (mut pending, now) = (PendingOperations::default(), Instant::now());
        for &(what, stream, after) in entries {
            pending.add(what, stream, now + Duration::from_secs(after), commands(1, 1));
        }
        (pending, now)
    }

    #[test]
    fn completion_check_stops_at_first_unfinished_operation_of_a_stream() {
        let (mut pending, _) = pending(&[(1, 0, 9), (2, 1, 9), (3, 0, 9), (4, 1, 9), (5, 1, 9)]);
        let mut asked = Vec::new();
        let (done, failed) = pending.reap(|&what| {
            asked.push(what);
            Ok::<_, ()>(what == 2 || what == 4)
        });
        assert_eq!((done, failed, asked), (vec![2, 4], None, vec![1, 2, 4, 5]));
        assert_eq!(pending.drain(), [1, 3, 5]);
    }

    #[test]
    fn completion_check_stops_after_an_error_and_loses_nothing() {
        let (mut pending, _) = pending(&[(1, 0, 9), (2, 1, 9), (3, 2, 9)]);
        let (done, failed) = pending.reap(|&what| if what == 2 { Err("broken") } else { Ok(true) });
        assert_eq!((done, failed), (vec![1], Some("broken")));
        assert_eq!(pending.drain(), [2, 3]);
    }

    #[test]
    fn first_overdue_operation_is_named() {
        let (pending, now) = pending(&[(1, 0, 9), (2, 1, 3), (3, 1, 2)]);
        assert_eq!(pending.first_timed_out(now), None);
        assert_eq!(pending.first_timed_out(now + Duration::from_secs(3)), Some(&2));
    }

    #[test]
    fn polling_resumes_when_state_may_have_changed() {
        let (mut pending, now) = pending(&[(1, 0, 9)]);
        assert_eq!(pending.next_check_in(now), Some(CHECK_INTERVAL));
        assert_eq!(pending.next_check_in(now + Duration::from_secs(10)), Some(Duration::ZERO));
        pending.request_fast_poll();
        assert_eq!(pending.next_check_in(now), Some(FAST_INTERVAL));
        pending.reap(|_| Ok::<_, ()>(true));
        assert_eq!((pending.next_check_in(now), pending.is_empty()), (None, true));
        pending.add(2, 0, now + Duration::from_secs(9), commands(1, 1));
        assert_eq!(pending.next_check_in(now), Some(CHECK_INTERVAL));
    }

    #[test]
    fn many_submissions_trigger_polls_and_wait_when_queue_is_full() {
        let (mut pending, now) = pending(&[]);
        let looks: Vec<u32> = (1..=63).filter(|&what| pending.add(what, 0, now, commands(1, 1))).collect();
        assert_eq!(looks, [32]);
        assert!(!pending.is_full());
        pending.add(64, 0, now, commands(1, 1));
        assert!(pending.is_full());
        pending.reap(|&what| Ok::<_, ()>(what == 1));
        assert!(!pending.is_full() && pending.any(|&what| what == 2) && !pending.any(|&what| what == 1));
        // Messages of one call share a launch, so even one to a hundred ranks uses a small part of the limit.
        assert!(commands(200, 2) < MAX_COMMANDS / 4);
        // An operation of many buffers exceeds the limit alone, and may still be added behind others.
        pending.add(65, 0, now, commands(1000, 1000));
        assert!(pending.is_full());
        pending.drain();
        assert!(!pending.is_full());
    }
}
