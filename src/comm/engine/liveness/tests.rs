//! Tests of the liveness, most of them in a simulated group. Its ranks die or leave, and its hosts are cut off
//! from the network, at random times.

use std::collections::BTreeMap;

use super::*;
use convoke_testkit::Random;

/// Times are milliseconds since the start of the simulation.
type Millis = u64;

const TICK: Millis = 5;
/// Longest time for which a host may not acknowledge.
const PEER_TIMEOUT: Millis = 3000;
/// Interval of the kernel's probes of an idle connection.
const PROBE_INTERVAL: Millis = 1000;
const END: Millis = 7000;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Ended {
    Died,
    Left,
}

/// From `at` on, `host` cannot send to other hosts, or cannot receive from them.
#[derive(Debug, Clone, Copy)]
struct Cut {
    host: usize,
    at: Millis,
    sends: bool,
    receives: bool,
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Goodbye(usize),
    Closed(usize),
    TimedOut(usize),
    DataClosed(usize),
    /// The launcher reports that the rank has ended.
    ExitReport(usize),
    /// Another rank has ended the group because of the loss of this rank.
    Abort(usize),
}

#[derive(Debug)]
struct Group {
    /// The host of each rank.
    hosts: Vec<usize>,
    ended: BTreeMap<usize, (Millis, Ended)>,
    cut: Option<Cut>,
    has_agent: bool,
    /// When each rank last asked other ranks for an acknowledgement.
    asked: Vec<Option<Millis>>,
    /// Events by time and receiver.
    events: BTreeMap<Millis, Vec<(usize, Event)>>,
    /// The cause of the first rank that could reach the store, which is on host 0.
    agreed: Option<usize>,
    /// For each rank, the rank that it believes to be lost, and since when.
    decisions: Vec<Option<(Millis, usize)>>,
}

/// What one rank observes.
struct View<'a> {
    group: &'a Group,
    me: usize,
    now: Millis,
}

impl Group {
    fn random(random: &mut Random) -> Self {
        let host_count = 1 + random.below(4);
        let hosts: Vec<usize> = (0..2 + random.below(6)).map(|rank| rank % host_count).collect();
        let at = |random: &mut Random| 2000 + random.below(500) as Millis;
        let cut = (host_count > 1 && random.below(2) == 0).then(|| {
            let kind = random.below(3);
            let host = random.below(host_count);
            Cut { host, at: at(random), sends: kind == 0, receives: kind == 1 }
        });
        // One kind of fault at a time, so that it is known which rank is to be named.
        let ends = if cut.is_some() { 0 } else { random.below(3) };
        let ended = (0..ends).map(|_| {
            let how = if random.below(3) == 0 { Ended::Left } else { Ended::Died };
            (random.below(hosts.len()), (at(random), how))
        });
        let ended = ended.collect();
        let (asked, decisions) = (vec![None; hosts.len()], vec![None; hosts.len()]);
        let has_agent = random.below(2) == 0;
        let events = BTreeMap::new();
        let mut group = Self { hosts, ended, cut, has_agent, asked, events, agreed: None, decisions };
        for (a, b) in group.pairs() {
            group.plan_connection(a, b, random);
        }
        group
    }

    fn pairs(&self) -> Vec<(usize, usize)> {
        let ranks = || 0..self.hosts.len();
        ranks().flat_map(|a| ranks().map(move |b| (a, b))).filter(|(a, b)| a != b).collect()
    }

    /// Returns the time from which on bytes from `a` do not reach `b`.
    fn lost_from(&self, a: usize, b: usize) -> Option<Millis> {
        let [a, b] = [self.hosts[a], self.hosts[b]];
        let cut = self.cut.filter(|_| a != b)?;
        (cut.host == a && !cut.sends || cut.host == b && !cut.receives).then_some(cut.at)
    }

    /// Returns the time from which on `a` gets no acknowledgements of `b`.
    fn unacknowledged_from(&self, a: usize, b: usize) -> Option<Millis> {
        self.lost_from(a, b).into_iter().chain(self.lost_from(b, a)).min()
    }

    fn send(&mut self, to: usize, at: Millis, random: &mut Random, event: Event) {
        self.events.entry(at + 1 + random.below(20) as Millis).or_default().push((to, event));
    }

    /// Plans what rank `a` sees of its connections to `b`.
    fn plan_connection(&mut self, a: usize, b: usize, random: &mut Random) {
        if let Some(&(at, how)) = self.ended.get(&b) {
            if how == Ended::Left {
                self.events.entry(at + 1).or_default().push((a, Event::Goodbye(b)));
            } else if self.has_agent && random.below(3) > 0 {
                self.send(a, at + 20, random, Event::ExitReport(b));
            }
            let data_first = random.below(2) == 0;
            self.send(a, at + 1, random, if data_first { Event::DataClosed(b) } else { Event::Closed(b) });
            self.send(a, at + 21, random, Event::Closed(b));
        }
        if let Some(from) = self.unacknowledged_from(a, b) {
            let gives_up = from + PEER_TIMEOUT;
            self.send(a, gives_up, random, Event::TimedOut(b));
            // The host that gives up tells the other one, if that still receives.
            if self.lost_from(a, b).is_none() {
                self.send(b, gives_up, random, Event::Closed(a));
            }
        }
    }

    fn decide(&mut self, me: usize, now: Millis, lost: usize, random: &mut Random) {
        let reaches_store = self.cut.is_none_or(|cut| (cut.host == self.hosts[me]) == (cut.host == 0));
        let lost = if reaches_store { *self.agreed.get_or_insert(lost) } else { lost };
        self.decisions[me] = Some((now, lost));
        for other in (0..self.hosts.len()).filter(|&other| other != me) {
            if self.lost_from(me, other).is_none_or(|from| now < from) {
                self.send(other, now, random, Event::Abort(lost));
            }
        }
    }

    fn run(&mut self, random: &mut Random) {
        let start = Instant::now();
        let time = |now: Millis| start + Duration::from_millis(now);
        let size = self.hosts.len();
        let mut ranks: Vec<Liveness> =
            (0..size).map(|me| Liveness::new(me, size, Duration::from_millis(PEER_TIMEOUT))).collect();
        for now in (0..END).step_by(TICK as usize) {
            let later = self.events.split_off(&(now + 1));
            let due = std::mem::replace(&mut self.events, later);
            for (me, event) in due.into_values().flatten() {
                let (at, liveness) = (time(now), &mut ranks[me]);
                match event {
                    Event::Goodbye(peer) => liveness.on_goodbye(peer),
                    Event::Closed(peer) if liveness.is_closed(peer) => {}
                    Event::Closed(peer) => liveness.on_control_closed(peer, at, LossReason::Disconnected),
                    Event::TimedOut(peer) if liveness.is_closed(peer) => {}
                    Event::TimedOut(peer) => {
                        let how = LossReason::Unreachable { what: "timed out".to_owned() };
                        liveness.on_control_closed(peer, at, how);
                    }
                    Event::DataClosed(peer) => liveness.on_data_closed(peer, at, "closed".to_owned()),
                    Event::ExitReport(lost) | Event::Abort(lost) => {
                        let has_ended = self.ended.get(&me).is_some_and(|&(at, _)| at <= now);
                        if self.decisions[me].is_none() && !has_ended {
                            self.decide(me, now, lost, random);
                        }
                    }
                }
            }
            for (me, liveness) in ranks.iter_mut().enumerate() {
                let has_ended = self.ended.get(&me).is_some_and(|&(at, _)| at <= now);
                if has_ended || self.decisions[me].is_some() || random.below(4) == 0 {
                    continue;
                }
                let decision =
                    liveness.check(time(now), random.below(3) == 0, &View { group: self, me, now });
                assert!(liveness.wake_at(time(now)).is_none_or(|at| at > time(now)), "rank {me} spins");
                match decision {
                    Some(Decision::Ask(_)) => self.asked[me] = Some(now),
                    Some(Decision::Lost { rank, .. }) => self.decide(me, now, rank, random),
                    None => {}
                }
            }
        }
    }

    /// Returns whether `rank` has died, or its host is cut off.
    fn is_lost(&self, rank: usize) -> bool {
        self.ended.get(&rank).is_some_and(|&(_, how)| how == Ended::Died)
            || self.cut.is_some_and(|cut| cut.host == self.hosts[rank])
    }

    fn check(&self) {
        let ranks = 0..self.hosts.len();
        let host_count = self.hosts.iter().max().map_or(0, |last| last + 1);
        let died = self.ended.values().filter(|(_, how)| *how == Ended::Died).map(|(at, _)| *at).min();
        let fault = self.cut.map(|cut| cut.at + PEER_TIMEOUT).or(died);
        let stays = |rank: &usize| !self.ended.contains_key(rank);
        for me in ranks.clone().filter(stays) {
            let is_struck = |&other: &usize| {
                self.unacknowledged_from(me, other).is_some() || self.cut.is_none() && self.is_lost(other)
            };
            let Some((at, named)) = self.decisions[me] else {
                let struck = ranks.clone().filter(|&other| other != me).find(is_struck);
                assert_eq!(struck, None, "rank {me} does not notice the loss: {self:?}");
                continue;
            };
            // Without a third host it cannot be told which of two hosts is cut off.
            let is_right = self.is_lost(named) || self.cut.is_some() && host_count == 2;
            assert!(is_right, "rank {me} names {named}: {self:?}");
            let fault = fault.expect("only a fault ends the group");
            assert!(at < fault + 1300, "rank {me} notices at {at}: {self:?}");
        }
        // Ranks that cannot reach the store, which is on host 0, agree with nobody.
        let agreeing =
            ranks.filter(|&rank| self.cut.is_none_or(|cut| cut.host != 0 && cut.host != self.hosts[rank]));
        let mut named =
            agreeing.filter(stays).filter_map(|rank| self.decisions[rank]).map(|(_, named)| named);
        let first = named.next();
        assert!(named.all(|named| Some(named) == first), "ranks name different ranks: {self:?}");
    }
}

impl Evidence for View<'_> {
    fn may_report_exits(&self) -> bool {
        self.group.has_agent
    }

    fn share_host(&self, a: usize, b: usize) -> bool {
        self.group.hosts[a] == self.group.hosts[b]
    }

    fn has_control(&self, _rank: usize) -> bool {
        true
    }

    fn time_since_ack(&self, rank: usize) -> Option<Duration> {
        let died = self.group.ended.get(&rank).map(|end| end.0);
        let until = died.into_iter().chain(self.group.unacknowledged_from(self.me, rank)).min();
        let idle = |at: Millis| at - at % PROBE_INTERVAL;
        let last = until.filter(|&until| until < self.now).map_or_else(|| idle(self.now), idle);
        Some(Duration::from_millis(self.now - last))
    }

    fn is_flushed(&self, rank: usize) -> bool {
        let asked = self.group.asked[self.me];
        let is_lost = self.group.unacknowledged_from(self.me, rank).is_some_and(|from| from <= self.now);
        asked.is_some_and(|asked| self.now >= asked + 40) && !is_lost
    }
}

#[test]
fn lost_rank_is_named_and_healthy_ranks_are_not() {
    let mut random = Random::new("liveness");
    for _ in 0..2000 {
        let mut group = Group::random(&mut random);
        group.run(&mut random);
        group.check();
    }
}

/// Returns a group of two hosts and what rank 0 observes of it at `now`.
fn pair(has_agent: bool) -> Group {
    Group {
        hosts: vec![0, 1],
        ended: BTreeMap::new(),
        cut: None,
        has_agent,
        asked: vec![None; 2],
        events: BTreeMap::new(),
        agreed: None,
        decisions: vec![None; 2],
    }
}

fn lost(rank: usize, how: LossReason) -> Option<Decision> {
    Some(Decision::Lost { rank, how })
}

#[test]
fn launcher_has_60_ms_to_report_how_a_rank_ended() {
    let start = Instant::now();
    let after = |millis| start + Duration::from_millis(millis);
    for (has_agent, decision) in [(true, None), (false, lost(1, LossReason::Disconnected))] {
        let (group, mut liveness) =
            (pair(has_agent), Liveness::new(0, 2, Duration::from_millis(PEER_TIMEOUT)));
        liveness.on_control_closed(1, start, LossReason::Disconnected);
        let view = View { group: &group, me: 0, now: 0 };
        assert_eq!(liveness.check(after(1), false, &view), decision);
        if has_agent {
            assert_eq!(liveness.wake_at(after(1)), Some(after(61)));
            assert_eq!(liveness.check(after(60), false, &view), None);
            assert_eq!(liveness.check(after(61), false, &view), lost(1, LossReason::Disconnected));
        }
    }
}

#[test]
fn goodbye_that_comes_after_the_end_of_the_connection_ends_the_suspicion() {
    let (start, group, mut liveness) =
        (Instant::now(), pair(true), Liveness::new(0, 2, Duration::from_millis(PEER_TIMEOUT)));
    let view = View { group: &group, me: 0, now: 0 };
    liveness.on_control_closed(1, start, LossReason::Disconnected);
    assert_eq!(liveness.check(start, false, &view), None);
    assert!(liveness.is_undecided());
    liveness.on_goodbye(1);
    assert!(!liveness.is_undecided());
    assert_eq!(liveness.check(start + Duration::from_secs(5), false, &view), None);
}

#[test]
fn data_that_moves_delays_the_detection_by_50_ms() {
    let (start, group, mut liveness) =
        (Instant::now(), pair(false), Liveness::new(0, 2, Duration::from_millis(PEER_TIMEOUT)));
    let view = View { group: &group, me: 0, now: 0 };
    liveness.on_control_closed(1, start, LossReason::Disconnected);
    assert_eq!(liveness.check(start + Duration::from_millis(49), true, &view), None);
    let decision = liveness.check(start + Duration::from_millis(50), true, &view);
    assert_eq!(decision, lost(1, LossReason::Disconnected));
}

#[test]
fn data_connection_that_ends_without_an_explanation_is_a_loss_after_2_s() {
    let (start, group, mut liveness) =
        (Instant::now(), pair(true), Liveness::new(0, 2, Duration::from_millis(PEER_TIMEOUT)));
    let view = View { group: &group, me: 0, now: 0 };
    liveness.on_data_closed(1, start, "reset".to_owned());
    let at = liveness.wake_at(start).expect("the control connection has not shown why");
    assert_eq!(at, start + Duration::from_secs(2));
    assert_eq!(liveness.check(at - Duration::from_millis(1), false, &view), None);
    let how = LossReason::Unreachable { what: "reset".to_owned() };
    assert_eq!(liveness.check(at, false, &view), lost(1, how));
}
