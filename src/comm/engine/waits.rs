//! The waits of this rank: their deadlines, and the reports of waits between the ranks.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use convoke_store::interrupt::INTERRUPTED;

use super::completion::{Completion, QUERY_LEAD_TIME};
use super::lifecycle::Finishing;
use super::messages::DeadlineBounds;
use super::missing::missing;
use super::peer::Wait;
use super::state::Engine;
use crate::collectives::call::{Call, CallKind};
use crate::error::cause::{Cause, MAX_REPORTED_RANKS};
use crate::transport::frame::{Frame, Kind};

/// Time without progress after which a rank reports to the other ranks which call it waits in. It is a
/// quarter of the call's timeout if that is less.
const REPORT_DELAY: Duration = Duration::from_millis(100);
/// Longest sleep of the thread that drives the engine. Correctness does not depend on it.
const LONGEST_SLEEP: Duration = Duration::from_secs(30);

/// Returns the reason with which a group ends whose program was interrupted while it waited for `rank`.
pub(super) fn interruption_while_waiting(rank: Option<usize>) -> String {
    let waited = rank.map_or_else(String::new, |rank| format!(", while it waited for rank {rank}"));
    format!("{INTERRUPTED}{waited}")
}

impl Engine {
    /// Returns the call that this rank waits in, and for which ranks: its first collective, else its
    /// messages. `None` if nothing is pending.
    fn current_wait(&self) -> Option<Wait> {
        if let Some(first) = self.collectives.queue.front() {
            let awaits = first.awaited(self.settings.me, &self.peers).take(MAX_REPORTED_RANKS).collect();
            return Some((first.seq, first.call, awaits));
        }
        let (_, call, _) = self.message_waits().next()?;
        let awaits: BTreeSet<usize> = self.message_waits().flat_map(|(.., awaits)| awaits).collect();
        Some((0, call, awaits.into_iter().take(MAX_REPORTED_RANKS).collect()))
    }

    /// Returns the wait that this rank reports to a rank in a collective (`in_collective`) or a message.
    ///
    /// If no caller waits for a pending operation, the program computes, and the other rank may wait for its
    /// next call: nothing is reported. But a pending collective is always reported to a rank that waits in a
    /// collective.
    pub(super) fn reportable_wait(&self, in_collective: bool) -> Option<Wait> {
        let has_waiter =
            || self.driver.has_waiter || self.message_waits().any(|(completion, ..)| completion.is_awaited());
        let is_reportable = |kind| in_collective && kind != CallKind::PointToPoint || has_waiter();
        self.current_wait().filter(|(_, call, _)| is_reportable(call.kind))
    }

    pub(super) fn wait_report(&self, (seq, call, awaits): &Wait) -> (Frame, Vec<u8>) {
        let payload = awaits.iter().flat_map(|&rank| (rank as u32).to_le_bytes()).collect();
        (Frame { call: call.encode(), ..self.frame(Kind::State, *seq) }, payload)
    }

    /// Reports to all ranks which call this rank waits in, if it has waited for [`REPORT_DELAY`] and has not
    /// reported the same wait before.
    fn report_wait(&mut self, now: Instant) {
        if self.report_wait_at().is_some_and(|at| now >= at)
            && let Some(wait) = self.reportable_wait(true)
            && self.waits.reported.as_ref() != Some(&wait)
        {
            let (frame, payload) = self.wait_report(&wait);
            self.waits.reported = Some(wait);
            self.broadcast_control(&frame, &payload);
        }
    }

    /// Returns when this rank reports its wait to the others; `None` if data moves or nothing is pending.
    fn report_wait_at(&self) -> Option<Instant> {
        Some(self.waits.stalled_since? + REPORT_DELAY.min(self.deadline_bounds()?.shortest / 4))
    }

    /// Shortly before the deadline of a call, asks all ranks which calls they wait in. Their earlier reports
    /// may be out of date, and a rank that does not answer waits for no other rank.
    fn query_waits(&mut self, now: Instant) {
        let due = |completion: &Completion| {
            now >= completion.query_at() && self.waits.queried_at.is_none_or(|at| at < completion.query_at())
        };
        let may_be_due = self.deadline_bounds().is_some_and(|bounds| now >= bounds.query_at);
        if may_be_due && self.completions().any(due) {
            self.waits.queried_at = Some(now);
            self.broadcast_control(&self.wait_query(), &[]);
        }
    }

    /// Returns the frame that asks a rank which call it waits in.
    pub(super) fn wait_query(&self) -> Frame {
        self.frame(Kind::StateQuery, u64::from(self.collectives.queue.is_empty()))
    }

    /// Returns when a call times out: at its deadline, or later if this rank asked the other ranks late, so
    /// that they have time to answer.
    pub(super) fn times_out_at(&self, completion: &Completion) -> Instant {
        let answered =
            self.waits.queried_at.map_or(completion.deadline, |asked| asked + completion.query_lead_time());
        answered.clamp(completion.deadline, completion.deadline + QUERY_LEAD_TIME)
    }

    pub(super) fn completions(&self) -> impl Iterator<Item = &Completion> {
        let collectives = self.collectives.queue.iter().map(|collective| &*collective.completion);
        let messages = self.peers.iter().map(|peer| &peer.messages).filter(|messages| messages.is_busy());
        let messages = messages.flat_map(|messages| {
            let sends = messages.sends.iter().map(|send| &*send.posted.completion);
            sends.chain(messages.recvs.iter().map(|recv| &*recv.posted.completion))
        });
        collectives.chain(messages).chain(self.any_source_completions())
    }

    /// Returns lower bounds for all pending calls: of their timeouts, and of the times to ask other ranks
    /// what they wait in. `None` if no call is pending.
    pub(super) fn deadline_bounds(&self) -> Option<DeadlineBounds> {
        let collectives = self.collectives.queue.iter().map(|collective| &*collective.completion);
        let few = collectives.chain(self.any_source_completions()).map(DeadlineBounds::of);
        let messages = self.peers.iter().filter_map(|peer| peer.messages.deadline_bounds());
        few.chain(messages).reduce(DeadlineBounds::min)
    }

    /// Returns the completions of receives from any rank, and of probes.
    pub(super) fn any_source_completions(&self) -> impl Iterator<Item = &Completion> {
        let recvs = self.any_source.recvs.iter().map(|recv| &*recv.posted.completion);
        recvs.chain(self.any_source.probes.iter().map(|probe| &*probe.completion))
    }

    /// Fails the group if a call is overdue or a peer whose connection has ended counts as lost.
    pub(super) fn check_deadlines(&mut self, now: Instant) {
        self.check_closed_peers(now);
        if let Some((awaited, timeout)) = self.overdue(now) {
            let (missing, after_ms) = (self.missing(&awaited), timeout.as_millis() as u64);
            self.fail_for(Cause::Timeout { missing, after_ms });
        }
    }

    /// Returns the ranks that an overdue call waits for, and its timeout; `None` if no call is overdue.
    fn overdue(&self, now: Instant) -> Option<(Vec<usize>, Duration)> {
        let late = |completion: &Completion| now >= self.times_out_at(completion);
        let queue = &self.collectives.queue;
        if let Some(first) = queue.front()
            && let Some(overdue) = queue.iter().find(|collective| late(&collective.completion))
        {
            let awaited = first.awaited(self.settings.me, &self.peers).collect();
            return Some((awaited, overdue.completion.timeout));
        }
        // The common bound of all messages is checked first, because checking each message may take long.
        if self.deadline_bounds().is_none_or(|bounds| now < bounds.query_at) || !self.completions().any(late)
        {
            return None;
        }
        let mut messages = self.message_waits();
        messages
            .find_map(|(completion, _, awaited)| late(completion).then_some((awaited, completion.timeout)))
    }

    /// Returns the completion and the call of each pending send, receive and probe, and the ranks that it
    /// waits for. Calls of sends are [marked](Call::as_send).
    pub(super) fn message_waits(&self) -> impl Iterator<Item = (&Arc<Completion>, Call, Vec<usize>)> {
        let single = self.settings.size == 1;
        let candidate =
            move |&rank: &usize| single || rank != self.settings.me && !self.liveness.has_left(rank);
        let candidates =
            move || (0..self.settings.size).filter(candidate).take(MAX_REPORTED_RANKS).collect::<Vec<_>>();
        let with = self.peers.iter().enumerate().flat_map(|(rank, peer)| {
            let sends = peer.messages.sends.iter().map(|send| (&send.posted, send.posted.call.as_send()));
            let all = sends.chain(peer.messages.recvs.iter().map(|recv| (&recv.posted, recv.posted.call)));
            all.map(move |(posted, call)| (&posted.completion, call, vec![rank]))
        });
        let open = self.any_source.recvs.iter().map(|recv| &recv.posted);
        let open = open.map(move |posted| (&posted.completion, posted.call, candidates()));
        let probes = self.any_source.probes.iter().map(move |probe| {
            (&probe.completion, probe.call, probe.from.map_or_else(candidates, |from| vec![from]))
        });
        with.chain(open).chain(probes)
    }

    /// Returns the reason of an abort after an interruption of the program: for which rank this rank waited.
    pub(super) fn interruption(&self) -> String {
        let first = self.collectives.queue.front();
        let in_collective = first.and_then(|first| first.awaited(self.settings.me, &self.peers).next());
        let in_message = || self.message_waits().find_map(|(_, _, awaited)| awaited.first().copied());
        interruption_while_waiting(in_collective.or_else(in_message))
    }

    /// Follows the waits that ranks have reported, from the ranks `awaited` on, and returns the ranks that do
    /// not answer: they hold up this rank.
    fn missing(&self, awaited: &[usize]) -> Vec<usize> {
        let waits = |rank: usize| {
            let report = self.peers[rank].wait_report.as_ref()?;
            // A report that came before this rank last asked may be out of date.
            (Some(report.received_at) >= self.waits.queried_at).then_some(report.awaits.as_slice())
        };
        missing(self.settings.me, awaited, waits).into_iter().take(MAX_REPORTED_RANKS).collect()
    }

    /// Returns the time at which the timers must be checked again, even if no descriptor is ready.
    pub(super) fn wake_at(&self, now: Instant) -> Instant {
        let tell = self.report_wait_at().filter(|&at| at > now);
        // The completions are scanned one by one only after the earliest time to ask other ranks.
        let bounds = self.deadline_bounds().map(|bounds| bounds.query_at);
        let late = || bounds.is_some_and(|at| now >= at).then(|| self.completions()).into_iter().flatten();
        let asks = late()
            .map(Completion::query_at)
            .filter(|&at| self.waits.queried_at.is_none_or(|asked| asked < at));
        let deadlines = late().map(|completion| self.times_out_at(completion));
        let first = bounds.filter(|&at| now < at);
        let finishing = self.lifecycle.finishing.as_ref().map(Finishing::wake_at);
        let times =
            deadlines.chain(asks).chain(first).chain(self.liveness.wake_at(now)).chain(tell).chain(finishing);
        let times = times.chain(self.links.wake_at());
        times.min().unwrap_or(now + LONGEST_SLEEP).min(now + LONGEST_SLEEP)
    }

    pub(super) fn check_timers(&mut self, now: Instant) {
        self.report_wait(now);
        self.query_waits(now);
        self.check_deadlines(now);
    }
}
