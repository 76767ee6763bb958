//! Cost of a job with many agents for its coordinator: messages and work per agent do not grow with their
//! number.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::super::*;
use super::agent::ready;

const RULES: Rules = Rules {
    last_call: Duration::from_secs(30),
    join_timeout: Duration::from_secs(600),
    heartbeat_timeout: Duration::from_secs(3),
    job_budget: None,
};

/// Members and their coordinator. Every message arrives at once.
struct LocalJob {
    coordinator: Coordinator,
    members: HashMap<AgentId, Member>,
    now: Duration,
    messages: usize,
    /// Time spent in the coordinator.
    work: Duration,
}

impl LocalJob {
    fn handle(&mut self, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let (start, mut actions) = (Instant::now(), Vec::new());
            self.coordinator.handle(self.now, event, &mut actions);
            self.work += start.elapsed();
            for action in actions {
                match action {
                    Action::Write(_) => events.push(Event::Written),
                    Action::Send { agent, message } => {
                        self.messages += 1;
                        let Some(member) = self.members.get_mut(&agent) else { continue };
                        let (command, reply) = member.receive(message);
                        match command {
                            Some(Command::Run(run)) => member.enter(Phase::Running { round: run.round }),
                            Some(Command::Stop(_)) => {
                                let Phase::Running { round } = *member.phase() else { continue };
                                member.enter(ready(agent, round, 0));
                            }
                            _ if !reply => continue,
                            _ => {}
                        }
                        self.messages += 1;
                        events.push(Event::Status { agent, status: member.status(self.now) });
                    }
                }
            }
        }
    }

    fn running(&self) -> usize {
        self.members.values().filter(|member| matches!(member.phase(), Phase::Running { .. })).count()
    }
}

/// Returns messages and coordinator time per agent: `count` agents join and start, one is lost, and the
/// others restart.
fn cost(count: usize) -> (f64, Duration) {
    let mut job = LocalJob {
        coordinator: Coordinator::new(RULES, 1, 7),
        members: HashMap::new(),
        now: Duration::ZERO,
        messages: 0,
        work: Duration::ZERO,
    };
    for index in 0..count {
        let agent = AgentId(index as u128 * 0x9E37_79B9_7F4A_7C15 % (1 << 100));
        let host = format!("h{index}");
        let profile =
            Profile { host, pid: 1, min: count - 1, max: count, workers: 8, role: "default".to_owned() };
        let mut member = Member::new(ready(agent, 0, 0), RULES.heartbeat_timeout);
        let status = member.status(job.now);
        job.members.insert(agent, member);
        job.messages += 2;
        job.handle(Event::Hello { agent, profile });
        job.handle(Event::Status { agent, status });
    }
    assert_eq!(job.running(), count);
    let lost = *job.members.keys().next().unwrap();
    job.members.remove(&lost);
    job.now += Duration::from_secs(1);
    job.handle(Event::Disconnected { agent: lost });
    job.now += Duration::from_secs(1);
    job.handle(Event::Tick);
    assert_eq!(job.running(), count - 1);
    (job.messages as f64 / count as f64, job.work / u32::try_from(count).unwrap())
}

#[test]
fn messages_and_work_per_agent_are_independent_of_agent_count() {
    let costs = [100, 1000, 10_000].map(|count| (count, cost(count)));
    for (count, (messages, work)) in costs {
        println!("{count} agents: {messages:.1} messages and {work:?} each");
    }
    let (few, many) = (costs[0].1.0, costs[2].1.0);
    assert!(many < few * 1.1, "{costs:?}");
}
