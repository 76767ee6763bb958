//! Coordinator session of a node: connects and reconnects, sends the node's statuses, and receives orders.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::backoff::Backoff;
use super::caller::{self, Caller, Connection};
use super::directory::Trouble;
use super::finder::{Attempt, Finder, Nowhere};
use super::link::{self, LinkError};
use super::wire::{MEMBERS_LIMIT, ToCoordinator, ToMember};
use crate::config::is_named;
use crate::membership::{Departure, Ending, LENIENCE, Member, News, Phase, Refusal};

/// First delay between two attempts to connect. [`SLOWEST_RETRY`] is the longest.
const RETRY: Duration = Duration::from_millis(20);
const SLOWEST_RETRY: Duration = Duration::from_secs(1);
/// Number of refused connections after which the process of the coordinator counts as dead.
const ATTEMPTS: u32 = 4;
/// Time after which an attempt also checks whether another coordinator is registered.
const QUICK: Duration = Duration::from_millis(500);
/// Interval at which a node checks whether the coordinator of an ended job is gone.
const CLOSING: Duration = Duration::from_millis(200);
/// Longest time that a leaving node waits for its last message to be sent.
const FAREWELL: Duration = Duration::from_millis(500);

/// Input from the node.
#[derive(Debug)]
pub(super) enum Said {
    Enter(Phase),
    /// The node leaves.
    Leave(Departure),
}

/// Event for the node.
#[derive(Debug)]
pub(super) enum Heard {
    News(News),
    /// No answer came for so long that the other nodes have continued without this one.
    Alone {
        silent: Duration,
        last: String,
    },
    /// No answer came for too long, so the workers must stop. The node will rejoin the others.
    Stop {
        silent: Duration,
        last: String,
    },
    /// There is no connection at present. `why` is the reason.
    Waiting {
        why: String,
    },
    /// A connection is impossible.
    Unusable {
        why: String,
    },
    Connected,
}

/// Coordinator session of one node.
pub(super) struct Desk {
    pub(super) caller: Caller,
    /// Heartbeat interval of most nodes.
    pub(super) beat: Duration,
    /// Time for which a node without workers waits for a replaceable coordinator.
    pub(super) join_timeout: Duration,
}

/// Reason for which there is no connection.
enum Missed {
    Because {
        why: String,
        how: Attempt,
    },
    /// The coordinator has moved, or will move.
    Moved,
    Unusable(String),
    /// The job has ended.
    Closed(Ending),
    /// The job has ended, and another one has started under its run id.
    Replaced,
}

impl From<Nowhere> for Missed {
    fn from(nowhere: Nowhere) -> Self {
        match nowhere {
            Nowhere::Because(Trouble::Passing(why)) => Self::Because { why, how: Attempt::Fine },
            Nowhere::Because(Trouble::Final(why)) => Self::Unusable(why),
            Nowhere::Closed(ending) => Self::Closed(ending),
            Nowhere::Replaced => Self::Replaced,
        }
    }
}

/// Reason for which a session ended.
enum Over {
    /// The node leaves.
    Gone,
    /// The coordinator has evicted this node.
    GivenUp,
    /// This node never took part, and the job has ended.
    Closed(Ending),
    Broken(LinkError),
}

impl Desk {
    /// Runs until the node leaves or is cut off from the others.
    pub(super) async fn run(
        mut self,
        member: &mut Member,
        finder: &mut Finder,
        said: &mut mpsc::UnboundedReceiver<Said>,
        heard: &mpsc::UnboundedSender<Heard>,
        towards: &Mutex<Option<IpAddr>>,
    ) {
        let began = Instant::now();
        let mut retry = Backoff::new(RETRY, SLOWEST_RETRY);
        let (mut last, mut how, mut vain) = (String::new(), Attempt::Fine, 0);
        let mut since = began;
        loop {
            let is_fixed = finder.is_fixed();
            let ends = self.ends(member, is_fixed, began, since);
            let takes_part = member.answered().is_some();
            let connecting = async {
                let found = finder.find(how, takes_part).await?;
                tokio::select! {
                    connected = self.caller.connect(&found) => connected.map_err(|(why, how)| match how {
                        Attempt::Never => Missed::Unusable(why),
                        Attempt::Fine | Attempt::Refused | Attempt::Failed => Missed::Because { why, how },
                    }),
                    () = async {
                        // Most attempts succeed before this delay ends.
                        sleep(QUICK).await;
                        finder.moved().await;
                    } => Err(Missed::Moved),
                }
            };
            let connected = tokio::select! {
                connected = connecting => connected,
                () = wait_for_departure(member, said) => return,
                () = until(ends.map(|(at, _)| at), began) => {
                    let silent = began.elapsed().saturating_sub(member.answered().unwrap_or_default());
                    let is_end = ends.is_none_or(|(_, end)| end);
                    let last = last.clone();
                    if is_end {
                        let _ = heard.send(Heard::Alone { silent, last });
                        return;
                    }
                    member.stop_alone();
                    let _ = heard.send(Heard::Stop { silent, last });
                    continue;
                }
            };
            let connected = match connected {
                // A coordinator that answered before may do so again.
                Err(Missed::Unusable(why)) if member.answered().is_some() => {
                    Err(Missed::Because { why, how })
                }
                connected => connected,
            };
            match connected {
                Ok(connection) => {
                    retry.reset();
                    (how, vain) = (Attempt::Fine, 0);
                    member.coordinates(finder.is_own());
                    let own = connection.stream.local_addr().ok().map(|address| address.ip());
                    *towards.lock().unwrap_or_else(PoisonError::into_inner) = own;
                    let _ = heard.send(Heard::Connected);
                    match self.talk(connection, member, finder, began, said, heard).await {
                        Over::Gone => return,
                        Over::GivenUp => {
                            last = "the others have gone on without this node".to_owned();
                            if has_workers(member) {
                                let silent = member.lease();
                                let _ = heard.send(Heard::Stop { silent, last: last.clone() });
                            }
                            match caller::fresh_id() {
                                Ok(id) => {
                                    self.caller.agent = id;
                                    finder.comes_anew(id);
                                }
                                Err(error) => last = error.to_string(),
                            }
                            member.come_anew();
                        }
                        Over::Closed(ending) if !ending.frees_run_id(is_named(&self.caller.run_id)) => {
                            let _ = heard.send(Heard::News(News::Refuse(Refusal::Closed(ending))));
                            return;
                        }
                        Over::Closed(_) => {
                            member.forget_coordinator();
                            last = "the job before has ended, and its launcher still serves the endpoint"
                                .to_owned();
                            let _ = heard.send(Heard::Waiting { why: last.clone() });
                            tokio::select! {
                                () = sleep(CLOSING) => {}
                                () = wait_for_departure(member, said) => return,
                            }
                        }
                        Over::Broken(error) => {
                            how = Attempt::Failed;
                            last = error.to_string();
                        }
                    }
                    since = Instant::now();
                }
                Err(Missed::Closed(ending)) => {
                    // For a node that took part, this is the outcome of the job.
                    let news =
                        if takes_part { News::End(ending) } else { News::Refuse(Refusal::Closed(ending)) };
                    let _ = heard.send(Heard::News(news));
                    return;
                }
                Err(Missed::Replaced) => {
                    let why = "the job that this node took part in has ended while it heard nobody, and another one has \
                               begun under its run id";
                    let _ = heard.send(Heard::Unusable { why: why.to_owned() });
                    return;
                }
                Err(Missed::Moved) => retry.reset(),
                Err(Missed::Unusable(why)) => {
                    let _ = heard.send(Heard::Unusable { why });
                    return;
                }
                Err(Missed::Because { why, how: now }) => {
                    how = now;
                    let _ = heard.send(Heard::Waiting { why: why.clone() });
                    vain = if how == Attempt::Refused { vain + 1 } else { 0 };
                    last = why;
                    // The process of the coordinator is gone, and no other node can become the coordinator.
                    if let Some(answered) = member.answered().filter(|_| vain >= ATTEMPTS && is_fixed) {
                        let silent = began.elapsed().saturating_sub(answered);
                        let _ = heard.send(Heard::Alone { silent, last });
                        return;
                    }
                    tokio::select! {
                        () = sleep(retry.next()) => {}
                        () = wait_for_departure(member, said) => return,
                    }
                }
            }
        }
    }

    /// Returns the time at which a node that has no connection since `since` acts, and whether it then gives
    /// up altogether. Otherwise it only stops its workers.
    fn ends(
        &self,
        member: &Member,
        is_fixed: bool,
        began: Instant,
        since: Instant,
    ) -> Option<(Duration, bool)> {
        let lease = member.lease_ends();
        if is_fixed {
            return lease.map(|at| (at + self.more_patience(member), true));
        }
        match member.phase() {
            Phase::Running { .. } | Phase::Failed { .. } | Phase::Leaving { .. } => {
                lease.map(|at| (at, false))
            }
            Phase::Ready { .. } | Phase::Succeeded { .. } | Phase::Left(_) => {
                // A node that was never connected has no deadline here: its caller has one.
                lease.map(|_| (since.duration_since(began) + self.join_timeout, true))
            }
        }
    }

    /// Returns the time beyond its lease for which a node may receive nothing. It is zero unless the node
    /// only waits for a round.
    fn more_patience(&self, member: &Member) -> Duration {
        match member.phase() {
            Phase::Ready { .. } => member.lease() * (LENIENCE - 1),
            Phase::Running { .. }
            | Phase::Failed { .. }
            | Phase::Succeeded { .. }
            | Phase::Leaving { .. }
            | Phase::Left(_) => Duration::ZERO,
        }
    }

    /// Exchanges messages until the connection ends or the node leaves.
    async fn talk(
        &self,
        connection: Connection,
        member: &mut Member,
        finder: &Finder,
        began: Instant,
        said: &mut mpsc::UnboundedReceiver<Said>,
        heard: &mpsc::UnboundedSender<Heard>,
    ) -> Over {
        let Connection { stream, mut ours, mut theirs } = connection;
        let (mut reading, mut writing) = stream.into_split();
        // A separate task reads frames, because a read must not be cancelled halfway.
        let (passes, mut orders) = mpsc::channel(16);
        let reader = tokio::task::spawn_local(async move {
            loop {
                let order: Result<ToMember, LinkError> =
                    link::read(&mut reading, &mut theirs, MEMBERS_LIMIT).await;
                let ends = order.is_err();
                if passes.send(order).await.is_err() || ends {
                    return;
                }
            }
        });
        let mut next_beat = Instant::now();
        let is_fixed = finder.is_fixed();
        let start = began.elapsed();
        let mut begins = start;
        let result = loop {
            // A node without workers may have been silent before.
            let ends = match member.lease_ends() {
                Some(ends) if has_workers(member) => Some(ends),
                ends => {
                    // If another coordinator may be registered, the node looks for it soon.
                    let more = if is_fixed { self.more_patience(member) } else { Duration::ZERO };
                    ends.max(Some(begins + member.lease())).map(|ends| ends + more)
                }
            };
            tokio::select! {
                biased;
                what = said.recv() => match what {
                    Some(Said::Enter(phase)) => {
                        // Each state is sent, even if the next one follows at once.
                        member.enter(phase);
                        let status = ToCoordinator::Status(member.status(began.elapsed()));
                        if let Err(error) = link::write(&mut writing, &mut ours, &status).await {
                            break Over::Broken(error);
                        }
                        next_beat = Instant::now() + member.beat(self.beat);
                    }
                    Some(Said::Leave(departure)) => {
                        member.enter(Phase::Left(departure));
                        let status = ToCoordinator::Status(member.status(began.elapsed()));
                        let _ = timeout(FAREWELL, link::write(&mut writing, &mut ours, &status)).await;
                        break Over::Gone;
                    }
                    None => break Over::Gone,
                },
                order = orders.recv() => match order {
                    Some(Ok(ToMember::Order(message))) => {
                        let (news, reply) = member.hear(message);
                        match news {
                            Some(News::Refuse(Refusal::GivenUp { .. })) if !is_fixed => break Over::GivenUp,
                            Some(News::Refuse(Refusal::Closed(ending))) => match member.answered() {
                                Some(_) => drop(heard.send(Heard::News(News::End(ending)))),
                                None => break Over::Closed(ending),
                            },
                            Some(news) => drop(heard.send(Heard::News(news))),
                            None => {}
                        }
                        if reply {
                            next_beat = Instant::now();
                        }
                    }
                    Some(Err(error)) => break Over::Broken(error),
                    None => break Over::Broken(LinkError::Stranger),
                },
                () = sleep_until(next_beat) => {
                    finder.look();
                    next_beat = Instant::now() + member.beat(self.beat);
                    let status = ToCoordinator::Status(member.status(began.elapsed()));
                    if let Err(error) = link::write(&mut writing, &mut ours, &status).await {
                        break Over::Broken(error);
                    }
                }
                () = until(ends, began) => {
                    let silent = began.elapsed().saturating_sub(member.answered().unwrap_or_default().max(start));
                    let may_wait = !is_fixed && !has_workers(member) && silent < member.lease() * LENIENCE;
                    if !may_wait || !finder.stands().await {
                        break Over::Broken(LinkError::Silent(member.lease()));
                    }
                    // The coordinator is alive but busy.
                    begins = began.elapsed();
                }
            }
        };
        reader.abort();
        result
    }
}

/// Returns true if the node has workers or may have some.
fn has_workers(member: &Member) -> bool {
    matches!(member.phase(), Phase::Running { .. } | Phase::Failed { .. } | Phase::Leaving { .. })
}

/// Completes `at` that time after `began`, or never if `at` is `None`.
async fn until(at: Option<Duration>, began: Instant) {
    match at {
        Some(at) => sleep_until(began + at).await,
        None => std::future::pending().await,
    }
}

/// Processes states of the node while no coordinator is reachable. Returns when the node leaves.
async fn wait_for_departure(member: &mut Member, said: &mut mpsc::UnboundedReceiver<Said>) {
    while let Some(Said::Enter(phase)) = said.recv().await {
        member.enter(phase);
    }
}
