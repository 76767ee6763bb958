//! Parses text into values, as Python does. Pure.

use std::collections::BTreeMap;

use crate::config::{StreamChoice, Streams};

/// Python's `int(text)`: blanks around, a sign, digits, single underscores between digits.
///
/// Numbers beyond 10^36 become 10^36 (or its negative): no flag has a use for them.
pub(crate) fn integer(text: &str) -> Option<i128> {
    let text = text.trim();
    let (negative, digits) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let groups_are_digits =
        digits.split('_').all(|group| !group.is_empty() && group.bytes().all(|b| b.is_ascii_digit()));
    if !groups_are_digits {
        return None;
    }
    let most = 10i128.pow(36);
    let number = digits
        .bytes()
        .filter(u8::is_ascii_digit)
        .fold(0i128, |number, digit| (number * 10 + i128::from(digit - b'0')).min(most));
    Some(if negative { -number } else { number })
}

/// Python's `float(text)`.
pub(crate) fn float(text: &str) -> Option<f64> {
    let text = text.trim();
    let well_placed = |(at, byte): (usize, u8)| {
        let bytes = text.as_bytes();
        byte != b'_'
            || at > 0 && bytes[at - 1].is_ascii_digit() && bytes.get(at + 1).is_some_and(u8::is_ascii_digit)
    };
    if !text.bytes().enumerate().all(well_placed) {
        return None;
    }
    text.replace('_', "").parse().ok()
}

/// The value of `-r` and `-t`: one digit, or `rank:digit,rank:digit` with one-digit ranks.
pub(crate) fn streams(text: &str) -> Option<StreamChoice> {
    if let Some(streams) = one_streams(text) {
        return Some(StreamChoice::All(streams));
    }
    let mut of_rank = BTreeMap::new();
    for item in text.split(',') {
        let (rank, streams) = item.split_once(':')?;
        let [rank @ b'0'..=b'9'] = rank.as_bytes() else { return None };
        of_rank.insert(usize::from(rank - b'0'), one_streams(streams)?);
    }
    Some(StreamChoice::Some(of_rank))
}

fn one_streams(text: &str) -> Option<Streams> {
    match text {
        "0" => Some(Streams { stdout: false, stderr: false }),
        "1" => Some(Streams { stdout: true, stderr: false }),
        "2" => Some(Streams { stdout: false, stderr: true }),
        "3" => Some(Streams { stdout: true, stderr: true }),
        _ => None,
    }
}

/// The value of the duplicate filters: split at commas, `,,` is a comma itself. Empty texts, which every
/// line would contain, are dropped.
pub(crate) fn substrings(text: &str) -> Vec<String> {
    let mut out = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c == ',' && chars.next_if_eq(&',').is_none() {
            out.push(String::new());
        } else if let Some(last) = out.last_mut() {
            last.push(c);
        }
    }
    out.retain(|text| !text.is_empty());
    out
}
