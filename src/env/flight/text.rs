//! A group in one line. Pure.

use std::fmt;

use super::standing::{Member, Position, Standing, Step};

/// Most parts of a line, and ranks that one names.
const PARTS: usize = 8;
const NAMED_RANKS: usize = 16;

/// `rank 3`, `ranks 0,2,5-9`: numbers in order, and three and more in a row as a range.
#[derive(Debug, Clone, Copy)]
pub struct Ranks<'a>(pub &'a [u32]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", if self.0.len() == 1 { "rank " } else { "ranks " })?;
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for &rank in self.0 {
            match runs.last_mut() {
                Some((_, last)) if last.checked_add(1) == Some(rank) => *last = rank,
                Some(_) | None => runs.push((rank, rank)),
            }
        }
        let texts: Vec<String> =
            runs.iter().take(NAMED_RANKS).map(|&(first, last)| range(first, last)).collect();
        let more = if runs.len() > NAMED_RANKS { " and others" } else { "" };
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

/// A time span for people: `0.25 ms`, `3.1 s`, `30 s`, `12 min`.
#[must_use]
pub fn span(ns: u64) -> String {
    let ms = ns as f64 / 1e6;
    match ms {
        ..10.0 => format!("{ms:.2} ms"),
        ..1000.0 => format!("{ms:.0} ms"),
        ..10_000.0 => format!("{:.1} s", ms / 1e3),
        ..300_000.0 => format!("{:.0} s", ms / 1e3),
        _ => format!("{:.0} min", ms / 60e3),
    }
}

/// Members of whom the same can be said.
struct Part<'a> {
    order: (u8, Option<u64>),
    singular: String,
    plural: String,
    /// How long, at most.
    ms: Option<u64>,
    members: Vec<&'a Member>,
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts: Vec<Part<'_>> = Vec::new();
        for member in &self.members {
            let part = part(member);
            match parts.iter_mut().find(|other| other.plural == part.plural) {
                Some(other) => {
                    other.ms = other.ms.max(part.ms);
                    other.members.extend(part.members);
                }
                None => parts.push(part),
            }
        }
        parts.sort_by_key(|part| part.order);
        let mut texts: Vec<String> = Vec::new();
        if !self.absent.is_empty() {
            let verb = if self.absent.len() == 1 { "has" } else { "have" };
            texts.push(format!("{} {verb} not come", Ranks(&self.absent)));
        }
        texts.extend(parts.iter().map(|part| self.part(part)));
        if texts.len() > PARTS {
            let more = texts.len() - PARTS;
            texts.truncate(PARTS);
            texts.push(format!("and {more} more"));
        }
        if !self.unrecorded.is_empty() {
            let ranges: Vec<String> = self
                .unrecorded
                .iter()
                .take(PARTS)
                .map(|&(first, last)| range(first, last.max(first)))
                .collect();
            let one = self.unrecorded.len() == 1 && self.unrecorded[0].0 == self.unrecorded[0].1;
            texts.push(format!(
                "no recording of {} {}",
                if one { "rank" } else { "ranks" },
                ranges.join(",")
            ));
        }
        write!(f, "group {}: {}", self.group, texts.join("; "))?;
        self.failure.as_ref().map_or(Ok(()), |failure| write!(f, " ({failure})"))
    }
}

impl Standing {
    fn part(&self, part: &Part<'_>) -> String {
        let ranks: Vec<u32> = part.members.iter().map(|member| member.rank).collect();
        let verb = if ranks.len() == 1 { &part.singular } else { &part.plural };
        let mut text = format!("{} {verb}", Ranks(&ranks));
        let in_a_call = |member: &&Member| match &member.position {
            Position::Waiting { step, .. } | Position::Failed { step } => {
                step.seq.is_some() && !step.waits_for.is_empty()
            }
            _ => false,
        };
        let of_it: Vec<&Member> = part.members.iter().copied().filter(in_a_call).collect();
        if !of_it.is_empty() && !part.members[0].died {
            let awaited: Vec<u32> = self.awaited(&part.members).into_iter().collect();
            match awaited.is_empty() {
                true => text.push_str(" for each other"),
                false => text.push_str(&format!(" for {}", Ranks(&awaited))),
            }
        }
        if let Some(ms) = part.ms {
            let idle = if matches!(part.members[0].position, Position::Idle { .. }) { "idle " } else { "" };
            text.push_str(&format!(" ({idle}{})", span(ms.saturating_mul(1_000_000))));
        }
        text
    }
}

fn at(step: &Step) -> String {
    match step.seq {
        Some(seq) => format!("seq {seq} {}", step.call),
        None => step.call.clone(),
    }
}

fn part(member: &Member) -> Part<'_> {
    let now = |one: &'static str, many: &'static str, past: [&'static str; 2]| match member.alive {
        Some(false) => past,
        Some(true) | None => [one, many],
    };
    let (is, died) = (now("is", "are", ["was", "were"]), ["died"; 2]);
    let (order, [one, many], rest, ms) = match &member.position {
        Position::Waiting { step, .. } if member.died => {
            ((0, step.seq), died, format!("in {}", at(step)), None)
        }
        Position::Idle { after: Some(step), .. } | Position::Elsewhere { after: Some(step), .. }
            if member.died =>
        {
            ((0, step.seq), died, format!("after {}", at(step)), None)
        }
        _ if member.died => ((0, None), died, "before the first call".to_owned(), None),
        Position::Idle { after: None, for_ms } => {
            let called = now("has called", "have called", ["called"; 2]);
            ((1, None), called, "nothing".to_owned(), *for_ms)
        }
        Position::Idle { after: Some(step), for_ms } => {
            ((1, step.seq), is, format!("at {}", at(step)), *for_ms)
        }
        Position::Elsewhere { after, group, step } => {
            let after = after.as_ref().map_or_else(String::new, |step| format!(", here after {}", at(step)));
            ((1, None), is, format!("in group {group}: {}{after}", at(step)), None)
        }
        Position::Left { after } => {
            let after = after.as_ref().map_or_else(String::new, |step| format!(" after {}", at(step)));
            ((1, None), ["has left", "have left"], format!("the group{after}"), None)
        }
        Position::Forming { for_ms } => {
            ((2, None), now("looks", "look", ["looked"; 2]), "for the others".to_owned(), *for_ms)
        }
        Position::Unformed => ((2, None), ["did not find"; 2], "the others".to_owned(), None),
        Position::Waiting { step, for_ms } => {
            ((2, step.seq), now("waits", "wait", ["waited"; 2]), format!("in {}", at(step)), *for_ms)
        }
        Position::Failed { step } => ((2, step.seq), ["waited"; 2], format!("in {}", at(step)), None),
    };
    let (singular, plural) = (format!("{one} {rest}"), format!("{many} {rest}"));
    Part { order, singular, plural, ms, members: vec![member] }
}
