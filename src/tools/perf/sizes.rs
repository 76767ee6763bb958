//! Sizes in bytes: parsing, series of sizes, and formatting. Pure.

use std::iter;

/// Parses a size in bytes: `4`, `64K`, `64k`, `64KiB`, `1M`, `2GB`: powers of 1024, as in nccl-tests.
pub(crate) fn parse(text: &str) -> Result<usize, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err("a size is a whole number and K, M, G or nothing: 4, 64K, 1G".to_owned()),
    };
    let number: usize = number.parse().map_err(|_| match number {
        "" => "a size begins with a whole number: 4, 64K, 1G".to_owned(),
        _ => "the size is too large".to_owned(),
    })?;
    number.checked_mul(1 << shift).ok_or_else(|| "the size is too large".to_owned())
}

/// Rule by which the next size of a series is computed from the previous one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SizeStep {
    Times(usize),
    Plus(usize),
}

/// Returns the sizes of the series from `least` to `most` bytes. A step that does not increase the size gives
/// one size.
pub(crate) fn series(least: usize, most: usize, step: SizeStep) -> impl Iterator<Item = usize> {
    let next = move |&size: &usize| {
        let next = match step {
            SizeStep::Times(factor) => size.checked_mul(factor),
            SizeStep::Plus(bytes) => size.checked_add(bytes),
        };
        next.filter(|&next| next > size && next <= most)
    };
    iter::successors((least <= most).then_some(least), next)
}

const UNITS: [(usize, &str); 4] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];

/// Formats a size: `64 KiB` if that is exact, else all digits, such as `65532 B`.
pub(crate) fn text(bytes: usize) -> String {
    match UNITS.into_iter().find(|&(unit, _)| bytes >= unit && bytes.is_multiple_of(unit)) {
        Some((unit, name)) => format!("{} {name}", bytes / unit),
        None => format!("{bytes} B"),
    }
}

/// Formats an approximate size in a unit that makes the number short: `3.7 GiB`.
pub(crate) fn approximate(bytes: usize) -> String {
    match UNITS.into_iter().find(|&(unit, _)| bytes >= unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_in_all_spellings() {
        for (text, bytes) in [
            ("0", 0),
            ("4", 4),
            ("4B", 4),
            ("64K", 64 << 10),
            ("64k", 64 << 10),
            ("64KiB", 64 << 10),
            ("64 KB", 64 << 10),
            ("3M", 3 << 20),
            ("2G", 2 << 30),
            ("1TiB", 1 << 40),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn invalid_size_error_states_the_reason() {
        for (text, why) in [
            ("", "begins with a whole number"),
            ("K", "begins with a whole number"),
            ("-4", "whole number and K, M, G"),
            ("1.5K", "whole number and K, M, G"),
            ("4X", "whole number and K, M, G"),
            ("99999999999999999999", "the size is too large"),
            ("99999999999T", "the size is too large"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn size_series_ends_exactly_at_its_maximum() {
        let all = |least, most, step| series(least, most, step).collect::<Vec<_>>();
        assert_eq!(all(4, 64, SizeStep::Times(4)), [4, 16, 64]);
        assert_eq!(all(4, 63, SizeStep::Times(4)), [4, 16]);
        assert_eq!(all(10, 30, SizeStep::Plus(10)), [10, 20, 30]);
        assert_eq!(all(8, 8, SizeStep::Times(2)), [8]);
        assert!(all(9, 8, SizeStep::Times(2)).is_empty());
        assert_eq!(all(0, 8, SizeStep::Times(2)), [0], "nothing comes of multiplying by it");
        assert_eq!(all(1 << 63, usize::MAX, SizeStep::Times(2)), [1 << 63]);
    }

    #[test]
    fn sizes_are_abbreviated_if_exact() {
        assert_eq!([5, 4 << 30, 3 << 29].map(approximate), ["5 B", "4.0 GiB", "1.5 GiB"]);
        assert_eq!([4, 1023, 1024, 65532, 3 << 20].map(text), ["4 B", "1023 B", "1 KiB", "65532 B", "3 MiB"]);
    }
}
