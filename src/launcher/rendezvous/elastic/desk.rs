//! A node's connection to the coordinator: made, kept, made again; what the node says goes out, what it is told comes in.

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

/// Between two attempts, at first and at most.
const RETRY: Duration = Duration::from_millis(20);
const SLOWEST_RETRY: Duration = Duration::from_secs(1);
/// Attempts in vain, with nobody listening, until the coordinator's process is taken for dead.
const ATTEMPTS: u32 = 4;
/// After so long it is looked whether there is another coordinator by now.
const QUICK: Duration = Duration::from_millis(500);
/// Between two looks whether the coordinator of a job that has ended is gone.
const CLOSING: Duration = Duration::from_millis(200);
/// How long somebody who goes waits for the word of it to be sent.
const FAREWELL: Duration = Duration::from_millis(500);

/// What the node says.
#[derive(Debug)]
pub(super) enum Said {
    Enter(Phase),
    /// It goes.
    Leave(Departure),
}

/// What comes of it.
#[derive(Debug)]
pub(super) enum Heard {
    News(News),
    /// Nobody has answered for so long that the others have gone on without this node.
    Alone {
        silent: Duration,
        last: String,
    },
    /// The same, but there will be others to go on with: its workers are to stop.
    Stop {
        silent: Duration,
        last: String,
    },
    /// There is no connection, for this reason.
    Waiting {
        why: String,
    },
    /// There will never be one.
    Unusable {
        why: String,
    },
    Connected,
}

/// See the module's head.
pub(super) struct Desk {
    pub(super) caller: Caller,
    /// Between two statuses of most nodes.
    pub(super) beat: Duration,
    /// How long a node without workers waits for a coordinator that another one may replace.
    pub(super) join_timeout: Duration,
}

/// Why there is no connection.
enum Missed {
    Because {
        why: String,
        how: Attempt,
    },
    /// The coordinator is, or will be, somewhere else.
    Moved,
    Unusable(String),
    /// The job has ended.
    Closed(Ending),
    /// And another one has begun under its run id.
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

/// Why a conversation is over.
enum Over {
    /// The node goes.
    Gone,
    /// The others have gone on without it.
    GivenUp,
    /// This node has never taken part, and the job has ended.
    Closed(Ending),
    Broken(LinkError),
}

impl Desk {
    /// Runs until the node leaves or is alone.
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
                        // Most connections are made at once.
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
                // What has worked before may work again.
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
                    // For who took part it is how the job ended.
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
                    // Its process is gone, and nobody else can be the coordinator.
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

    /// When a node without a connection since then gives up something, and whether that is all.
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
                // Who has never been there is told by who waits for it.
                lease.map(|_| (since.duration_since(began) + self.join_timeout, true))
            }
        }
    }

    /// How much longer than a lease a node may hear nothing: as long as it only waits for a round.
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

    /// Speaks and listens until the connection ends, or the node goes.
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
        // Frames are read by a task of their own: a read must not be given up halfway.
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
            // Who has no workers may have been silent before.
            let ends = match member.lease_ends() {
                Some(ends) if has_workers(member) => Some(ends),
                ends => {
                    // Where there may be another coordinator it is looked for soon.
                    let more = if is_fixed { self.more_patience(member) } else { Duration::ZERO };
                    ends.max(Some(begins + member.lease())).map(|ends| ends + more)
                }
            };
            tokio::select! {
                biased;
                what = said.recv() => match what {
                    Some(Said::Enter(phase)) => {
                        // Each is told, also if the next one follows at once.
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
                    // It is busy.
                    begins = began.elapsed();
                }
            }
        };
        reader.abort();
        result
    }
}

/// Or may have.
fn has_workers(member: &Member) -> bool {
    matches!(member.phase(), Phase::Running { .. } | Phase::Failed { .. } | Phase::Leaving { .. })
}

/// Ends `at` that time after `began`; never if there is none.
async fn until(at: Option<Duration>, began: Instant) {
    match at {
        Some(at) => sleep_until(began + at).await,
        None => std::future::pending().await,
    }
}

/// Takes in what the node says while nobody can be told; ends when it goes.
async fn wait_for_departure(member: &mut Member, said: &mut mpsc::UnboundedReceiver<Said>) {
    while let Some(Said::Enter(phase)) = said.recv().await {
        member.enter(phase);
    }
}
