//! Formats signals, numbers, addresses and data as text. Pure.

use std::io::{self, Write};

use nix::sys::signal::Signal;
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// Formats a signal as `SIGTERM`, or as `signal 40` if it has no name.
pub(crate) fn signal(number: i32) -> String {
    Signal::try_from(number).map_or_else(|_| format!("signal {number}"), |known| known.as_str().to_owned())
}

/// Formats rank numbers as `rank 3` or `ranks 0-2,5`.
pub(crate) fn ranks(ranks: &[usize]) -> String {
    let mut ranks = ranks.to_vec();
    ranks.sort_unstable();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", ranges(&ranks))
}

/// Formats ascending numbers as `0-3,8`.
pub(crate) fn ranges(numbers: &[usize]) -> String {
    let parts = numbers.chunk_by(|a, b| a + 1 == *b).map(|part| match part {
        [first, .., last] => format!("{first}-{last}"),
        part => part.iter().map(ToString::to_string).collect(),
    });
    parts.collect::<Vec<_>>().join(",")
}

/// Joins host and port to `host:port`. An IPv6 address gets brackets.
pub(crate) fn address(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// Formats a number with its noun: `1 node`, `2 nodes`.
pub(crate) fn count(number: usize, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

/// Serializes plain data to JSON as Python does, with a space after `,` and `:`.
pub(crate) fn python_json(value: &impl Serialize) -> String {
    let mut out = Vec::new();
    let mut serializer = Serializer::with_formatter(&mut out, PythonFormatter);
    value.serialize(&mut serializer).expect("the value is plain data");
    String::from_utf8(out).expect("JSON is text")
}

struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        out.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.begin_array_value(out, first)
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

/// Formats bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the longest beginning of `text` with at most `most` bytes that ends between characters.
pub(crate) fn cut_text(text: &str, most: usize) -> String {
    text[..text.floor_char_boundary(most)].to_owned()
}
