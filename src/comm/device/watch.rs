//! Operations on a device that are not known to be done. Pure: what has come to its end is asked of the caller.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How often it is looked whether all is well while something is under way.
pub(super) const LOOK: Duration = Duration::from_millis(100);
/// The same while somebody waits to be told, who does not look himself.
const HURRIED: Duration = Duration::from_micros(100);
/// From so many on, whoever adds one looks which are done, so that their number stays bounded by what streams hold.
const MANY: usize = 256;

/// What the caller knows an operation by, and where and until when it is.
#[derive(Debug)]
struct Entry<P> {
    what: P,
    /// Operations of one stream end in the order in which they began.
    stream: usize,
    deadline: Instant,
}

/// Operations that are not known to be done, in the order in which they began.
#[derive(Debug)]
pub(super) struct Watch<P> {
    entries: VecDeque<Entry<P>>,
    /// Somebody waits to be told.
    hurried: bool,
}

impl<P> Default for Watch<P> {
    fn default() -> Self {
        Self { entries: VecDeque::new(), hurried: false }
    }
}

impl<P> Watch<P> {
    /// One more is under way; whether it should be looked which are done.
    pub(super) fn add(&mut self, what: P, stream: usize, deadline: Instant) -> bool {
        self.entries.push_back(Entry { what, stream, deadline });
        self.entries.len().is_multiple_of(MANY)
    }

    /// Somebody waits to be told of one of them.
    pub(super) fn hurry(&mut self) {
        self.hurried = true;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Takes out what `is_done`, which is asked once for each stream that has come no further. The first error of it
    /// ends the asking.
    pub(super) fn reap<E>(&mut self, mut is_done: impl FnMut(&P) -> Result<bool, E>) -> (Vec<P>, Option<E>) {
        let (mut done, mut left, mut failed) = (Vec::new(), VecDeque::new(), None);
        let mut stuck: Vec<usize> = Vec::new();
        for entry in std::mem::take(&mut self.entries) {
            let answer = failed.is_none() && !stuck.contains(&entry.stream);
            match if answer { is_done(&entry.what) } else { Ok(false) } {
                Ok(true) => done.push(entry.what),
                Ok(false) => {
                    stuck.push(entry.stream);
                    stuck.dedup();
                    left.push_back(entry);
                }
                Err(error) => {
                    failed = Some(error);
                    left.push_back(entry);
                }
            }
        }
        self.entries = left;
        if self.entries.is_empty() {
            self.hurried = false;
        }
        (done, failed)
    }

    /// The first whose time is over.
    pub(super) fn overdue(&self, now: Instant) -> Option<&P> {
        self.entries.iter().find(|entry| now >= entry.deadline).map(|entry| &entry.what)
    }

    /// How long until it is to be looked again; `None` if nothing is under way.
    pub(super) fn look_in(&self, now: Instant) -> Option<Duration> {
        let due = self.entries.iter().map(|entry| entry.deadline).min()?;
        let usual = if self.hurried { HURRIED } else { LOOK };
        Some(usual.min(due.saturating_duration_since(now)))
    }

    /// Takes out all of them.
    pub(super) fn end(&mut self) -> Vec<P> {
        self.hurried = false;
        std::mem::take(&mut self.entries).into_iter().map(|entry| entry.what).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(entries: &[(u32, usize, u64)]) -> (Watch<u32>, Instant) {
        let (mut watch, now) = (Watch::default(), Instant::now());
        for &(what, stream, after) in entries {
            watch.add(what, stream, now + Duration::from_secs(after));
        }
        (watch, now)
    }

    #[test]
    fn a_stream_is_asked_until_it_has_come_no_further() {
        let (mut watch, _) = watch(&[(1, 0, 9), (2, 1, 9), (3, 0, 9), (4, 1, 9), (5, 1, 9)]);
        let mut asked = Vec::new();
        let (done, failed) = watch.reap(|&what| {
            asked.push(what);
            Ok::<_, ()>(what == 2 || what == 4)
        });
        assert_eq!((done, failed, asked), (vec![2, 4], None, vec![1, 2, 4, 5]));
        assert_eq!(watch.end(), [1, 3, 5]);
    }

    #[test]
    fn nobody_is_asked_after_an_error_and_nothing_is_lost() {
        let (mut watch, _) = watch(&[(1, 0, 9), (2, 1, 9), (3, 2, 9)]);
        let (done, failed) = watch.reap(|&what| if what == 2 { Err("broken") } else { Ok(true) });
        assert_eq!((done, failed), (vec![1], Some("broken")));
        assert_eq!(watch.end(), [2, 3]);
    }

    #[test]
    fn the_first_whose_time_is_over_is_named() {
        let (watch, now) = watch(&[(1, 0, 9), (2, 1, 3), (3, 1, 2)]);
        assert_eq!(watch.overdue(now), None);
        assert_eq!(watch.overdue(now + Duration::from_secs(3)), Some(&2));
    }

    #[test]
    fn it_is_looked_again_when_something_can_have_changed() {
        let (mut watch, now) = watch(&[(1, 0, 9)]);
        assert_eq!(watch.look_in(now), Some(LOOK));
        assert_eq!(watch.look_in(now + Duration::from_secs(10)), Some(Duration::ZERO));
        watch.hurry();
        assert_eq!(watch.look_in(now), Some(HURRIED));
        watch.reap(|_| Ok::<_, ()>(true));
        assert_eq!((watch.look_in(now), watch.is_empty()), (None, true));
        watch.add(2, 0, now + Duration::from_secs(9));
        assert_eq!(watch.look_in(now), Some(LOOK));
    }

    #[test]
    fn whoever_adds_many_looks_now_and_then() {
        let (mut watch, now) = watch(&[]);
        let looks: Vec<u32> = (1..=1000).filter(|&what| watch.add(what, 0, now)).collect();
        assert_eq!(looks, [256, 512, 768]);
    }
}
