//! The text of a [`GroupSnapshot`]: one line. Pure.

use std::fmt;

use crate::snapshot::{CallSummary, GroupSnapshot, Member, Position};

/// Most clauses of a line.
const MAX_CLAUSES: usize = 8;
/// Most ranges of ranks that a list names.
const MAX_RANGES: usize = 16;

/// Prints ascending ranks as `rank 3` or `ranks 0,2,5-9`: three and more in a row become a range.
#[derive(Debug, Clone, Copy)]
pub struct RankList<'a>(pub &'a [u32]);

impl fmt::Display for RankList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", if self.0.len() == 1 { "rank " } else { "ranks " })?;
        let mut runs = self.0.chunk_by(|&rank, &next| rank.checked_add(1) == Some(next));
        let texts = runs.by_ref().take(MAX_RANGES).map(|run| range(run[0], run[run.len() - 1]));
        let texts: Vec<String> = texts.collect();
        let more = if runs.next().is_some() { " and others" } else { "" };
        write!(f, "{}{more}", texts.join(","))
    }
}

fn range(first: u32, last: u32) -> String {
    match last - first {
        0 => first.to_string(),
        1 => format!("{first},{last}"),
        _ => format!("{first}-{last}"),
    }
}

/// Formats a duration, given in nanoseconds: `0.25 ms`, `3.1 s`, `30 s`, `12 min`.
#[must_use]
pub fn format_duration(ns: u64) -> String {
    let ms = ns as f64 / 1e6;
    match ms {
        ..10.0 => format!("{ms:.2} ms"),
        ..1000.0 => format!("{ms:.0} ms"),
        ..10_000.0 => format!("{:.1} s", ms / 1e3),
        ..300_000.0 => format!("{:.0} s", ms / 1e3),
        _ => format!("{:.0} min", ms / 60e3),
    }
}

/// A clause of the line: a position in the group's sequence of calls, and the members at that
/// position.
struct Clause<'a> {
    order: (u8, Option<u64>),
    singular: String,
    plural: String,
    /// Longest time for which a member has been at this position, in milliseconds.
    ms: Option<u64>,
    members: Vec<&'a Member>,
}

impl fmt::Display for GroupSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut clauses: Vec<Clause<'_>> = Vec::new();
        for member in &self.members {
            let clause = clause(member);
            match clauses.iter_mut().find(|other| other.plural == clause.plural) {
                Some(other) => {
                    other.ms = other.ms.max(clause.ms);
                    other.members.extend(clause.members);
                }
                None => clauses.push(clause),
            }
        }
        clauses.sort_by_key(|clause| clause.order);
        let mut texts: Vec<String> = Vec::new();
        if !self.absent.is_empty() {
            let verb = if self.absent.len() == 1 { "has" } else { "have" };
            texts.push(format!("{} {verb} not joined", RankList(&self.absent)));
        }
        texts.extend(clauses.iter().map(|clause| self.clause(clause)));
        if texts.len() > MAX_CLAUSES {
            let more = texts.len() - MAX_CLAUSES;
            texts.truncate(MAX_CLAUSES);
            texts.push(format!("and {more} more"));
        }
        if !self.unrecorded.is_empty() {
            let ranges = self.unrecorded.iter().take(MAX_CLAUSES);
            let ranges: Vec<String> = ranges.map(|&(first, last)| range(first, last.max(first))).collect();
            let one = self.unrecorded.len() == 1 && self.unrecorded[0].0 == self.unrecorded[0].1;
            let ranks = if one { "rank" } else { "ranks" };
            texts.push(format!("no recording of {ranks} {}", ranges.join(",")));
        }
        write!(f, "group {}: {}", self.group, texts.join("; "))?;
        self.failure.as_ref().map_or(Ok(()), |failure| write!(f, " ({failure})"))
    }
}

impl GroupSnapshot {
    fn clause(&self, clause: &Clause<'_>) -> String {
        let ranks: Vec<u32> = clause.members.iter().map(|member| member.rank).collect();
        let verb = if ranks.len() == 1 { &clause.singular } else { &clause.plural };
        let mut text = format!("{} {verb}", RankList(&ranks));
        let in_a_call = |member: &&Member| match &member.position {
            Position::Waiting { call, .. } | Position::Failed { call } => {
                call.seq.is_some() && !call.waits_for.is_empty()
            }
            _ => false,
        };
        if clause.members.iter().any(in_a_call) && !clause.members[0].died {
            let awaited: Vec<u32> = self.awaited(&clause.members).into_iter().collect();
            match awaited.is_empty() {
                true => text.push_str(" for each other"),
                false => text.push_str(&format!(" for {}", RankList(&awaited))),
            }
        }
        if let Some(ms) = clause.ms {
            let idle = if matches!(clause.members[0].position, Position::Idle { .. }) { "idle " } else { "" };
            text.push_str(&format!(" ({idle}{})", format_duration(ms.saturating_mul(1_000_000))));
        }
        text
    }
}

impl fmt::Display for CallSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.seq.map_or(Ok(()), |seq| write!(f, "seq {seq} "))?;
        f.write_str(&self.text)
    }
}

fn clause(member: &Member) -> Clause<'_> {
    let now = |one: &'static str, many: &'static str, past: [&'static str; 2]| match member.alive {
        Some(false) => past,
        Some(true) | None => [one, many],
    };
    let (is, died) = (now("is", "are", ["was", "were"]), ["died"; 2]);
    let (order, [one, many], rest, ms) = match &member.position {
        Position::Waiting { call, .. } if member.died => ((0, call.seq), died, format!("in {call}"), None),
        Position::Idle { after: Some(call), .. } | Position::Elsewhere { after: Some(call), .. }
            if member.died =>
        {
            ((0, call.seq), died, format!("after {call}"), None)
        }
        _ if member.died => ((0, None), died, "before the first call".to_owned(), None),
        Position::Idle { after: None, for_ms } => {
            let called = now("has called", "have called", ["called"; 2]);
            ((1, None), called, "nothing".to_owned(), *for_ms)
        }
        Position::Idle { after: Some(call), for_ms } => ((1, call.seq), is, format!("at {call}"), *for_ms),
        Position::Elsewhere { after, group, call } => {
            let after = after.as_ref().map_or_else(String::new, |call| format!(", here after {call}"));
            ((1, None), is, format!("in group {group}: {call}{after}"), None)
        }
        Position::Left { after } => {
            let after = after.as_ref().map_or_else(String::new, |call| format!(" after {call}"));
            ((1, None), ["has left", "have left"], format!("the group{after}"), None)
        }
        Position::Forming { for_ms } => {
            ((2, None), now("waits", "wait", ["waited"; 2]), "for the others to join".to_owned(), *for_ms)
        }
        Position::Unformed => ((2, None), ["did not form"; 2], "the group".to_owned(), None),
        Position::Waiting { call, for_ms } => {
            ((2, call.seq), now("waits", "wait", ["waited"; 2]), format!("in {call}"), *for_ms)
        }
        Position::Failed { call } => ((2, call.seq), ["waited"; 2], format!("in {call}"), None),
    };
    let (singular, plural) = (format!("{one} {rest}"), format!("{many} {rest}"));
    Clause { order, singular, plural, ms, members: vec![member] }
}
