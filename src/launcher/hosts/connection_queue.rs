//! The queue of hosts to which connections are opened: many at a time, and fewer after sshd has dropped some. Pure.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Connections that are opened at one time, and those after sshd has dropped some.
const AT_ONCE: usize = 64;
const AT_ONCE_AFTER_DROPS: usize = 8;
/// Attempts for each host: among 64, 8, 4, 2 connections at a time, and alone.
const ATTEMPTS: u32 = 5;
/// Delay of a host after its first drop. Each further drop doubles it.
const FIRST_DELAY: Duration = Duration::from_millis(250);

/// The hosts that wait for a connection. sshd drops connections if too many at a time have not logged in yet
/// (MaxStartups). A jump host, through which all connections go, drops them first.
#[derive(Debug)]
pub(super) struct ConnectionQueue {
    at_once: usize,
    waiting: VecDeque<Waiting>,
    hosts: Vec<Attempts>,
}

/// A host that waits for a connection.
#[derive(Debug)]
struct Waiting {
    host: usize,
    /// The time before which it is not tried; `None` before the first drop.
    not_before: Option<Instant>,
}

#[derive(Debug, Clone, Default)]
struct Attempts {
    /// Dropped connections after which the host waited again.
    drops: u32,
    /// Connections at a time when the last attempt began.
    at_once: usize,
}

impl ConnectionQueue {
    pub(super) fn new(hosts: usize) -> Self {
        let waiting = (0..hosts).map(|host| Waiting { host, not_before: None }).collect();
        Self { at_once: AT_ONCE, waiting, hosts: vec![Attempts::default(); hosts] }
    }

    /// Returns the next host to connect to while `open` other connections are being opened; `None` if none is to be
    /// opened now.
    pub(super) fn next(&mut self, open: usize, now: Instant) -> Option<usize> {
        if open >= self.at_once {
            return None;
        }
        let is_due = |waiting: &Waiting| waiting.not_before.is_none_or(|time| now >= time);
        let place = self.waiting.iter().position(is_due)?;
        let host = self.waiting.remove(place)?.host;
        self.hosts[host].at_once = self.at_once;
        Some(host)
    }

    /// Records that the connection to the host was dropped. Returns true if it will be tried again.
    pub(super) fn dropped(&mut self, host: usize, now: Instant) -> bool {
        let attempts = &mut self.hosts[host];
        if attempts.drops + 1 >= ATTEMPTS {
            return false;
        }
        // Connections that were opened together are dropped together: they lower the number once.
        if attempts.at_once == self.at_once {
            self.at_once = (self.at_once / 2).clamp(1, AT_ONCE_AFTER_DROPS);
        }
        let not_before = now + FIRST_DELAY * 2_u32.pow(attempts.drops);
        attempts.drops += 1;
        self.waiting.push_back(Waiting { host, not_before: Some(not_before) });
        true
    }

    /// Returns true if a connection to the host was dropped.
    pub(super) fn has_dropped(&self, host: usize) -> bool {
        self.hosts[host].drops > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Connects to `hosts` hosts through an sshd that takes `places` connections at a time. A login takes as long as
    /// given. Returns how many got through, and how long that took.
    fn connect(hosts: usize, places: usize, login: Duration) -> (usize, Duration) {
        let start = Instant::now();
        let (mut queue, mut now, mut through) = (ConnectionQueue::new(hosts), start, 0);
        while !queue.waiting.is_empty() {
            let mut open = Vec::new();
            while let Some(host) = queue.next(open.len(), now) {
                open.push(host);
            }
            through += open.len().min(places);
            let dropped = open.iter().skip(places).filter(|&&host| !queue.dropped(host, now)).count();
            assert!(places == 0 || dropped == 0, "{dropped} hosts are given up");
            now += if open.is_empty() { Duration::from_millis(10) } else { login };
        }
        (through, now - start)
    }

    #[test]
    fn all_hosts_get_through_an_sshd_that_takes_few_connections_at_a_time() {
        for places in [1, 2, 3, 8, 10, 64] {
            for hosts in [1, 2, 6, 64, 1024] {
                let (through, _) = connect(hosts, places, Duration::from_millis(100));
                assert_eq!(through, hosts, "{places} places");
            }
        }
        let (_, took) = connect(64, 10, Duration::from_millis(100));
        assert!(took < Duration::from_millis(1300), "{took:?}");
    }

    #[test]
    fn hosts_that_are_always_dropped_are_given_up_after_some_seconds() {
        let (through, took) = connect(3, 0, Duration::ZERO);
        assert_eq!(through, 0);
        assert!((3.75..3.9).contains(&took.as_secs_f64()), "{took:?}");
    }
}
