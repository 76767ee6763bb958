//! Pauses between the polls of a waiting thread.

use std::thread;
use std::time::{Duration, Instant};

/// Pauses between a thread's polls: first it spins, then it yields, then it sleeps for growing times.
#[derive(Default)]
pub(super) struct Backoff {
    polls: u32,
    yields_since: Option<Instant>,
}

impl Backoff {
    const SPINS: u32 = 100;
    /// Longest time for which the thread yields before it sleeps. A sleeping thread would wake too late for a
    /// short wait.
    const YIELDS: Duration = Duration::from_micros(200);
    const MAX_SLEEP: Duration = Duration::from_millis(10);

    /// Returns how long to sleep. `None` if it spun or yielded instead, because it is too early to sleep.
    fn next(&mut self) -> Option<Duration> {
        self.polls += 1;
        let Some(beyond) = self.polls.checked_sub(Self::SPINS) else {
            std::hint::spin_loop();
            return None;
        };
        if self.yields_since.get_or_insert_with(Instant::now).elapsed() < Self::YIELDS {
            self.polls = Self::SPINS;
            thread::yield_now();
            return None;
        }
        Some(Self::MAX_SLEEP.min(Duration::from_micros(20) * (1 + beyond / 16)))
    }

    pub(super) fn pause(&mut self) {
        if let Some(time) = self.next() {
            thread::sleep(time);
        }
    }

    /// Like [`Self::pause`], but ends at `until`, and when the thread is unparked.
    pub(super) fn park(&mut self, until: Option<Instant>) {
        if let Some(time) = self.next() {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            thread::park_timeout(left.unwrap_or(time).min(time));
        }
    }

    /// Calls `ask` until it returns a value or `until` has passed; at least once.
    pub(super) fn poll_until<T>(until: Instant, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
        let mut wait = Self::default();
        loop {
            let answer = ask();
            if answer.is_some() || Instant::now() >= until {
                return answer;
            }
            wait.pause();
        }
    }
}
