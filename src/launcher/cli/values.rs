//! Parses text into numbers, as Python does. Pure.

/// Parses like Python's `int(text)`: blanks around, a sign, digits, single underscores between digits.
///
/// Numbers beyond 10^36 become 10^36 (or its negative), since no flag accepts such numbers.
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
    // Only a number that is too large for the type cannot be parsed.
    let number = digits.replace('_', "").parse().unwrap_or(most).min(most);
    Some(if negative { -number } else { number })
}

/// Parses like Python's `float(text)`.
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
