//! Device operations that are not known to be done. Pure: the caller tells whether an operation is done.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

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

/// Operations that are not known to be done, in the order in which they began. A value `K` is kept while
/// operations whose handle was dropped may be pending.
#[derive(Debug)]
pub(super) struct PendingOperations<P, K> {
    entries: VecDeque<Entry<P>>,
    /// The number of CUDA commands of all operations together.
    commands: usize,
    /// Set while a thread waits for the watchdog to report that an operation is done.
    fast_poll: bool,
    /// Set while the watchdog sleeps because no operation is in progress.
    watchdog_idle: bool,
    kept: Option<K>,
}

/// The precision with which [`PendingOperations::reap`] finds the operations that are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Search {
    /// Finds all operations that are done.
    Exact,
    /// Asks at most twice for each stream, and may miss operations that are done.
    Quick,
}

impl<P, K> Default for PendingOperations<P, K> {
    fn default() -> Self {
        Self { entries: VecDeque::new(), commands: 0, fast_poll: false, watchdog_idle: false, kept: None }
    }
}

impl<P, K> PendingOperations<P, K> {
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

    /// Records that the watchdog goes to sleep. It sleeps long if no operation is in progress.
    pub(super) fn watchdog_sleeps(&mut self) {
        self.watchdog_idle = self.entries.is_empty();
    }

    /// Returns whether the watchdog must be woken because operations are in progress; once for each sleep.
    pub(super) fn must_wake_watchdog(&mut self) -> bool {
        !self.entries.is_empty() && std::mem::take(&mut self.watchdog_idle)
    }

    /// Keeps `what` while operations are pending. Returns it if that is not needed, for the caller to drop.
    pub(super) fn keep(&mut self, what: K) -> Option<K> {
        if self.entries.is_empty() || self.kept.is_some() {
            return Some(what);
        }
        self.kept.replace(what)
    }

    /// Returns the kept value if no operation is pending.
    pub(super) fn release(&mut self) -> Option<K> {
        if self.entries.is_empty() { self.kept.take() } else { None }
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

    /// Removes and returns the operations that are done. After the first error of `is_done` it asks about no
    /// further operation, and returns that error too.
    ///
    /// A stream ends its operations in order, so all operations before a finished one are done too. This asks
    /// `is_done` seldom, because one question to the driver takes 1.6 µs (measured on an H200).
    pub(super) fn reap<E>(
        &mut self,
        search: Search,
        mut is_done: impl FnMut(&P) -> Result<bool, E>,
    ) -> (Vec<P>, Option<E>) {
        // Each stream, with the number of its operations, and of those that are done.
        let mut streams: SmallVec<[(usize, usize); 4]> = SmallVec::new();
        for entry in &self.entries {
            match streams.iter_mut().find(|(stream, _)| *stream == entry.stream) {
                Some((_, count)) => *count += 1,
                None => streams.push((entry.stream, 1)),
            }
        }
        let mut failed = None;
        for (stream, count) in &mut streams {
            *count = count_done(search, *count, &mut |position| {
                let mut entries = self.entries.iter().filter(|entry| entry.stream == *stream);
                match (&failed, entries.nth(position)) {
                    (None, Some(entry)) => is_done(&entry.what).unwrap_or_else(|error| {
                        failed = Some(error);
                        false
                    }),
                    _ => false,
                }
            });
        }
        let mut done = Vec::with_capacity(streams.iter().map(|(_, count)| count).sum());
        for _ in 0..self.entries.len() {
            let Some(entry) = self.entries.pop_front() else { unreachable!("the loop counts the entries") };
            match streams.iter_mut().find(|(stream, count)| *stream == entry.stream && *count > 0) {
                Some((_, count)) => {
                    *count -= 1;
                    self.commands -= entry.commands;
                    done.push(entry.what);
                }
                None => self.entries.push_back(entry),
            }
        }
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

    pub(super) fn drain(&mut self) -> Vec<P> {
        (self.fast_poll, self.commands) = (false, 0);
        std::mem::take(&mut self.entries).into_iter().map(|entry| entry.what).collect()
    }
}

/// Returns how many of `count` operations of one stream are done, by few questions.
fn count_done(search: Search, count: usize, is_done: &mut impl FnMut(usize) -> bool) -> usize {
    let (mut done, mut pending) = (0, count);
    while done < pending {
        // The last one first: usually all are done. Then the first one: otherwise most often none is.
        let position = match (search, pending == count, done) {
            (Search::Exact, true, 0) => count - 1,
            (Search::Exact, false, 0) => 0,
            (Search::Quick, true, 0) => count / 2,
            (Search::Quick, false, 0) => 0,
            (Search::Exact, ..) => done.midpoint(pending),
            (Search::Quick, ..) => break,
        };
        if is_done(position) { done = position + 1 } else { pending = position }
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending(entries: &[(u32, usize, u64)]) -> (PendingOperations<u32, &'static str>, Instant) {
        let (mut pending, now) = (PendingOperations::default(), Instant::now());
        for &(what, stream, after) in entries {
            pending.add(what, stream, now + Duration::from_secs(after), commands(1, 1));
        }
        (pending, now)
    }

    #[test]
    fn operations_are_done_up_to_the_last_finished_one_of_each_stream() {
        for finished in 0..=20 {
            let entries: Vec<_> = (0..40).map(|what| (what, what as usize % 2, 9)).collect();
            let (mut pending, _) = pending(&entries);
            let mut asked = 0;
            let (done, failed) = pending.reap(Search::Exact, |&what| {
                asked += 1;
                Ok::<_, ()>(what % 2 == 1 || what < 2 * finished)
            });
            let expected: Vec<u32> = (0..40).filter(|what| what % 2 == 1 || *what < 2 * finished).collect();
            assert_eq!((done, failed), (expected, None));
            assert!(asked <= 8, "{asked} questions for {finished} of 20");
            let left = (0..20).filter(|&what| what >= finished).map(|what| 2 * what);
            assert_eq!(pending.drain(), left.collect::<Vec<_>>());
        }
    }

    #[test]
    fn quick_search_frees_entries_with_few_questions() {
        for finished in 0..=40 {
            let entries: Vec<_> = (0..40).map(|what| (what, 0, 9)).collect();
            let (mut pending, _) = pending(&entries);
            let mut asked = 0;
            let (done, failed) = pending.reap(Search::Quick, |&what| {
                asked += 1;
                Ok::<_, ()>(what < finished)
            });
            assert!(asked <= 2 && failed.is_none());
            assert!(done.len() <= finished as usize && (finished == 0 || !done.is_empty()));
            assert!(finished <= 20 || done.len() > 20);
        }
    }

    #[test]
    fn value_is_kept_until_no_operation_is_pending() {
        let (mut pending, now) = pending(&[]);
        assert_eq!(pending.keep("group"), Some("group"));
        pending.add(1, 0, now, commands(1, 1));
        assert_eq!((pending.keep("group"), pending.keep("another handle")), (None, Some("another handle")));
        assert_eq!(pending.release(), None);
        pending.reap(Search::Exact, |_| Ok::<_, ()>(true));
        assert_eq!((pending.release(), pending.release()), (Some("group"), None));
    }

    #[test]
    fn completion_check_stops_after_an_error_and_loses_nothing() {
        let (mut pending, _) = pending(&[(1, 0, 9), (2, 1, 9), (3, 2, 9)]);
        let (done, failed) =
            pending.reap(Search::Exact, |&what| if what == 2 { Err("broken") } else { Ok(true) });
        assert_eq!((done, failed), (vec![1], Some("broken")));
        assert_eq!(pending.drain(), [2, 3]);
    }

    #[test]
    fn idle_watchdog_is_woken_once() {
        let (mut pending, now) = pending(&[]);
        pending.watchdog_sleeps();
        assert!(!pending.must_wake_watchdog());
        pending.add(1, 0, now, commands(1, 1));
        assert!(pending.must_wake_watchdog() && !pending.must_wake_watchdog());
        pending.watchdog_sleeps();
        pending.add(2, 0, now, commands(1, 1));
        assert!(!pending.must_wake_watchdog(), "the watchdog checks often while operations are in progress");
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
        pending.reap(Search::Exact, |_| Ok::<_, ()>(true));
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
        pending.reap(Search::Exact, |&what| Ok::<_, ()>(what == 1));
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
